"""Plain reading of a dense draft directory (DeepSpec's or z-lab's layout), one block at a time, in any precision.

Written from the published layout alone, so that the engines' proposals can be checked without our own drafter.
Legend: S context positions, K slots, D hidden, H heads, T taps, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class ReferenceBlock:
    """What the draft says about one anchor."""

    tokens: list[int]
    """K greedy draft tokens."""
    logits: Tensor
    """[K, V] with the Markov bias."""
    confidence_logits: Tensor | None
    """[K]; None without a confidence head."""

    def margin(self) -> Tensor:
        """[K] distance between the best and the second best logit: below it, two roundings may disagree."""
        best = self.logits.topk(2).values
        return best[:, 0] - best[:, 1]


class ReferenceDraft:
    """A target with its draft, both loaded from directories."""

    def __init__(self, target_dir: Path, draft_dir: Path, dtype: torch.dtype = torch.float64):
        self.target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=dtype).eval()
        self.config = json.loads((draft_dir / "config.json").read_text(encoding="utf-8"))
        self.weights = {name: w.to(dtype) for name, w in load_file(draft_dir / "model.safetensors").items()}
        if self.config.get("markov_head_type", "vanilla") != "vanilla":
            raise ValueError(f"markov_head_type {self.config['markov_head_type']!r}: only 'vanilla' is read here")
        self.bonus_anchor = self.config["architectures"] == ["DFlashDraftModel"]

    @torch.no_grad()
    def context(self, token_ids: list[int]) -> Tensor:
        """[S, D] projected target features of every position of a row."""
        states = self.target(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        taps = torch.cat([states[i + 1][0] for i in self.config["dflash_config"]["target_layer_ids"]], dim=-1)
        return self._norm(taps @ self.weights["fc.weight"].T, "hidden_norm.weight")

    @torch.no_grad()
    def propose(self, context: Tensor, anchor_token: int, num_draft_tokens: int) -> ReferenceBlock:
        """Draft after ``anchor_token``, which stands right behind the S context positions."""
        first = 1 if self.bonus_anchor else 0
        start, slots = context.shape[0], num_draft_tokens + first
        mask = self.config["dflash_config"]["mask_token_id"]
        hidden = self.target.get_input_embeddings()(torch.tensor([anchor_token] + [mask] * (slots - 1)))
        positions = torch.arange(start + slots)
        for i in range(self.config["num_hidden_layers"]):
            hidden = self._layer(f"layers.{i}.", hidden, context, positions)
        hidden = self._norm(hidden, "norm.weight")[first:]
        logits = hidden @ self.target.get_output_embeddings().weight.T
        if "markov_head.markov_w1.weight" not in self.weights:
            return ReferenceBlock(logits.argmax(-1).tolist(), logits, None)
        w1, w2 = self.weights["markov_head.markov_w1.weight"], self.weights["markov_head.markov_w2.weight"]
        tokens, latents = [anchor_token], []
        for k in range(num_draft_tokens):
            latents.append(w1[tokens[-1]])
            logits[k] += w2 @ latents[-1]
            tokens.append(int(logits[k].argmax()))
        features = torch.cat([hidden, torch.stack(latents)], dim=-1)
        confidence = features @ self.weights["confidence_head.proj.weight"][0]
        return ReferenceBlock(tokens[1:], logits, confidence + self.weights["confidence_head.proj.bias"])

    def _layer(self, prefix: str, hidden: Tensor, context: Tensor, positions: Tensor) -> Tensor:
        """One decoder layer: queries of the K slots, keys and values of context and slots, no mask among them."""
        config, slots = self.config, hidden.shape[0]
        normed = self._norm(hidden, prefix + "input_layernorm.weight")
        both = torch.cat([context, normed])
        query = self._heads(normed, prefix, "q", config["num_attention_heads"])
        key = self._heads(both, prefix, "k", config["num_key_value_heads"])
        value = self._heads(both, prefix, "v", config["num_key_value_heads"])
        query, key = self._rotate(query, positions[-slots:]), self._rotate(key, positions)
        attended = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        hidden = hidden + self._linear(attended.transpose(0, 1).reshape(slots, -1), prefix + "self_attn.o_proj")
        normed = self._norm(hidden, prefix + "post_attention_layernorm.weight")
        gate = F.silu(self._linear(normed, prefix + "mlp.gate_proj"))
        return hidden + self._linear(gate * self._linear(normed, prefix + "mlp.up_proj"), prefix + "mlp.down_proj")

    def _heads(self, x: Tensor, prefix: str, kind: str, heads: int) -> Tensor:
        """[S, D] -> [H, S, head_dim], queries and keys normalised per head."""
        split = self._linear(x, f"{prefix}self_attn.{kind}_proj").unflatten(-1, (heads, -1))
        if kind != "v":
            split = self._norm(split, f"{prefix}self_attn.{kind}_norm.weight")
        return split.transpose(0, 1)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        inverse = self.config["rope_theta"] ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = positions[:, None].double() * inverse
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name + ".weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[name]
