"""Exact output distribution of scheduled speculative sampling on a tiny vocabulary, in fractions.

Legend: R requests, G draft tokens a block, V tokens. Everything is enumerated: drafts, acceptances, resampled and bonus
tokens, over several steps of several requests whose lengths a policy decides together.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

import numpy as np

Prefix = tuple[int, ...]
Distribution = tuple[Fraction, ...]
Model = Callable[[int, Prefix], Distribution]
"""(request, tokens so far) -> probabilities of the next token."""
Decide = Callable[[tuple[np.ndarray, ...]], Sequence[int]]
"""Confidence logits [R, G] of all steps so far -> lengths of the latest step."""


def overlap(target: Distribution, draft: Distribution) -> Fraction:
    """Probability that a draft token is accepted."""
    return sum((min(t, d) for t, d in zip(target, draft)), Fraction(0))


def residual(target: Distribution, draft: Distribution) -> Distribution:
    """Distribution of the token that replaces a rejected one."""
    excess = [max(t - d, Fraction(0)) for t, d in zip(target, draft)]
    return tuple(e / sum(excess) for e in excess)


def logit(probability: Fraction) -> float:
    if probability in (0, 1):
        return math.inf if probability == 1 else -math.inf
    return math.log(probability / (1 - probability))


class Enumerator:
    """Speculative sampling of ``requests`` requests against ``target`` with drafts from ``draft``."""

    def __init__(self, target: Model, draft: Model, *, requests: int, gamma: int, vocabulary: int = 2) -> None:
        self.target, self.draft = cache(target), cache(draft)
        self.requests, self.gamma, self.tokens = requests, gamma, range(vocabulary)

    def outputs(self, decide: Decide, *, steps: int, length: int) -> dict[tuple[Prefix, ...], Fraction]:
        """Joint distribution of each request's first ``length`` tokens after ``steps`` scheduled steps.

        Outputs that are still shorter are continued from the target, one token at a time.
        """
        states: dict[tuple[tuple[Prefix, ...], tuple[bytes, ...]], Fraction] = {
            (((),) * self.requests, ()): Fraction(1)
        }
        for _ in range(steps):
            following: dict[tuple[tuple[Prefix, ...], tuple[bytes, ...]], Fraction] = defaultdict(Fraction)
            for (outputs, history), chance in states.items():
                per_request = [list(self._blocks(r, outputs[r])) for r in range(self.requests)]
                for blocks in itertools.product(*per_request):
                    logits = np.array([block[2] for block in blocks])
                    seen = (*history, logits.tobytes())
                    lengths = self._decide(decide, seen)
                    drafted = chance * math.prod(block[1] for block in blocks)
                    emitted = [
                        self._emit(r, outputs[r], blocks[r][0], lengths[r]).items() for r in range(self.requests)
                    ]
                    for tokens in itertools.product(*emitted):
                        ends = tuple(outputs[r] + tokens[r][0] for r in range(self.requests))
                        following[ends, seen] += drafted * math.prod(t[1] for t in tokens)
            states = following
        result: dict[tuple[Prefix, ...], Fraction] = defaultdict(Fraction)
        for (outputs, _), chance in states.items():
            tails = [self._continue(r, outputs[r], length).items() for r in range(self.requests)]
            for ends in itertools.product(*tails):
                result[tuple(end[0] for end in ends)] += chance * math.prod(end[1] for end in ends)
        return {outputs: chance for outputs, chance in result.items() if chance}

    def wanted(self, length: int) -> dict[tuple[Prefix, ...], Fraction]:
        """The same from the target alone."""
        tails = [self._continue(r, (), length).items() for r in range(self.requests)]
        return {
            tuple(end[0] for end in ends): math.prod((end[1] for end in ends), start=Fraction(1))
            for ends in itertools.product(*tails)
        }

    def _decide(self, decide: Decide, seen: tuple[bytes, ...]) -> Sequence[int]:
        known = self.__dict__.setdefault("_decisions", {})
        if (decide, seen) not in known:
            shape = (self.requests, self.gamma)
            known[decide, seen] = list(decide(tuple(np.frombuffer(step).reshape(shape) for step in seen)))
        return known[decide, seen]

    def _blocks(self, r: int, prefix: Prefix) -> list[tuple[Prefix, Fraction, tuple[float, ...]]]:
        """Drafts with their probability and the confidence logits of their slots (which see earlier tokens only)."""
        found = []
        for block in itertools.product(self.tokens, repeat=self.gamma):
            chance, logits = Fraction(1), []
            for k, token in enumerate(block):
                here = prefix + block[:k]
                logits.append(logit(overlap(self.target(r, here), self.draft(r, here))))
                chance *= self.draft(r, here)[token]
            if chance:
                found.append((block, chance, tuple(logits)))
        return found

    def _emit(self, r: int, prefix: Prefix, block: Prefix, length: int) -> dict[Prefix, Fraction]:
        """Tokens that a round commits when ``length`` draft tokens are verified, with their probabilities."""
        result: dict[Prefix, Fraction] = defaultdict(Fraction)
        alive = Fraction(1)
        for k in range(length):
            here = prefix + block[:k]
            target, draft = self.target(r, here), self.draft(r, here)
            accept = min(Fraction(1), target[block[k]] / draft[block[k]])
            if accept < 1:
                for token, chance in enumerate(residual(target, draft)):
                    if chance:
                        result[(*block[:k], token)] += alive * (1 - accept) * chance
            alive *= accept
        for token, chance in enumerate(self.target(r, prefix + block[:length])):
            if alive * chance:
                result[(*block[:length], token)] += alive * chance
        return result

    def _continue(self, r: int, prefix: Prefix, length: int) -> dict[Prefix, Fraction]:
        result = {prefix[:length]: Fraction(1)}
        for _ in range(length - len(prefix)):
            result = {
                (*tokens, token): chance * p
                for tokens, chance in result.items()
                for token, p in enumerate(self.target(r, tokens))
                if p
            }
        return result
