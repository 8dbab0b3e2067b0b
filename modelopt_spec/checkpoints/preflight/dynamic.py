"""Blocks computed twice: by training's own pass, and by a reader that knows the files alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_spec.checkpoints.compare import StandIn, difference, draft_block, rebuild, training_block
from modelopt_spec.checkpoints.independent_reader import IndependentDraft
from modelopt_spec.checkpoints.layouts import Draft
from modelopt_spec.checkpoints.preflight.report import Fact
from modelopt_spec.errors import UnsupportedError
from modelopt_spec.targets.base import open_target

__all__ = ["TOLERANCE", "block_facts"]

TOLERANCE = 2e-4
"""Largest accepted relative difference in float32."""
SHORT = (1, 8, 40)
LONGEST = 4096


def block_facts(
    root: Path,
    draft: Draft,
    target: nn.Module | None,
    card: dict[str, Any] | None,
    contexts: Sequence[int] | None,
) -> tuple[list[Fact], list[str]]:
    """One fact for each context length, and what could not be checked."""
    lengths = _contexts(draft, card, target) if contexts is None else list(contexts)
    drafter = rebuild(draft)
    try:
        reader = IndependentDraft.open(root)
    except UnsupportedError as error:
        return [], [f"blocks: {error}"]
    config = draft.config
    facts = []
    for length in lengths:
        taps, anchor, embed, logits = _context(draft, target, length)
        decoded = draft_block(drafter, taps, anchor, embed, logits)
        previous = [anchor, *decoded.tokens[:-1]]
        trained = training_block(drafter, taps, previous, embed, logits)
        rule = config.backbone.window_rule
        read = reader.block(taps, anchor, embed, logits, previous=previous, window_rule=rule)
        off = max(difference(trained, read, length).worst, difference(trained, decoded, length).worst)
        same_tokens = trained.tokens == _as_draft_ids(drafter, read.tokens) or off <= TOLERANCE
        fine = off <= TOLERANCE and same_tokens
        facts.append(
            Fact(
                "block",
                "",
                f"{length} context positions",
                None,
                f"{off:.1e}",
                "same" if fine else "differs",
                "" if fine else "the files compute something else than training did",
            )
        )
    return facts, [] if target is not None else ["blocks on the target's own features: no target was given"]


def _as_draft_ids(drafter: Any, tokens: list[int]) -> list[int]:
    """Ids of the target as the draft's own, where the vocabulary is reduced."""
    offsets = getattr(drafter, "d2t", None)
    if offsets is None:
        return tokens
    ids = (offsets + torch.arange(len(offsets))).tolist()
    return [ids.index(token) for token in tokens]


def _contexts(draft: Draft, card: dict[str, Any] | None, target: nn.Module | None) -> list[int]:
    """Short contexts, one around a sliding window, and one beyond the length that was trained on."""
    config = draft.config
    lengths = {*SHORT, config.block_size}
    window = config.backbone.sliding_window
    if window is not None and window <= LONGEST:
        lengths |= {max(1, window - 1), window + config.block_size}
    trained = ((card or {}).get("recipe") or {}).get("data", {}).get("max_length")
    beyond = min(int(trained or 256) + 2 * config.block_size, LONGEST)
    positions = config.backbone.max_position_embeddings or LONGEST
    if target is not None:
        positions = min(positions, open_target(target).shape.max_position_embeddings or positions)
    lengths.add(min(beyond, positions - config.block_size))
    return sorted(length for length in lengths if 0 < length <= positions - config.block_size)


@torch.no_grad()
def _context(
    draft: Draft, target: nn.Module | None, length: int
) -> tuple[Tensor, int, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Features [C, T*D], anchor, embedding and base logits: the target's, or a stand-in's without one.

    A target in low precision would round hidden states that differ by 1e-7 to logits that differ by 1e-2, so its output
    projection, which is no part of the draft, is then the stand-in's.
    """
    config = draft.config
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, config.vocab_size or 1, (1, length + 1), generator=generator)
    if target is None:
        width = (config.target_hidden_size or 0) * len(config.target_layer_ids or ())
        stand_in = StandIn(config.backbone.hidden_size or 0, config.vocab_size or 0)
        return torch.randn(length, width, generator=generator), int(ids[0, -1]), stand_in.embed, stand_in.logits
    bound = open_target(target)
    device = next(target.parameters()).device
    was_training = target.training
    target.eval()
    try:
        taps = bound.features(ids.to(device), list(config.target_layer_ids or ())).taps[0, :-1]
    finally:
        target.train(was_training)
    dtype = next(p.dtype for p in target.parameters() if p.is_floating_point())

    def embed(tokens: Tensor) -> Tensor:
        return bound.embed(tokens.to(device)).float().cpu()

    def logits(hidden: Tensor) -> Tensor:
        return bound.logits(hidden.to(device=device, dtype=dtype)).float().cpu()

    if dtype not in (torch.float32, torch.float64):
        logits = StandIn(config.backbone.hidden_size or 0, config.vocab_size or 0).logits
    return taps.float().cpu(), int(ids[0, -1]), embed, logits
