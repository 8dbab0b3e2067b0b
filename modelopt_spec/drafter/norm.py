"""RMSNorm of the dense backbone, alone or with the rotary embedding after it, trained on a CPU tile by tile.

With ``r = (mean(x^2) + eps)^-1/2`` and ``n = x * r`` the norm is ``y = n * w``, and its gradient

    dw = sum over rows of (dy * n),    dx = r * (dy * w - n * mean(dy * w * n))

(Zhang and Sennrich, arXiv 1910.07467, equation 4 differentiated). PyTorch's CPU composite makes a new tensor of the
whole context for each of a dozen steps, and first touches of memory cost more there than the arithmetic; here a tile
stays in cache through all steps, and only the result is new. ``plain_norm`` is the reference and every other case:
accelerators have fused kernels of their own.

Legend: R rows, H heads (1 without), d normalised width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.models.qwen3.modeling_qwen3 import rotate_half

__all__ = ["Angles", "DraftNorm", "plain_norm", "rotate"]

Angles = tuple[Tensor, Tensor]
"""cos and sin of the rotary embedding, [..., d]."""

TILE = 1 << 17
"""Elements of a tile: half a MiB in float32, so that a step finds in a core's cache what the step before it left."""


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Apply rotary angles [..., d] to heads [..., H, d]."""
    cos, sin = (part.unsqueeze(-2) for part in angles)
    return x * cos + rotate_half(x) * sin


def plain_norm(x: Tensor, weight: Tensor, eps: float | None, angles: Angles | None = None) -> Tensor:
    """RMSNorm over the last dimension, then the rotary embedding if angles are given."""
    normed = functional.rms_norm(x, weight.shape, weight, eps)
    return normed if angles is None else rotate(normed, angles)


class DraftNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` of the last dimension, with a weight, that may rotate its result too."""

    def __init__(self, width: int, eps: float | None = None) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor, angles: Angles | None = None) -> Tensor:
        """[..., d] -> [..., d]; with angles [..., d], heads [..., H, d] -> [..., H, d]."""
        given = () if angles is None else angles
        if torch.is_grad_enabled() and _takes_tiles(x, self.weight, *given):
            return _TiledNorm.apply(x, self.weight, self.eps, *(given or (None, None)))
        return plain_norm(x, self.weight, self.eps, angles)


def _takes_tiles(x: Tensor, *others: Tensor) -> bool:
    """Whether all are on the CPU in the same full precision, and no compiler is there to fuse the plain steps."""
    if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    if x.shape[-1:] != others[0].shape:
        return False
    full = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return full and all(other.device == x.device and other.dtype == x.dtype for other in others)


class _TiledNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float | None, cos: Tensor | None, sin: Tensor | None
    ) -> Tensor:
        x = x.contiguous()
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        out, inverse = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
        ctx.save_for_backward(x, weight, inverse, cos, sin)
        rows, angles = _rows(x, cos, sin)
        out_rows, inverse_rows = out.view_as(rows), inverse.view(*rows.shape[:-1], 1)
        for tile in _tiles(rows):
            scale = inverse_rows[tile]
            torch.linalg.vector_norm(rows[tile], dim=-1, keepdim=True, out=scale)
            scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            if angles is None:
                torch.mul(rows[tile], scale, out=out_rows[tile]).mul_(weight)
            else:
                _turn((rows[tile] * scale).mul_(weight), angles[0][tile], angles[1][tile], out_rows[tile])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse, cos, sin = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        rows, angles = _rows(x, cos, sin)
        inverse_rows = inverse.view(*rows.shape[:-1], 1)
        grad_rows, grad_x_rows = grad.contiguous().view_as(rows), grad_x.view_as(rows)
        for tile in _tiles(rows):
            scale, above = inverse_rows[tile], grad_rows[tile]
            if angles is not None:
                above = _turn(above, angles[0][tile], -angles[1][tile], torch.empty_like(above))
            normed = rows[tile] * scale
            product = above * normed
            grad_weight += product.flatten(0, -2).sum(0)
            mean = torch.matmul(product, weight).unsqueeze(-1).div_(x.shape[-1])
            torch.mul(above, weight, out=grad_x_rows[tile]).sub_(normed.mul_(mean)).mul_(scale)
        return grad_x, grad_weight, None, None, None


def _rows(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Angles | None]:
    """[..., d] -> [R, d] without angles; [..., H, d] -> [R, H, d] and angles [R, 1, d] with them."""
    if cos is None or sin is None:
        return x.view(-1, x.shape[-1]), None
    cos, sin = (part.expand(*x.shape[:-2], -1).reshape(-1, 1, x.shape[-1]) for part in (cos, sin))
    return x.view(-1, *x.shape[-2:]), (cos, sin)


def _tiles(rows: Tensor) -> Iterator[slice]:
    size = max(1, TILE // max(1, rows[:1].numel()))
    return (slice(start, start + size) for start in range(0, rows.shape[0], size))


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """Rotate [R, H, d] by [R, 1, d] into ``out``; cos and sin are equal in both halves of d."""
    half = x.shape[-1] // 2
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(x[..., half:], sin[..., half:], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., :half])
    return out
