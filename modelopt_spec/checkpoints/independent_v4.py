"""The plain reading of a DeepSeek-V4 draft: from ``mtp.*`` tensors and keys to the logits of one block.

As :mod:`modelopt_spec.checkpoints.independent_reader`, nothing here uses the drafter, the layouts or the conventions of
this package. One token at a time through the streams and the experts; one block, no batch, no cache.

Legend: C context positions, K slots, n streams, D hidden, H heads, d head width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from modelopt_spec.checkpoints.independent_reader import BlockResult, IndependentDraft
from modelopt_spec.errors import UnsupportedError

__all__ = ["IndependentV4Draft", "holds_v4_draft"]

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def holds_v4_draft(root: Path) -> bool:
    """Whether a directory's files have the tensors of a DeepSeek-V4 draft."""
    for file in sorted(root.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            if "mtp.0.main_proj.weight" in reader.keys():  # noqa: SIM118
                return True
    return False


class IndependentV4Draft(IndependentDraft):
    """A DeepSeek-V4 draft as its files describe it, alone or beside its target's tensors."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.raw = self.shape = config
        self.dtype = dtype
        self.tensors = _dequantised(tensors, dtype)
        self.num_layers = 1 + max(int(name.split(".")[1]) for name in self.tensors)
        self.last = f"mtp.{self.num_layers - 1}."
        self.width, self.heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        self.head_dim, self.eps = int(config["head_dim"]), float(config["rms_norm_eps"])
        self.block_size, self.mask_id = int(config["dspark_block_size"]), int(config["dspark_noise_token_id"])
        self.taps = [int(i) for i in config["dspark_target_layer_ids"]]
        self.anchor_first, self.first, self.head = True, 0, "vanilla"

    @classmethod
    def open(cls, directory: str | Path, dtype: torch.dtype = torch.float32) -> IndependentV4Draft:
        """Read ``config.json`` and the ``mtp.*`` tensors of a directory that was just written, or checked before."""
        import json

        root, tensors = Path(directory), {}
        for file in sorted(root.glob("*.safetensors")):
            with safe_open(file, framework="pt") as reader:
                names = [name for name in reader.keys() if name.startswith("mtp.")]  # noqa: SIM118
                tensors.update({name: reader.get_tensor(name) for name in names})
        return cls(json.loads((root / "config.json").read_text()), tensors, dtype)

    # ---- streams ---------------------------------------------------------------------------------------------------

    def _mixed(self, streams: Tensor, place: str) -> Tensor:
        """One token's streams [n, D] through a projection: [m]."""
        flat = streams.flatten()
        return self._weight(f"{place}_fn") @ (flat * torch.rsqrt(flat.pow(2).mean() + self.eps))

    def _coefficients(self, streams: Tensor, place: str) -> tuple[Tensor, Tensor, Tensor]:
        """pre [n], post [n], comb [n, n] of one token."""
        n, tiny = streams.shape[0], float(self.raw.get("hc_eps", 1e-6))
        mixed, base, scale = self._mixed(streams, place), self._weight(f"{place}_base"), self._weight(f"{place}_scale")
        pre = torch.sigmoid(mixed[:n] * scale[0] + base[:n]) + tiny
        post = 2 * torch.sigmoid(mixed[n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (mixed[2 * n :] * scale[2] + base[2 * n :]).view(n, n).softmax(-1) + tiny
        comb = comb / (comb.sum(0, keepdim=True) + tiny)
        for _ in range(int(self.raw.get("hc_sinkhorn_iters", 20)) - 1):
            comb = comb / (comb.sum(1, keepdim=True) + tiny)
            comb = comb / (comb.sum(0, keepdim=True) + tiny)
        return pre, post, comb

    def _around(self, streams: Tensor, place: str, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """A sublayer [K, D] -> [K, D] inside of the streams [K, n, D]."""
        found = [self._coefficients(token, place) for token in streams]
        inputs = torch.stack([pre @ token for (pre, _, _), token in zip(found, streams, strict=True)])
        outputs = sublayer(inputs)
        merged = [
            post.unsqueeze(1) * out + comb.T @ token
            for (_, post, comb), out, token in zip(found, outputs, streams, strict=True)
        ]
        return torch.stack(merged)

    # ---- attention -------------------------------------------------------------------------------------------------

    def _turn(self, x: Tensor, positions: Tensor, sign: float = 1.0) -> Tensor:
        """Rotate the last channels of [n, heads, d] by its positions [n], in neighbouring pairs, as complex numbers."""
        rope = self.raw.get("rope_parameters") or {}
        theta = float(self.raw.get("rope_theta") or rope["main"]["rope_theta"])
        width = int(self.raw["qk_rope_head_dim"])
        frequencies = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = sign * positions.double().unsqueeze(1) * frequencies
        still, turned = x[..., :-width], x[..., -width:]
        pairs = torch.view_as_complex(turned.double().unflatten(-1, (-1, 2)).contiguous())
        rotated = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)).flatten(-2)
        return torch.cat([still, rotated.to(x.dtype)], dim=-1)

    def _attend(self, stage: str, slots: Tensor, context: Tensor, visible: Tensor) -> Tensor:
        """Normed slots [K, D], context [C, D], visible [K, C+K] -> [K, D]."""
        count, width = context.shape[0], slots.shape[0]
        positions = torch.arange(count + width)
        low = self._norm(F.linear(slots, self._weight(f"{stage}.wq_a.weight")), self._weight(f"{stage}.q_norm.weight"))
        q = F.linear(low, self._weight(f"{stage}.wq_b.weight")).view(width, self.heads, self.head_dim)
        q = self._turn(q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + self.eps), positions[count:])
        kv = F.linear(torch.cat([context, slots]), self._weight(f"{stage}.wkv.weight"))
        kv = self._turn(self._norm(kv, self._weight(f"{stage}.kv_norm.weight")).unsqueeze(1), positions).squeeze(1)
        scores = torch.einsum("qhd,kd->hqk", q, kv) / self.head_dim**0.5
        scores = scores.masked_fill(~visible, float("-inf"))
        sink = self._weight(f"{stage}.attn_sink").view(-1, 1, 1).expand(-1, width, 1)
        shares = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        out = self._turn(torch.einsum("hqk,kd->qhd", shares, kv), positions[count:], sign=-1.0)
        groups, rank = int(self.raw["o_groups"]), int(self.raw["o_lora_rank"])
        per_group = out.reshape(width, groups, -1)
        low_rank = self._weight(f"{stage}.wo_a.weight").view(groups, rank, -1)
        joined = torch.cat([per_group[:, g] @ low_rank[g].T for g in range(groups)], dim=-1)
        return F.linear(joined, self._weight(f"{stage}.wo_b.weight"))

    def _windows(self) -> int | None:
        return int(self.raw["sliding_window"])

    def _causal(self) -> bool:
        return False

    # ---- experts ---------------------------------------------------------------------------------------------------

    def _expert(self, place: str, x: Tensor) -> Tensor:
        limit = float(self.raw.get("swiglu_limit", 10.0))
        gate, up = (self._weight(f"{place}.{part}.weight") @ x for part in ("w1", "w3"))
        inner = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        return self._weight(f"{place}.w2.weight") @ inner

    def _route(self, place: str, x: Tensor) -> Tensor:
        """One token [D] through its experts."""
        if self.raw.get("scoring_func", "sqrtsoftplus") != "sqrtsoftplus":
            raise UnsupportedError(f"scoring_func {self.raw['scoring_func']!r}: published drafts use sqrtsoftplus")
        scores = F.softplus(self._weight(f"{place}.gate.weight") @ x).sqrt()
        chosen = (scores + self._weight(f"{place}.gate.bias")).topk(int(self.raw["num_experts_per_tok"])).indices
        weights = scores[chosen]
        if self.raw.get("norm_topk_prob", True):
            weights = weights / (weights.sum() + 1e-20)
        weights = weights * float(self.raw.get("routed_scaling_factor", 1.5))
        parts = [w * self._expert(f"{place}.experts.{int(e)}", x) for w, e in zip(weights, chosen, strict=True)]
        return torch.stack(parts).sum(0) + self._expert(f"{place}.shared_experts", x)

    # ---- a block ---------------------------------------------------------------------------------------------------

    def collapsed(self, taps: Tensor, block: Tensor, window_rule: str) -> Tensor:
        """Features [C, T*D_target] and an embedded block [K, D] -> [K, D] before the final norm."""
        fused = F.linear(taps.to(self.dtype), self._weight("mtp.0.main_proj.weight"))
        context = self._norm(fused, self._weight("mtp.0.main_norm.weight"))
        visible = self._visible(taps.shape[0], window_rule)
        streams = block.to(self.dtype).unsqueeze(1).repeat(1, int(self.raw.get("hc_mult", 4)), 1)
        for index in range(self.num_layers):
            stage = f"mtp.{index}"

            def attend(x: Tensor, stage: str = stage) -> Tensor:
                return self._attend(
                    f"{stage}.attn", self._norm(x, self._weight(f"{stage}.attn_norm.weight")), context, visible
                )

            def experts(x: Tensor, stage: str = stage) -> Tensor:
                normed = self._norm(x, self._weight(f"{stage}.ffn_norm.weight"))
                return torch.stack([self._route(f"{stage}.ffn", token) for token in normed])

            streams = self._around(streams, f"{stage}.hc_attn", attend)
            streams = self._around(streams, f"{stage}.hc_ffn", experts)
        base, scale = self._weight(f"{self.last}hc_head_base"), self._weight(f"{self.last}hc_head_scale")
        tiny = float(self.raw.get("hc_eps", 1e-6))
        rows = [
            (torch.sigmoid(self._mixed(token, f"{self.last}hc_head") * scale + base) + tiny) @ token
            for token in streams
        ]
        return torch.stack(rows)

    def hidden(self, taps: Tensor, block: Tensor, window_rule: str) -> Tensor:
        """As :meth:`collapsed`, after the final norm."""
        return self._norm(self.collapsed(taps, block, window_rule), self._weight(f"{self.last}norm.weight"))

    def block(
        self,
        taps: Tensor,
        anchor: int,
        embed: Callable[[Tensor], Tensor],
        base_logits: Callable[[Tensor], Tensor],
        *,
        previous: Sequence[int] | None = None,
        window_rule: str = "block",
    ) -> BlockResult:
        """Draft one block; arguments as of the dense reader."""
        ids = torch.tensor([anchor] + [self.mask_id] * (self.block_size - 1))
        collapsed = self.collapsed(taps, embed(ids), window_rule)
        hidden = self._norm(collapsed, self._weight(f"{self.last}norm.weight"))
        base = base_logits(hidden).to(self.dtype)
        first, out = (self._weight(f"{self.last}markov_head.markov_w{i}.weight") for i in (1, 2))
        confidence = self.tensors.get(f"{self.last}confidence_head.proj.weight")
        token, tokens, biases, confidences = anchor, [], [], []
        for slot in range(self.block_size):
            token = int(previous[slot]) if previous is not None else token
            biases.append(out @ first[token])
            if confidence is not None:
                confidences.append(confidence[0] @ torch.cat([collapsed[slot], first[token]]))
            token = int((base[slot] + biases[-1]).argmax())
            tokens.append(token)
        stacked = torch.stack(biases)
        return BlockResult(hidden, stacked, base + stacked, tokens, torch.stack(confidences) if confidences else None)


def _dequantised(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Every weight as floats: FP8 with scales of 128 x 128 blocks, packed 4-bit floats with scales of 32 neighbours."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        scales = tensors.get(f"{name.removesuffix('.weight')}.scale")
        if name.endswith(".scale"):
            continue
        if scales is None:
            plain[name] = tensor.to(dtype)
            continue
        factor = scales.float() if scales.dtype == torch.float8_e8m0fnu or scales.is_floating_point() else None
        if factor is None:
            factor = torch.exp2(scales.view(torch.uint8).float() - 127)
        if tensor.dtype == torch.float8_e4m3fn:
            whole = factor.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]]
            plain[name] = (tensor.float() * whole).to(dtype)
        else:
            codes = tensor.view(torch.uint8).long()
            values = torch.stack([_E2M1[codes % 16], _E2M1[codes // 16]], dim=-1).flatten(1)
            plain[name] = (values * factor.repeat_interleave(32, 1)).to(dtype)
    return plain
