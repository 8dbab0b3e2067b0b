"""What a Hugging Face target is built of besides plain layers, in the words of a backbone's config.

A drafter takes these over where its own config leaves them open: the experts' sizes of a mixture-of-experts target,
and for DeepSeek-V4, whose checkpoint a drafter of the same architecture shares, streams, attention and window too.
"""

from __future__ import annotations

from typing import Any

__all__ = ["own_parts"]

_NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def own_parts(config: Any) -> dict[str, Any]:
    """Sections and fields of a ``BackboneConfig`` that a text config gives values for; empty for a plain target."""
    parts: dict[str, Any] = {}
    experts = next((value for name in _NUM_EXPERTS if (value := getattr(config, name, None))), None)
    if experts and getattr(config, "num_experts_per_tok", None):
        width = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
        parts["moe"] = {
            "num_experts": int(experts),
            "experts_per_token": int(config.num_experts_per_tok),
            "intermediate_size": int(width) if width else None,
        }
    if config.model_type == "deepseek_v4":
        parts["moe"] |= {
            "scoring": config.scoring_func,
            "normalize_weights": bool(config.norm_topk_prob),
            "routed_scaling_factor": float(config.routed_scaling_factor),
            "swiglu_limit": float(config.swiglu_limit),
        }
        parts["hyper_connection"] = {
            "streams": int(config.hc_mult),
            "sinkhorn_iterations": int(config.hc_sinkhorn_iters),
            "eps": float(config.hc_eps),
        }
        parts["latent_attention"] = {
            "q_lora_rank": int(config.q_lora_rank),
            "qk_rope_head_dim": int(config.qk_rope_head_dim),
            "o_groups": int(config.o_groups),
            "o_lora_rank": int(config.o_lora_rank),
        }
        parts["sliding_window"] = int(config.sliding_window)
    return parts
