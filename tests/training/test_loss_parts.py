"""Plan, tiles, reductions over ranks and memory of the fused loss."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modelopt_spec.training.loss import LossResult, LossWeights, draft_loss
from modelopt_spec.training.loss_plan import Tiling, default_tiling, plan_chunks
from modelopt_spec.training.loss_reference import dpace_weights_reference, draft_loss_reference
from modelopt_spec.training.loss_tile import dpace_weights, row_argmax
from modelopt_spec.training.vocab_reduce import GroupReduce, VocabReduce
from tests.training.loss_cases import assert_gradients, assert_same, gradients, random_case


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**20), chunk_rows=st.sampled_from([1, 5, 12, 40, 1000]), ordered=st.booleans())
def test_plan_covers_rows_and_positions(seed: int, chunk_rows: int, ordered: bool) -> None:
    rows, _ = random_case(seed, length=50, anchors=9)
    assert rows.target_index is not None
    index = rows.target_index if ordered else rows.target_index[torch.randperm(rows.num_rows)]
    chunks = plan_chunks(rows.blocks, index, chunk_rows)
    buffer: list[int] = []
    computed: list[int] = []
    end = 0
    for chunk in chunks:
        assert chunk.rows.start == end
        end = chunk.rows.stop
        assert end == rows.num_rows or rows.blocks[end] != rows.blocks[end - 1]
        buffer = [buffer[i] for i in chunk.kept.tolist()] + chunk.new.tolist()
        computed += chunk.new.tolist()
        assert [buffer[i] for i in chunk.index.tolist()] == index[chunk.rows].tolist()
        assert set(buffer) == set(index[chunk.rows].tolist())
    assert end == rows.num_rows
    assert set(computed) == set(index.tolist())
    if ordered:
        assert len(computed) == len(set(computed))


@pytest.mark.parametrize("vocab", [1000, 32000, 151936, 262144])
def test_default_tiling_bounds_memory(vocab: int) -> None:
    tiling = default_tiling(vocab, torch.float32, torch.device("cpu"))
    assert tiling.chunk_rows * vocab * 4 <= 256 * 2**20
    assert tiling.chunk_rows >= 240
    assert default_tiling(vocab, torch.bfloat16, torch.device("cuda")).columns == vocab


@pytest.mark.parametrize("width", [1, 7, 1024, 2048, 2049, 5000])
def test_row_argmax_is_the_first_of_equals(width: int) -> None:
    logits = torch.randint(0, 3, (50, width)).float()
    logits[0] = -torch.inf
    value, index = row_argmax(logits)
    expected = torch.stack([(row == row.max()).nonzero()[0, 0] for row in logits])
    assert torch.equal(index, expected)
    assert torch.equal(value, logits.amax(-1))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_equal_their_definition(alpha: float) -> None:
    rows, _ = random_case(3, supervised=0.6, block_size=6, anchors=8)
    ce = torch.rand(rows.num_rows, dtype=torch.float64) * 3
    found = dpace_weights(ce, rows.blocks, rows.slots, 6, alpha)
    torch.testing.assert_close(found, dpace_weights_reference(ce, rows.blocks, alpha))


# ---- a vocabulary in parts -------------------------------------------------------------------------------------------


class ThreadReduce(VocabReduce):
    """Ranks are threads of this process."""

    sharded = True

    def __init__(self, start: int, rank: int, box: list, barrier: threading.Barrier) -> None:
        self.start, self.rank, self.box, self.barrier = start, rank, box, barrier

    def _all(self, values: Tensor) -> Tensor:
        self.box[self.rank] = values
        self.barrier.wait()
        result = torch.stack(list(self.box))
        self.barrier.wait()
        return result

    def max(self, values: Tensor) -> Tensor:
        return self._all(values).amax(0)

    def sum(self, values: Tensor) -> Tensor:
        return self._all(values).sum(0)


def run_ranks(count: int, work: Callable[[int], None]) -> None:
    errors = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors


@pytest.mark.parametrize(
    "weights",
    [
        LossWeights(ce=0.1, tv=0.9, confidence=1.0),
        LossWeights(ce=0.6, base_ce=0.4),
        LossWeights(ce=0.3, tv=0.7, confidence=0.2, kl=0.5, base_ce=0.4, dpace_alpha=0.3),
    ],
)
@pytest.mark.parametrize("module", [False, True])
def test_ranks_that_share_the_vocabulary_get_the_whole_loss(weights: LossWeights, module: bool) -> None:
    rows, projection = random_case(21, vocab=90, anchors=7)
    expected = draft_loss(rows, projection, weights)
    expected_gradients = gradients(expected, rows, projection)
    cuts = [0, 50, 90, 90]
    box: list = [None] * 3
    barrier = threading.Barrier(3, timeout=30)
    results: list[tuple[LossResult, dict[str, Tensor]] | None] = [None] * 3

    def work(rank: int) -> None:
        part = slice(cuts[rank], cuts[rank + 1])
        reduce = ThreadReduce(part.start, rank, box, barrier)
        weight = projection.weight[part]
        copies = {name: getattr(rows, name).detach().requires_grad_() for name in ("hidden", "latents", "confidence")}
        own = dataclasses.replace(rows, **copies)
        out = projection.head_out.detach()[part].requires_grad_()

        def logits(hidden: Tensor) -> Tensor:
            return SummedGradient.apply(hidden, reduce) @ weight.T

        whole = dataclasses.replace(
            projection, weight=None if module else weight, logits=logits, head_out=out, vocab=reduce
        )
        result = draft_loss(own, whole, weights, tiling=Tiling(20, 16, 100))
        results[rank] = result, gradients(result, own, whole)

    run_ranks(3, work)
    for rank in range(3):
        assert results[rank] is not None
        result, found = results[rank]
        assert_same(result, expected, 1e-9)
        part = slice(cuts[rank], cuts[rank + 1])
        assert_gradients(found, {**expected_gradients, "head_out": expected_gradients["head_out"][part]}, 1e-9)


class SummedGradient(torch.autograd.Function):
    """As in a column-parallel layer: the gradient of the input is summed over the ranks."""

    @staticmethod
    def forward(ctx, hidden, reduce):
        ctx.reduce = reduce
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.reduce.sum(gradient), None


def test_reductions_over_a_process_group(tmp_path) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        rows, projection = random_case(22)
        weights = LossWeights(ce=0.3, tv=0.7, kl=0.5, base_ce=0.4)
        shared = dataclasses.replace(projection, vocab=GroupReduce(torch.distributed.group.WORLD, 0))
        assert_same(draft_loss(rows, shared, weights), draft_loss_reference(rows, projection, weights), 1e-9)
    finally:
        torch.distributed.destroy_process_group()


# ---- memory ----------------------------------------------------------------------------------------------------------


class PeakBytes(TorchDispatchMode):
    """Largest sum of bytes of tensors made inside of it that were alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.alive = {ref: size for ref, size in self.alive.items() if not ref.expired()}
        known = {ref.cdata for ref in self.alive}
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known | inputs:
                self.alive[StorageWeakRef(leaf.untyped_storage())] = leaf.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


@pytest.mark.parametrize("terms", [LossWeights(ce=0.1, tv=0.9, confidence=1.0), LossWeights(ce=0.6, base_ce=0.4)])
def test_peak_memory_does_not_grow_with_the_number_of_slots(terms: LossWeights) -> None:
    vocab, tiling = 6000, Tiling(chunk_rows=24, columns=1024, cells=6000)
    peaks = []
    for anchors in (32, 96):
        rows, projection = random_case(
            23, batch=1, length=400, anchors=anchors, supervised=1.0, vocab=vocab, dtype=torch.float32
        )
        with PeakBytes() as memory:
            draft_loss(rows, projection, terms, tiling=tiling).loss.backward()
        peaks.append(memory.peak)
    out_gradient = vocab * 5 * 4
    assert peaks[1] < peaks[0] + 200_000
    assert peaks[1] < out_gradient + 2 * tiling.chunk_rows * vocab * 4
    assert rows.num_rows * vocab * 4 > 5 * peaks[1]
