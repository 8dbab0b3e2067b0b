"""argmax over the vocabulary of ``base_v + W_v . u`` that reads only the rows of W that can win.

By Cauchy and Schwarz a correction cannot exceed ``|W_v| |u|``, so a token whose base logit plus that bound stays below
what another token surely reaches cannot be the argmax. One pass over the V base logits replaces one over the V x R
matrix for each slot of a block; the result is the exact argmax whatever the weights are.

It is for one row on a CPU, where reading W dominates; on accelerators the dense product is faster.

Legend: V vocabulary, R head rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelopt_spec.targets.base import is_plain_linear

__all__ = ["PrunedArgmax"]


class PrunedArgmax:
    """The row norms of one W_out, and the search that uses them."""

    DENSE_SHARE = 8
    """Multiply the whole matrix when more than V / 8 tokens remain."""
    ROUNDING = 1e-4
    """Relative slack, so that rounding cannot make a bound too tight."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()
        self.norms = self.weight.float().norm(dim=1)

    @staticmethod
    def pays(out: nn.Module, batch_size: int) -> bool:
        """Whether the search is faster than calling the module: one row on a CPU, a plain and large matrix."""
        if not (batch_size == 1 and is_plain_linear(out)):
            return False
        weight = out.weight
        return isinstance(weight, Tensor) and weight.device.type == "cpu" and weight.numel() >= 2**19

    def __call__(self, base: Tensor, latent: Tensor) -> Tensor:
        """Base [1, V], latent [1, R] -> [1] index of the largest ``base + W u``."""
        scores, u = base[0].float(), latent[0]
        leader = scores.argmax()
        surely = scores[leader] + torch.dot(self.weight[leader].float(), u.float())
        reach = torch.addcmul(scores, self.norms, u.float().norm())
        slack = self.ROUNDING * (1 + surely.abs())
        candidates = (reach >= surely - slack).nonzero().squeeze(1)
        if len(candidates) * self.DENSE_SHARE > len(scores):
            return (scores + torch.mv(self.weight, u).float()).argmax().unsqueeze(0)
        corrected = scores[candidates] + torch.mv(self.weight[candidates], u).float()
        return candidates[corrected.argmax()].unsqueeze(0)
