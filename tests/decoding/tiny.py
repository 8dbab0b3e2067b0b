"""Tiny random targets and drafters for the decoding tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from modelopt_spec.conversion import convert

HEADS = ("none", "vanilla", "gated", "rnn", "gru")
LAYOUTS = ("anchor_first", "bonus_anchor")

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}

_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 6,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 8,
    },
}


def tiny_target(name: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A random causal model whose logits are spread enough that no two are nearly equal."""
    torch.manual_seed(seed)
    values = {**_SIZES, **_MODELS[name], **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    model.generation_config.eos_token_id = values.get("eos_token_id")
    model.generation_config.pad_token_id = values.get("pad_token_id")
    return model.to(dtype).eval()


def add_drafter(
    model: nn.Module,
    head: str = "vanilla",
    layout: str = "anchor_first",
    seed: int = 1,
    pure_draft_prefix_len: int = 1,
    **changes: Any,
) -> nn.Module:
    """Convert with a random drafter whose head really changes what is drafted."""
    torch.manual_seed(seed)
    mode = {"none": "dflash", "gru": "domino"}.get(head, "dspark")
    config: dict[str, Any] = {
        "block_size": 5,
        "layout": layout,
        "mask_token_id": min(3, model.config.get_text_config().vocab_size - 1),
        "backbone": {"num_layers": 2},
        **changes,
    }
    if head != "none":
        config["head"] = {"type": head, "rank": 6, "pure_draft_prefix_len": pure_draft_prefix_len}
        config["confidence"] = {"enabled": True}
    convert(model, (mode, config), quiet=True)
    with torch.no_grad():
        for name, parameter in model.drafter.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.6 if "markov" in name or "domino" in name else 0.3)
    return model


def rig_head(model: nn.Module, wrong: int) -> None:
    """Make the correction head propose one token always: a bias gives it a huge logit wherever the head corrects."""

    def add_bias(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[..., wrong] += 1e6 * (args[0] != 0).any(-1)
        return output

    model.drafter.head.out.register_forward_hook(add_bias)
