"""Tiny random targets, on Hugging Face's side and on Megatron's, for the jobs that run inside the workers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from modelopt_spec.targets.megatron_model import build_gpt_model, transformer_config
from modelopt_spec.targets.megatron_weights import load_hf_weights

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}


def hf_config(family: str, **overrides: Any) -> PretrainedConfig:
    """A config of eight layers; 97 tokens, so that every Megatron vocabulary is padded."""
    shape = {**SHAPE, **overrides}
    if family == "qwen3":
        return Qwen3Config(**shape)
    if family == "llama":
        return LlamaConfig(**{**shape, "num_key_value_heads": 2})
    if family == "qwen3_moe":
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
        return Qwen3MoeConfig(**{**moe, "norm_topk_prob": True, **shape})
    raise ValueError(family)


def hf_model(config: PretrainedConfig, seed: int = 0) -> torch.nn.Module:
    """Random weights that are large enough for every layer to matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.dim() > 1 else 0.2))
            if "norm" in name:
                parameter.add_(1.0)
    return model


def initialize(tp: int = 1, pp: int = 1, ep: int = 1, cp: int = 1) -> None:
    """Megatron's groups and seeds for the current world."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        context_parallel_size=cp,
        expert_tensor_parallel_size=1 if ep > 1 else None,
    )
    model_parallel_cuda_manual_seed(123)


def gpt_model(
    hf_side: torch.nn.Module | None,
    config: PretrainedConfig,
    *,
    sp: bool = False,
    vocab_multiple: int = 8,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> GPTModel:
    """Build this rank's part of the same model with everything that a CPU lacks switched off."""
    values = {
        "sequence_parallel": sp,
        "use_cpu_initialization": True,
        "batch_p2p_comm": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        **overrides,
    }
    model = build_gpt_model(
        config,
        transformer_config(config, dtype=dtype, **values),
        vocab_multiple=vocab_multiple,
        use_transformer_engine=False,
    )
    if hf_side is not None:
        load_hf_weights(model, hf_side.state_dict(), config)
    return model.eval()
