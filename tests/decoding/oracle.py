"""A drafter that proposes a script instead of its own guesses: perfect, hopeless or anything between."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelopt_spec.drafter.cache import ContextCache
from modelopt_spec.drafter.dense import DenseDrafter


class _NamedRows(ContextCache):
    """A context cache that remembers which rows it still holds."""

    def __init__(self, num_layers: int, batch_size: int, device: torch.device) -> None:
        super().__init__(num_layers, batch_size, device)
        self.rows = list(range(batch_size))

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.rows = [self.rows[row] for row in rows.tolist()]


class ScriptedDrafter(DenseDrafter):
    """Runs the whole draft pass, then replaces the base logits by near-certainty of the scripted tokens."""

    script: list[list[int]]
    """Tokens of each row by position."""
    extended: list[list[int]]
    """Positions of each row whose features were given to the drafter, in order."""

    def new_cache(self, batch_size: int) -> ContextCache:
        self.extended = [[] for _ in range(batch_size)]
        return _NamedRows(len(self.layers), batch_size, self.device)

    def extend(self, cache: ContextCache, taps: Tensor, counts: Tensor | None = None) -> None:
        before = cache.lengths.tolist()
        super().extend(cache, taps, counts)
        for row, start, end in zip(cache.rows, before, cache.lengths.tolist(), strict=True):
            self.extended[row] += range(start, end)

    def decode(self, cache: ContextCache, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        self._at = list(zip(cache.rows, cache.lengths.tolist(), strict=True))
        for (row, position), token in zip(self._at, input_ids[:, 0].tolist(), strict=True):
            assert len(self.script[row]) <= position or self.truth[row][position] == token
        return super().decode(cache, input_ids)

    def base_logits(self, hidden: Tensor) -> Tensor:
        logits = super().base_logits(hidden) * 0
        for index, (row, position) in enumerate(self._at):
            for slot in range(hidden.shape[1]):
                at = position + 1 + slot
                token = self.script[row][at] if at < len(self.script[row]) else 0
                logits[index, slot, token] = 1e5
        return logits


def propose(model: nn.Module, truth: list[list[int]], wrong_share: float = 0.0, seed: int = 0) -> ScriptedDrafter:
    """Make a model's drafter propose ``truth`` [rows][position], a share of it replaced by other tokens."""
    generator = torch.Generator().manual_seed(seed)
    vocab = model.config.get_text_config().vocab_size

    def spoil(token: int) -> int:
        if float(torch.rand(1, generator=generator)) >= wrong_share:
            return token
        return (token + 1 + int(torch.randint(vocab - 1, (1,), generator=generator))) % vocab

    drafter = model.drafter
    drafter.__class__ = ScriptedDrafter
    drafter.truth = truth
    drafter.script = [[spoil(token) for token in row] for row in truth]
    return drafter
