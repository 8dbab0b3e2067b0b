"""DeepSpec's layout of a DSpark draft with Gemma-4 layers, for Gemma-4 targets.

Keys are those of transformers' ``gemma4_text`` with DeepSpec's draft keys beside them. The file carries copies of the
target's embedding and output projection, because vLLM does not share the target's with such a draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modelopt_spec.checkpoints.account import KeyReader
from modelopt_spec.checkpoints.layouts.base import NO_TARGET, Draft, Layout
from modelopt_spec.checkpoints.layouts.deepspec import MARKOV_HEADS, draft_keys, read_dspark
from modelopt_spec.checkpoints.layouts.qwen3_keys import NEUTRAL_KEYS
from modelopt_spec.checkpoints.safe_read import TensorEntry
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import BackboneConfig, DrafterConfig
from modelopt_spec.conventions import BlockLayout
from modelopt_spec.errors import CheckpointError

__all__ = ["DeepSpecGemma4Layout"]

ROPE = "rope_parameters.full_attention."
_UNUSED = {"enable_moe_block": False, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False}
"""Parts of Gemma-4 that drafts do not have."""


class DeepSpecGemma4Layout(Layout):
    """``Gemma4DSparkModel``."""

    name = "deepspec_gemma4"
    title = "DeepSpec for Gemma-4 (Gemma4DSparkModel)"

    def recognises(self, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> bool:
        """By architecture."""
        return "Gemma4DSparkModel" in (config.get("architectures") or [])

    def refuses(self, config: DrafterConfig) -> str | None:
        """Gemma-4 layers, full attention, full vocabulary, blocks from slot 0."""
        backbone = config.backbone
        if backbone.layer_style != "gemma4":
            return "holds Gemma-4 layers only; use layout 'deepspec', or train with backbone.layer_style gemma4"
        if config.head.type not in MARKOV_HEADS:
            return f"has no {config.head.type!r} head; train with head.type vanilla"
        if config.layout != BlockLayout.ANCHOR_FIRST:
            return "its readers draft from slot 0; train with layout anchor_first"
        if config.draft_vocab_size is not None:
            return "has no reduced vocabulary; train with draft_vocab_size null"
        if backbone.sliding_window is not None:
            return "its drafts attend fully; train with backbone.sliding_window null"
        return None

    def write_config(self, config: DrafterConfig, *, target: TargetFacts = NO_TARGET) -> dict[str, Any]:
        """Shape keys of full attention stand under their own and under the ``global_`` names."""
        backbone = config.backbone
        layers = backbone.num_layers or 0
        return {
            "architectures": ["Gemma4DSparkModel"],
            "model_type": "gemma4_text",
            "vocab_size": config.vocab_size,
            "hidden_size": backbone.hidden_size,
            "intermediate_size": backbone.intermediate_size,
            "num_hidden_layers": layers,
            "num_attention_heads": backbone.num_attention_heads,
            "num_key_value_heads": backbone.num_key_value_heads,
            "num_global_key_value_heads": backbone.num_key_value_heads,
            "head_dim": backbone.head_dim,
            "global_head_dim": backbone.head_dim,
            "hidden_activation": backbone.hidden_act,
            "rms_norm_eps": backbone.rms_norm_eps,
            "max_position_embeddings": backbone.max_position_embeddings,
            "attention_bias": backbone.attention_bias,
            "attention_dropout": 0.0,
            "attention_k_eq_v": backbone.key_is_value,
            "rope_parameters": {"full_attention": dict(sorted((backbone.rope_parameters or {}).items()))},
            "layer_types": ["full_attention"] * layers,
            "is_causal": backbone.causal,
            "final_logit_softcapping": target.logit_softcapping,
            "num_kv_shared_layers": 0,
            "tie_word_embeddings": False,
            **_UNUSED,
            "target_hidden_size": config.target_hidden_size,
            "num_target_layers": config.num_target_layers,
            **draft_keys(config),
        }

    def read_config(self, keys: KeyReader, entries: Mapping[str, TensorEntry]) -> DrafterConfig:
        """Full attention's shape; another than the draft can have is refused."""
        shared = keys.get("key_is_value", "attention_k_eq_v", default=False, convert=bool)
        own = ("num_global_key_value_heads", "num_key_value_heads") if shared else ("num_key_value_heads",)
        layers = keys.get("num_layers", "num_hidden_layers", convert=int)
        types = keys.get("sliding_window", "layer_types", default=["full_attention"] * layers, convert=list)
        if types != ["full_attention"] * layers:
            raise CheckpointError(f"{keys.where}: layer_types {types} are not {layers} full layers")
        for key, value in _UNUSED.items():
            if keys.get("shape", key, default=value) != value:
                raise CheckpointError(f"{keys.where}: {key} is {keys.peek(key)!r}: drafts with such parts are unknown")
        backbone = BackboneConfig(
            layer_style="gemma4",
            key_is_value=shared,
            num_layers=layers,
            hidden_size=keys.get("hidden_size", "hidden_size", convert=int),
            num_attention_heads=keys.get("num_attention_heads", "num_attention_heads", convert=int),
            num_key_value_heads=keys.get("num_key_value_heads", own[0], convert=int),
            head_dim=keys.get("head_dim", "global_head_dim", convert=int),
            intermediate_size=keys.get("intermediate_size", "intermediate_size", convert=int),
            hidden_act=keys.get("hidden_act", "hidden_activation", default="gelu_pytorch_tanh", convert=str),
            rms_norm_eps=keys.get("rms_norm_eps", "rms_norm_eps", default=1e-6, convert=float),
            max_position_embeddings=keys.get(
                "max_position_embeddings", "max_position_embeddings", default=131072, convert=int
            ),
            attention_bias=keys.get("attention_bias", "attention_bias", default=False, convert=bool),
            rope_parameters=self._rope(keys),
            causal=keys.get("causal", "is_causal", default=False, convert=bool),
        )
        keys.ignore("the target's own module caps", "final_logit_softcapping")
        keys.ignore("sliding layers, which the draft has none of", "head_dim", "num_key_value_heads", "sliding_window")
        keys.ignore("no part of a draft", "num_kv_shared_layers", "rope_parameters.sliding_attention")
        keys.ignore("no effect on the draft", *NEUTRAL_KEYS, "tie_word_embeddings")
        return read_dspark(keys, entries, backbone=backbone)

    @staticmethod
    def _rope(keys: KeyReader) -> dict[str, Any]:
        """Base, type and the share of a head that rotates."""
        rope: dict[str, Any] = {
            "rope_theta": keys.get("rope_theta", f"{ROPE}rope_theta", convert=float),
            "rope_type": keys.get("rope_parameters", f"{ROPE}rope_type", default="default", convert=str),
        }
        if rope["rope_type"] not in ("default", "proportional"):
            raise CheckpointError(f"{keys.where}: rope_type {rope['rope_type']!r} of a Gemma-4 draft is not supported")
        share = keys.get("rope share", f"{ROPE}partial_rotary_factor", default=None)
        if share is not None:
            rope["partial_rotary_factor"] = float(share)
        if rope["rope_type"] == "default" and float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
            raise CheckpointError(f"{keys.where}: a partial_rotary_factor needs rope_type 'proportional'")
        factor = keys.get("rope_parameters", f"{ROPE}factor", default=None)
        return rope if factor is None else {**rope, "factor": float(factor)}

    def write_tensors(self, draft: Draft) -> dict[str, Tensor]:
        """With the target's modules, which the file must carry."""
        if set(draft.shared) != {"embed_tokens.weight", "lm_head.weight"}:
            raise CheckpointError(
                f"layout {self.name!r} carries the target's embedding and output projection: export a model with its "
                "target in memory, or from a checkpoint that names its target"
            )
        return {**super().write_tensors(draft), **{n: t.to(draft.dtype).contiguous() for n, t in draft.shared.items()}}
