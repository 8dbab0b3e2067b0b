"""Draft directories made by hand, so that the engine harness is proven without a trained drafter.

Legend: D hidden, R head rank, T taps, V vocabulary.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def bigrams(sequences: Sequence[Sequence[int]]) -> dict[int, int]:
    """The most frequent successor of each token, ties to the smaller id."""
    counts: dict[int, dict[int, int]] = {}
    for tokens in sequences:
        for previous, following in itertools.pairwise(tokens):
            row = counts.setdefault(previous, {})
            row[following] = row.get(following, 0) + 1
    return {previous: min(row, key=lambda token: (-row[token], token)) for previous, row in counts.items()}


def bigram_head(table: Mapping[int, int], vocab_size: int, rank: int, strength: float) -> tuple[Tensor, Tensor]:
    """Markov factors W1 [V, R], W2 [V, R] whose bias ``W2 @ W1[x]`` peaks at ``table[x]``.

    Every known token x has a random sign code of length R; row v of W2 is the sum of the codes of all x that v follows,
    so the wanted bias is about ``strength`` and all others are crosstalk of about ``strength / sqrt(R)``.
    """
    w1 = torch.zeros(vocab_size, rank)
    w2 = torch.zeros(vocab_size, rank)
    for previous, following in table.items():
        code = torch.randint(0, 2, (rank,)).float() * 2 - 1
        w1[previous] = code * (strength / rank)
        w2[following] += code
    return w1, w2


def write_draft(
    directory: Path,
    target_config: Mapping[str, Any],
    *,
    block_size: int = 7,
    target_layer_ids: Sequence[int] = (9, 28),
    num_layers: int = 2,
    markov_rank: int = 64,
    mask_token_id: int = 4,
    table: Mapping[int, int] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a dense draft in DeepSpec's layout, with vanilla and confidence head, and return its directory.

    With a bigram ``table`` the Markov head proposes those successors and the backbone only whispers, so that the target
    accepts a good share; without one everything is random.
    """
    torch.manual_seed(seed)
    hidden = target_config["hidden_size"]
    heads = target_config["num_attention_heads"]
    kv_heads = target_config["num_key_value_heads"]
    head_dim = target_config["head_dim"]
    mlp = target_config["intermediate_size"]
    vocab = target_config["vocab_size"]

    def linear(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns) / columns**0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.1 * torch.randn(size)

    tensors = {
        "fc.weight": linear(hidden, len(target_layer_ids) * hidden),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden) * (0.02 if table else 1.0),
    }
    for i in range(num_layers):
        layer = {
            "input_layernorm.weight": norm(hidden),
            "post_attention_layernorm.weight": norm(hidden),
            "self_attn.q_proj.weight": linear(heads * head_dim, hidden),
            "self_attn.k_proj.weight": linear(kv_heads * head_dim, hidden),
            "self_attn.v_proj.weight": linear(kv_heads * head_dim, hidden),
            "self_attn.o_proj.weight": linear(hidden, heads * head_dim),
            "self_attn.q_norm.weight": norm(head_dim),
            "self_attn.k_norm.weight": norm(head_dim),
            "mlp.gate_proj.weight": linear(mlp, hidden),
            "mlp.up_proj.weight": linear(mlp, hidden),
            "mlp.down_proj.weight": linear(hidden, mlp),
        }
        tensors |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    if table:
        w1, w2 = bigram_head(table, vocab, markov_rank, strength=40.0)
    else:
        w1, w2 = torch.randn(vocab, markov_rank), torch.randn(vocab, markov_rank) / markov_rank**0.5
    tensors |= {
        "markov_head.markov_w1.weight": w1,
        "markov_head.markov_w2.weight": w2,
        "confidence_head.proj.weight": torch.randn(1, hidden + markov_rank) / (hidden + markov_rank) ** 0.5,
        "confidence_head.proj.bias": torch.zeros(1),
    }
    rope = target_config["rope_parameters"]
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target_config["rms_norm_eps"],
        "max_position_embeddings": target_config["max_position_embeddings"],
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "attention_bias": False,
        "layer_types": ["full_attention"] * num_layers,
        "tie_word_embeddings": False,
        "block_size": block_size,
        "num_target_layers": target_config["num_hidden_layers"],
        "mask_token_id": mask_token_id,
        "target_layer_ids": list(target_layer_ids),
        "markov_rank": markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "dflash_config": {
            "mask_token_id": mask_token_id,
            "target_layer_ids": list(target_layer_ids),
            "shift_label": True,
        },
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: value.to(dtype).contiguous() for name, value in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return directory
