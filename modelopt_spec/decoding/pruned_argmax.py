"""Argmax over the vocabulary of ``base_v + W_v . u`` that reads only the rows of W that can win.

By Cauchy and Schwarz a correction cannot exceed ``|W_v| |u|``, so a token whose base logit plus that bound stays below
what another token surely reaches cannot be the argmax. Tokens are looked at in chunks first: one maximum of base logits
for each chunk of a whole block is taken together, and only what is done with these few numbers waits for each slot. The
result is the exact argmax whatever the weights are; when too many tokens remain the whole product is taken.

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
    FEW = 16
    """Chunks up to which every token is multiplied, without looking at single tokens' bounds."""
    DENSE_SHARE = 8
    """Multiply the whole matrix when more than a chunk in 8 remains."""
    ROUNDING = 1e-4
    """Relative slack, so that rounding cannot make a bound too tight."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()
        self._chunks = self.weight.view(-1, self.CHUNK, self.weight.shape[1])
        self._norms = self._chunks.float().norm(dim=2)
        self._largest = self._norms.amax(1)
        self._ids = torch.arange(len(self.weight)).view(-1, self.CHUNK)
        self._scores = self._tops = torch.empty(0)

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

    def best(self, slot: int, latent: Tensor) -> Tensor:
        """[1] index of the largest ``base + W u`` of a slot, latent [R]."""
        scores, tops = self._scores[slot], self._tops[slot]
        size = float(torch.linalg.vector_norm(latent.float()))
        leader = int(tops.argmax())
        corrected = scores[leader] + torch.mv(self._chunks[leader], latent)
        inside = int(corrected.argmax())
        surely = float(corrected[inside])
        threshold = surely - self.ROUNDING * (1 + abs(surely))
        chunks = (torch.add(tops, self._largest, alpha=size) >= threshold).nonzero().squeeze(1)
        if len(chunks) == 1:
            return torch.tensor([leader * self.CHUNK + inside])
        if len(chunks) * self.DENSE_SHARE > len(tops):
            return (scores.flatten() + functional.linear(latent, self.weight)).argmax().unsqueeze(0)
        tokens = self._ids[chunks].flatten()
        if len(chunks) > self.FEW:
            reach = torch.add(scores[chunks], self._norms[chunks], alpha=size)
            tokens = tokens[(reach >= threshold).flatten().nonzero().squeeze(1)]
        corrected = scores.flatten()[tokens] + torch.mv(self.weight[tokens], latent)
        return tokens[corrected.argmax()].unsqueeze(0)
