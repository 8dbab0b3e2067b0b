"""Tiny random targets of several architectures, for exactness tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

TEXT_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mistral": {"sliding_window": None},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 8},
}


def tiny(
    model_type: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A tiny random causal language model in eval mode."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**COMMON, **TEXT_MODELS.get(model_type, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3 if "embed" in name or "lm_head" in name else 0.15)
    return model.eval()


def tiny_vision_language(*, seed: int = 0) -> PreTrainedModel:
    """A tiny LLaVA around a Llama: the text config and the decoder are nested."""
    torch.manual_seed(seed)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "projection_dim": 16,
    }
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **COMMON},
        vision_config={"model_type": "clip_vision_model", **vision},
        image_token_index=96,
        tie_word_embeddings=False,
    )
    return AutoModelForImageTextToText.from_config(config).eval()
