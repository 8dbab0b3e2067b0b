"""A small DeepSeek-V4 target as its published checkpoints are written, for engines that read those names.

Sizes that llama.cpp's DeepSeek-V4 graph takes: four residual streams, one layer with compression ratio 4, an indexer
whose head width is another than the attention's, and as many indexed entries as the context can have.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from modelopt_spec.checkpoints.layouts.deepseek_v4_names import file_names

VOCAB = 49152
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 32,
    "compress_ratios": [0, 4, 0],
    "compress_rope_theta": 160000.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 512,
    "num_hash_layers": 0,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_COMPRESSOR = {
    "compressor.position_bias": "compressor.ape",
    "compressor.kv_proj.weight": "compressor.wkv.weight",
    "compressor.gate_proj.weight": "compressor.wgate.weight",
    "compressor.kv_norm.weight": "compressor.norm.weight",
    "compressor.indexer.position_bias": "indexer.compressor.ape",
    "compressor.indexer.kv_proj.weight": "indexer.compressor.wkv.weight",
    "compressor.indexer.gate_proj.weight": "indexer.compressor.wgate.weight",
    "compressor.indexer.kv_norm.weight": "indexer.compressor.norm.weight",
    "compressor.indexer.q_b_proj.weight": "indexer.wq_b.weight",
    "compressor.indexer.scorer.weights_proj.weight": "indexer.weights_proj.weight",
}
_ROOT = {
    "model.embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}


def make_model(seed: int = 0) -> nn.Module:
    """Random weights, large enough that no two logits are nearly equal."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(DeepseekV4Config(**SHAPE), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or "inv_freq" in name or not tensor.is_floating_point():
                continue
            spread = 1.0 if "embed" in name else 0.3 if "lm_head" in name else 0.12
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * spread)
    return model.eval()


def original_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights under the names of DeepSeek's own checkpoints, experts one by one."""
    layer_names = {ours: file for ours, file in file_names(1).items() if ours.startswith("layers.0.")}
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name in _ROOT:
            found[_ROOT[name]] = tensor
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        if rest == "mlp.experts.gate_up_proj":
            for expert, stack in enumerate(tensor):
                gate, up = stack.chunk(2)
                found[f"layers.{layer}.ffn.experts.{expert}.w1.weight"] = gate
                found[f"layers.{layer}.ffn.experts.{expert}.w3.weight"] = up
        elif rest == "mlp.experts.down_proj":
            for expert, stack in enumerate(tensor):
                found[f"layers.{layer}.ffn.experts.{expert}.w2.weight"] = stack
        elif (part := rest.removeprefix("self_attn.")) in _COMPRESSOR:
            found[f"layers.{layer}.attn.{_COMPRESSOR[part]}"] = tensor
        elif "inv_freq" not in name:
            file = layer_names[f"layers.0.{rest}"].removeprefix("mtp.0.")
            found[f"layers.{layer}.{file}"] = tensor
    return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


def write_target(directory: Path, tokenizer_dir: Path, seed: int = 0) -> nn.Module:
    """Write the target with the files of a tokenizer of its vocabulary; returns the model."""
    directory.mkdir(parents=True, exist_ok=True)
    model = make_model(seed)
    save_file(original_tensors(model), directory / "model.safetensors", metadata={"format": "pt"})
    keys = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", **SHAPE, "torch_dtype": "float32"}
    keys |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "hidden_act": "silu"}
    (directory / "config.json").write_text(json.dumps(keys, indent=1))
    for file in tokenizer_dir.iterdir():
        if file.name.startswith(("tokenizer", "vocab", "merges", "special_tokens", "chat_template")):
            shutil.copy(file, directory / file.name)
    return model
