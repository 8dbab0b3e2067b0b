"""The Qwen3 shape keys that all dense layouts share: sizes, rope, window, and where each of them stands."""

from __future__ import annotations

from typing import Any

from modelopt_spec.checkpoints.account import KeyReader
from modelopt_spec.config import BackboneConfig
from modelopt_spec.errors import CheckpointError

__all__ = ["DTYPE_KEYS", "NEUTRAL_KEYS", "read_backbone", "read_rope", "write_backbone"]

DTYPE_KEYS = ("dtype", "torch_dtype")
NEUTRAL_KEYS = (
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "transformers_version",
    "use_cache",
    "model_type",
    "max_window_layers",
    "_name_or_path",
    "return_dict",
    "num_anchors",
    "architectures",
    *DTYPE_KEYS,
)
"""Keys that say nothing about what the draft computes."""


def write_backbone(backbone: BackboneConfig) -> dict[str, Any]:
    """The keys of a resolved dense backbone. Rope stands in both forms, transformers 5's and the older one."""
    rope = dict(sorted((backbone.rope_parameters or {}).items()))
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    windowed = backbone.sliding_window is not None
    layers = backbone.num_layers or 0
    return {
        "hidden_size": backbone.hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": backbone.num_attention_heads,
        "num_key_value_heads": backbone.num_key_value_heads,
        "head_dim": backbone.head_dim,
        "intermediate_size": backbone.intermediate_size,
        "hidden_act": backbone.hidden_act,
        "rms_norm_eps": backbone.rms_norm_eps,
        "max_position_embeddings": backbone.max_position_embeddings,
        "attention_bias": backbone.attention_bias,
        "attention_dropout": 0.0,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "layer_types": ["sliding_attention" if windowed else "full_attention"] * layers,
        "use_sliding_window": windowed,
        "sliding_window": backbone.sliding_window,
        "is_causal": backbone.causal,
        "tie_word_embeddings": False,
    }


def read_rope(keys: KeyReader, prefix: str = "") -> dict[str, Any]:
    """Rope as in transformers 5 from ``rope_parameters`` and the older ``rope_theta`` with ``rope_scaling``.

    Raises:
        CheckpointError: no base anywhere, two that differ, or a draft that rotates part of a head only.
    """
    theta = keys.get(
        "rope_theta",
        f"{prefix}rope_theta",
        f"{prefix}rope_parameters.rope_theta",
        f"{prefix}rope_scaling.rope_theta",
        convert=float,
    )
    parts = {}
    for name in ("rope_parameters", "rope_scaling"):
        given = keys.peek(f"{prefix}{name}")
        if isinstance(given, dict):
            part = {key: value for key, value in given.items() if key not in ("rope_theta", "type")}
            part.setdefault("rope_type", given.get("type", "default"))
            parts[name] = part
            keys.get("rope_parameters", f"{prefix}{name}")
    if parts.get("rope_parameters", {}).get("rope_type", "default") == "default" and "rope_scaling" in parts:
        parts.pop("rope_parameters", None)
    chosen = parts.get("rope_parameters", parts.get("rope_scaling", {"rope_type": "default"}))
    if len(parts) == 2 and parts["rope_parameters"] != parts["rope_scaling"]:
        message = (
            f"{keys.where} contradicts itself: rope_parameters says {parts['rope_parameters']} but rope_scaling says "
            f"{parts['rope_scaling']}"
        )
        keys.contradict("rope_parameters", message)
    partial = keys.get(
        "rope share", f"{prefix}partial_rotary_factor", f"{prefix}rope_parameters.partial_rotary_factor", default=1.0
    )
    if float(partial) != 1.0:
        raise CheckpointError(
            f"{keys.where}: partial_rotary_factor is {partial}: a draft that rotates part of each head is not supported"
        )
    chosen.pop("partial_rotary_factor", None)
    return {"rope_theta": theta, **chosen}


def read_backbone(
    keys: KeyReader, prefix: str = "", nested: str = "dflash_config.", known: dict[str, Any] | None = None
) -> BackboneConfig:
    """A dense backbone from a config's keys.

    Args:
        keys: the config.
        prefix: where the shape keys stand (``transformer_layer_config.`` in speculators).
        nested: where the draft's own keys may stand besides the top level.
        known: fields that were read elsewhere.
    """
    heads = keys.get("num_attention_heads", f"{prefix}num_attention_heads", convert=int)
    width = keys.get("hidden_size", f"{prefix}hidden_size", convert=int)
    layers = keys.get("num_layers", f"{prefix}num_hidden_layers", convert=int)
    window, sliding_layers = _read_window(keys, prefix, nested, layers)
    fields = {
        "num_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get(
            "num_key_value_heads", f"{prefix}num_key_value_heads", default=heads, convert=int
        ),
        "head_dim": keys.get("head_dim", f"{prefix}head_dim", default=width // heads, convert=int),
        "intermediate_size": keys.get("intermediate_size", f"{prefix}intermediate_size", convert=int),
        "hidden_act": keys.get("hidden_act", f"{prefix}hidden_act", default="silu", convert=str),
        "rms_norm_eps": keys.get("rms_norm_eps", f"{prefix}rms_norm_eps", default=1e-6, convert=float),
        "max_position_embeddings": keys.get(
            "max_position_embeddings", f"{prefix}max_position_embeddings", default=32768, convert=int
        ),
        "attention_bias": keys.get("attention_bias", f"{prefix}attention_bias", default=False, convert=bool),
        "rope_parameters": read_rope(keys, prefix),
        "sliding_window": window,
        "window_rule": "query" if window is not None else "block",
        "causal": keys.get("causal", f"{prefix}is_causal", f"{nested}causal", default=sliding_layers, convert=bool),
        "attention_sink": keys.get(
            "attention_sink",
            f"{nested}attention_sink_bias",
            f"{prefix}attention_sink_bias",
            f"{prefix}add_swa_attention_sink_bias",
            default=False,
            convert=bool,
        ),
    }
    keys.get("attention value scale", f"{nested}attention_value_scale", default=None)
    if keys.peek(f"{nested}attention_value_scale") not in (None, 1.0):
        raise CheckpointError(f"{keys.where}: {nested}attention_value_scale is not supported; only 1.0 is")
    if keys.get("rotary style", f"{prefix}is_neox_style", f"{prefix}rope_is_neox_style", default=True) is not True:
        raise CheckpointError(f"{keys.where}: an interleaved rotary embedding (is_neox_style false) is not supported")
    scales = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
    keys.ignore("the target's own module scales", *(nested + key for key in scales))
    keys.ignore("no effect on the draft", *(prefix + key for key in NEUTRAL_KEYS))
    keys.ignore("no effect on the draft", "tie_word_embeddings", f"{prefix}tie_word_embeddings")
    return BackboneConfig(**{**fields, **(known or {})})


def _read_window(keys: KeyReader, prefix: str, nested: str, layers: int) -> tuple[int | None, bool]:
    """The sliding window of all layers (None: full attention), and whether ``layer_types`` says so.

    Readers take layers of type ``sliding_attention`` for causal ones where no key says otherwise.
    """
    types = keys.get("sliding_window", f"{prefix}layer_types", default=["full_attention"] * layers, convert=list)
    kinds = set(types)
    if len(types) != layers or kinds - {"full_attention", "sliding_attention"}:
        raise CheckpointError(f"{keys.where}: layer_types {types} does not name {layers} full or sliding layers")
    flag = keys.get("sliding_window", f"{nested}use_swa", default=None)
    keys.get("sliding_window", f"{prefix}use_sliding_window", default=None)
    if len(kinds) > 1:
        raise CheckpointError(f"{keys.where}: layer_types mixes full and sliding layers, which is not supported")
    sliding = kinds == {"sliding_attention"} or bool(flag)
    if not sliding:
        keys.ignore("all layers attend fully", f"{prefix}sliding_window", f"{nested}swa_window_size")
        return None, False
    window = keys.get("sliding_window", f"{nested}swa_window_size", f"{prefix}sliding_window", convert=int)
    return window, kinds == {"sliding_attention"}
