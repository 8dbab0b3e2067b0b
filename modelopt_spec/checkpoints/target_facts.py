"""What of a target a draft's files and engines must know: how it scales embeddings and logits, and who it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from modelopt_spec.targets.base import open_target

__all__ = ["TargetFacts"]


@dataclass(frozen=True)
class TargetFacts:
    """A target as an engine sees it; the defaults are those of a target that scales nothing."""

    name: str = ""
    known: bool = False
    """Whether the values were read from a target rather than assumed."""
    embedding_scale: float = 1.0
    """What training embedded, relative to the rows of the embedding matrix that engines share with the draft."""
    embedding_multiplier: float = 1.0
    """The part of that scale that the target applies outside of its embedding module."""
    logit_softcapping: float | None = None
    logit_scale: float = 1.0

    @classmethod
    def of(cls, model: nn.Module) -> TargetFacts:
        """Read from a model; the embedding's scale is measured on a few tokens."""
        target = open_target(model)
        shape = target.shape
        name = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
        return cls(
            name=name,
            known=True,
            embedding_scale=_measured_scale(model, target.embed),
            embedding_multiplier=shape.embedding_scale,
            logit_softcapping=shape.logit_softcapping,
            logit_scale=shape.logit_scale,
        )

    @classmethod
    def from_card(cls, target: Mapping[str, Any]) -> TargetFacts:
        """From the target entry of a card or of a checkpoint's description."""
        facts = target.get("facts")
        if not isinstance(facts, dict):
            return cls(name=str(target.get("name", "")))
        return cls(name=str(target.get("name", "")), known=True, **facts)

    def to_dict(self) -> dict[str, Any]:
        """The measured values, for a card."""
        return {
            "embedding_scale": self.embedding_scale,
            "embedding_multiplier": self.embedding_multiplier,
            "logit_softcapping": self.logit_softcapping,
            "logit_scale": self.logit_scale,
        }


@torch.no_grad()
def _measured_scale(model: nn.Module, embed: Any) -> float:
    """embed(ids) = scale * rows(ids): the scale, 1.0 where the rows cannot be read."""
    getter: Any = getattr(model, "get_input_embeddings", None)
    weight = getattr(getter(), "weight", None) if getter is not None else None
    if weight is None or not weight.is_floating_point() or weight.is_meta:
        return 1.0
    ids = torch.arange(min(16, weight.shape[0]), device=weight.device)
    rows, embedded = weight[ids].double(), embed(ids).double()
    norm = (rows * rows).sum()
    if rows.shape != embedded.shape or norm == 0:
        return 1.0
    scale = float((rows * embedded).sum() / norm)
    return 1.0 if abs(scale - 1.0) < 1e-3 else scale
