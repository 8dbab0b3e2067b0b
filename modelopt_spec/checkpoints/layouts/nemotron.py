"""The layout of NVIDIA's Nemotron drafts: DeepSpec's keys with aliases for taps, window, causality and attention sinks.

Taps stand twice, as ours and as ``eagle_aux_hidden_state_layer_ids`` (one more); the window stands in ``dflash_config``
alone; ``attention_sink_bias`` stands at the top level; the draft says whether it carries the target's embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelopt_spec.checkpoints.account import KeyReader
from modelopt_spec.checkpoints.layouts.base import NO_TARGET
from modelopt_spec.checkpoints.layouts.deepspec import DeepSpecLayout, read_dspark
from modelopt_spec.checkpoints.layouts.dense_keys import layer_ids
from modelopt_spec.checkpoints.safe_read import TensorEntry
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import DrafterConfig
from modelopt_spec.conventions import aux_layer_id, tap_from_aux_layer_id

__all__ = ["NemotronLayout"]

_AUX = "eagle_aux_hidden_state_layer_ids"


class NemotronLayout(DeepSpecLayout):
    """``Qwen3DSparkModel`` with ``eagle_aux_hidden_state_layer_ids``."""

    name = "nemotron"
    title = "Nemotron (Qwen3DSparkModel with aux ids, sinks, windows)"

    def recognises(self, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> bool:
        """DeepSpec's architecture with aux ids at the top level."""
        return super().recognises(config, entries) and _AUX in config

    def write_config(self, config: DrafterConfig, *, target: TargetFacts = NO_TARGET) -> dict[str, Any]:
        """DeepSpec's keys and the aliases."""
        keys = super().write_config(config, target=target)
        keys[_AUX] = [aux_layer_id(i) for i in config.target_layer_ids or ()]
        keys["has_embed_tokens"] = False
        keys["has_lm_head"] = config.draft_vocab_size is not None
        keys["attention_sink_bias"] = config.backbone.attention_sink
        return keys

    def read_config(self, keys: KeyReader, entries: Mapping[str, TensorEntry]) -> DrafterConfig:
        """The two forms of the taps must agree; either may be missing."""
        aux = keys.get("target_layer_ids", _AUX, convert=layer_ids)
        taps = tuple(tap_from_aux_layer_id(i) for i in aux)
        written = keys.peek("target_layer_ids", keys.peek("dflash_config.target_layer_ids"))
        if written is None:
            keys.config = {**keys.config, "target_layer_ids": list(taps)}
        elif list(written) != list(taps):
            message = (
                f"{keys.where} contradicts itself: {_AUX} {list(aux)} means layer outputs {list(taps)}, but "
                f"target_layer_ids is {list(written)}"
            )
            keys.contradict("target_layer_ids", message)
        keys.ignore("says what the file carries", "has_embed_tokens", "has_lm_head")
        return read_dspark(keys, entries)
