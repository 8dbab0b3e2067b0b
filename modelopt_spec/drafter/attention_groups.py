"""Cuts a block attention plan into the rectangles of work that its mask asks for.

Blocks that are neighbours in the order of their anchors see nearly the same context. A *group* is a run of them that
shares one tile of scores, [slots of the group, context columns ``lo..hi`` + the K slots of the own block]. Inside of a
group *strips* are the rectangles (blocks x columns) that are multiplied, *holes* the ones that no strip covers, and
*edges* add -inf to the cells of strips that a block does not see.

Costs are counted in cells (one slot x one context column). The constants are measured on one AVX-512 core with 4 kv
heads of 64: a cell takes its seven products (two forward, four backward, one recomputed) of head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_spec.drafter.attention_plan import BlockAttentionPlan

__all__ = ["Edge", "Group", "Rectangle", "group_blocks"]

GROUP_CALLS = 1200.0
"""Cells that the fixed calls of a group cost at a kv width of 256 (about 120 us)."""
STRIP_CALLS = 3000.0
"""Cells that the calls of one more strip cost at a kv width of 256."""
COLUMN = 6.0
"""Cells that a column of a tile costs on top of its own ones: packing the keys for a product."""
ELEMENTWISE = 0.11
"""Part of a cell's time that is not products, and so is spent on holes too."""
TILE_ROWS = 256
"""Slots times query heads per kv head of a group, at most (a single block may have more)."""
TILE_CELLS = 1 << 19
"""Elements of a tile, all kv heads together, at most (a single block may have more)."""
ALIGN = 16
"""Tiles and strips begin and end at multiples of a cache line of float32: products run about 10% faster there."""

Span = tuple[int, int]
"""Context positions lo..hi, hi exclusive."""
Area = tuple[int, int, int, int]
"""Blocks first..last of a group times context positions lo..hi; ends exclusive."""
EMPTY: Span = (0, 0)


@dataclass(frozen=True)
class Rectangle:
    """Part of a tile: the rows of some of its blocks times some of its context columns."""

    rows: slice
    """Rows of the tile."""
    columns: slice
    """Columns of the tile."""
    context: slice
    """The same columns as context positions of the row."""


@dataclass(frozen=True)
class Edge:
    """-inf for what is hidden in some context columns of a tile."""

    columns: slice
    bias: Tensor
    """[G, K or 1, 1, columns] float32, 0 or -inf."""


@dataclass(frozen=True)
class Group:
    """A run of blocks (in ascending order of anchors) that share a tile."""

    blocks: slice
    """The blocks of the row."""
    rows: slice
    """Their rows (block, slot, query head of a kv head), counted over the whole row of the batch."""
    size: int
    """G."""
    width: int
    """Context columns of the tile, C."""
    strips: tuple[Rectangle, ...]
    holes: tuple[Rectangle, ...]
    edges: tuple[Edge, ...]


def group_blocks(
    plan: BlockAttentionPlan, heads_per_kv: int, num_kv_heads: int, head_dim: int
) -> tuple[tuple[Group, ...], ...]:
    """Groups of each row of the batch, made once per plan and head geometry. Padding blocks are in none."""
    key = ("groups", heads_per_kv, num_kv_heads, head_dim)
    if key not in plan.cache:
        plan.cache[key] = _Grouping(plan, heads_per_kv, num_kv_heads, head_dim).rows()
    return plan.cache[key]


class _Grouping:
    def __init__(self, plan: BlockAttentionPlan, heads_per_kv: int, num_kv_heads: int, head_dim: int) -> None:
        self.rows_per_block = plan.block_size * heads_per_kv
        self.num_kv_heads = num_kv_heads
        calls = 256 / (num_kv_heads * head_dim)
        self.group_calls = GROUP_CALLS * calls
        self.strip_calls = STRIP_CALLS * calls / self.rows_per_block
        self.block_size = plan.block_size
        self.first = plan.sort(plan.first_visible())
        self.stop = plan.sort(plan.anchors)
        self.kept: list[int] = plan.keep.sum(1).tolist()
        seeing = self.first[..., 0] < self.stop
        lows = self.first[..., 0] // ALIGN * ALIGN
        highs = (-(-self.stop // ALIGN) * ALIGN).clamp(max=plan.seq_len)
        spans = torch.stack([lows, highs], -1) * seeing.unsqueeze(-1)
        self.spans: list[list[Span]] = [[(lo, hi) for lo, hi in row] for row in spans.tolist()]

    def rows(self) -> tuple[tuple[Group, ...], ...]:
        return tuple(self._row(row) for row in range(len(self.kept)))

    def _row(self, row: int) -> tuple[Group, ...]:
        """Greedy: a block joins the group before it while that is cheaper than starting a group with it."""
        size, groups, first, span = self.rows_per_block, [], 0, EMPTY
        for block in range(self.kept[row]):
            own = self.spans[row][block]
            joint = _union(span, own)
            rows = (block - first) * size
            if block > first:
                joined = self._cost(rows + size, joint) - self._cost(rows, span)
                cells = self.num_kv_heads * (rows + size) * (joint[1] - joint[0] + self.block_size)
                full = rows + size > TILE_ROWS or cells > TILE_CELLS
                if full or joined > self._cost(size, own) + self.group_calls:
                    groups.append(self._group(row, first, block, span))
                    first, joint = block, own
            span = joint
        if self.kept[row]:
            groups.append(self._group(row, first, self.kept[row], span))
        return tuple(groups)

    def _cost(self, rows: int, span: Span) -> float:
        return (span[1] - span[0]) * (COLUMN + ELEMENTWISE * rows)

    def _group(self, row: int, first: int, last: int, span: Span) -> Group:
        lo, hi = span
        strips = self._split(self.spans[row][first:last], lo, hi)
        holes = [(0, last - first, low, high) for low, high in _gaps(strips, lo, hi)]
        for a, b, low, high in strips:
            holes += [(c, d, low, high) for c, d in ((0, a), (b, last - first)) if c < d]
        return Group(
            blocks=slice(first, last),
            rows=self._rows(first, last),
            size=last - first,
            width=hi - lo,
            strips=tuple(self._rectangle(area, lo) for area in strips),
            holes=tuple(self._rectangle(area, lo) for area in holes),
            edges=self._edges(row, first, last, lo, hi),
        )

    def _rows(self, first: int, last: int) -> slice:
        return slice(first * self.rows_per_block, last * self.rows_per_block)

    def _rectangle(self, area: Area, origin: int) -> Rectangle:
        first, last, lo, hi = area
        return Rectangle(self._rows(first, last), slice(lo - origin, hi - origin), slice(lo, hi))

    def _split(self, spans: list[Span], lo: int, hi: int) -> list[Area]:
        """Cut the columns ``lo..hi`` where a block's context ends as long as the cells saved outweigh the calls."""
        whole = _cover(spans, lo, hi)
        if whole is None:
            return []
        area = _size(whole)
        needed = sum(max(0, min(high, hi) - max(low, lo)) for low, high in spans)
        if area - needed <= self.strip_calls:
            return [whole]
        cuts = {end for span in spans for end in span if lo < end < hi}
        sizes = {at: _size(_cover(spans, lo, at)) + _size(_cover(spans, at, hi)) for at in cuts}
        best = min(sizes, key=lambda at: (sizes[at], at), default=None)
        if best is None or area - sizes[best] <= self.strip_calls:
            return [whole]
        return self._split(spans, lo, best) + self._split(spans, best, hi)

    def _edges(self, row: int, first: int, last: int, lo: int, hi: int) -> tuple[Edge, ...]:
        """The columns that some slot of the group does not see, at the left and at the right of the tile."""
        starts, stops = self.first[row, first:last].unsqueeze(-1), self.stop[row, first:last].view(-1, 1, 1)
        left = min(max(int(starts.max()), lo), hi)
        right = min(max(int(stops.min()), lo), hi)
        edges = []
        for low, high in [(lo, hi)] if left > right else [(lo, left), (right, hi)]:
            if low == high:
                continue
            column = torch.arange(low, high, device=starts.device)
            hidden = (column < starts) | (column >= stops)
            if bool((hidden == hidden[:, :1]).all()):
                hidden = hidden[:, :1]
            bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
            edges.append(Edge(slice(low - lo, high - lo), bias.unsqueeze(2)))
        return tuple(edges)


def _union(a: Span, b: Span) -> Span:
    if EMPTY in (a, b):
        return b if a == EMPTY else a
    return min(a[0], b[0]), max(a[1], b[1])


def _cover(spans: list[Span], lo: int, hi: int) -> Area | None:
    """The smallest run of blocks that holds everyone who sees something of ``lo..hi``."""
    seeing = [i for i, (low, high) in enumerate(spans) if low < hi and high > lo]
    return (seeing[0], seeing[-1] + 1, lo, hi) if seeing else None


def _size(area: Area | None) -> int:
    return (area[1] - area[0]) * (area[3] - area[2]) if area else 0


def _gaps(strips: list[Area], lo: int, hi: int) -> list[Span]:
    """Columns of ``lo..hi`` in no strip; strips ascend and do not overlap."""
    ends = [lo, *(end for strip in strips for end in strip[2:]), hi]
    return [(a, b) for a, b in zip(ends[::2], ends[1::2]) if a < b]
