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
    """Draws tokens and acceptances for rows by index; subclasses may script them.

    A row only uses up numbers for what it decides itself, never for padding that its batch needs.
    """

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

    def uniform(self, rows: Sequence[int], counts: Sequence[int], width: int) -> Tensor:
        """[R, width] float64 on the CPU: counts[r] numbers in [0, 1), then ones."""
        numbers = np.ones((len(rows), width))
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            numbers[index, :count] = self._streams[row].random(count)
        return torch.from_numpy(numbers)

    def categorical(self, probabilities: Tensor, rows: Sequence[int], active: Sequence[bool] | None = None) -> Tensor:
        """One token a row, drawn from [R, V] weights: [R]. Tokens of weight 0 are never drawn.

        Rows that are not ``active`` draw nothing; their entry is some token.
        """
        cumulative = probabilities.double().cumsum(-1)
        total = cumulative[:, -1:]
        counts = [1] * len(rows) if active is None else [int(flag) for flag in active]
        point = self.uniform(rows, counts, 1).to(total.device) * total
        drawn = torch.searchsorted(cumulative, point, right=True).squeeze(1)
        last = (cumulative < total).sum(-1)
        return torch.minimum(drawn, last)

    def accept(self, probability: Tensor, rows: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Independent bool [R, n]: true with probability [R, n] in a row's first counts[r] entries, else false."""
        width = probability.shape[1]
        return self.uniform(rows, counts, width).to(probability.device) < probability
