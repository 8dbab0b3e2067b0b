"""The fused loss against its plain version: shapes, types, overlaps, terms, paths and edges."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.training.loss import LossWeights, Projection, draft_loss, first_nonfinite_row, gather_rows
from modelopt_spec.training.loss_plan import Tiling
from modelopt_spec.training.loss_reference import draft_loss_reference
from tests.training.loss_cases import (
    assert_gradients,
    assert_same,
    gradients,
    in_double,
    random_blocks,
    random_case,
)

TERMS = {
    "ce": LossWeights(ce=1.0),
    "tv": LossWeights(tv=0.9),
    "confidence": LossWeights(confidence=1.0),
    "kl": LossWeights(kl=1.0),
    "base_ce": LossWeights(base_ce=1.0),
    "dspark": LossWeights(ce=0.1, tv=0.9, confidence=1.0),
    "domino": LossWeights(ce=0.6, base_ce=0.4),
    "dpace": LossWeights(ce=1.0, dpace_alpha=0.5),
    "all": LossWeights(ce=0.3, tv=0.7, confidence=0.2, kl=0.5, base_ce=0.4, dpace_alpha=0.3),
}
TILINGS = st.builds(
    Tiling,
    chunk_rows=st.sampled_from([1, 7, 16, 1000]),
    columns=st.sampled_from([1, 13, 64, 4096]),
    cells=st.sampled_from([1, 150, 100_000]),
)
SHAPES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**20),
        "batch": st.integers(1, 2),
        "length": st.sampled_from([3, 12, 40]),
        "anchors": st.integers(1, 7),
        "block_size": st.integers(1, 5),
        "supervised": st.sampled_from([0.0, 0.5, 1.0]),
        "vocab": st.sampled_from([2, 61, 2100]),
        "head": st.booleans(),
        "module": st.booleans(),
    }
)


@pytest.mark.parametrize("terms", TERMS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(shape=SHAPES, tiling=TILINGS)
def test_equals_the_plain_version_in_float64(terms: str, shape: dict, tiling: Tiling) -> None:
    rows, projection = random_case(**shape)
    weights = TERMS[terms]
    expected = draft_loss_reference(rows, projection, weights)
    result = draft_loss(rows, projection, weights, tiling=tiling)
    if rows.latents is None and weights.base_ce:
        result.terms.setdefault("base_ce", expected.terms["base_ce"])
        result.values.setdefault("base_ce", expected.values["base_ce"])
    assert_same(result, expected, 1e-9)
    assert_gradients(gradients(result, rows, projection), gradients(expected, rows, projection), 1e-8)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("module", [False, True])
def test_low_precision_stays_close_to_float64(dtype: torch.dtype, tolerance: float, terms: str, module: bool) -> None:
    rows, projection = random_case(5, dtype=dtype, vocab=501, module=module, anchors=9)
    exact_rows, exact_projection = in_double(rows, projection)
    if module:
        assert projection.logits is not None
        own = projection.logits
        exact_projection = dataclasses.replace(exact_projection, logits=lambda hidden: own(hidden.to(dtype)).double())
    weights = TERMS[terms]
    expected = draft_loss_reference(exact_rows, exact_projection, weights)
    columns = 100 if dtype == torch.float32 else 4096
    result = draft_loss(rows, projection, weights, tiling=Tiling(40, columns, 2000))
    assert result.loss.dtype == torch.float32
    torch.testing.assert_close(result.loss.double(), expected.loss, rtol=tolerance, atol=tolerance)
    wanted = gradients(expected, exact_rows, exact_projection)
    for name, value in gradients(result, rows, projection).items():
        assert value.dtype == dtype
        difference = (value.double() - wanted[name]).norm()
        assert difference <= 2 * tolerance * wanted[name].norm() + 1e-9, name


def test_autocast_multiplies_in_its_type_and_keeps_softmax_in_float32() -> None:
    rows, projection = random_case(3, dtype=torch.float32, vocab=301)
    weights = TERMS["dspark"]
    expected = draft_loss(rows, projection, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = draft_loss(rows, projection, weights)
    assert result.loss.dtype == torch.float32
    assert result.loss.item() != expected.loss.item()
    torch.testing.assert_close(result.loss, expected.loss, rtol=2e-2, atol=2e-2)
    wanted = gradients(expected, rows, projection)
    for name, value in gradients(result, rows, projection).items():
        assert value.dtype == torch.float32
        assert (value - wanted[name]).norm() <= 6e-2 * wanted[name].norm(), name


def test_autocast_reaches_a_module() -> None:
    rows, projection = random_case(3, dtype=torch.float32, module=True)
    linear = torch.nn.Linear(rows.hidden.shape[1], 61, bias=False).requires_grad_(False)
    seen = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(linear(hidden).dtype)
        return linear(hidden)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        draft_loss(rows, dataclasses.replace(projection, logits=logits), TERMS["dspark"]).loss.backward()
    assert set(seen) == {torch.bfloat16}
    assert rows.hidden.grad is not None


@pytest.mark.parametrize("terms", TERMS)
def test_no_rows_give_zero_loss_and_zero_gradients(terms: str) -> None:
    rows, projection = random_case(0, supervised=0.0)
    assert rows.num_rows == 0
    result = draft_loss(rows, projection, TERMS[terms], divisor=torch.zeros(()))
    assert result.loss.item() == 0
    result.loss.backward()
    assert projection.head_out is not None
    assert torch.equal(projection.head_out.grad, torch.zeros_like(projection.head_out))
    assert rows.hidden.grad.shape == (0, 8)
    assert first_nonfinite_row(rows, result) is None


@pytest.mark.parametrize("terms", TERMS)
def test_one_row(terms: str) -> None:
    rows, projection = random_case(1, batch=1, anchors=1, block_size=1, supervised=1.0)
    assert rows.num_rows == 1
    result, expected = (f(rows, projection, TERMS[terms]) for f in (draft_loss, draft_loss_reference))
    assert_same(result, expected, 1e-10)
    assert_gradients(gradients(result, rows, projection), gradients(expected, rows, projection), 1e-9)


def test_terms_of_weight_zero_ask_for_nothing() -> None:
    rows, projection = random_case(2)
    bare = dataclasses.replace(rows, target_hidden=None, target_index=None, confidence=None)
    seen = []

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return hidden @ projection.weight.T

    module = Projection(None, counted, projection.head_out)
    for weights in (TERMS["ce"], TERMS["domino"]):
        seen.clear()
        result = draft_loss(rows, module, weights)
        assert sum(seen) == rows.num_rows
        assert_same(draft_loss(bare, projection, weights), result, 1e-12)
        assert result.acceptance is None


def test_the_target_is_projected_once_per_distinct_position() -> None:
    rows, projection = random_case(4, length=60, anchors=20)
    seen = []

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return hidden @ projection.weight.T

    tiling = Tiling(20, 64, 200)
    draft_loss(rows, Projection(None, counted, projection.head_out), TERMS["dspark"], tiling=tiling)
    assert rows.target_hidden is not None
    assert len(seen) > 8
    assert sum(seen) == rows.num_rows + len(rows.target_hidden)
    assert len(rows.target_hidden) < rows.num_rows


def test_rows_in_any_order_give_the_same() -> None:
    rows, projection = random_case(6, anchors=8)
    order = torch.randperm(rows.num_rows)
    names = [f.name for f in dataclasses.fields(rows) if f.name != "target_hidden"]
    mixed = dataclasses.replace(rows, **{name: getattr(rows, name)[order] for name in names})
    tiling = Tiling(9, 64, 200)
    weights = LossWeights(ce=0.1, tv=0.9, kl=0.4)
    left, right = (
        draft_loss(rows, projection, weights, tiling=tiling),
        draft_loss(mixed, projection, weights, tiling=tiling),
    )
    torch.testing.assert_close(left.loss, right.loss)
    torch.testing.assert_close(left.acceptance[order], right.acceptance)


def test_without_gradients_nothing_is_kept_and_values_are_the_same() -> None:
    rows, projection = random_case(7)
    with torch.no_grad():
        result = draft_loss(rows, projection, TERMS["all"])
    assert not result.loss.requires_grad
    assert_same(result, draft_loss(rows, projection, TERMS["all"]), 1e-12)


@pytest.mark.parametrize("frozen", ["hidden", "latents", "head_out"])
def test_frozen_inputs_get_no_gradient(frozen: str) -> None:
    rows, projection = random_case(8)
    expected = gradients(draft_loss_reference(rows, projection, TERMS["all"]), rows, projection)
    (projection.head_out if frozen == "head_out" else getattr(rows, frozen)).requires_grad_(False)
    draft_loss(rows, projection, TERMS["all"]).loss.backward()
    leaves = {"hidden": rows.hidden, "latents": rows.latents, "head_out": projection.head_out}
    for name, leaf in leaves.items():
        assert (leaf.grad is None) == (name == frozen)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, expected[name])


def test_acceptance_can_be_measured_without_a_term() -> None:
    rows, projection = random_case(9)
    result = draft_loss(rows, projection, TERMS["ce"], measure_acceptance=True)
    expected = draft_loss_reference(rows, projection, TERMS["dspark"])
    torch.testing.assert_close(result.acceptance, expected.acceptance)
    assert set(result.terms) == {"ce"}
    assert_gradients(
        gradients(result, rows, projection),
        gradients(draft_loss_reference(rows, projection, TERMS["ce"]), rows, projection),
        1e-9,
    )


@pytest.mark.parametrize("terms", ["dspark", "all"])
def test_divisor_as_number_tensor_or_function(terms: str) -> None:
    rows, projection = random_case(10)
    weights = TERMS[terms]
    expected = draft_loss_reference(rows, projection, weights, 7.0)
    wanted = gradients(expected, rows, projection)
    for divisor in (7.0, torch.tensor(7.0), torch.tensor(7.0, dtype=torch.float64)):
        result = draft_loss(rows, projection, weights, divisor)
        assert_same(result, expected, 1e-12)
        assert_gradients(gradients(result, rows, projection), wanted, 1e-9)
    own = draft_loss(rows, projection, weights)
    doubled = draft_loss(rows, projection, weights, lambda total: 2 * total)
    torch.testing.assert_close(doubled.loss, own.loss / 2, rtol=1e-6, atol=0)
    halves = gradients(doubled, rows, projection)
    for name, value in gradients(own, rows, projection).items():
        torch.testing.assert_close(halves[name], value / 2, rtol=1e-6, atol=1e-12)


def test_micro_batches_with_the_common_divisor_add_up() -> None:
    cases = [random_case(seed) for seed in (11, 12)]
    projection = cases[0][1]
    total = sum(rows.weights.sum() for rows, _ in cases)
    for rows, _ in cases:
        draft_loss(rows, projection, TERMS["dspark"], total).loss.backward()
    together = sum(
        (draft_loss_reference(rows, projection, TERMS["dspark"], total).loss for rows, _ in cases), torch.zeros(())
    )
    torch.testing.assert_close(projection.head_out.grad, torch.autograd.grad(together, projection.head_out)[0])


def test_backward_scales_and_runs_once() -> None:
    rows, projection = random_case(13)
    expected = gradients(draft_loss_reference(rows, projection, TERMS["dspark"]), rows, projection)
    loss = draft_loss(rows, projection, TERMS["dspark"]).loss
    (3 * loss).backward(retain_graph=True)
    torch.testing.assert_close(projection.head_out.grad, 3 * expected["head_out"])
    torch.testing.assert_close(rows.hidden.grad, 3 * expected["hidden"])
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()


def test_correct_takes_the_first_of_equal_logits() -> None:
    rows, projection = random_case(14, vocab=2100)
    flat = dataclasses.replace(
        projection, weight=torch.zeros_like(projection.weight), head_out=torch.zeros_like(projection.head_out)
    )
    labels = torch.arange(rows.num_rows) % 2
    result = draft_loss(dataclasses.replace(rows, labels=labels), flat, TERMS["dspark"])
    assert torch.equal(result.correct, labels == 0)
    torch.testing.assert_close(result.acceptance, torch.ones_like(result.acceptance))


@pytest.mark.parametrize("field", ["hidden", "latents", "target_hidden", "confidence", "weights"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_found(field: str, bad: float) -> None:
    rows, projection = random_case(15, dtype=torch.float32)
    values = getattr(rows, field).detach().clone()
    if field == "target_hidden":
        values[int(rows.target_index[5])] = bad
        first = int((rows.target_index == rows.target_index[5]).nonzero()[0])
    else:
        values[5] = bad
        first = 5
    broken = dataclasses.replace(rows, **{field: values})
    result = draft_loss(broken, projection, TERMS["dspark"], divisor=10.0)
    assert not torch.isfinite(result.loss)
    assert first_nonfinite_row(broken, result) == first
    assert first_nonfinite_row(rows, draft_loss(rows, projection, TERMS["dspark"])) is None


@pytest.mark.parametrize(
    ("change", "weights", "error", "message"),
    [
        ({"confidence": None}, "dspark", ConfigError, "no confidence logits"),
        ({"target_hidden": None}, "tv", ConfigError, "target_hidden is None"),
        ({"latents": None}, "ce", ConfigError, "latents is None"),
        ({"labels": "large"}, "ce", DataError, "labels range from"),
        ({"weights": "short"}, "ce", DataError, "one entry a row"),
        ({"hidden": "narrow"}, "ce", ConfigError, "hidden_size must be the target's"),
    ],
)
def test_parts_that_do_not_fit_are_named(change: dict, weights: str, error: type, message: str) -> None:
    rows, projection = random_case(16)
    made = {
        "large": rows.labels + 61,
        "short": rows.weights[:-1],
        "narrow": rows.hidden[:, :-1],
    }
    changed = {name: made[value] if value is not None else None for name, value in change.items()}
    with pytest.raises(error, match=message):
        draft_loss(dataclasses.replace(rows, **changed), projection, TERMS[weights])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "all loss weights are 0"),
        ({"ce": -1.0}, "loss weight ce is -1.0"),
        ({"tv": float("nan")}, "loss weight tv is nan"),
        ({"ce": 1.0, "dpace_alpha": 2.0}, "dpace_alpha is 2.0"),
    ],
)
def test_impossible_weights_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossWeights(**values)


def test_gather_rows_equals_a_loop() -> None:
    from modelopt_spec.records import BlockOutput

    blocks = random_blocks(
        torch.Generator().manual_seed(0), batch=3, length=15, anchors=4, block_size=3, supervised=0.7, vocab=9
    )
    shape = tuple(blocks.label_ids.shape)
    output = BlockOutput(torch.randn(*shape, 4), torch.randn(*shape, 2), torch.randn(*shape))
    last = torch.randn(3, 15, 4)
    rows = gather_rows(output, blocks, last)
    places = [
        place for place in torch.cartesian_prod(*map(torch.arange, shape)).tolist() if blocks.supervised[tuple(place)]
    ]
    assert rows.num_rows == len(places) > 10
    assert rows.target_hidden is not None
    for row, (b, n, k) in enumerate(places):
        assert torch.equal(rows.hidden[row], output.hidden[b, n, k])
        assert torch.equal(rows.latents[row], output.latents[b, n, k])
        assert rows.confidence[row] == output.confidence[b, n, k]
        assert rows.labels[row] == blocks.label_ids[b, n, k]
        assert rows.weights[row] == blocks.weights[b, n, k]
        assert (rows.slots[row], rows.blocks[row]) == (k, b * shape[1] + n)
        assert torch.equal(rows.target_hidden[rows.target_index[row]], last[b, blocks.target_positions[b, n, k]])
    distinct = {(b, int(blocks.target_positions[b, n, k])) for b, n, k in places}
    assert len(rows.target_hidden) == len(distinct)
