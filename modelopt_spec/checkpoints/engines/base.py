"""What an engine is to an export: which drafters and layouts it serves, why not others, and how it reads a config."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import Qwen3Config

from modelopt_spec.checkpoints.safe_read import TensorEntry
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import DrafterConfig
from modelopt_spec.conventions import BlockLayout, first_drafting_slot

__all__ = [
    "Directory",
    "Engine",
    "Serving",
    "View",
    "confidence_input",
    "drafts_of",
    "is_anchor_first",
    "qwen3_view",
    "reduced_vocabulary",
]


@dataclass(frozen=True)
class Serving:
    """A drafter as an engine gets it."""

    config: DrafterConfig
    layout: str
    dtype: torch.dtype
    target: TargetFacts = TargetFacts()
    quantization: str | None = None
    """The ``quant_algo`` of its ``quantization_config``."""


@dataclass(frozen=True)
class Directory:
    """A draft directory as it lies on disk."""

    config: Mapping[str, Any]
    entries: Mapping[str, TensorEntry]
    files: tuple[str, ...] = ()


@dataclass
class View:
    """What an engine will do with a directory: a value for each fact that it decides, and what makes it fail."""

    does: dict[str, Any] = field(default_factory=dict)
    """Fact -> value; the facts are those of ``preflight.facts``."""
    harmless: dict[str, str] = field(default_factory=dict)
    """Fact -> why another value than training's makes no difference there."""
    fails: dict[str, str] = field(default_factory=dict)
    """Fact -> why loading or serving fails on it."""


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
    quantisations: ClassVar[tuple[str, ...]] = ()
    """``quant_algo`` values of drafts that it loads."""

    @abstractmethod
    def refuses(self, serving: Serving) -> str | None:
        """Why it does not serve this drafter in this layout, with the nearest thing that works; None if it does."""

    @abstractmethod
    def launch(
        self, config: DrafterConfig, layout: str, target: str, draft: str, quantization: str | None = None
    ) -> str:
        """The command line that serves ``target`` with the draft directory."""

    @abstractmethod
    def reads(self, directory: Directory, target: TargetFacts) -> View:
        """What it will do with a directory, key by key, its defaults included."""

    def notes(self, serving: Serving) -> list[str]:
        """What to know when serving a drafter that it does serve."""
        return []

    def only_dtype(self, config: DrafterConfig) -> torch.dtype | None:
        """The one type of weights that it serves this drafter in; None where there are several."""
        return None

    def serves_without_head(self, config: DrafterConfig) -> bool:
        """Whether an anchor-first drafter without a head needs no head of zeros here."""
        return False

    def common_refusal(self, serving: Serving) -> str | None:
        """Rules that all engines share: activation, head, layout, window."""
        config = serving.config
        backbone = config.backbone
        if backbone.hidden_act != "silu":
            return f"it builds SiLU layers whatever hidden_act says ({backbone.hidden_act!r}); train with silu"
        if config.head.type not in self.heads:
            return f"it has no {config.head.type!r} head. {self.way_out(config.head.type)}"
        if serving.layout not in self.layouts:
            return f"it does not read layout {serving.layout!r}; use {' or '.join(self.layouts)}"
        if serving.quantization is not None and (reason := self.quantisation_refusal(serving)) is not None:
            return reason
        if backbone.sliding_window is not None and backbone.window_rule != "query":
            return (
                "a dense draft's window is counted for each query there (q - k < window), and this one was trained "
                "with window_rule 'block'; train with window_rule 'query'"
            )
        return None

    def quantisation_refusal(self, serving: Serving) -> str | None:
        """Rules that all engines share for a quantised draft: its format, its layout, the type of the rest."""
        if serving.quantization not in self.quantisations:
            known = " or ".join(self.quantisations) or "none"
            return (
                f"it is not known to load a draft quantised as {serving.quantization} (known: {known}); export it whole"
            )
        if serving.layout not in ("deepspec", "zlab", "nemotron", "domino"):
            return (
                f"it is not known to read a quantization_config in layout {serving.layout!r}; write layout 'deepspec'"
            )
        if serving.dtype not in (torch.bfloat16, torch.float16):
            return "it runs quantised layers on 16-bit activations only; pass dtype=bfloat16"
        return None

    def way_out(self, head: str) -> str:
        """What to do about a head that it does not serve."""
        if head in ("gated", "rnn"):
            return "Distill it into a vanilla head (mtsp distill), or serve it with SGLang"
        if head == "gru":
            return "Serve it with SGLang, or train with head.type vanilla"
        return f"Heads that it serves: {', '.join(self.heads)}"


def drafts_of(config: DrafterConfig) -> int:
    """Tokens that one block of this drafter proposes when every drafting slot is used."""
    return config.block_size - first_drafting_slot(config.layout)


def is_anchor_first(config: DrafterConfig) -> bool:
    """Whether slot 0 drafts."""
    return config.layout == BlockLayout.ANCHOR_FIRST


def confidence_input(enabled: bool, with_markov: bool) -> str:
    """What a confidence head reads, as a fact's value."""
    return "none" if not enabled else "hidden and token" if with_markov else "hidden"


def reduced_vocabulary(keys: Mapping[str, Any]) -> int | None:
    """``draft_vocab_size`` where it is not the whole vocabulary."""
    size = keys.get("draft_vocab_size")
    return None if size in (None, 0, keys.get("vocab_size")) else size


def qwen3_view(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that an engine takes from transformers' Qwen3Config, its defaults and rope rules included."""
    given = copy.deepcopy({key: value for key, value in keys.items() if key not in ("architectures", "model_type")})
    hf = Qwen3Config(**given)
    rope: dict[str, Any] = dict(hf.rope_parameters or {})
    return {
        "shape": (
            hf.num_hidden_layers,
            hf.hidden_size,
            hf.num_attention_heads,
            hf.num_key_value_heads,
            hf.head_dim,
            hf.intermediate_size,
        ),
        "rope base": float(rope.pop("rope_theta")),
        "rotated share": float(rope.pop("partial_rotary_factor", 1.0) or 1.0),
        "rope scaling": {key: value for key, value in rope.items() if key not in ("type", "mrope_section")},
        "norm epsilon": float(hf.rms_norm_eps),
        "activation": hf.hidden_act,
        "attention bias": bool(hf.attention_bias),
        "longest context": int(hf.max_position_embeddings),
        "vocabulary": int(hf.vocab_size),
    }
