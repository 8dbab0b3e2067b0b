"""SpecForge 0.2's layouts: every draft key inside ``dflash_config``, architectures of its own.

``DSparkDraftModel`` (Markov heads) and ``DominoDraftModel``; its plain DFlash is the z-lab layout. Early checkpoints
keep the head's tensors under ``logit_head.``, which is read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelopt_spec.checkpoints.account import KeyReader
from modelopt_spec.checkpoints.layouts.base import NO_TARGET, Layout, only_dense
from modelopt_spec.checkpoints.layouts.deepspec import read_dspark
from modelopt_spec.checkpoints.layouts.dense_keys import sink_to_file, sink_to_ours
from modelopt_spec.checkpoints.layouts.domino import DominoLayout
from modelopt_spec.checkpoints.layouts.qwen3_keys import write_backbone
from modelopt_spec.checkpoints.layouts.zlab import flash_config
from modelopt_spec.checkpoints.safe_read import TensorEntry
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import DrafterConfig
from modelopt_spec.conventions import BlockLayout

__all__ = ["SpecForgeDSparkLayout", "SpecForgeDominoLayout"]

_OLD_HEAD = "logit_head."


class SpecForgeDSparkLayout(Layout):
    """``DSparkDraftModel`` with ``projector_type`` dspark."""

    name = "specforge"
    title = "SpecForge DSpark (DSparkDraftModel, nested keys)"

    def recognises(self, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> bool:
        """``DSparkDraftModel`` whose head keys are nested only."""
        nested = config.get("dflash_config") or {}
        own = "DSparkDraftModel" in (config.get("architectures") or [])
        return own and "markov_rank" not in config and "markov_rank" in nested

    def refuses(self, config: DrafterConfig) -> str | None:
        """Anchor-first Markov heads on a dense backbone with a full vocabulary."""
        if (reason := only_dense(config)) is not None:
            return reason
        if config.head.type not in ("vanilla", "gated", "rnn"):
            return f"holds Markov heads only, this drafter's is {config.head.type!r}; use 'zlab' or 'specforge_domino'"
        if config.layout != BlockLayout.ANCHOR_FIRST:
            return "holds anchor-first blocks only; use layout 'deepspec' or 'speculators'"
        if config.draft_vocab_size is not None:
            return "has no reduced vocabulary; use layout 'deepspec' or 'speculators'"
        if config.backbone.attention_sink:
            return "has no attention sink; use layout 'deepspec'"
        return None

    def write_config(self, config: DrafterConfig, *, target: TargetFacts = NO_TARGET) -> dict[str, Any]:
        """Nested draft keys; ``attention_mode`` says whether key-value heads are shared."""
        backbone = config.backbone
        grouped = backbone.num_key_value_heads != backbone.num_attention_heads
        return {
            "architectures": ["DSparkDraftModel"],
            "model_type": "qwen3",
            "vocab_size": config.vocab_size,
            **write_backbone(backbone),
            "num_target_layers": config.num_target_layers,
            "block_size": config.block_size,
            "dflash_config": {
                **flash_config(config, target),
                "projector_type": "dspark",
                "attention_mode": "gqa" if grouped else "mha",
                "shift_label": True,
                "markov_rank": config.head.rank,
                "markov_head_type": config.head.type,
                "enable_confidence_head": config.confidence.enabled,
                "confidence_head_with_markov": config.confidence.enabled and config.confidence.with_markov,
            },
        }

    def read_config(self, keys: KeyReader, entries: Mapping[str, TensorEntry]) -> DrafterConfig:
        """DSpark is anchor-first here whatever ``shift_label`` says: its trainer labels slot k with token a+k+1."""
        keys.ignore("says whether heads are shared", "dflash_config.attention_mode")
        keys.ignore("a training setting", "dflash_config.confidence_head_alpha", "dflash_config.pure_draft_prefix_len")
        config = read_dspark(keys, entries)
        return config.replace(layout=BlockLayout.ANCHOR_FIRST)

    def file_name(self, ours: str) -> str:
        """Names are ours."""
        return sink_to_file(ours)

    def our_name(self, name: str) -> str:
        """Names are ours; older files have a ``logit_head.`` in front of the head's."""
        return sink_to_ours(name.removeprefix(_OLD_HEAD))


class SpecForgeDominoLayout(DominoLayout):
    """``DominoDraftModel``: Domino's keys and names under an architecture that no engine knows."""

    name = "specforge_domino"
    title = "SpecForge Domino (DominoDraftModel)"
    architecture = "DominoDraftModel"

    def recognises(self, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> bool:
        """By architecture; ``projector_type`` may be left out."""
        return self.architecture in (config.get("architectures") or [])

    def our_name(self, name: str) -> str:
        """Older files have a ``logit_head.`` in front of the head's names."""
        return super().our_name(name.removeprefix(_OLD_HEAD))
