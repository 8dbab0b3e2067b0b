"""Random inputs of the loss, built the way training builds them, and comparison of two results."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from modelopt_spec.conventions import BlockLayout, label_positions, slot_decay, supervision_mask
from modelopt_spec.records import BlockBatch, BlockOutput
from modelopt_spec.training.loss import LossResult, Projection, SlotRows, gather_rows

INPUTS = ("hidden", "latents", "confidence")


def random_blocks(
    generator: torch.Generator,
    *,
    batch: int,
    length: int,
    anchors: int,
    block_size: int,
    supervised: float,
    vocab: int,
    layout: BlockLayout = BlockLayout.ANCHOR_FIRST,
    stop_at_gap: bool = False,
) -> BlockBatch:
    """Blocks at ascending, possibly equal anchors; the last block of each row may be padding."""
    places = torch.randint(0, length, (batch, anchors), generator=generator).sort(1).values
    keep = torch.ones(batch, anchors, dtype=torch.bool)
    if anchors > 1:
        keep[:, -1] = torch.rand(batch, generator=generator) < 0.5
    places = torch.where(keep, places, 0)
    loss_mask = torch.rand(batch, length, generator=generator) < supervised
    taught = supervision_mask(loss_mask, places, keep, block_size=block_size, layout=layout, stop_at_gap=stop_at_gap)
    labels = label_positions(places, block_size, layout)
    shape = taught.shape
    ids = torch.randint(0, vocab, shape, generator=generator)
    return BlockBatch(
        anchors=places,
        keep=keep,
        input_ids=ids,
        prev_ids=ids,
        label_ids=torch.randint(0, vocab, shape, generator=generator),
        supervised=taught,
        weights=taught * slot_decay(block_size, 4.0, layout),
        target_positions=(labels - 1).clamp(0, length - 1),
        position_ids=labels,
        context_start=torch.zeros_like(places),
    )


def random_case(
    seed: int,
    *,
    batch: int = 2,
    length: int = 20,
    anchors: int = 5,
    block_size: int = 4,
    supervised: float = 0.8,
    vocab: int = 61,
    width: int = 8,
    rank: int = 5,
    head: bool = True,
    target: bool = True,
    module: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[SlotRows, Projection]:
    """Rows and projection with leaves that want gradients: hidden, latents, confidence, head_out."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    blocks = random_blocks(
        generator,
        batch=batch,
        length=length,
        anchors=anchors,
        block_size=block_size,
        supervised=supervised,
        vocab=vocab,
    )
    shape = tuple(blocks.label_ids.shape)
    output = BlockOutput(
        normal(*shape, width), normal(*shape, rank) if head else None, normal(*shape) if target else None
    )
    rows = gather_rows(output, blocks, normal(batch, length, width) if target else None)
    leaves = {name: value.detach().requires_grad_() for name in INPUTS if (value := getattr(rows, name)) is not None}
    rows = dataclasses.replace(rows, **leaves)
    weight = normal(vocab, width, scale=1.5 / width**0.5)
    out = normal(vocab, rank, scale=0.5).requires_grad_() if head else None
    if module:
        cap = 3.0
        return rows, Projection(None, lambda hidden: torch.tanh(hidden @ weight.T / cap) * cap, out)
    return rows, Projection(weight, None, out)


def gradients(result: LossResult, rows: SlotRows, projection: Projection) -> dict[str, Tensor]:
    """Gradient of the loss for each leaf, zeros where none reaches it."""
    leaves = {name: getattr(rows, name) for name in INPUTS} | {"head_out": projection.head_out}
    present = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    found = torch.autograd.grad(result.loss, list(present.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if value is None else value
        for (name, leaf), value in zip(present.items(), found, strict=True)
    }


def in_double(rows: SlotRows, projection: Projection) -> tuple[SlotRows, Projection]:
    """The same numbers in float64."""

    def double(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.detach().double().requires_grad_(value.requires_grad)

    changed = {name: double(getattr(rows, name)) for name in (*INPUTS, "target_hidden")}
    weight = None if projection.weight is None else projection.weight.double()
    return dataclasses.replace(rows, **changed), dataclasses.replace(
        projection, weight=weight, head_out=double(projection.head_out)
    )


def assert_same(result: LossResult, expected: LossResult, tolerance: float) -> None:
    """Loss, terms and row values of two results agree."""

    def close(name: str, left: Tensor, right: Tensor) -> None:
        torch.testing.assert_close(
            left.double(), right.double(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
        )

    close("loss", result.loss.detach(), expected.loss.detach())
    assert set(result.terms) == set(expected.terms)
    for name, term in result.terms.items():
        close(f"terms[{name}].total", term.total, expected.terms[name].total)
        close(f"terms[{name}].weight", term.weight, expected.terms[name].weight)
        close(f"values[{name}]", result.values[name], expected.values[name])
    close("weights", result.weights, expected.weights)
    close("ce", result.ce, expected.ce)
    assert torch.equal(result.correct, expected.correct)
    if result.acceptance is not None and expected.acceptance is not None:
        close("acceptance", result.acceptance, expected.acceptance)
    if result.base_correct is not None and expected.base_correct is not None:
        assert torch.equal(result.base_correct, expected.base_correct)


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """All gradients agree, relative to the largest entry of each."""
    assert set(found) == set(expected)
    for name, value in found.items():
        scale = max(1e-3, float(expected[name].abs().max())) if value.numel() else 1.0
        difference = float((value.double() - expected[name].double()).abs().max()) if value.numel() else 0.0
        assert difference <= tolerance * scale, f"gradient of {name}: off by {difference} of {scale}"
