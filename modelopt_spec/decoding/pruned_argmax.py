"""Argmax over the vocabulary of ``base_v + W_v . u`` that reads only the rows of W that can win.

What all rows of W have in common shifts every logit alike. With the mean row c, ``W_v . u = c . u + (W_v - c) . u``,
and by Cauchy and Schwarz the second part cannot exceed ``|W_v - c| |u|``: a token whose base logit plus c . u plus that
bound stays below what another token surely reaches cannot be the argmax. (A trained W_out is mostly such a common row.)
Tokens are looked at in chunks first: one maximum of base logits for each chunk of a whole block is taken together, and
only what is done with these few numbers waits for each slot. The result is the exact argmax whatever the weights are;
when too many tokens remain the whole product is taken.

It is for one row on a CPU, where reading W for every slot dominates; on accelerators the dense product is faster.

Legend: m draft slots, V vocabulary, R head rank, C chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelopt_spec.targets.base import is_plain_linear

__all__ = ["PrunedArgmax"]


class PrunedArgmax:
    """The norms of one W_out, and the search that uses them."""

    CHUNK = 64
    """Tokens of a chunk."""
    LEADERS = 4
    """Chunks of the largest base logits, whose best corrected logit is what the argmax surely reaches."""
    MANY_SHARE = 2
    """Look at all tokens' bounds at once when more than a chunk in 2 remains."""
    DENSE_SHARE = 8
    """Multiply the whole matrix when more than a token in 8 remains."""
    ROUNDING = 1e-4
    """Relative slack, so that rounding cannot make a bound too tight."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()
        self._wide = torch.promote_types(weight.dtype, torch.float32)
        self._chunks = self.weight.view(-1, self.CHUNK, self.weight.shape[1])
        self._common = self.weight.mean(0, dtype=self._wide)
        self._norms = (self._chunks - self._common).norm(dim=2)
        self._largest = self._norms.amax(1)
        self._unit = float(self._common.norm() + self._largest.max()) * torch.finfo(weight.dtype).eps
        """What rounding a product can cost for |u| = 1."""
        self._ids = torch.arange(len(self.weight)).view(-1, self.CHUNK)
        self._scores = self._tops = self._leading = self._leading_rows = torch.empty(0)

    @classmethod
    def pays(cls, out: nn.Module, batch_size: int) -> bool:
        """Whether the search is faster than calling the module: one row on a CPU, a plain and large matrix."""
        if not (batch_size == 1 and is_plain_linear(out)):
            return False
        weight = out.weight
        if not (isinstance(weight, Tensor) and weight.device.type == "cpu" and weight.is_contiguous()):
            return False
        return weight.shape[0] % cls.CHUNK == 0 and weight.numel() >= 2**19

    def start(self, base: Tensor) -> None:
        """Take the base logits [m, V] of a block."""
        if self._scores.shape[:1] != base.shape[:1]:
            self._scores = base.new_empty((len(base), *self._ids.shape), dtype=torch.float32)
        self._scores.copy_(base.view(self._scores.shape))
        self._tops = self._scores.amax(2)
        leaders = self._tops.topk(min(self.LEADERS, self._tops.shape[1]), sorted=False).indices
        self._leading = self._scores.gather(1, leaders.unsqueeze(2).expand(-1, -1, self.CHUNK)).flatten(1)
        rows = self._chunks.index_select(0, leaders.flatten())
        self._leading_rows = rows.view(len(base), -1, rows.shape[2]).to(self._wide)

    def candidates(self, slot: int, latent: Tensor) -> Tensor:
        """[c] ascending ids of the tokens that can have the largest ``base + W u`` of a slot, latent [R]."""
        scores, tops, u = self._scores[slot], self._tops[slot], latent.to(self._wide)
        size = float(torch.linalg.vector_norm(u))
        surely = float((self._leading[slot] + torch.mv(self._leading_rows[slot], u)).max())
        slack = self.ROUNDING * (1 + abs(surely)) + self._unit * size
        threshold = surely - float(torch.dot(self._common, u)) - slack
        chunks = (torch.add(tops, self._largest, alpha=size) >= threshold).nonzero().squeeze(1)
        if len(chunks) * self.MANY_SHARE > len(tops):
            return (torch.add(scores, self._norms, alpha=size) >= threshold).flatten().nonzero().squeeze(1)
        reach = torch.add(scores.index_select(0, chunks), self._norms.index_select(0, chunks), alpha=size)
        inside = (reach >= threshold).flatten().nonzero().squeeze(1)
        return self._ids.index_select(0, chunks).flatten().index_select(0, inside)

    def best(self, slot: int, latent: Tensor) -> Tensor:
        """[1] index of the largest ``base + W u`` of a slot, latent [R]."""
        tokens, scores = self.candidates(slot, latent), self._scores[slot].flatten()
        if len(tokens) * self.DENSE_SHARE > len(scores):
            return (scores + functional.linear(latent, self.weight)).argmax().unsqueeze(0)
        rows = self.weight.index_select(0, tokens).to(self._wide)
        correction = torch.mv(rows, latent.to(self._wide)).to(latent.dtype)
        return tokens[(scores.index_select(0, tokens) + correction).argmax()].unsqueeze(0)
