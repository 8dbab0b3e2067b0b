"""nvidia-modelopt 0.47's layout of a DSpark draft: a ``DFlashDraftModel`` with flat head names and nested head keys.

No engine loads it as it is (its DFlash and Domino drafts are the z-lab and Domino layouts). The confidence head always
reads the previous token's embedding, and blocks are always anchor-first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelopt_spec.checkpoints.account import KeyReader
from modelopt_spec.checkpoints.layouts.base import NO_TARGET, Layout, only_dense
from modelopt_spec.checkpoints.layouts.deepspec import read_dspark
from modelopt_spec.checkpoints.layouts.dense_keys import sink_to_file, sink_to_ours
from modelopt_spec.checkpoints.layouts.qwen3_keys import write_backbone
from modelopt_spec.checkpoints.layouts.zlab import flash_config
from modelopt_spec.checkpoints.safe_read import TensorEntry
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import DrafterConfig
from modelopt_spec.conventions import BlockLayout

__all__ = ["ModelOptLayout", "flat_to_ours", "ours_to_flat"]

_HEAD_PARTS = ("markov_w1.", "markov_w2.", "gate_proj.", "joint_proj.")


def ours_to_flat(ours: str) -> str:
    """Our name of a tensor -> nvidia-modelopt's."""
    ours = ours.removeprefix("markov_head.").removeprefix("domino_head.")
    return sink_to_file(ours.replace("confidence_head.proj.", "confidence_proj."))


def flat_to_ours(name: str) -> str:
    """Inverse of :func:`ours_to_flat`; the nested ``markov_head.`` names, which it reads too, stay as they are."""
    if name.startswith(_HEAD_PARTS):
        return f"markov_head.{name}"
    if name.startswith(("prefix_gru.", "embed_proj.")):
        return f"domino_head.{name}"
    return sink_to_ours(name.replace("confidence_proj.", "confidence_head.proj."))


class ModelOptLayout(Layout):
    """``markov_w1``, ``gate_proj``, ``confidence_proj`` ... beside the backbone; head keys inside ``dflash_config``."""

    name = "modelopt"
    title = "nvidia-modelopt 0.47 DSpark"

    def recognises(self, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> bool:
        """``DFlashDraftModel`` with ``projector_type`` dspark."""
        nested = config.get("dflash_config") or {}
        return "DFlashDraftModel" in (config.get("architectures") or []) and nested.get("projector_type") == "dspark"

    def refuses(self, config: DrafterConfig) -> str | None:
        """Anchor-first Markov heads on a dense backbone with a full vocabulary."""
        if (reason := only_dense(config)) is not None:
            return reason
        if config.head.type not in ("vanilla", "gated", "rnn"):
            return f"holds Markov heads only, this drafter's is {config.head.type!r}; use layout 'zlab' or 'domino'"
        if config.layout != BlockLayout.ANCHOR_FIRST:
            return "holds anchor-first blocks only; use layout 'deepspec' or 'speculators'"
        if config.draft_vocab_size is not None:
            return "has no reduced vocabulary; use layout 'deepspec' or 'speculators'"
        if config.confidence.enabled and not config.confidence.with_markov:
            return "has no confidence head without the Markov embedding; use layout 'deepspec'"
        return None

    def write_config(self, config: DrafterConfig, *, target: TargetFacts = NO_TARGET) -> dict[str, Any]:
        """As its own exporter writes it."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": config.vocab_size,
            **write_backbone(config.backbone),
            "num_target_layers": config.num_target_layers,
            "block_size": config.block_size,
            "dflash_config": {
                **flash_config(config, target),
                "projector_type": "dspark",
                "shift_label": True,
                "markov_rank": config.head.rank,
                "markov_head_type": config.head.type,
                "use_confidence_head": config.confidence.enabled,
            },
        }

    def read_config(self, keys: KeyReader, entries: Mapping[str, TensorEntry]) -> DrafterConfig:
        """Nested keys; the confidence head's width says that it reads the Markov embedding."""
        return read_dspark(keys, entries)

    def file_name(self, ours: str) -> str:
        """Flat head names."""
        return ours_to_flat(ours)

    def our_name(self, name: str) -> str:
        """Flat or nested head names."""
        return flat_to_ours(name)
