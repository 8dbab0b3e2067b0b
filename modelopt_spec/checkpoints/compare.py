"""One block, computed by the drafter and by the independent reading of its files, and how far apart they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_spec.checkpoints.independent_reader import BlockResult, IndependentDraft
from modelopt_spec.checkpoints.layouts.base import Draft
from modelopt_spec.conventions import first_drafting_slot
from modelopt_spec.drafter.drafter import Drafter, build_drafter
from modelopt_spec.records import TargetFeatures
from modelopt_spec.training.blocks import BlockSettings, make_blocks

__all__ = ["Comparison", "StandIn", "compare_block", "difference", "draft_block", "rebuild", "training_block"]


class StandIn:
    """A seeded embedding and output projection in place of a target: enough to compare two readings of a draft.

    Tables of fixed size, so that a vocabulary of any width costs nothing.
    """

    def __init__(self, width: int, vocab_size: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._rows = torch.randn(1021, width, generator=generator, dtype=torch.float64).to(dtype)
        self._down = torch.randn(width, 16, generator=generator, dtype=torch.float64).mul(width**-0.5).to(dtype)
        self._up = torch.randn(16, vocab_size, generator=generator, dtype=torch.float64).to(dtype)

    def embed(self, ids: Tensor) -> Tensor:
        """[...] -> [..., D]."""
        return self._rows[ids % len(self._rows)]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return hidden @ self._down @ self._up


@dataclass(frozen=True)
class Comparison:
    """The largest differences between the drafter and the reading of its files, on one block."""

    context: int
    """Context positions."""
    hidden: float
    """max |difference| of the hidden states, relative to the largest one."""
    logits: float
    """The same for the corrected logits of the drafting slots."""
    confidence: float
    """max |difference| of the confidence logits; 0 without a confidence head."""
    same_tokens: bool
    """Whether both would draft the same tokens greedily."""

    @property
    def worst(self) -> float:
        """The largest of the three."""
        return max(self.hidden, self.logits, self.confidence)


def rebuild(draft: Draft, dtype: torch.dtype = torch.float32) -> Drafter:
    """A drafter with a draft's weights, on the CPU and not bound to a target."""
    drafter = build_drafter(draft.config).to(dtype)
    drafter.load_state_dict({n: t.to(dtype) if t.is_floating_point() else t for n, t in draft.tensors.items()})
    return drafter.eval()


class _Bound:
    """The part of a target that a drafter uses while decoding."""

    def __init__(self, embed: Callable[[Tensor], Tensor], logits: Callable[[Tensor], Tensor]) -> None:
        self.embed, self.logits = embed, logits


@torch.no_grad()
def draft_block(
    drafter: Drafter,
    taps: Tensor,
    anchor: int,
    embed: Callable[[Tensor], Tensor],
    base_logits: Callable[[Tensor], Tensor],
    previous: list[int] | None = None,
) -> BlockResult:
    """The drafter's own block after [C, T*D] context, through its decoding path; arguments as the reader's."""
    config = drafter.config
    drafter.bind(_Bound(embed, base_logits))  # type: ignore[arg-type]
    cache = drafter.new_cache(1)
    drafter.extend(cache, taps.unsqueeze(0).to(drafter.dtype))
    ids = torch.tensor([[anchor] + [drafter.mask_token_id] * (config.block_size - 1)])
    hidden, confidence_hidden = drafter.decode(cache, ids)
    first = first_drafting_slot(config.layout)
    offsets = getattr(drafter, "d2t", None)
    head = drafter.head
    state = head.initial_state(hidden[0, 0]) if head is not None else None
    token, tokens, biases, confidences = anchor, [], [], []
    base = drafter.base_logits(hidden[0, first:])
    for slot in range(first, config.block_size):
        token = previous[slot - first] if previous is not None else token
        prev = torch.tensor(token)
        bias = torch.zeros_like(base[0])
        if head is not None:
            u, state = head.step(prev, hidden[0, slot], state, slot)
            bias = head.out(u)
        biases.append(bias)
        logit = drafter.confidence(confidence_hidden[0, slot], prev)
        if logit is not None:
            confidences.append(logit)
        choice = int((base[slot - first] + bias).argmax())
        token = choice if offsets is None else choice + int(offsets[choice])
        tokens.append(token)
    stacked = torch.stack(biases)
    return BlockResult(hidden[0], stacked, base + stacked, tokens, torch.stack(confidences) if confidences else None)


@torch.no_grad()
def training_block(
    drafter: Drafter,
    taps: Tensor,
    previous: list[int],
    embed: Callable[[Tensor], Tensor],
    base_logits: Callable[[Tensor], Tensor],
) -> BlockResult:
    """The same block through the pass that training runs, teacher-forced with ``previous`` (the anchor first).

    Features at and behind the anchor are noise: a pass that sees them gives something else.
    """
    config = drafter.config
    drafter.bind(_Bound(embed, base_logits))  # type: ignore[arg-type]
    context, size = taps.shape[0], config.block_size
    length = context + size + 2
    noise = torch.randn(length - context, taps.shape[1], generator=torch.Generator().manual_seed(2))
    row = torch.zeros(1, length, dtype=torch.long)
    row[0, context : context + len(previous)] = torch.tensor(previous)
    anchors = torch.tensor([[context]])
    settings = BlockSettings(size, config.layout, drafter.mask_token_id, 1, None, False)
    blocks = make_blocks(
        row, torch.ones_like(row, dtype=torch.bool), anchors, torch.ones_like(anchors).bool(), settings
    )
    features = TargetFeatures(torch.cat([taps, noise]).unsqueeze(0).to(drafter.dtype))
    output = drafter(features, blocks)
    first = first_drafting_slot(config.layout)
    hidden = output.hidden[0, 0]
    base = drafter.base_logits(hidden[first:])
    bias = torch.zeros_like(base)
    if output.latents is not None and drafter.head is not None:
        bias = drafter.head.out(output.latents[0, 0, first:])
    confidence = None if output.confidence is None else output.confidence[0, 0, first:]
    logits = base + bias
    return BlockResult(hidden, bias, logits, logits.argmax(-1).tolist(), confidence)


@torch.no_grad()
def compare_block(
    drafter: Drafter,
    reader: IndependentDraft,
    taps: Tensor,
    anchor: int,
    embed: Callable[[Tensor], Tensor],
    base_logits: Callable[[Tensor], Tensor],
    *,
    window_rule: str = "query",
) -> Comparison:
    """Run both on the same context and measure where they differ. The reader is given the drafter's greedy tokens."""
    ours = draft_block(drafter, taps, anchor, embed, base_logits)
    previous = [anchor, *ours.tokens[:-1]]
    theirs = reader.block(taps, anchor, embed, base_logits, previous=previous, window_rule=window_rule)
    return difference(ours, theirs, taps.shape[0])


@torch.no_grad()
def difference(ours: BlockResult, theirs: BlockResult, context: int) -> Comparison:
    """How far two computations of one block are apart, relative to the largest value of the first."""

    def relative(a: Tensor, b: Tensor) -> float:
        if a.shape != b.shape:
            return float("inf")
        difference = (a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-6)
        return float(difference) if torch.isfinite(difference) else float("inf")

    confidence = 0.0
    if (ours.confidence is None) != (theirs.confidence is None):
        confidence = float("inf")
    elif ours.confidence is not None and theirs.confidence is not None:
        same_shape = ours.confidence.shape == theirs.confidence.shape
        differences = (ours.confidence.double() - theirs.confidence.double()).abs() if same_shape else None
        confidence = float("inf") if differences is None else float(differences.detach().max())
    return Comparison(
        context=context,
        hidden=relative(theirs.hidden, ours.hidden),
        logits=relative(theirs.logits, ours.logits),
        confidence=confidence,
        same_tokens=ours.tokens == theirs.tokens,
    )
