"""Tiny DeepSeek-V4 targets and drafters, made anew for each test."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from modelopt_spec.conversion import convert
from modelopt_spec.drafter.drafter import Drafter

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 12,
    "o_groups": 2,
    "o_lora_rank": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "sliding_window": 8,
    "swiglu_limit": 0.9,
    "hc_mult": 4,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def v4_target(
    ratios: tuple[int, ...] = (0, 4, 0, 128), *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A random DeepSeek-V4 model whose layers are windowed (0) or compressed (4, 128), without hash routing."""
    torch.manual_seed(seed)
    config = DeepseekV4Config(
        **{**SIZES, "num_hidden_layers": len(ratios), "compress_ratios": list(ratios), "num_hash_layers": 0, **changes}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shake(model, 0.15)
    return model.eval()


@torch.no_grad()
def shake(module: nn.Module, std: float, seed: int = 1) -> None:
    """Random values everywhere, so that nothing is zero or one by its initialisation."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point() and "inv_freq" not in name:
            noise = torch.randn(tensor.shape, generator=generator) * std
            tensor.add_(noise.to(tensor.dtype)) if "norm" in name else tensor.copy_(noise)


def v4_drafter(model: nn.Module, *, std: float = 0.2, **config: Any) -> Drafter:
    """A random drafter of DeepSeek-V4 stages on a target."""
    backbone = {"type": "moe_mhc", **config.pop("backbone", {})}
    settings = {"block_size": 4, "mask_token_id": 90, "head": {"type": "vanilla", "rank": 6}, **config}
    convert(model, ("dspark", {**settings, "backbone": backbone}), quiet=True)
    drafter: Any = model.drafter
    shake(drafter, std)
    return drafter.eval()
