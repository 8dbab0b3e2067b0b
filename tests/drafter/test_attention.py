"""The grouped block attention against the dense reference, and what must never leak."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_spec.drafter import attention_groups
from modelopt_spec.drafter.attention import block_attention, plan_blocks
from modelopt_spec.drafter.attention_grouped import grouped_block_attention
from modelopt_spec.drafter.attention_reference import block_attention_reference, visible_keys
from modelopt_spec.errors import ConfigError, SpecError
from tests.drafter.attention_cases import Case, cases, sees_context, sees_slot


def assert_equal(got: dict, want: dict, atol: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=atol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


# ---- the reference ---------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(case=cases(blocks=3, batch=2, length=12))
def test_the_reference_sees_what_the_rules_say(case: Case):
    plan = case.plan
    got = visible_keys(plan)
    for row in range(case.batch):
        for block in range(case.blocks):
            for slot in range(case.slots):
                context = [sees_context(plan, row, block, slot, p) for p in range(case.length)]
                own = [
                    bool(plan.keep[row, block]) and other == block and sees_slot(plan, slot, j)
                    for other in range(case.blocks)
                    for j in range(case.slots)
                ]
                assert got[row, block, slot].tolist() == context + own


def test_the_reference_equals_attention_of_one_block_alone():
    case = Case(seed=3, blocks=4, length=20, window=6)
    out = case.run(block_attention_reference)
    q, k_ctx, v_ctx, k_blk, v_blk = case.tensors
    for block, anchor in enumerate(case.plan.anchors[0].tolist()):
        seen = slice(max(0, anchor - 6), anchor)
        for head in range(4):
            keys = torch.cat([k_ctx[0, seen, head // 2], k_blk[0, block, :, head // 2]])
            values = torch.cat([v_ctx[0, seen, head // 2], v_blk[0, block, :, head // 2]])
            want = (q[0, block, :, head] @ keys.T * case.scale).softmax(-1) @ values
            torch.testing.assert_close(out[0, block, :, head], want)


# ---- the grouped path ------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(case=cases(), keep_bytes=st.sampled_from([0, 1 << 14, 1 << 40]))
def test_outputs_and_gradients_equal_the_reference(case: Case, keep_bytes: int):
    got = case.gradients(grouped_block_attention, keep_bytes=keep_bytes)
    assert_equal(got, case.gradients(block_attention_reference), 1e-11)


@settings(max_examples=60, deadline=None)
@given(
    case=cases(length=150, blocks=20, spread=None), rows=st.sampled_from([4, 40, 10**6]), cost=st.sampled_from([0, 1e9])
)
def test_any_grouping_gives_the_same(case: Case, rows: int, cost: float):
    """Tiles of one block or of all of them, cut at every anchor or at none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_groups, "TILE_ROWS", rows)
        patch.setattr(attention_groups, "STRIP_CALLS", cost)
        patch.setattr(attention_groups, "GROUP_CALLS", 1e9)
        patch.setattr(attention_groups, "ALIGN", 1 if case.seed % 2 else 16)
        got = case.gradients(grouped_block_attention)
    assert_equal(got, case.gradients(block_attention_reference), 1e-11)


@settings(max_examples=25, deadline=None)
@given(case=cases(dtype=torch.float32))
def test_float32_is_within_rounding_of_float64(case: Case):
    want = case.like(dtype=torch.float64).gradients(block_attention_reference)
    got = {name: x.double() for name, x in case.gradients(grouped_block_attention).items()}
    assert_equal(got, want, 5e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype):
    case = Case(seed=5, batch=2, blocks=12, length=80, window=30, with_sinks=True, padding=0.2, dtype=dtype)
    got = case.gradients(grouped_block_attention)
    exact = case.like(dtype=torch.float32)
    exact.tensors = tuple(x.float() for x in case.tensors)
    want = exact.gradients(grouped_block_attention)
    eps = torch.finfo(dtype).eps
    assert got["out"].dtype == dtype
    torch.testing.assert_close(got["out"].float(), want["out"], rtol=eps, atol=1e-6)
    for name in want:
        assert (got[name].float() - want[name]).abs().max() <= 4 * eps * want[name].abs().max(), name


def test_large_scores_do_not_overflow():
    case = Case(seed=1, blocks=6, length=60, scale=300.0, with_sinks=True, dtype=torch.float32)
    for name, x in case.gradients(grouped_block_attention).items():
        assert x.isfinite().all(), name
    torch.testing.assert_close(case.run(grouped_block_attention), case.run(block_attention_reference))


def test_edges_of_a_batch():
    """Anchor 0 (no context at all), the same anchor thrice, the last position, a row of padding only."""
    case = Case(seed=2, batch=2, blocks=6, length=25, with_sinks=True)
    anchors = torch.tensor([[0, 0, 7, 7, 7, 25], [3, 9, 0, 0, 0, 0]])
    keep = torch.tensor([[True] * 6, [False] * 6])
    case.plan = plan_blocks(anchors, keep, block_size=case.slots, seq_len=case.length)
    got = case.gradients(grouped_block_attention)
    assert_equal(got, case.gradients(block_attention_reference), 1e-11)
    assert (got["out"][1] == 0).all()
    assert (got["k_ctx"][1] == 0).all()
    assert (got["q"][1] == 0).all()


def test_a_grown_window_and_the_whole_context_agree():
    case = Case(seed=4, blocks=9, length=50)
    whole = case.run(block_attention)
    for rule in ("block", "query"):
        wide = case.like(window=50 + case.slots, window_rule=rule)
        torch.testing.assert_close(wide.run(block_attention), whole, rtol=0, atol=1e-14)


def test_window_rules_agree_while_the_window_is_not_full():
    """Context <= window - block: the two engines' rules are the same there, and differ beyond."""
    case = Case(seed=6, blocks=8, length=40, window=20, spread=20 - 4)
    assert torch.equal(visible_keys(case.plan), visible_keys(case.like(window_rule="query").plan))
    longer = case.like(spread=None)
    assert not torch.equal(visible_keys(longer.plan), visible_keys(longer.like(window_rule="query").plan))


def test_nothing_is_changed_in_place():
    for repeat, kv_heads in ((1, 1), (4, 1), (2, 2)):
        case = Case(repeat=repeat, kv_heads=kv_heads, with_sinks=True)
        before = [x.clone() for x in case.tensors]
        case.gradients(grouped_block_attention)
        assert all(torch.equal(a, b) for a, b in zip(before, case.tensors, strict=True))


def test_strided_inputs():
    """Projections cut from one tensor, and a gradient that is expanded."""
    case = Case(seed=8, blocks=7, length=60)
    strided = tuple(
        torch.cat([x, x], dim=-2).transpose(0, 1).contiguous().transpose(0, 1)[..., : x.shape[-2], :]
        for x in case.tensors
    )
    want = case.gradients(grouped_block_attention)
    case.tensors = strided
    torch.testing.assert_close(case.run(grouped_block_attention), want["out"])
    leaf = strided[0].detach().requires_grad_()
    case.run(grouped_block_attention, (leaf, *strided[1:])).sum().backward()
    assert leaf.grad.shape == leaf.shape


# ---- leaks -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(case=cases(batch=1, blocks=7, length=40, dtype=torch.float32), data=st.data())
def test_what_a_block_does_not_see_cannot_change_it(case: Case, data: st.DataObject):
    """Changing every key and value that a block must not see leaves its output equal in every bit."""
    block = data.draw(st.integers(0, case.blocks - 1), label="block")
    seen = visible_keys(case.plan)[0, block].any(0)
    context, slots = seen[: case.length], seen[case.length :].view(case.blocks, case.slots)
    changed = [x.clone() for x in case.tensors]
    for i, hidden in ((1, ~context), (2, ~context), (3, ~slots), (4, ~slots)):
        changed[i][0, hidden] = 50 * torch.randn(changed[i][0, hidden].shape)
    others = torch.arange(case.blocks) != block
    changed[0][0, others] = torch.randn(changed[0][0, others].shape)
    before, after = case.run(grouped_block_attention), case.run(grouped_block_attention, changed)
    assert torch.equal(before[0, block], after[0, block])


@settings(max_examples=30, deadline=None)
@given(case=cases(blocks=7, length=40, batch=2))
def test_unseen_keys_get_no_gradient(case: Case):
    gradients = case.gradients(grouped_block_attention)
    seen = visible_keys(case.plan).flatten(1, 2).any(1)
    context, slots = seen[:, : case.length], seen[:, case.length :].view(case.batch, case.blocks, case.slots)
    for name, visible in (("k_ctx", context), ("v_ctx", context), ("k_blk", slots), ("v_blk", slots)):
        assert (gradients[name][~visible] == 0).all(), name
    assert (gradients["out"][~case.plan.keep] == 0).all()
    assert (gradients["q"][~case.plan.keep] == 0).all()


# ---- memory and errors -----------------------------------------------------------------------------------------------


def saved_bytes(case: Case, **options) -> int:
    """Bytes that the forward pass keeps for the backward pass, other than its inputs and its output."""
    inputs = tuple(x.clone().requires_grad_() for x in case.tensors)
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = case.run(grouped_block_attention, inputs, **options)
    return sum(size for pointer, size in saved.items() if pointer not in {x.data_ptr() for x in (*inputs, out)})


def test_kept_bytes_do_not_grow_with_the_context(monkeypatch):
    monkeypatch.setattr(attention_groups, "TILE_ROWS", 32)
    short = Case(blocks=24, length=100, dim=16, dtype=torch.float32)
    long = short.like(length=800)
    statistics = 2 * short.tensors[0].numel() // short.dim * 4
    assert saved_bytes(short, keep_bytes=0) == saved_bytes(long, keep_bytes=0) == statistics
    everything = saved_bytes(long, keep_bytes=1 << 30)
    budget = everything * 2 // 3
    assert statistics < saved_bytes(long, keep_bytes=budget) <= statistics + budget < everything
    assert everything > 3 * saved_bytes(short, keep_bytes=1 << 30)  # what the budget is for


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"window": 0}, "window is 0"),
        ({"window_rule": "vllm"}, "window_rule is 'vllm'"),
        ({"anchors": torch.tensor([[1, 11]])}, r"anchors \[11\]"),
        ({"anchors": torch.tensor([[-1, 2]])}, r"anchors \[-1\]"),
        ({"anchors": torch.tensor([1, 2])}, "must both be"),
        ({"context_start": torch.zeros(1, 3)}, "context_start"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(change: dict, message: str):
    good = {
        "anchors": torch.tensor([[1, 2]]),
        "keep": torch.ones(1, 2, dtype=torch.bool),
        "block_size": 2,
        "seq_len": 10,
    }
    plan_blocks(**good)
    with pytest.raises(SpecError, match=message):
        plan_blocks(**{**good, **change})


def test_padding_blocks_may_hold_any_anchor():
    plan = plan_blocks(torch.tensor([[1, 99]]), torch.tensor([[True, False]]), block_size=2, seq_len=10)
    assert plan.order is None


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x[:, :1], "q is"),
        (1, lambda x: x[:, :-1], "k_ctx is"),
        (2, lambda x: x[..., :2], "v_ctx is"),
        (3, lambda x: x.float(), "k_blk is torch.float32"),
        (4, lambda x: x[:, :, :1], "v_blk is"),
        (5, lambda x: x[:2], "sinks is"),
    ],
)
def test_tensors_that_do_not_fit_are_named(index: int, change, message: str):
    case = Case(with_sinks=True)
    tensors = list(case.tensors)
    tensors[index] = change(tensors[index])
    with pytest.raises(SpecError, match=message):
        case.run(block_attention, tensors)


def test_heads_that_do_not_divide_and_unknown_implementations():
    case = Case(kv_heads=2)
    tensors = (torch.cat([case.tensors[0]] * 2, dim=3)[..., :5, :], *case.tensors[1:])
    with pytest.raises(SpecError, match="5 query heads cannot share 2"):
        case.run(block_attention, tensors)
    with pytest.raises(ConfigError, match="implementation is 'fast'"):
        case.run(block_attention, implementation="fast")
