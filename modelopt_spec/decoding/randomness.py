"""Where chance comes from while decoding: one seeded stream for each row, so that a row's output does not depend on
which other rows share its batch.

Legend: R rows, K slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from modelopt_spec.errors import ConfigError

__all__ = ["RowRandom"]


class RowRandom:
    """Draws tokens and acceptances for rows by index; subclasses may script them."""

    def __init__(self, batch_size: int, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        """Args: seed: of all rows; without one, torch's global generator (or ``generator``) gives it."""
        if seed is not None and generator is not None:
            raise ConfigError(f"seed {seed} and generator are both given: pass one of them")
        if seed is None:
            device = "cpu" if generator is None else generator.device
            seed = int(torch.randint(2**62, (1,), generator=generator, device=device))
        if seed < 0:
            raise ConfigError(f"seed is {seed}: it must not be negative")
        self._streams = [np.random.default_rng([seed, row]) for row in range(batch_size)]

    def uniform(self, rows: Sequence[int], count: int) -> Tensor:
        """[R, count] numbers in [0, 1), float64, on the CPU."""
        return torch.from_numpy(np.stack([self._streams[row].random(count) for row in rows]))

    def categorical(self, probabilities: Tensor, rows: Sequence[int]) -> Tensor:
        """One token a row, drawn from [R, V] weights: [R]. Tokens of weight 0 are never drawn."""
        cumulative = probabilities.double().cumsum(-1)
        total = cumulative[:, -1:]
        point = self.uniform(rows, 1).to(total.device) * total
        drawn = torch.searchsorted(cumulative, point, right=True).squeeze(1)
        last = (cumulative < total).sum(-1)
        return torch.minimum(drawn, last)

    def accept(self, probability: Tensor, rows: Sequence[int]) -> Tensor:
        """Independent bool [R, K], each true with its probability [R, K]."""
        return self.uniform(rows, probability.shape[1]).to(probability.device) < probability
