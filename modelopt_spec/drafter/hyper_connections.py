"""Manifold-constrained hyper-connections: n parallel residual streams around a sublayer (mHC, arXiv 2512.24880).

A sublayer f on streams s_1 .. s_n, each [D], with coefficients that depend on the streams themselves:

    x        = sum_i pre_i s_i                              what the sublayer reads
    s'_j     = post_j f(x) + sum_i comb[i, j] s_i           comb is doubly stochastic: mixing never amplifies

pre, post and comb come from one small projection of all streams (DeepSeek-V4's form: `transformers`' `deepseek_v4`,
whose parameter names and shapes these modules carry). The coefficients, and with them Sinkhorn's iterations, are
computed in float32 (float64 for float64 streams) whatever the model's type and whatever autocast says; the parameters
stay float32 when the drafter around them is cast to a 16-bit type.

A new module is an ordinary residual connection: the projection's scale starts at 0, pre at 1/n, post at 1, and since
all streams start as copies of the embedding, any doubly stochastic comb leaves them copies. `fn` starts random, so the
first update of the scale tells the streams apart.

Legend: ... any leading axes, n streams, D hidden, M tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from modelopt_spec.config import HyperConnectionConfig
from modelopt_spec.errors import ConfigError

__all__ = ["Float32Module", "HyperConnection", "Mixing", "PlainResidual", "StreamCollapse", "sinkhorn"]

_HALF = (torch.bfloat16, torch.float16)
_DIAGONAL = 2.0
"""Initial logit of comb's diagonal: with n = 4 a stream keeps 71 % of itself.

The nearer a matrix is to a permutation, the slower Sinkhorn's iterations reach it. Around this start 20 of them leave
rows exact to eps while logits move by less than about 0.3; a diagonal of 4 starts where they are off by 1e-3.
"""


class Float32Module(nn.Module):
    """A module whose parameters and buffers stay float32 when it is cast to a 16-bit type; without weight decay."""

    no_weight_decay: ClassVar[tuple[str, ...]] = ()
    """Own parameters that weight decay must not touch."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in _HALF and tensor.dtype == torch.float32 else moved

        return super()._apply(keep, recurse)


class Mixing(NamedTuple):
    """The coefficients of one sublayer, for M tokens."""

    pre: Tensor
    """[M, n] weight of each stream in the sublayer's input."""
    post: Tensor
    """[M, n] weight of the output in each stream."""
    comb: Tensor
    """[M, n, n] old stream i (second axis) in new stream j (last axis)."""


def sinkhorn(logits: Tensor, *, iterations: int, eps: float, across: int = -1, down: int = -2) -> Tensor:
    """A doubly stochastic matrix from logits.

    softmax across each row, plus eps; one column normalisation; then ``iterations - 1`` times row and column, each
    with eps in the divisor (DeepSeek-V4). The columns come last, so they are exact to eps. Rows approach 1 at a rate
    that falls with the spread of the logits: 20 iterations reach eps for logits within 1.5 of their mean (n = 4), and
    leave 2e-2 for logits within 4. Engines fix number and order of the iterations, so none are added here.

    Args:
        logits: any shape with the matrix on the axes ``down`` (rows) and ``across`` (columns).
        iterations: t_max, at least 1.
        eps: floor of the divisors.
        across: axis along which the entries of one row stand.
        down: axis along which the entries of one column stand.
    """
    matrix = logits.softmax(dim=across) + eps
    matrix = matrix / (matrix.sum(dim=down, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(dim=across, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=down, keepdim=True) + eps)
    return matrix


def _settled(config: HyperConnectionConfig) -> tuple[int, int, float]:
    """Streams, iterations and eps of a config without open fields."""
    n, iterations, eps = config.streams, config.sinkhorn_iterations, config.eps
    if n is None or iterations is None or eps is None:
        raise ConfigError(f"backbone.hyper_connection {config.model_dump()} has open fields: resolve it with a target")
    return n, iterations, eps


def _exact(streams: Tensor) -> torch.dtype:
    return torch.float64 if streams.dtype == torch.float64 else torch.float32


def _logit(share: float, eps: float) -> float:
    """b with sigmoid(b) + eps = share, kept finite for a share of 1."""
    inside = min(max(share - eps, 1e-7), 1 - 1e-7)
    return math.log(inside / (1 - inside))


def _normalised_projection(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """fn @ RMSNorm(all streams of a token), [M, n, D] and [m, n*D] -> [m, M].

    The norm has no weight, so it is one factor a token and can follow the projection. Tokens stand last: what comes
    after works along long rows.
    """
    flat = streams.flatten(1)
    scale = torch.rsqrt(flat.square().mean(dim=-1) + eps)
    return (fn @ flat.T) * scale


def _by_token(coefficients: Tensor) -> Tensor:
    """[n, M] -> [M, n], laid out so: batched products of other layouts run one small matrix at a time on a CPU."""
    return coefficients.T.contiguous()


class HyperConnection(Float32Module):
    """The streams around one sublayer. Parameters: ``fn`` [(2+n)n, nD], ``base`` [(2+n)n] and ``scale`` [3]."""

    no_weight_decay = ("fn", "base", "scale")

    def __init__(self, config: HyperConnectionConfig, hidden_size: int, norm_eps: float) -> None:
        super().__init__()
        self.n, self.iterations, self.eps = _settled(config)
        n, self.norm_eps = self.n, norm_eps
        self.fn = nn.Parameter(torch.empty((2 + n) * n, n * hidden_size, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty((2 + n) * n, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))
        if not self.fn.is_meta:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """An ordinary residual connection; see the module's text."""
        n = self.n
        nn.init.normal_(self.fn, std=0.02)
        nn.init.zeros_(self.scale)
        self.base[:n] = _logit(1 / n, self.eps)
        self.base[n : 2 * n] = 0.0
        self.base[2 * n :] = (torch.eye(n) * _DIAGONAL).flatten()

    def forward(self, streams: Tensor) -> tuple[Tensor, Mixing]:
        """Streams [..., n, D] -> the sublayer's input [..., D] in their type, and the coefficients of :meth:`merge`."""
        n, exact = self.n, _exact(streams)
        with torch.autocast(streams.device.type, enabled=False):
            tokens = streams.reshape(-1, *streams.shape[-2:]).to(exact)
            logits = _normalised_projection(tokens, self.fn.to(exact), self.norm_eps)
            base, scale = self.base.to(exact).unsqueeze(1), self.scale.to(exact)
            pre = torch.sigmoid(logits[:n] * scale[0] + base[:n]) + self.eps
            post = 2 * torch.sigmoid(logits[n : 2 * n] * scale[1] + base[n : 2 * n])
            comb = (logits[2 * n :] * scale[2] + base[2 * n :]).unflatten(0, (n, n))
            comb = sinkhorn(comb, iterations=self.iterations, eps=self.eps, across=1, down=0)
            collapsed = torch.bmm(_by_token(pre).unsqueeze(1), tokens).view(*streams.shape[:-2], -1)
            new_from_old = comb.permute(2, 1, 0).contiguous()
        return collapsed.to(streams.dtype), Mixing(pre.T, post.T, new_from_old.transpose(1, 2))

    def merge(self, streams: Tensor, output: Tensor, mixing: Mixing) -> Tensor:
        """New streams [..., n, D] from the old ones and the sublayer's output [..., D]."""
        exact = _exact(streams)
        with torch.autocast(streams.device.type, enabled=False):
            tokens = streams.reshape(-1, *streams.shape[-2:]).to(exact)
            written = mixing.post.unsqueeze(-1) * output.reshape(-1, 1, output.shape[-1]).to(exact)
            merged = torch.baddbmm(written, mixing.comb.transpose(1, 2), tokens)
        return merged.view(streams.shape).to(streams.dtype)


class PlainResidual(nn.Module):
    """The interface of :class:`HyperConnection` for one stream: x + f(x)."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., D] -> itself."""
        return x, None

    def merge(self, x: Tensor, output: Tensor, mixing: None) -> Tensor:
        """x + f(x)."""
        return x + output


class StreamCollapse(Float32Module):
    """The last collapse of all streams: pre weights as in a hyper-connection, nothing written back."""

    no_weight_decay = ("hc_fn", "hc_base", "hc_scale")

    def __init__(self, config: HyperConnectionConfig, hidden_size: int, norm_eps: float) -> None:
        super().__init__()
        self.n, self.iterations, self.eps = _settled(config)
        n, self.norm_eps = self.n, norm_eps
        self.hc_fn = nn.Parameter(torch.empty(n, n * hidden_size, dtype=torch.float32))
        self.hc_base = nn.Parameter(torch.empty(n, dtype=torch.float32))
        self.hc_scale = nn.Parameter(torch.empty(1, dtype=torch.float32))
        if not self.hc_fn.is_meta:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The mean of the streams."""
        nn.init.normal_(self.hc_fn, std=0.02)
        nn.init.zeros_(self.hc_scale)
        nn.init.constant_(self.hc_base, _logit(1 / self.n, self.eps))

    def forward(self, streams: Tensor) -> Tensor:
        """[..., n, D] -> [..., D]."""
        exact = _exact(streams)
        with torch.autocast(streams.device.type, enabled=False):
            tokens = streams.reshape(-1, *streams.shape[-2:]).to(exact)
            logits = _normalised_projection(tokens, self.hc_fn.to(exact), self.norm_eps)
            pre = torch.sigmoid(logits * self.hc_scale.to(exact) + self.hc_base.to(exact).unsqueeze(1)) + self.eps
            collapsed = torch.bmm(_by_token(pre).unsqueeze(1), tokens).view(*streams.shape[:-2], -1)
        return collapsed.to(streams.dtype)
