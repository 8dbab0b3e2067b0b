"""The target while it decodes: prefill, verify n tokens a row in one pass, keep what was accepted.

Two caches stand behind it. :class:`RowSession` keeps plain keys and values by row and takes any batch. Everything else
that transformers caches (compressed, chunked or recurrent states) goes through :class:`ReplaySession`, one row at a
time, which returns to a copy of the cache when tokens were rejected and feeds the kept ones again with the next pass.

Legend: B rows, S prompt length, n tokens to verify a row, D hidden, T taps, V vocabulary.
"""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from modelopt_spec.decoding.row_cache import RowCache, attention_implementation, cacheable_layers, layer_windows
from modelopt_spec.errors import UnsupportedError
from modelopt_spec.targets.hf import HFTarget, text_config

__all__ = ["Pass", "ReplaySession", "RowSession", "TargetSession", "open_session"]


@dataclass(frozen=True)
class Pass:
    """What one target pass gave."""

    hidden: Tensor
    """[B, n, D] after the final norm."""
    taps: Tensor
    """[B, n, T*D] outputs of the tapped layers."""


class TargetSession(ABC):
    """A target with the cache of one batch. The taps' hooks must be registered: see ``HFTarget.tapped``."""

    def __init__(self, target: HFTarget, layer_ids: Sequence[int], taps: dict[int, Tensor]) -> None:
        self._target = target
        self._layer_ids = tuple(layer_ids)
        self._taps = taps

    def _run(self, ids: Tensor, cache: Any, positions: Tensor, mask: Any) -> Pass:
        output = self._target.decoder(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        return Pass(output.last_hidden_state, self._target.join(self._taps, self._layer_ids))

    @abstractmethod
    def prefill(self, ids: Tensor, lengths: list[int]) -> Pass:
        """Run right-padded prompts [B, S]; row b keeps its first lengths[b] positions."""

    @abstractmethod
    def verify(self, ids: Tensor) -> Pass:
        """Run n tokens [B, n] behind what is kept. :meth:`keep` must follow."""

    @abstractmethod
    def keep(self, counts: Tensor, host_counts: list[int]) -> None:
        """Row b keeps the first counts[b] >= 1 tokens of the pass; ``host_counts`` are the same numbers."""

    @abstractmethod
    def select(self, rows: list[int]) -> None:
        """Keep these rows only, in this order."""


class RowSession(TargetSession):
    """Plain keys and values in a :class:`RowCache`."""

    def __init__(self, target: HFTarget, layer_ids: Sequence[int], taps: dict[int, Tensor], batch_size: int) -> None:
        super().__init__(target, layer_ids, taps)
        model: Any = target.model
        self._additive = attention_implementation(model) == "eager"
        self._dtype: torch.dtype = model.dtype
        self.cache = RowCache(text_config(target.model), batch_size, target.device)

    def prefill(self, ids: Tensor, lengths: list[int]) -> Pass:
        """Causal attention hides the padding behind a prompt, so the model's own masks serve."""
        result = self._run(ids, self.cache, self.cache.positions(ids.shape[1]), None)
        self.cache.advance(torch.tensor(lengths, device=ids.device), lengths)
        return result

    def verify(self, ids: Tensor) -> Pass:
        """One pass for all rows; a batch brings its own masks."""
        count, mask = ids.shape[1], None
        if ids.shape[0] > 1:
            mask = self.cache.masks(count, additive=self._additive, dtype=self._dtype)
        return self._run(ids, self.cache, self.cache.positions(count), mask)

    def keep(self, counts: Tensor, host_counts: list[int]) -> None:
        """Count the kept tokens; the others are written over."""
        self.cache.advance(counts, host_counts)

    def select(self, rows: list[int]) -> None:
        """Copy the remaining rows together."""
        self.cache.select(rows)


class ReplaySession(TargetSession):
    """Any cache of transformers, for one row.

    A cache that cannot be cut back is copied before each pass and put back if a token was rejected; the kept tokens are
    fed again in front of the next ones. When more than ``MAX_REPLAY`` wait, a pass of their own settles them.
    """

    MAX_REPLAY = 32

    def __init__(self, target: HFTarget, layer_ids: Sequence[int], taps: dict[int, Tensor]) -> None:
        super().__init__(target, layer_ids, taps)
        self._cache: Any = DynamicCache(config=text_config(target.model))
        self._before: Any = None
        self._length = 0
        self._replay: list[Tensor] = []
        self._ids: Tensor | None = None

    def _advance(self, ids: Tensor) -> Pass:
        positions = torch.arange(self._length, self._length + ids.shape[1], device=ids.device).unsqueeze(0)
        result = self._run(ids, self._cache, positions, None)
        self._length += ids.shape[1]
        return result

    def prefill(self, ids: Tensor, lengths: list[int]) -> Pass:
        """One prompt, without padding."""
        return self._advance(ids)

    def verify(self, ids: Tensor) -> Pass:
        """Feed what waits and the new tokens; the result is of the new ones only."""
        waiting = sum(part.shape[1] for part in self._replay)
        if waiting > self.MAX_REPLAY:
            self._advance(torch.cat(self._replay, dim=1))
            self._replay, waiting = [], 0
        self._before = copy.deepcopy(self._cache)
        self._ids = ids
        result = self._advance(torch.cat([*self._replay, ids], dim=1))
        return Pass(result.hidden[:, waiting:], result.taps[:, waiting:])

    def keep(self, counts: Tensor, host_counts: list[int]) -> None:
        """Stay when every token is kept, else go back and remember what is to be fed again."""
        assert self._ids is not None
        kept, fed = host_counts[0], self._ids.shape[1]
        if kept == fed:
            self._replay = []
        else:
            self._cache = self._before
            self._length -= fed + sum(part.shape[1] for part in self._replay)
            self._replay.append(self._ids[:, :kept])
        self._before = None

    def select(self, rows: list[int]) -> None:
        """One row stays or goes as a whole."""


def open_session(target: HFTarget, layer_ids: Sequence[int], taps: dict[int, Tensor], batch_size: int) -> TargetSession:
    """The session that serves a target's kind of cache.

    Raises:
        UnsupportedError: more than one row for a target whose states cannot be kept by row.
    """
    model = target.model
    plain = cacheable_layers(text_config(model))
    if batch_size == 1:
        return RowSession(target, layer_ids, taps, 1) if plain else ReplaySession(target, layer_ids, taps)
    hint = "call generate with one prompt at a time (evaluate does so with batch_size 1)"
    if not plain:
        raise UnsupportedError(
            f"{type(model).__name__} keeps states that rows of different lengths cannot share (batch of {batch_size}): "
            f"{hint}"
        )
    implementation = attention_implementation(model)
    if implementation not in ("sdpa", "eager"):
        raise UnsupportedError(
            f"attn_implementation {implementation!r} takes no mask for each row (batch of "
            f"{batch_size}): load the target with attn_implementation='sdpa', or {hint}"
        )
    if not _takes_row_masks(target, layer_ids, taps):
        raise UnsupportedError(
            f"{type(model).__name__} gives other hidden states in a batch with masks of our own than row by row, so a "
            f"batch of {batch_size} would not be lossless: {hint}"
        )
    return RowSession(target, layer_ids, taps, batch_size)


_PROVEN: weakref.WeakKeyDictionary[nn.Module, dict[str, bool]] = weakref.WeakKeyDictionary()


def _takes_row_masks(target: HFTarget, layer_ids: Sequence[int], taps: dict[int, Tensor]) -> bool:
    """Compare two rows of different lengths, decoded together, with each row alone; once for a model."""
    known = _PROVEN.setdefault(target.model, {})
    implementation = attention_implementation(target.model)
    if implementation not in known:
        known[implementation] = _compare_rows(target, layer_ids, taps)
    return known[implementation]


def _compare_rows(target: HFTarget, layer_ids: Sequence[int], taps: dict[int, Tensor]) -> bool:
    windows = [window for window in layer_windows(text_config(target.model)) if window is not None]
    long = min(windows, default=3) + 1 if min(windows, default=3) <= 64 else 4
    ids = (torch.arange(2 * (long + 2), device=target.device) % target.shape.vocab_size).view(2, -1)
    prompts, after = ids[:, :long], ids[:, long:]
    lengths = [long, max(1, long // 2)]
    together = RowSession(target, layer_ids, taps, 2)
    together.prefill(prompts, lengths)
    try:
        got = together.verify(after).hidden.float()
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError):
        return False
    tolerance = 0.02 if target.model.dtype in (torch.bfloat16, torch.float16) else 1e-3
    for row, length in enumerate(lengths):
        alone = RowSession(target, layer_ids, taps, 1)
        alone.prefill(prompts[row : row + 1, :length], [length])
        want = alone.verify(after[row : row + 1]).hidden[0].float()
        if not (got[row] - want).abs().max() <= tolerance * want.abs().max():
            return False
    return True
