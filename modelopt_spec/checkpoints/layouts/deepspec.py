"""DeepSpec's layout of a dense DSpark draft, which vLLM, SGLang and llama.cpp read.

All draft keys stand at the top level; a ``dflash_config`` copy carries those that some readers look up there. Blocks
are anchor-first unless ``sample_from_anchor`` is false; ``markov_rank`` 0 is a DFlash draft without a correction head.
"""

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
from modelopt_spec.config import (
    BackboneConfig,
    ConfidenceConfig,
    DFlashConfig,
    DrafterConfig,
    DSparkConfig,
    HeadConfig,
)
from modelopt_spec.conventions import BlockLayout

__all__ = ["MARKOV_HEADS", "DeepSpecLayout", "draft_keys", "read_dspark"]

MARKOV_HEADS = ("none", "vanilla", "gated", "rnn")


class DeepSpecLayout(Layout):
    """``Qwen3DSparkModel``: ``markov_head.*`` and ``confidence_head.proj.*`` beside an unprefixed backbone."""

    name = "deepspec"
    title = "DeepSpec dense (Qwen3DSparkModel)"
    architectures = ("Qwen3DSparkModel",)

    def recognises(self, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> bool:
        """By architecture, or a Qwen3 config with ``markov_rank`` and unprefixed DeepSpec tensors."""
        names = config.get("architectures") or []
        if any(name in self.architectures for name in names):
            return True
        return "DSparkDraftModel" in names and config.get("model_type") == "qwen3" and "fc.weight" in entries

    def refuses(self, config: DrafterConfig) -> str | None:
        """Markov heads on a dense backbone."""
        if (reason := only_dense(config)) is not None:
            return reason
        if config.head.type not in MARKOV_HEADS:
            holds_it = config.head.type == "gru"
            other = "layout 'domino' holds it" if holds_it else "train a drafter with a vanilla head to have it served"
            return f"has no {config.head.type!r} head; {other}"
        return None

    def write_config(self, config: DrafterConfig, *, target: TargetFacts = NO_TARGET) -> dict[str, Any]:
        """Every key that a reader may look up, none left to a default.

        ``sample_from_anchor`` stands at the top level only: inside ``dflash_config`` vLLM takes it for a DFlash draft's
        and refuses it.
        """
        keys = draft_keys(config)
        nested = {**flash_config(config, target), "shift_label": keys["sample_from_anchor"]}
        if config.draft_vocab_size is not None:
            keys["draft_vocab_size"] = config.draft_vocab_size
        return {
            "architectures": [self.architectures[0]],
            "model_type": "qwen3",
            "vocab_size": config.vocab_size,
            **write_backbone(config.backbone),
            "target_hidden_size": config.target_hidden_size,
            "num_target_layers": config.num_target_layers,
            **keys,
            "dflash_config": nested,
        }

    def read_config(self, keys: KeyReader, entries: Mapping[str, TensorEntry]) -> DrafterConfig:
        """Top-level keys; copies inside ``dflash_config`` must agree."""
        return read_dspark(keys, entries)

    def file_name(self, ours: str) -> str:
        """Sinks are called ``attention_sink_bias``."""
        return sink_to_file(ours)

    def our_name(self, name: str) -> str:
        """Inverse of :meth:`file_name`."""
        return sink_to_ours(name)


def draft_keys(config: DrafterConfig) -> dict[str, Any]:
    """DeepSpec's own keys, none left to a default."""
    return {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids or ()),
        "markov_rank": 0 if config.head.type == "none" else config.head.rank,
        "markov_head_type": "vanilla" if config.head.type == "none" else config.head.type,
        "enable_confidence_head": config.confidence.enabled,
        "confidence_head_with_markov": config.confidence.enabled and config.confidence.with_markov,
        "sample_from_anchor": config.layout == BlockLayout.ANCHOR_FIRST,
    }


def read_dspark(
    keys: KeyReader,
    entries: Mapping[str, TensorEntry],
    nested: str = "dflash_config.",
    backbone: BackboneConfig | None = None,
) -> DrafterConfig:
    """A DSpark (or headless) drafter from top-level keys with copies in ``nested``, whichever are there.

    Where no key says it, a confidence head that reads the previous token's embedding is recognised by its width.
    """

    def both(ours: str, *names: str, **kwargs: Any) -> Any:
        return keys.get(ours, *(place + name for name in names for place in ("", nested)), **kwargs)

    backbone = backbone or read_backbone(keys, nested=nested)
    rank = both("head.rank", "markov_rank", default=0, convert=int)
    kind = both("head.type", "markov_head_type", default="vanilla", convert=str).lower()
    enabled = both("confidence.enabled", "enable_confidence_head", "use_confidence_head", default=False, convert=bool)
    projection = entries.get("confidence_head.proj.weight") or entries.get("confidence_proj.weight")
    wide = rank > 0 and projection is not None and projection.shape[-1] == (backbone.hidden_size or 0) + rank
    with_markov = both("confidence.with_markov", "confidence_head_with_markov", default=wide, convert=bool)
    anchor_first = both("layout", "sample_from_anchor", "shift_label", default=True, convert=bool)
    keys.ignore("says which head it is in other layouts", nested + "projector_type")
    fields: dict[str, Any] = {
        **read_draft_keys(keys, entries, backbone, nested),
        "layout": BlockLayout.ANCHOR_FIRST if anchor_first else BlockLayout.BONUS_ANCHOR,
        "backbone": backbone,
    }
    if rank == 0:
        return DFlashConfig(**fields, confidence=ConfidenceConfig(enabled=enabled, with_markov=not enabled))
    return DSparkConfig(
        **fields,
        head=HeadConfig(type=kind, rank=rank),
        confidence=ConfidenceConfig(enabled=enabled, with_markov=with_markov if enabled else True),
    )
