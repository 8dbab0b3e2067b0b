"""Routed experts as three-dimensional weights: tokens sorted by expert, one matrix product a segment, none dropped.

The products of all experts run as one grouped matmul where torch has a kernel for it, and segment by segment elsewhere.
Parameters as in transformers: ``gate_up_proj`` [E, 2I, D] (gate rows first), ``down_proj`` [E, D, I].

Legend: M tokens, k experts a token, P = M k pairs, E experts, D hidden, I width of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Experts", "gated", "grouped_linear"]


def gated(gate_up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) * up of [..., 2I], gate first; both clamped by ``limit`` (the gate from above only). [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return F.silu(gate) * up


class _SegmentLinear(torch.autograd.Function):
    """y[s:e] = x[s:e] @ w[i].T for each expert's segment, without a copy of any slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ends = ends
        out = x.new_empty(x.shape[0], weight.shape[1])
        start = 0
        for expert, end in enumerate(ends):
            torch.mm(x[start:end], weight[expert].T, out=out[start:end])
            start = end
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_w = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        start = 0
        for expert, end in enumerate(ctx.ends):
            if grad_x is not None:
                torch.mm(grad[start:end], weight[expert], out=grad_x[start:end])
            if grad_w is not None:
                torch.mm(grad[start:end].T, x[start:end], out=grad_w[expert])
            start = end
        return grad_x, grad_w, None


def _has_grouped_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped matmul runs here: half and single precision on GPUs of compute capability 8 and above.

    On a CPU it takes the same steps as the segments do and refuses float64.
    """
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    aligned = all(16 % t.element_size() == 0 and t.shape[-1] * t.element_size() % 16 == 0 for t in (x, weight))
    return hasattr(F, "grouped_mm") and aligned and torch.cuda.get_device_capability(x.device) >= (8, 0)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows sorted by expert times each expert's own matrix.

    Args:
        x: [P, in], the first ``counts[0]`` rows for expert 0, and so on.
        weight: [E, out, in].
        counts: [E] rows of each expert; their sum is P.

    Returns:
        [P, out].
    """
    ends = counts.cumsum(0)
    if _has_grouped_kernel(x, weight):
        return F.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends.to(torch.int32))
    return _SegmentLinear.apply(x, weight, ends.tolist())


class Experts(nn.Module):
    """E gated feed-forward experts."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, limit: float | None) -> None:
        super().__init__()
        self.num_experts, self.limit = num_experts, limit
        self.exchange: Any = None
        """How tokens get to experts on other ranks; see :mod:`modelopt_spec.drafter.experts_parallel`."""
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        if not self.down_proj.is_meta:
            nn.init.normal_(self.gate_up_proj, std=0.02)
            nn.init.normal_(self.down_proj, std=0.02)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """sum_k weights[m, k] * expert_{ids[m, k]}(x[m]).

        Args:
            x: [M, D]. ids: [M, k] distinct experts of each token. weights: [M, k].

        Returns:
            [M, D] in the type of ``x``; the sum over k is taken in the type of ``weights``.
        """
        chosen = ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=self.num_experts)
        gate_up, down = self._weights(x.device.type)
        rows = x.to(gate_up.dtype)[order // chosen]

        def compute(rows: Tensor, counts: Tensor) -> Tensor:
            return grouped_linear(gated(grouped_linear(rows, gate_up, counts), self.limit), down, counts)

        out = compute(rows, counts) if self.exchange is None else self.exchange(rows, counts, compute)
        unsorted = torch.empty_like(order)
        unsorted[order] = torch.arange(len(order), device=order.device)
        pairs = out[unsorted].unflatten(0, (-1, chosen))
        return (pairs.to(weights.dtype) * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _weights(self, device: str) -> tuple[Tensor, Tensor]:
        """Both matrices of this rank's experts, in autocast's type where it is on."""
        weights: list[Tensor] = [self.gate_up_proj, self.down_proj]
        if self.exchange is not None:
            weights = [self.exchange.local(weight) for weight in weights]
        if torch.is_autocast_enabled(device):
            weights = [weight.to(torch.get_autocast_dtype(device)) for weight in weights]
        return weights[0], weights[1]
