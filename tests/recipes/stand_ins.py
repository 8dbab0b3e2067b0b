"""The targets of the recipes without their weights: full-size configurations, and small models of the same classes.

Sizes are those of the published config.json files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6}
QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": {
        **QWEN3,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": {
        **QWEN3,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-14B": {
        **QWEN3,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 17408,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B": {
        **QWEN3,
        **QWEN3_MOE,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
    },
    "google/gemma-3-12b-it": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": 262208,
            "hidden_size": 3840,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "intermediate_size": 15360,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 256,
    },
    "Qwen/Qwen2.5-VL-7B-Instruct": {
        "model_type": "qwen2_5_vl",
        "text_config": {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
        },
        "tie_word_embeddings": False,
    },
    "deepseek-ai/DeepSeek-V4-Flash": {"model_type": "deepseek_v4"},
}
"""By the recipes' ``model.name_or_path``; transformers' own defaults of deepseek_v4 are those of the Flash model."""

SMALL_TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "query_pre_attn_scalar": 8,
    "sliding_window": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 56,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [0],
}


def write_config(name: str, directory: Path) -> Path:
    """A target directory that holds its full-size config.json alone."""
    directory.mkdir(parents=True, exist_ok=True)
    values = dict(CONFIGS[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values, dtype="bfloat16")
    (directory / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    return directory


def small(name: str) -> PreTrainedModel:
    """A random model of the same class with the same number of layers, a few thousand parameters each."""
    values = json.loads(json.dumps(CONFIGS[name]))
    text = values.get("text_config", values)
    text.update({key: value for key, value in SMALL_TEXT.items() if key in text or key.endswith("_token_id")})
    if "rope_parameters" in text:
        text["rope_parameters"]["mrope_section"] = [1, 1, 2]
    if "vision_config" in values:
        vision = values["vision_config"]
        vision.update({key: value for key, value in SMALL_VISION.items() if key in vision or key.startswith("full")})
        values.update(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
        values["image_token_index"] = 90
        values["mm_tokens_per_image"] = 4
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    plain = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return (AutoModelForCausalLM if plain else AutoModelForImageTextToText).from_config(config).eval()
