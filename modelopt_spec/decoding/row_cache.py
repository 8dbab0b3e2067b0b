"""A key-value cache of the target whose rows have lengths of their own and can be cut back.

Row b keeps its positions 0 .. lengths[b]-1 in columns 0 .. lengths[b]-1: column and position are the same number, in
layers with a sliding window too. Rejected tokens are simply not counted; the next pass writes over them. Nothing is
copied when rows accept different numbers of tokens, and windows are exact because no column ever stands for a hole.

transformers' own sliding-window layers drop states as they go and cannot be cut back; this cache keeps them and hides
them by the mask instead, as transformers does for its assisted generation.

Legend: B rows, G kv heads, C columns, n new positions, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

__all__ = ["RowCache", "attention_implementation", "cacheable_layers", "layer_windows"]

CACHEABLE = frozenset({"full_attention", "sliding_attention"})


def cacheable_layers(config: Any) -> bool:
    """Whether every layer keeps plain keys and values (no compressed, chunked, recurrent or shared states)."""
    kinds, _ = get_layer_types_and_kwargs(config)
    return set(kinds) <= CACHEABLE and len(kinds) == config.num_hidden_layers


def layer_windows(config: Any) -> list[int | None]:
    """Sliding window of each layer in tokens, the query's own included; None for full attention."""
    kinds, options = get_layer_types_and_kwargs(config)
    return [options["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]


class _RowLayer(CacheLayerMixin):
    """Keys and values [B, G, C, d] of one layer; the lengths stand in the cache that owns it."""

    supports_early_init = False

    def __init__(self, cache: RowCache, window: int | None) -> None:
        super().__init__()
        self._cache = cache
        self.window = window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: room is made by :meth:`update`."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write n new positions behind each row's length; return what the queries may see."""
        count = key_states.shape[-2]
        self.keys = self._write(self.keys, key_states)
        self.values = self._write(self.values, value_states)
        self.is_initialized = True
        visible = slice(self.first_column(), self._cache.longest + count)
        return self.keys[:, :, visible], self.values[:, :, visible]

    def _write(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        cache, count = self._cache, new.shape[-2]
        needed = cache.longest + count
        if buffer is None or buffer.shape[2] < needed:
            grown = new.new_zeros((*new.shape[:2], max(needed, cache.capacity), new.shape[-1]))
            if buffer is not None:
                grown[:, :, : cache.longest] = buffer[:, :, : cache.longest]
            buffer = grown
        if cache.shortest == cache.longest:
            buffer[:, :, cache.longest : needed] = new
        else:
            columns = cache.positions(count).unsqueeze(1)
            rows = torch.arange(new.shape[0], device=new.device).view(-1, 1, 1)
            heads = torch.arange(new.shape[1], device=new.device).view(1, -1, 1)
            buffer[rows, heads, columns] = new
        return buffer

    def first_column(self) -> int:
        """First column that any of the next queries can see."""
        return 0 if self.window is None else max(0, self._cache.shortest - self.window + 1)

    def get_seq_length(self) -> int:
        """Length of the longest row."""
        return self._cache.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that :meth:`update` returns for n queries, and the first of them."""
        first = self.first_column()
        return self._cache.longest + query_length - first, first

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def select(self, rows: Tensor) -> None:
        """Keep these rows only."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


class RowCache(Cache):
    """One layer's buffers for each decoder layer, and the rows' lengths."""

    def __init__(self, config: Any, batch_size: int, device: torch.device) -> None:
        """Args: config: the text config of the target; see :func:`cacheable_layers`."""
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.longest = self.shortest = 0
        self._host = [0] * batch_size
        self._row_layers = [_RowLayer(self, window) for window in layer_windows(config)]
        super().__init__(layers=list(self._row_layers))

    @property
    def capacity(self) -> int:
        """Columns to make room for when a buffer grows: twice the longest row, at least 256."""
        return max(256, 2 * self.longest)

    def positions(self, count: int) -> Tensor:
        """Positions [B, n] of the next n entries."""
        return self.lengths.unsqueeze(1) + torch.arange(count, device=self.lengths.device)

    def advance(self, counts: Tensor, host_counts: list[int]) -> None:
        """Keep the first ``counts[b]`` of the entries just written; ``host_counts`` are the same numbers."""
        self.lengths = self.lengths + counts
        self._host = [length + count for length, count in zip(self._host, host_counts, strict=True)]
        self.longest, self.shortest = max(self._host), min(self._host)

    def select(self, rows: list[int]) -> None:
        """Keep these rows only, in this order."""
        self._host = [self._host[row] for row in rows]
        index = torch.tensor(rows, device=self.lengths.device)
        self.lengths = self.lengths[index]
        self.longest, self.shortest = max(self._host, default=0), min(self._host, default=0)
        for layer in self._row_layers:
            layer.select(index)

    def masks(self, count: int, *, additive: bool, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Attention masks [B, 1, n, columns] for n queries a row, as the layers' :meth:`_RowLayer.update` returns keys.

        Query i of row b stands at position ``lengths[b] + i`` and sees the columns up to there, the last ``window`` of
        them in sliding layers. One tensor, or one for each kind of layer where a model has both: true where a query
        may see a key (sdpa), or ``additive`` of 0 and the dtype's lowest number (eager attention).
        """
        positions = self.positions(count).unsqueeze(-1)
        masks: dict[str, Tensor] = {}
        for layer in self._row_layers:
            kind = "full_attention" if layer.window is None else "sliding_attention"
            if kind in masks:
                continue
            first = layer.first_column()
            columns = torch.arange(first, self.longest + count, device=positions.device)
            seen = columns <= positions
            if layer.window is not None:
                seen = seen & (columns > positions - layer.window)
            if additive:
                seen = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
                    ~seen, torch.finfo(dtype).min
                )
            masks[kind] = seen.unsqueeze(1)
        return next(iter(masks.values())) if len(masks) == 1 else masks


def attention_implementation(model: nn.Module) -> str:
    """Name of the attention implementation that a model runs with."""
    return str(getattr(model.config, "_attn_implementation", None))
