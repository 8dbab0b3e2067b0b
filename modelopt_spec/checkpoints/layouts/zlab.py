"""z-lab's layout of a DFlash draft: bonus-anchor blocks, the draft's own keys inside ``dflash_config``.

A block of ``block_size`` slots drafts ``block_size - 1`` tokens; slot 0 holds the known anchor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelopt_spec.checkpoints.account import KeyReader
from modelopt_spec.checkpoints.layouts.base import NO_TARGET, Layout, only_dense
from modelopt_spec.checkpoints.layouts.dense_keys import read_draft_keys, sink_to_file, sink_to_ours
from modelopt_spec.checkpoints.layouts.qwen3_keys import read_backbone, write_backbone
from modelopt_spec.checkpoints.safe_read import TensorEntry
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import ConfidenceConfig, DFlashConfig, DrafterConfig
from modelopt_spec.conventions import BlockLayout

__all__ = ["ZLabLayout", "flash_config"]


def flash_config(config: DrafterConfig, target: TargetFacts) -> dict[str, Any]:
    """The ``dflash_config`` entries that say taps, mask, window, causality and sink, and how the target scales."""
    backbone = config.backbone
    nested: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids or ()),
        "causal": backbone.causal,
        "use_swa": backbone.sliding_window is not None,
    }
    if backbone.sliding_window is not None:
        nested["swa_window_size"] = backbone.sliding_window
    if backbone.attention_sink:
        nested["attention_sink_bias"] = True
    if target.embedding_scale != 1.0:
        nested["input_embedding_scale"] = target.embedding_scale
    if target.logit_scale != 1.0:
        nested["output_multiplier"] = target.logit_scale
    if target.logit_softcapping is not None:
        nested["final_logit_softcapping"] = target.logit_softcapping
    return nested


class ZLabLayout(Layout):
    """``DFlashDraftModel`` without a correction head."""

    name = "zlab"
    title = "z-lab DFlash (DFlashDraftModel, bonus anchor)"

    def recognises(self, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> bool:
        """``DFlashDraftModel`` without a projector and without head tensors."""
        nested = config.get("dflash_config") or {}
        plain = not any(name.startswith(("markov", "prefix_gru", "embed_proj")) for name in entries)
        known = nested.get("projector_type", config.get("projector_type", "dflash")) in (None, "dflash")
        return "DFlashDraftModel" in (config.get("architectures") or []) and plain and known

    def refuses(self, config: DrafterConfig) -> str | None:
        """Headless bonus-anchor drafts with a full vocabulary."""
        if (reason := only_dense(config)) is not None:
            return reason
        if config.head.type != "none":
            return f"has no correction head, this drafter's is {config.head.type!r}; use layout 'deepspec' or 'domino'"
        if config.layout != BlockLayout.BONUS_ANCHOR:
            return (
                "holds bonus-anchor blocks only: its readers skip slot 0. An anchor-first DFlash draft goes into "
                "layout 'deepspec' (markov_rank 0)"
            )
        if config.confidence.enabled:
            return "has no confidence head; use layout 'deepspec', or train without one"
        return None

    def write_config(self, config: DrafterConfig, *, target: TargetFacts = NO_TARGET) -> dict[str, Any]:
        """Backbone at the top level, draft keys nested."""
        keys = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": config.vocab_size,
            **write_backbone(config.backbone),
            "num_target_layers": config.num_target_layers,
            "block_size": config.block_size,
            "dflash_config": flash_config(config, target),
        }
        if config.target_hidden_size != config.backbone.hidden_size:
            keys["target_hidden_size"] = config.target_hidden_size
        if config.draft_vocab_size is not None:
            keys["draft_vocab_size"] = config.draft_vocab_size
        return keys

    def read_config(self, keys: KeyReader, entries: Mapping[str, TensorEntry]) -> DrafterConfig:
        """``sample_from_anchor`` and ``shift_label`` may stand there and must be false."""
        backbone = read_backbone(keys)
        shifted = keys.get(
            "layout",
            *(f"{place}{key}" for place in ("dflash_config.", "") for key in ("sample_from_anchor", "shift_label")),
            default=False,
            convert=bool,
        )
        return DFlashConfig(
            **read_draft_keys(keys, entries, backbone),
            layout=BlockLayout.ANCHOR_FIRST if shifted else BlockLayout.BONUS_ANCHOR,
            backbone=backbone,
            confidence=ConfidenceConfig(enabled=False),
        )

    def file_name(self, ours: str) -> str:
        """Sinks are called ``attention_sink_bias``."""
        return sink_to_file(ours)

    def our_name(self, name: str) -> str:
        """Inverse of :meth:`file_name`."""
        return sink_to_ours(name)
