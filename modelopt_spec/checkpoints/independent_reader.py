"""A second, plain reading of an exported draft: from its files alone to the logits of one block.

Nothing here uses the drafter, the layouts or the conventions of this package, on purpose: export and preflight compare
what training computes with what this reading of the published formats computes. One block, no batch, no cache.

Legend: C context positions, K slots, n drafting slots, D hidden, V vocabulary, T taps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from modelopt_spec.checkpoints.independent_packed import unpacked
from modelopt_spec.errors import CheckpointError, UnsupportedError

__all__ = ["BlockResult", "IndependentDraft"]

_PLACES = ("dflash_config", "dspark_config")


@dataclass(frozen=True)
class BlockResult:
    """What a draft says about one block."""

    hidden: Tensor
    """[K, D] after the final norm."""
    bias: Tensor
    """[n, V] the head's contribution to the logits of the drafting slots."""
    logits: Tensor
    """[n, V]."""
    tokens: list[int]
    """n greedy draft tokens, as ids of the target."""
    confidence: Tensor | None
    """[n] confidence logits."""


class IndependentDraft:
    """A dense draft as its files describe it."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.raw = config
        shape = config.get("transformer_layer_config") or config
        self.shape = shape
        self.dtype = dtype
        self.tensors = {
            name.removeprefix("model."): tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        self.width = int(shape["hidden_size"])
        self.heads = int(shape["num_attention_heads"])
        self.kv_heads = int(shape.get("num_key_value_heads") or self.heads)
        self.head_dim = int(shape.get("head_dim") or self.width // self.heads)
        self.eps = float(shape.get("rms_norm_eps", 1e-6))
        self.num_layers = int(shape["num_hidden_layers"])
        self.block_size = int(self._key("block_size"))
        self.mask_id = int(self._key("mask_token_id"))
        aux = self._key("aux_hidden_state_layer_ids")
        self.taps = [int(i) - 1 for i in aux] if aux is not None else [int(i) for i in self._key("target_layer_ids")]
        self.anchor_first = self._anchor_first()
        self.first = 0 if self.anchor_first else 1
        self.head = self._head_kind()

    @classmethod
    def open(cls, directory: str | Path, dtype: torch.dtype = torch.float32) -> IndependentDraft:
        """Read ``config.json`` and the safetensors files of a directory that was just written, or checked before."""
        from modelopt_spec.checkpoints.independent_v4 import IndependentV4Draft, holds_v4_draft

        root = Path(directory)
        if holds_v4_draft(root):
            return IndependentV4Draft.open(root, dtype)
        config = json.loads((root / "config.json").read_text())
        tensors: dict[str, Tensor] = {}
        for file in sorted(root.glob("*.safetensors")):
            tensors.update(load_file(file))
        if not tensors:
            raise CheckpointError(f"{root} holds no safetensors file")
        if "Gemma4DSparkModel" in (config.get("architectures") or []):
            from modelopt_spec.checkpoints.independent_gemma4 import IndependentGemma4Draft

            return IndependentGemma4Draft(config, unpacked(config, tensors), dtype)
        return cls(config, unpacked(config, tensors), dtype)

    # ---- what the files say ----------------------------------------------------------------------------------------

    def _key(self, name: str, default: Any = None) -> Any:
        """A draft key at the top level, else inside one of the nested configs, else in the shape."""
        for place in (self.raw, *(self.raw.get(p) or {} for p in _PLACES), self.shape):
            if place.get(name) is not None:
                return place[name]
        return default

    def _anchor_first(self) -> bool:
        for name in ("sample_from_anchor", "shift_label"):
            value = self._key(name)
            if value is not None:
                return bool(value)
        architectures = self.raw.get("architectures") or []
        return "speculators_config" not in self.raw and "DFlashDraftModel" not in architectures

    def _head_kind(self) -> str:
        if any(name.startswith("prefix_gru.") for name in self.tensors):
            return "gru"
        if int(self._key("markov_rank", 0)) == 0:
            return "none"
        return str(self._key("markov_head_type", "vanilla"))

    def _weight(self, *names: str) -> Tensor:
        for name in names:
            if name in self.tensors:
                return self.tensors[name]
        raise CheckpointError(f"the written file has no tensor {names[0]!r}")

    def _windows(self) -> int | None:
        types = self.shape.get("layer_types") or []
        nested = self.raw.get("dflash_config") or {}
        if "sliding_attention" in types or nested.get("use_swa"):
            return int(nested.get("swa_window_size") or self.shape["sliding_window"])
        return None

    def _causal(self) -> bool:
        nested = self.raw.get("dflash_config") or {}
        for value in (self.shape.get("is_causal"), nested.get("causal")):
            if value is not None:
                return bool(value)
        return "sliding_attention" in (self.shape.get("layer_types") or [])

    # ---- the forward pass ------------------------------------------------------------------------------------------

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate [n, heads, d] by its positions [n]; first and second half of d are the pairs."""
        frequencies, scale = rope_frequencies(self.shape, self.head_dim)
        angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
        cos, sin = (f(angles).mul(scale).to(self.dtype).unsqueeze(1) for f in (torch.cos, torch.sin))
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def _project(self, layer: str, part: str, x: Tensor) -> Tensor:
        bias = self.tensors.get(f"{layer}.self_attn.{part}_proj.bias")
        return F.linear(x, self._weight(f"{layer}.self_attn.{part}_proj.weight"), bias)

    def _attention(self, layer: str, x: Tensor, context: Tensor, visible: Tensor) -> Tensor:
        """Normed slots x [K, D], context [C, D], visible [K, C+K] -> [K, D]."""
        count, slots = context.shape[0], x.shape[0]
        positions = torch.arange(count + slots)
        both = torch.cat([context, x])
        q = self._norm(
            self._project(layer, "q", x).view(slots, self.heads, -1), self._weight(f"{layer}.self_attn.q_norm.weight")
        )
        k = self._norm(
            self._project(layer, "k", both).view(-1, self.kv_heads, self.head_dim),
            self._weight(f"{layer}.self_attn.k_norm.weight"),
        )
        v = self._project(layer, "v", both).view(-1, self.kv_heads, self.head_dim)
        q, k = self._rope(q, positions[count:]), self._rope(k, positions)
        share = self.heads // self.kv_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(~visible, float("-inf"))
        sink = self.tensors.get(f"{layer}.self_attn.attention_sink_bias", self.tensors.get(f"{layer}.self_attn.sinks"))
        if sink is not None:
            scores = torch.cat([scores, sink.view(-1, 1, 1).expand(-1, slots, 1)], dim=-1)
        share_of = scores.softmax(dim=-1)[..., : count + slots]
        return self._project(layer, "o", torch.einsum("hqk,khd->qhd", share_of, v).flatten(1))

    def _visible(self, count: int, window_rule: str) -> Tensor:
        """[K, C+K]: which context and block positions each slot may see."""
        queries = torch.arange(count, count + self.block_size).unsqueeze(1)
        keys = torch.arange(count + self.block_size).unsqueeze(0)
        visible = torch.ones(self.block_size, count + self.block_size, dtype=torch.bool)
        window = self._windows()
        if window is not None:
            visible &= (queries - keys < window) if window_rule == "query" else (keys >= count - window)
        return visible & (keys <= queries) if self._causal() else visible

    def hidden(self, taps: Tensor, block: Tensor, window_rule: str) -> Tensor:
        """Features [C, T*D_target] and an embedded block [K, D] -> [K, D] after the final norm."""
        context = self._norm(
            F.linear(taps.to(self.dtype), self._weight("fc.weight")), self._weight("hidden_norm.weight")
        )
        visible = self._visible(taps.shape[0], window_rule)
        x = block.to(self.dtype)
        for index in range(self.num_layers):
            layer = f"layers.{index}"
            x = x + self._attention(
                layer, self._norm(x, self._weight(f"{layer}.input_layernorm.weight")), context, visible
            )
            normed = self._norm(x, self._weight(f"{layer}.post_attention_layernorm.weight"))
            gate, up = (F.linear(normed, self._weight(f"{layer}.mlp.{part}_proj.weight")) for part in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, self._weight(f"{layer}.mlp.down_proj.weight"))
        return self._norm(x, self._weight("norm.weight"))

    def block(
        self,
        taps: Tensor,
        anchor: int,
        embed: Callable[[Tensor], Tensor],
        base_logits: Callable[[Tensor], Tensor],
        *,
        previous: Sequence[int] | None = None,
        window_rule: str = "query",
    ) -> BlockResult:
        """Draft one block.

        Args:
            taps: [C, T*D_target] features of the positions before the anchor.
            anchor: the anchor's token id.
            embed: the target's embedding, ids [...] -> [..., D].
            base_logits: the target's output projection, [..., D] -> [..., V]; not used with an own ``lm_head``.
            previous: token before each drafting slot, the anchor first; greedy choices if None.
            window_rule: how a reader with a sliding window counts, ``query`` or ``block``.
        """
        if (self.shape.get("hidden_act") or "silu") != "silu":
            raise UnsupportedError(f"hidden_act {self.shape['hidden_act']!r}: engines and this check know silu only")
        ids = torch.tensor([anchor] + [self.mask_id] * (self.block_size - 1))
        hidden = self.hidden(taps, embed(ids), window_rule)
        drafting = hidden[self.first :]
        own = self.tensors.get("lm_head.weight") if int(self._key("draft_vocab_size", 0) or 0) else None
        base = F.linear(drafting, own) if own is not None else base_logits(drafting).to(self.dtype)
        offsets = self.tensors.get("d2t")
        state: Tensor | None = None
        token, tokens, biases, confidences = anchor, [], [], []
        for slot in range(drafting.shape[0]):
            token = int(previous[slot]) if previous is not None else token
            bias, state = self._bias(slot, token, drafting[slot], state, embed)
            biases.append(torch.zeros_like(base[slot]) if bias is None else bias)
            confidences.append(self._confidence(drafting[slot], token))
            choice = int((base[slot] + biases[-1]).argmax())
            token = choice if offsets is None or own is None else choice + int(offsets[choice])
            tokens.append(token)
        stacked = torch.stack(biases)
        given = [c for c in confidences if c is not None]
        return BlockResult(hidden, stacked, base + stacked, tokens, torch.stack(given) if given else None)

    def _bias(
        self, slot: int, token: int, hidden: Tensor, state: Tensor | None, embed: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The head's logits [V] for one slot after ``token``, and the state for the next slot."""
        if self.head == "none":
            return None, None
        if self.head == "gru":
            return self._domino(slot, token, hidden, state, embed)
        e = self._weight("markov_head.markov_w1.weight", "markov_w1.weight")[token]
        out = self._weight("markov_head.markov_w2.weight", "markov_w2.weight")
        if self.head == "vanilla":
            u = e
        elif self.head == "gated":
            weight, bias = (self._weight(f"markov_head.gate_proj.{p}", f"gate_proj.{p}") for p in ("weight", "bias"))
            u = torch.sigmoid(weight @ torch.cat([hidden, e]) + bias) * e
        elif self.head == "rnn":
            weight, bias = (self._weight(f"markov_head.joint_proj.{p}", f"joint_proj.{p}") for p in ("weight", "bias"))
            old = torch.zeros_like(e) if state is None else state
            gate, candidate, output = (weight @ torch.cat([old, e, hidden]) + bias).chunk(3)
            g = torch.sigmoid(gate)
            state, u = g * old + (1 - g) * torch.tanh(candidate), torch.tanh(output)
        else:
            raise UnsupportedError(f"markov_head_type {self.head!r} is not a published head")
        return out @ u, state

    def _domino(
        self, slot: int, token: int, hidden: Tensor, state: Tensor | None, embed: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor | None, Tensor]:
        w_in, w_state = self._weight("prefix_gru.weight_ih_l0"), self._weight("prefix_gru.weight_hh_l0")
        x = embed(torch.tensor(token)).to(self.dtype)
        old = x.new_zeros(w_state.shape[1]) if state is None else state
        r_in, z_in, n_in = (w_in @ x).chunk(3)
        r_st, z_st, n_st = (w_state @ old).chunk(3)
        update = torch.sigmoid(z_in + z_st)
        state = (1 - update) * torch.tanh(n_in + torch.sigmoid(r_in + r_st) * n_st) + update * old
        if slot < int(self._key("pure_draft_prefix_len", 1)):
            return None, state
        u = F.silu(self._weight("embed_proj.0.weight") @ torch.cat([hidden, state]))
        return self._weight("embed_proj.2.weight") @ u, state

    def _confidence(self, hidden: Tensor, token: int) -> Tensor | None:
        if not (self._key("enable_confidence_head") or self._key("use_confidence_head")):
            return None
        weight = self._weight("confidence_head.proj.weight", "confidence_proj.weight")[0]
        inputs = hidden
        if weight.shape[0] > self.width:
            inputs = torch.cat([hidden, self._weight("markov_head.markov_w1.weight", "markov_w1.weight")[token]])
        bias = self.tensors.get("confidence_head.proj.bias", self.tensors.get("confidence_proj.bias"))
        return inputs @ weight + (0.0 if bias is None else bias[0])


def rope_frequencies(shape: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [d/2] in float64 and the factor on cos and sin, from a config's rope keys."""
    parameters = dict(shape.get("rope_parameters") or {})
    parameters.update(shape.get("rope_scaling") or {})
    base = float(shape.get("rope_theta") or parameters.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    frequencies = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if kind == "default":
        return frequencies, 1.0
    factor = float(parameters["factor"])
    if kind == "linear":
        return frequencies / factor, 1.0
    original = float(parameters.get("original_max_position_embeddings") or shape.get("max_position_embeddings") or 2048)
    if kind == "llama3":
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        turns = original * frequencies / (2 * math.pi)
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (blend + (1 - blend) / factor), 1.0
    if kind == "yarn":
        fast, slow = float(parameters.get("beta_fast") or 32), float(parameters.get("beta_slow") or 1)

        def dimension(turns: float) -> float:
            return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), head_dim - 1)
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - first) / max(last - first, 1e-3)).clamp(0, 1)
        scale = parameters.get("attention_factor") or 0.1 * math.log(factor) + 1.0
        return frequencies * (1 - ramp) + frequencies / factor * ramp, float(scale)
    raise UnsupportedError(f"rope_type {kind!r} has no independent check; use default, linear, llama3 or yarn")
