"""Megatron-Core models with the shape of a Hugging Face config: Qwen3, Qwen3-MoE and Llama.

A model that was made elsewhere (Megatron-LM, Megatron-Bridge, NeMo) needs nothing from here. These builders serve those
who start from a Hugging Face checkpoint: make the model of this rank, then fill it with
:func:`modelopt_spec.targets.megatron_weights.load_hf_weights`.

With TransformerEngine installed the layers come from its spec; without it from Megatron's own ("local") modules, with
:class:`RMSNorm` for the norms, because ``torch.nn.RMSNorm`` is refused under sequence parallelism.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_spec.errors import SpecError, UnsupportedError

try:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
except ImportError as error:
    raise SpecError(
        f"Megatron targets need megatron-core, which could not be imported ({error}): "
        "pip install 'modelopt-spec[megatron]'"
    ) from error

__all__ = [
    "RMSNorm",
    "block_spec",
    "build_gpt_model",
    "have_transformer_engine",
    "padded_vocab_size",
    "transformer_config",
]

FAMILIES = ("qwen3", "qwen3_moe", "llama")


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32 that Megatron's builders can make, with or without sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        if not config.use_cpu_initialization:
            self.weight.data = self.weight.data.to(torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., D], computed in float32 and rounded once before the weight is applied."""
        x = hidden.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(hidden.dtype)


def have_transformer_engine() -> bool:
    """Whether TransformerEngine can be used for the layers."""
    return importlib.util.find_spec("transformer_engine") is not None and torch.cuda.is_available()


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int, multiple: int = 128) -> int:
    """Rows of a Megatron vocabulary: ``vocab_size`` rounded up to a multiple of ``multiple * tensor_parallel_size``."""
    step = multiple * tensor_parallel_size
    return (vocab_size + step - 1) // step * step


def moe_layer_pattern(hf_config: Any) -> list[int]:
    """For each layer, 1 where Qwen3-MoE has experts and 0 where it has a dense MLP."""
    only_dense = set(hf_config.mlp_only_layers or [])
    step = hf_config.decoder_sparse_step
    return [int(i not in only_dense and (i + 1) % step == 0) for i in range(hf_config.num_hidden_layers)]


def transformer_config(hf_config: Any, *, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> TransformerConfig:
    """Megatron's config of a Hugging Face one; ``overrides`` win (parallel sizes, fusions, recomputation, ...).

    Parallel sizes default to those of the initialised ``parallel_state``.

    Raises:
        UnsupportedError: a model family or a feature (biases, rope scaling, sliding windows) that is not mapped.
    """
    family = hf_config.model_type
    if family not in FAMILIES:
        raise UnsupportedError(
            f"model_type {family!r} has no Megatron weight map: one of {', '.join(FAMILIES)} is needed"
        )
    for field in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if getattr(hf_config, field, False):
            raise UnsupportedError(
                f"{field} is {getattr(hf_config, field)!r}: the Megatron weight map covers models without it"
            )
    values: dict[str, Any] = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": family != "llama",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "attention_softmax_in_fp32": True,
        "calculate_per_token_loss": True,
    }
    if family == "qwen3_moe":
        values |= {
            "num_moe_experts": hf_config.num_experts,
            "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
            "moe_router_topk": hf_config.num_experts_per_tok,
            "moe_router_pre_softmax": not hf_config.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "moe_layer_freq": moe_layer_pattern(hf_config),
        }
    if parallel_state.model_parallel_is_initialized():
        values |= {
            "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
            "context_parallel_size": parallel_state.get_context_parallel_world_size(),
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        }
    return TransformerConfig(**(values | overrides))


def block_spec(config: TransformerConfig, *, use_transformer_engine: bool) -> TransformerBlockSubmodules:
    """Layers of this pipeline stage and the final norm."""

    def layer(num_experts: int | None) -> ModuleSpec:
        if use_transformer_engine:
            return get_gpt_layer_with_transformer_engine_spec(
                num_experts=num_experts, moe_grouped_gemm=num_experts is not None, qk_layernorm=config.qk_layernorm
            )
        spec = get_gpt_layer_local_spec(
            num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        )
        spec.submodules.input_layernorm = RMSNorm
        spec.submodules.pre_mlp_layernorm = RMSNorm
        if config.qk_layernorm:
            spec.submodules.self_attention.submodules.q_layernorm = RMSNorm
            spec.submodules.self_attention.submodules.k_layernorm = RMSNorm
        return spec

    pattern = config.moe_layer_freq if config.num_moe_experts else 0
    if isinstance(pattern, int):
        pattern = [int(bool(config.num_moe_experts))] * config.num_layers
    offset = get_transformer_layer_offset(config)
    stage = pattern[offset : offset + get_num_layers_to_build(config)]
    norm: Any = RMSNorm
    if use_transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    return TransformerBlockSubmodules(
        layer_specs=[layer(config.num_moe_experts if is_moe else None) for is_moe in stage], layer_norm=norm
    )


def _rope(hf_config: Any) -> dict[str, Any]:
    """Rotary arguments of ``GPTModel`` for transformers' ``rope_parameters``."""
    rope = dict(hf_config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    arguments: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": rope.get("rope_theta", 10000.0)}
    if kind == "default":
        return arguments
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(rope.get(name) == value for name, value in fixed.items()):
        return arguments | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    raise UnsupportedError(
        f"rope_parameters {rope}: the Megatron builder covers rope_type 'default' and 'llama3' with {fixed}"
    )


def build_gpt_model(
    hf_config: Any,
    config: TransformerConfig,
    *,
    vocab_multiple: int = 128,
    max_sequence_length: int | None = None,
    use_transformer_engine: bool | None = None,
) -> GPTModel:
    """Make this rank's part of the model for the initialised ``parallel_state``; weights are not loaded.

    The config stays with the model as ``model.hf_config``, from which a drafter takes what Megatron does not keep.

    ``vocab_multiple`` is Megatron-LM's ``--make-vocab-size-divisible-by``.
    """
    if use_transformer_engine is None:
        use_transformer_engine = have_transformer_engine()
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, use_transformer_engine=use_transformer_engine),
        vocab_size=padded_vocab_size(
            hf_config.vocab_size, parallel_state.get_tensor_model_parallel_world_size(), vocab_multiple
        ),
        max_sequence_length=max_sequence_length or hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        **_rope(hf_config),
    )
    model.hf_config = hf_config
    return model if config.use_cpu_initialization else model.cuda()
