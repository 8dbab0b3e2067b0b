"""From logits to the distribution that tokens are drawn from: one function for the target and the draft alike.

The order and the rules at the edges are those of transformers: temperature, then top-k (ties at the k-th logit stay),
then top-p (the smallest set whose probability exceeds p, one token at least).

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_spec.arguments import number, whole_number
from modelopt_spec.errors import ConfigError

__all__ = ["GREEDY", "Sampling", "probabilities"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most probable tokens up to this probability; 1 keeps all."""

    def __post_init__(self) -> None:
        number("temperature", self.temperature, 0, wanted="0 (greedy) or a positive number")
        whole_number("top_k", self.top_k, 0, note=": the tokens to keep; 0 is off")
        number("top_p", self.top_p, 0, 1, above=True, wanted="a number in (0, 1]; 1 is off")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken always."""
        return self.temperature == 0


GREEDY = Sampling()


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The processed distribution [..., V] of logits [..., V], in float32 (float64 stays).

    Logits of -inf mark tokens that cannot be drawn. Greedy sampling has no distribution here: take the argmax.
    """
    if sampling.greedy:
        raise ConfigError("temperature is 0: greedy decoding takes the argmax and has no distribution")
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature != 1:
        scores = scores / sampling.temperature
    size = scores.shape[-1]
    top_k = min(sampling.top_k or size, size)
    if top_k < size:
        best, ids = scores.topk(top_k, dim=-1)
        if sampling.top_p < 1 and not _tied(scores, best[..., -1:], top_k):
            kept = _within_top_p(best.flip(-1), sampling.top_p).flip(-1)
            weights = best.masked_fill(~kept, -math.inf).softmax(-1)
            return torch.zeros_like(scores).scatter_(-1, ids, weights)
        scores = scores.masked_fill(scores < best[..., -1:], -math.inf)
    if sampling.top_p < 1:
        ascending, order = scores.sort(dim=-1)
        kept = torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, _within_top_p(ascending, sampling.top_p))
        scores = scores.masked_fill(~kept, -math.inf)
    return scores.softmax(-1)


def _tied(scores: Tensor, smallest: Tensor, top_k: int) -> bool:
    """Whether more than k tokens reach the k-th largest score, so that all of them stay."""
    return bool(((scores >= smallest).sum(-1) > top_k).any())


def _within_top_p(ascending: Tensor, top_p: float) -> Tensor:
    """Which of the ascending scores [..., n] belong to the nucleus: all but the tail of probability 1 - p."""
    kept = ascending.softmax(-1).cumsum(-1) > 1 - top_p
    kept[..., -1] = True
    return kept
