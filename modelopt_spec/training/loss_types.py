"""What goes into the loss and what comes out: rows of supervised slots, the output projection, weights, results.

Legend: B batch, S sequence, N anchors, K slots, M supervised slots (rows), P distinct target positions, D hidden,
V vocabulary, R head rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from modelopt_spec.errors import ConfigError, DataError, UnsupportedError
from modelopt_spec.records import BlockBatch, BlockOutput
from modelopt_spec.training.vocab_reduce import VocabReduce

if TYPE_CHECKING:
    from modelopt_spec.drafter.drafter import Drafter

__all__ = [
    "WEIGHT_EPSILON",
    "LossResult",
    "LossWeights",
    "Projection",
    "SlotRows",
    "TermSum",
    "first_nonfinite_row",
    "gather_rows",
]

WEIGHT_EPSILON = 1e-6
"""Added to the summed slot weights where they are the divisor (DeepSpec's and SpecForge's Domino rule)."""


@dataclass(frozen=True)
class SlotRows:
    """The supervised slots of a batch, one a row: block after block, slots ascending inside a block."""

    hidden: Tensor
    """[M, D] the drafter's hidden states."""
    latents: Tensor | None
    """[M, R] the correction head's u; None without a head."""
    confidence: Tensor | None
    """[M] confidence logits; None without a confidence head."""
    labels: Tensor
    """[M] int64, the token that the row predicts."""
    weights: Tensor
    """[M] float, loss weight (decay included)."""
    slots: Tensor
    """[M] int64, slot index k in its block."""
    blocks: Tensor
    """[M] int64, index of its block, ``b * N + n``; equal values stand together."""
    target_hidden: Tensor | None = None
    """[P, D] last hidden states of the target at the distinct positions that predict a label. No gradient."""
    target_index: Tensor | None = None
    """[M] int64, row of ``target_hidden`` that belongs to each slot."""

    @property
    def num_rows(self) -> int:
        """M."""
        return self.hidden.shape[0]


@dataclass(frozen=True)
class Projection:
    """How hidden states and latents become logits: ``lm_head(h) + W_out u``.

    The output projection is frozen. ``weight`` serves where ``lm_head(h) == h @ weight.T`` exactly; otherwise
    (quantised, soft-capped, scaled, hooked) ``logits`` is called and no weight is read.
    """

    weight: Tensor | None = None
    """[V, D]."""
    logits: Callable[[Tensor], Tensor] | None = None
    """[m, D] -> [m, V]; used when ``weight`` is None, and then differentiable with respect to its input."""
    head_out: Tensor | None = None
    """W_out [V, R]; None without a correction head."""
    vocab: VocabReduce = field(default_factory=VocabReduce)
    """Reductions over the vocabulary, for ranks that hold a part of its rows each."""

    @classmethod
    def of(cls, drafter: Drafter) -> Projection:
        """The projection of a drafter that is bound to its target."""
        if drafter.config.draft_vocab_size is not None:
            raise UnsupportedError(
                f"draft_vocab_size is {drafter.config.draft_vocab_size}: training needs the target's full vocabulary; "
                "set draft_vocab_size to null"
            )
        head_out = None if drafter.head is None else drafter.head.out.weight
        return cls(drafter.target.output_weight(), drafter.target.logits, head_out)


@dataclass(frozen=True)
class LossWeights:
    """Weights of the terms; a term of weight 0 costs nothing and asks for nothing.

    loss = sum_i w_i (ce CE_i + tv |p_d - p_t|_1 + confidence BCE_i + kl KL(p_t || p_d) + base_ce CE_i(base)) / divisor

    where base are the logits lm_head(h) without the correction and all else reads the corrected ones.
    DSpark: ce, tv, confidence (full L1, not halved). Domino: ``ce = 1 - lambda``, ``base_ce = lambda``. ModelOpt's
    DFlash distillation: kl (its value there leaves out the target's entropy, the gradient is the same).
    """

    ce: float = 0.0
    tv: float = 0.0
    confidence: float = 0.0
    kl: float = 0.0
    base_ce: float = 0.0
    dpace_alpha: float | None = None
    """Multiply the row weights by D-PACE's position weights with this smoothing (arXiv 2605.18810); None: do not."""

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in ("ce", "tv", "confidence", "kl", "base_ce")}
        for name, value in values.items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"loss weight {name} is {value}: it must be a finite number of at least 0")
        if not any(values.values()):
            raise ConfigError(f"all loss weights are 0: give at least one of {', '.join(values)}")
        if self.dpace_alpha is not None and not 0 <= self.dpace_alpha <= 1:
            raise ConfigError(f"dpace_alpha is {self.dpace_alpha}: it must lie between 0 and 1")

    @property
    def needs_acceptance(self) -> bool:
        """Whether a term compares the two distributions token by token."""
        return bool(self.tv or self.confidence)

    @property
    def needs_target(self) -> bool:
        """Whether a term reads the target's distribution."""
        return bool(self.tv or self.confidence or self.kl)


class TermSum(NamedTuple):
    """A term before its division and before its weight in the loss: add both over batches and ranks, then divide."""

    total: Tensor
    """sum_i w_i value_i, a detached scalar."""
    weight: Tensor
    """sum_i w_i, a detached scalar."""


@dataclass(frozen=True)
class LossResult:
    """The loss and what it saw. Everything but ``loss`` is detached."""

    loss: Tensor
    """Scalar, in float32 (float64 if the inputs are)."""
    terms: dict[str, TermSum]
    """By name: ``ce`` always, the others where their weight is not 0."""
    weights: Tensor
    """[M] row weights, D-PACE included."""
    ce: Tensor
    """[M] cross entropy of the corrected logits."""
    correct: Tensor
    """[M] bool, whether the argmax of the corrected logits is the label."""
    acceptance: Tensor | None = None
    """[M] probability that the target accepts the slot's token, ``1 - 0.5 |p_d - p_t|_1``; None if nothing asked."""
    base_correct: Tensor | None = None
    """[M] bool, the same for the base logits; None without the ``base_ce`` term."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """[M] by name, each term's value before weights."""


def gather_rows(output: BlockOutput, blocks: BlockBatch, target_hidden: Tensor | None) -> SlotRows:
    """Flatten a draft pass to its supervised slots.

    Args:
        output: of the draft pass over ``blocks``.
        blocks: labels, weights and which slots are supervised.
        target_hidden: [B, S, D] the target's last hidden states; None if no term of the loss reads the target.

    Returns:
        Rows whose ``target_hidden`` holds each position once, ascending in (row of the batch, position).
    """
    slots_per_block = blocks.label_ids.shape[-1]
    taught = (blocks.supervised & (blocks.weights > 0)).flatten()
    index = taught.nonzero().squeeze(1)

    def rows(values: Tensor) -> Tensor:
        return values.flatten(0, 2).index_select(0, index)

    distinct = target_index = None
    if target_hidden is not None:
        batch, length = target_hidden.shape[:2]
        start = torch.arange(batch, device=index.device).view(-1, 1, 1) * length
        places = rows(blocks.target_positions + start)
        places, target_index = torch.unique(places, return_inverse=True)
        distinct = target_hidden.detach().flatten(0, 1).index_select(0, places)
    return SlotRows(
        hidden=rows(output.hidden),
        latents=None if output.latents is None else rows(output.latents),
        confidence=None if output.confidence is None else rows(output.confidence),
        labels=rows(blocks.label_ids),
        weights=rows(blocks.weights),
        slots=index % slots_per_block,
        blocks=index // slots_per_block,
        target_hidden=distinct,
        target_index=target_index,
    )


def first_nonfinite_row(rows: SlotRows, result: LossResult) -> int | None:
    """Index of the first row (slot) with a term that is NaN or infinite; None if all are finite.

    ``rows.blocks[i] // N`` is then its row of the batch, ``rows.slots[i]`` its slot.
    """
    if rows.num_rows == 0:
        return None
    finite = torch.stack([torch.isfinite(value) for value in (result.weights, *result.values.values())]).all(0)
    bad = (~finite).nonzero()
    return int(bad[0]) if len(bad) else None


def check_inputs(rows: SlotRows, projection: Projection, weights: LossWeights, measure_acceptance: bool) -> None:
    """Raise for parts that do not fit each other; names the part, what it is and what to do."""
    if weights.confidence and rows.confidence is None:
        raise ConfigError(
            f"loss weight confidence is {weights.confidence} but the draft has no confidence logits: "
            "set it to 0, or enable the confidence head"
        )
    if (weights.needs_target or measure_acceptance) and (rows.target_hidden is None or rows.target_index is None):
        wanted = [name for name in ("tv", "confidence", "kl") if getattr(weights, name)] or ["the acceptance"]
        raise ConfigError(
            f"{', '.join(wanted)} compares with the target, but target_hidden is None: "
            "pass the target's last hidden states to gather_rows"
        )
    if (rows.latents is None) != (projection.head_out is None):
        given, missing = ("latents", "head_out") if projection.head_out is None else ("head_out", "latents")
        raise ConfigError(f"{given} is given but {missing} is None: a correction head needs both")
    if projection.weight is None and projection.logits is None:
        raise ConfigError("the projection has neither weight nor logits: give one of them")
    if projection.weight is not None and projection.weight.shape[1] != rows.hidden.shape[1]:
        raise ConfigError(
            f"hidden is {rows.hidden.shape[1]} wide but the output weight {tuple(projection.weight.shape)}: "
            "the drafter's hidden_size must be the target's"
        )
    if rows.latents is not None and projection.head_out is not None:
        vocab = None if projection.weight is None else projection.weight.shape[0]
        if projection.head_out.shape[1] != rows.latents.shape[1] or vocab not in (None, projection.head_out.shape[0]):
            raise ConfigError(
                f"head_out is {tuple(projection.head_out.shape)}, which does not fit latents of width "
                f"{rows.latents.shape[1]} and a vocabulary of {vocab}"
            )
    for name in ("labels", "weights", "slots", "blocks", "latents", "confidence", "target_index"):
        value = getattr(rows, name)
        if value is not None and value.shape[:1] != rows.hidden.shape[:1]:
            raise DataError(
                f"{name} has shape {tuple(value.shape)}, hidden {tuple(rows.hidden.shape)}: one entry a row"
            )
    size = None if projection.weight is None else projection.weight.shape[0]
    if size is not None and rows.labels.device.type == "cpu" and rows.num_rows and not projection.vocab.sharded:
        low, high = int(rows.labels.min()), int(rows.labels.max())
        if low < 0 or high >= size:
            raise DataError(
                f"labels range from {low} to {high} but the vocabulary has {size} tokens: "
                "tokenize the data with the target's tokenizer"
            )
