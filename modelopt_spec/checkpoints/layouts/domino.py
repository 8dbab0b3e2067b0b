"""Domino's layout as SGLang and TensorRT-LLM read it: a ``DFlashDraftModel`` whose ``projector_type`` is ``domino``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelopt_spec.checkpoints.account import KeyReader
from modelopt_spec.checkpoints.layouts.base import NO_TARGET, Layout, only_dense
from modelopt_spec.checkpoints.layouts.dense_keys import read_draft_keys, sink_to_file, sink_to_ours
from modelopt_spec.checkpoints.layouts.qwen3_keys import read_backbone, write_backbone
from modelopt_spec.checkpoints.layouts.zlab import flash_config
from modelopt_spec.checkpoints.safe_read import TensorEntry
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import DominoConfig, DrafterConfig, HeadConfig
from modelopt_spec.conventions import BlockLayout

__all__ = ["DominoLayout"]

PREFIX = "domino_head."
_HEAD_PARTS = ("prefix_gru.", "embed_proj.")


class DominoLayout(Layout):
    """``prefix_gru.*`` and ``embed_proj.*`` without a prefix; head sizes inside ``dflash_config``."""

    name = "domino"
    title = "Domino (DFlashDraftModel, projector_type domino)"
    architecture = "DFlashDraftModel"

    def recognises(self, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> bool:
        """By architecture and projector type."""
        nested = config.get("dflash_config") or {}
        domino = nested.get("projector_type", config.get("projector_type")) == "domino"
        return domino and self.architecture in (config.get("architectures") or [])

    def refuses(self, config: DrafterConfig) -> str | None:
        """GRU heads on a dense backbone, full vocabulary."""
        if config.head.type != "gru":
            return f"holds the gru head only, this drafter's is {config.head.type!r}; use layout 'deepspec' or 'zlab'"
        if (reason := only_dense(config)) is not None:
            return reason
        if config.draft_vocab_size is not None:
            return "has no reduced vocabulary; train with draft_vocab_size null"
        if config.confidence.enabled:
            return "has no confidence head; train without one"
        return None

    def write_config(self, config: DrafterConfig, *, target: TargetFacts = NO_TARGET) -> dict[str, Any]:
        """Head keys nested; ``emb_dim`` also at the top level, where it must agree."""
        keys = {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "vocab_size": config.vocab_size,
            **write_backbone(config.backbone),
            "num_target_layers": config.num_target_layers,
            "block_size": config.block_size,
            "emb_dim": config.head.rank,
            "dflash_config": {
                **flash_config(config, target),
                "projector_type": "domino",
                "shift_label": config.layout == BlockLayout.ANCHOR_FIRST,
                "pure_draft_prefix_len": config.head.pure_draft_prefix_len,
                "gru_hidden_dim": config.head.gru_hidden_dim or 2 * config.head.rank,
                "emb_dim": config.head.rank,
            },
        }
        if config.target_hidden_size != config.backbone.hidden_size:
            keys["target_hidden_size"] = config.target_hidden_size
        return keys

    def read_config(self, keys: KeyReader, entries: Mapping[str, TensorEntry]) -> DrafterConfig:
        """Nested keys first; a top-level copy must agree."""

        def both(ours: str, key: str, **kwargs: Any) -> Any:
            return keys.get(ours, f"dflash_config.{key}", key, **kwargs)

        backbone = read_backbone(keys)
        both("algorithm", "projector_type")
        shifted = both("layout", "shift_label", convert=bool)
        head = HeadConfig(
            type="gru",
            rank=both("head.rank", "emb_dim", convert=int),
            gru_hidden_dim=both("head.gru_hidden_dim", "gru_hidden_dim", convert=int),
            pure_draft_prefix_len=both("head.pure_draft_prefix_len", "pure_draft_prefix_len", default=1, convert=int),
        )
        return DominoConfig(
            **read_draft_keys(keys, entries, backbone),
            layout=BlockLayout.ANCHOR_FIRST if shifted else BlockLayout.BONUS_ANCHOR,
            backbone=backbone,
            head=head,
        )

    def file_name(self, ours: str) -> str:
        """Head parts lose our ``domino_head.`` prefix."""
        return sink_to_file(ours.removeprefix(PREFIX))

    def our_name(self, name: str) -> str:
        """Inverse of :meth:`file_name`."""
        return sink_to_ours(PREFIX + name if name.startswith(_HEAD_PARTS) else name)
