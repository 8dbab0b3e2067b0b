"""What an engine is to an export: which drafters and layouts it serves, why not the others, and how to start it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from modelopt_spec.config import DrafterConfig
from modelopt_spec.conventions import BlockLayout, first_drafting_slot
from modelopt_spec.targets.base import TargetShape

__all__ = ["Engine", "Serving", "drafts_of"]


@dataclass(frozen=True)
class Serving:
    """A drafter as an engine gets it."""

    config: DrafterConfig
    layout: str
    dtype: torch.dtype
    target: TargetShape | None = None
    """Known where the export has its target at hand; rules about the target are skipped without it."""
    quantization: dict[str, Any] | None = field(default=None)
    """The directory's ``quantization_config``."""


class Engine(ABC):
    """Rules of one engine, of the version that they were read from."""

    name: ClassVar[str]
    title: ClassVar[str]
    version: ClassVar[str]
    evidence: ClassVar[str]
    """How the rules are checked: served in tests, or file rules only."""
    layouts: ClassVar[tuple[str, ...]]
    """Layouts that it reads."""
    heads: ClassVar[tuple[str, ...]]
    """Correction heads that it serves."""

    @abstractmethod
    def refuses(self, serving: Serving) -> str | None:
        """Why it does not serve this drafter in this layout, with the nearest thing that works; None if it does."""

    @abstractmethod
    def launch(self, config: DrafterConfig, layout: str, target: str, draft: str) -> str:
        """The command line that serves ``target`` with the draft directory."""

    def notes(self, serving: Serving) -> list[str]:
        """What to know when serving a drafter that it does serve."""
        return []

    def common_refusal(self, serving: Serving) -> str | None:
        """Rules that all engines share: activation, head, layout."""
        config = serving.config
        if config.backbone.hidden_act != "silu":
            return f"it builds SiLU layers whatever hidden_act says ({config.backbone.hidden_act!r}); train with silu"
        if config.head.type not in self.heads:
            return f"it has no {config.head.type!r} head. {self.way_out(config.head.type)}"
        if serving.layout not in self.layouts:
            return f"it does not read layout {serving.layout!r}; use {' or '.join(self.layouts)}"
        return None

    def way_out(self, head: str) -> str:
        """What to do about a head that it does not serve."""
        if head in ("gated", "rnn"):
            return "Distill it into a vanilla head (recipe distill/vanilla), or serve it with SGLang"
        if head == "gru":
            return "Serve it with SGLang, or train with head.type vanilla"
        return f"Heads that it serves: {', '.join(self.heads)}"


def drafts_of(config: DrafterConfig) -> int:
    """Tokens that one block of this drafter proposes when every drafting slot is used."""
    return config.block_size - first_drafting_slot(config.layout)


def is_anchor_first(config: DrafterConfig) -> bool:
    """Whether slot 0 drafts."""
    return config.layout == BlockLayout.ANCHOR_FIRST
