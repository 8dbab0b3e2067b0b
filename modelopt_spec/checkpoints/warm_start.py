"""Starting a drafter from another one's weights: a checkpoint of this package or a published draft directory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from modelopt_spec.checkpoints import store
from modelopt_spec.checkpoints.importing import read_draft
from modelopt_spec.checkpoints.layouts import Draft
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.errors import CheckpointError, ConfigError, nearest

__all__ = ["PARTS", "WarmStart", "freeze_parts", "warm_start"]

PARTS = ("backbone", "head", "confidence")
"""What :func:`freeze_parts` can freeze."""


@dataclass(frozen=True)
class WarmStart:
    """What a drafter took from another."""

    copied: tuple[str, ...]
    kept: tuple[str, ...]
    """Weights that the other one does not have, or has in another shape: they keep their own initial values."""
    unused: tuple[str, ...]
    """Weights of the other one that this drafter has no place for."""


def warm_start(model: nn.Module, source: str | os.PathLike[str]) -> WarmStart:
    """Copy into ``model.drafter`` what another drafter of the same target has under the same names and shapes.

    A head of another kind or rank starts anew; the backbone must fit completely.

    Args:
        model: a converted model.
        source: checkpoint directory of :func:`modelopt_spec.save` or a published draft directory of any known layout.

    Raises:
        CheckpointError: no drafter, other taps, or a backbone of another size.
    """
    drafter = getattr(model, "drafter", None)
    if not isinstance(drafter, Drafter):
        raise CheckpointError(f"this {type(model).__name__} has no drafter: call modelopt_spec.convert first")
    draft = _read(Path(source))
    theirs, ours = draft.config.target_layer_ids, drafter.config.target_layer_ids
    if theirs != ours:
        raise CheckpointError(
            f"{source} reads layers {list(theirs or ())} of the target, this drafter {list(ours or ())}: set "
            f"target_layer_ids to {list(theirs or ())}"
        )
    weights = drafter.state_dict()
    fits = [name for name, tensor in draft.tensors.items() if name in weights and weights[name].shape == tensor.shape]
    heads = ("markov_head.", "domino_head.", "confidence_head.", "lm_head.", "d2t")
    lost = [name for name in weights if name not in fits and not name.startswith(heads)]
    if lost:
        raise CheckpointError(
            f"{source} does not fit this drafter's backbone: {', '.join(lost[:4])} are missing there or of "
            "another shape. Take over its num_layers, head counts, head_dim and intermediate_size"
        )
    with torch.no_grad():
        for name in fits:
            weights[name].copy_(draft.tensors[name])
    return WarmStart(
        copied=tuple(fits),
        kept=tuple(name for name in weights if name not in fits),
        unused=tuple(name for name in draft.tensors if name not in fits),
    )


def freeze_parts(drafter: Drafter, parts: Iterable[str]) -> None:
    """Stop parts of a drafter from being trained: ``backbone`` (all but the heads), ``head``, ``confidence``.

    Raises:
        ConfigError: an unknown part, or nothing left to train.
    """
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"drafter.freeze names {part!r}.{nearest(str(part), PARTS)} Parts: {', '.join(PARTS)}")
        for name, parameter in drafter.named_parameters():
            if _part_of(name) == part:
                parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in drafter.parameters()):
        raise ConfigError(f"drafter.freeze {list(parts)} leaves nothing to train")


def _part_of(name: str) -> str:
    """The part that a weight belongs to."""
    if name.startswith(("markov_head.", "domino_head.")):
        return "head"
    return "confidence" if name.startswith("confidence_head.") else "backbone"


def _read(source: Path) -> Draft:
    if (source / store.DESCRIPTION).is_file():
        description = store.read_description(source)
        return Draft(store.config_of(description), store.read_weights(source, description))
    return read_draft(source).draft
