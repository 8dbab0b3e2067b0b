"""Fill the sections of a backbone with experts, hyper-connections or DeepSeek-V4's attention.

Each open field takes the target's own value where the target has such a part (`TargetShape.parts`), else a default.
"""

from __future__ import annotations

from typing import Any

from modelopt_spec.config import BackboneConfig
from modelopt_spec.errors import ConfigError
from modelopt_spec.targets.base import TargetShape

__all__ = ["PUBLISHED_STAGES", "deepseek_taps", "fill_parts"]

PUBLISHED_STAGES = 3
"""Stages of the released DeepSeek-V4 drafts."""
_WINDOW = 128
_HYPER = {"streams": 4, "sinkhorn_iterations": 20, "eps": 1e-6}


def deepseek_taps(backbone: BackboneConfig, shape: TargetShape) -> tuple[int, ...]:
    """One tap for each stage, the last layers' outputs, as the released DeepSeek-V4 drafts have them."""
    stages = min(backbone.num_layers or default_stages(shape), shape.num_layers)
    return tuple(range(shape.num_layers - stages, shape.num_layers))


def default_stages(shape: TargetShape) -> int:
    """Three, or one for a target that is not twice as deep."""
    return min(PUBLISHED_STAGES, max(1, shape.num_layers // 2))


def fill_parts(backbone: BackboneConfig, shape: TargetShape) -> BackboneConfig:
    """A backbone whose sections have no open fields, and whose shape is fit for its type.

    Raises:
        ConfigError: a setting that DeepSeek-V4's attention cannot have.
    """
    changes: dict[str, Any] = {}
    if backbone.type == "moe_mhc":
        changes |= _deepseek(backbone, shape)
    if backbone.hyper_connection is not None:
        changes["hyper_connection"] = _filled(backbone.hyper_connection, shape.parts.get("hyper_connection"), _HYPER)
    if backbone.moe is not None:
        changes["moe"] = _filled(backbone.moe, _experts_of(backbone, shape), _expert_defaults(backbone, shape))
        if backbone.type == "moe_mhc":
            changes["intermediate_size"] = changes["moe"].intermediate_size
    return backbone.replace(**changes) if changes else backbone


def _filled(section: Any, targets: dict[str, Any] | None, defaults: dict[str, Any]) -> Any:
    """A section whose open fields are the target's, else the defaults."""
    values = {**defaults, **{name: value for name, value in (targets or {}).items() if value is not None}}
    return section.replace(**{name: value for name, value in values.items() if getattr(section, name) is None})


def _experts_of(backbone: BackboneConfig, shape: TargetShape) -> dict[str, Any]:
    """The target's experts: their sizes, and how they are routed where drafter and target share an architecture."""
    experts = dict(shape.parts.get("moe") or {})
    if backbone.type != "moe_mhc":
        experts = {name: experts.get(name) for name in ("num_experts", "experts_per_token", "intermediate_size")}
    own = backbone.moe.num_experts if backbone.moe is not None else None
    if own is not None and (experts.get("experts_per_token") or 0) > own:
        experts["experts_per_token"] = own
    return experts


def _expert_defaults(backbone: BackboneConfig, shape: TargetShape) -> dict[str, Any]:
    moe = backbone.moe
    experts = (moe.num_experts if moe else None) or 8
    active = min(2, experts)
    chosen = (moe.experts_per_token if moe else None) or active
    shared = moe.num_shared_experts if moe else 0
    defaults: dict[str, Any] = {
        "num_experts": experts,
        "experts_per_token": active,
        "intermediate_size": max(1, (backbone.intermediate_size or shape.intermediate_size) // (active + shared)),
        "scoring": "sqrtsoftplus",
        "normalize_weights": chosen > 1,
        "routed_scaling_factor": 1.0,
    }
    return {**defaults, "swiglu_limit": 10.0} if backbone.type == "moe_mhc" else defaults


def _deepseek(backbone: BackboneConfig, shape: TargetShape) -> dict[str, Any]:
    """Fields of a DeepSeek-V4 stage."""
    rope = backbone.rope_parameters or shape.rope_parameters
    if backbone.rope_parameters is not None and backbone.rope_parameters.get("rope_type", "default") != "default":
        raise ConfigError(
            f"backbone.rope_parameters has rope_type {backbone.rope_parameters['rope_type']!r}, but the uncompressed "
            "attention of DeepSeek-V4 stages rotates without scaling: give rope_theta alone"
        )
    if backbone.num_key_value_heads not in (None, 1):
        raise ConfigError(
            f"backbone.num_key_value_heads is {backbone.num_key_value_heads}, but DeepSeek-V4 stages have one shared "
            "key/value head: leave it unset"
        )
    heads, width = backbone.num_attention_heads or shape.num_attention_heads, shape.hidden_size
    head_dim = backbone.head_dim or shape.head_dim
    groups = next(g for g in (8, 4, 2, 1) if heads % g == 0)
    defaults = {
        "q_lora_rank": max(1, width // 4),
        "qk_rope_head_dim": min(64, head_dim),
        "o_groups": groups,
        "o_lora_rank": max(1, width // 4),
    }
    latent = backbone.latent_attention
    assert latent is not None
    own_heads = backbone.num_attention_heads not in (None, shape.num_attention_heads)
    targets = dict(shape.parts.get("latent_attention") or {})
    if own_heads:
        targets.pop("o_groups", None)
    return {
        "num_layers": backbone.num_layers or default_stages(shape),
        "num_key_value_heads": 1,
        "sliding_window": backbone.sliding_window or shape.parts.get("sliding_window") or _WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(rope["rope_theta"])},
        "latent_attention": _filled(latent, targets, defaults),
    }
