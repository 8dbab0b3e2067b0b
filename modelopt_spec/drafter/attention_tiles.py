"""The score tile of a group of blocks: what is gathered into it, multiplied with it and scattered from it.

Legend: B batch, S sequence, N anchors, K slots, H query heads, Hkv key/value heads, d head dimension;
G blocks of a group, R = G * K * (H / Hkv) rows of its tile, C its context columns.

A tile [Hkv, R, C + K] holds the scores of a group against the context columns that it may see and against the own block
of each row. The query heads that share a kv head are rows (ordered block, slot, head), so keys and values are never
repeated. Attention needs three products with such a tile, forward and backward:

    tile = rows @ keys^T        (scores: q, k;   gradient of the weights: do, v)
    rows = tile @ values        (output: v;      gradient of the queries: k)
    keys += tile^T @ rows       (gradient of the values: do;  of the keys: q)
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_spec.drafter.attention_groups import ALIGN, Group, group_blocks
from modelopt_spec.drafter.attention_plan import BlockAttentionPlan

__all__ = ["Tiles"]


class Tiles:
    """Head geometry of one call and the products of its tiles. Half precision is computed in float32."""

    def __init__(self, q: Tensor, k_ctx: Tensor, plan: BlockAttentionPlan) -> None:
        self.slots, self.heads, self.head_dim = q.shape[2:]
        self.kv_heads = k_ctx.shape[2]
        self.repeat = self.heads // self.kv_heads
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.device = q.device
        self.groups = group_blocks(plan, self.repeat, self.kv_heads, self.head_dim)
        self.visible_slots = plan.slots_visible()

    # ---- sizes -------------------------------------------------------------------------------------------------------

    def rows(self, blocks: int) -> int:
        """Rows that a number of blocks takes in each kv head."""
        return blocks * self.slots * self.repeat

    def elements(self, group: Group) -> int:
        """Elements of memory that the group's tile takes."""
        return self.kv_heads * self.rows(group.size) * self._pitch(group)

    def _pitch(self, group: Group) -> int:
        """Elements from row to row: aligned, but no multiple of 2 KiB, where rows would share cache sets."""
        pitch = -(-(group.width + self.slots) // ALIGN) * ALIGN
        return pitch + ALIGN if pitch % 512 == 0 else pitch

    def scratch(self, skip: int = 0) -> Tensor:
        """Memory that the tiles of all groups, but for the first ``skip``, can share one after the other."""
        sizes = [self.elements(group) for groups in self.groups for group in groups]
        return torch.empty(max(sizes[skip:], default=0), dtype=self.dtype, device=self.device)

    def tile(self, group: Group, memory: Tensor) -> Tensor:
        """[Hkv, R, C + K] at the beginning of ``memory``, its rows aligned, not initialised."""
        padded = memory[: self.elements(group)].view(self.kv_heads, self.rows(group.size), self._pitch(group))
        return padded[..., : group.width + self.slots]

    # ---- gather and scatter ------------------------------------------------------------------------------------------

    def gather(self, x: Tensor, row: int, group: Group) -> Tensor:
        """Rows of a tile from [B, N, K, H, d]: [Hkv, R, d], always a copy."""
        part = x[row, group.blocks].view(-1, self.kv_heads, self.repeat, self.head_dim)
        rows = torch.empty(self.kv_heads, part.shape[0], *part.shape[2:], dtype=self.dtype, device=self.device)
        return rows.copy_(part.transpose(0, 1)).view(self.kv_heads, -1, self.head_dim)

    def scatter(self, rows: Tensor, x: Tensor, row: int, group: Group) -> None:
        """Inverse of :meth:`gather`: write [Hkv, R, d] into its place in [B, N, K, H, d]."""
        part = x[row, group.blocks].view(-1, self.kv_heads, self.repeat, self.head_dim)
        part.copy_(rows.view(self.kv_heads, -1, self.repeat, self.head_dim).transpose(0, 1))

    def row_dots(self, x: Tensor, y: Tensor, row: int, group: Group) -> Tensor:
        """Dot products of the rows of two tensors [B, N, K, H, d], ordered as in a tile: [Hkv, R, 1], a copy."""
        dots = (x[row, group.blocks].to(self.dtype) * y[row, group.blocks]).sum(-1)
        return dots.view(-1, self.kv_heads, self.repeat).transpose(0, 1).reshape(self.kv_heads, -1, 1)

    def gather_slots(self, x: Tensor, row: int, group: Group) -> Tensor:
        """Keys or values of the group's own blocks from [B, N, K, Hkv, d]: [Hkv * G, K, d], contiguous."""
        part = x[row, group.blocks].permute(2, 0, 1, 3).to(self.dtype)
        return part.reshape(-1, self.slots, self.head_dim)

    def scatter_slots(self, keys: Tensor, x: Tensor, row: int, group: Group) -> None:
        """Inverse of :meth:`gather_slots`."""
        part = keys.view(self.kv_heads, -1, self.slots, self.head_dim)
        x[row, group.blocks].copy_(part.permute(1, 2, 0, 3))

    def context(self, x: Tensor, row: int) -> Tensor:
        """Context keys or values of a row from [B, S, Hkv, d]: [Hkv, S, d]."""
        return x[row].transpose(0, 1).to(self.dtype)

    def sink_rows(self, sinks: Tensor | None, factor: float) -> Tensor | None:
        """The sink logit of each row of the largest tile, times ``factor``: [H] -> [Hkv, R, 1]; None without sinks."""
        if sinks is None:
            return None
        largest = max((group.size for groups in self.groups for group in groups), default=0)
        per_slot = (sinks.to(self.dtype) * factor).view(self.kv_heads, 1, self.repeat)
        return per_slot.expand(-1, largest * self.slots, -1).reshape(self.kv_heads, -1, 1)

    # ---- products ----------------------------------------------------------------------------------------------------

    def write_scores(self, tile: Tensor, rows: Tensor, context: Tensor, slots: Tensor, group: Group) -> None:
        """``tile = rows @ keys^T`` on the strips and the own blocks; holes stay as they are.

        rows [Hkv, R, d], context [Hkv, S, d], slots [Hkv * G, K, d].
        """
        for strip in group.strips:
            torch.bmm(
                rows[:, strip.rows],
                context[:, strip.context].transpose(1, 2),
                out=tile[:, strip.rows, strip.columns],
            )
        # transposed, since small products with a transposed right side are several times slower
        own = torch.bmm(slots, self._by_block(rows).transpose(1, 2))
        self._own(tile, group).copy_(own.transpose(1, 2))

    def mix(self, tile: Tensor, context: Tensor, slots: Tensor, group: Group) -> Tensor:
        """``tile @ values``: [Hkv, R, d]."""
        rows = torch.bmm(self._own(tile, group), slots).view(self.kv_heads, -1, self.head_dim)
        for strip in group.strips:
            part = rows[:, strip.rows]
            torch.baddbmm(part, tile[:, strip.rows, strip.columns], context[:, strip.context], out=part)
        return rows

    def add_to_keys(self, tile: Tensor, rows: Tensor, context: Tensor, group: Group) -> Tensor:
        """``tile^T @ rows``: added to context [Hkv, S, d], and returned for the own blocks [Hkv * G, K, d]."""
        for strip in group.strips:
            part = context[:, strip.context]
            cells = tile[:, strip.rows, strip.columns].transpose(1, 2)
            torch.baddbmm(part, cells, rows[:, strip.rows], out=part)
        return torch.bmm(self._own(tile, group).transpose(1, 2), self._by_block(rows))

    def fill_holes(self, tile: Tensor, group: Group, value: float) -> None:
        """Give the cells that no product writes a value."""
        for hole in group.holes:
            tile[:, hole.rows, hole.columns].fill_(value)

    def hide(self, tile: Tensor, group: Group) -> None:
        """Set the scores of everything that a row does not see to -inf."""
        self.fill_holes(tile, group, float("-inf"))
        view = tile.view(self.kv_heads, group.size, self.slots, self.repeat, -1)
        for edge in group.edges:
            view[..., edge.columns] += edge.bias
        if self.visible_slots is not None:
            view[..., group.width :].masked_fill_(~self.visible_slots.unsqueeze(1), float("-inf"))

    def _by_block(self, rows: Tensor) -> Tensor:
        return rows.view(-1, self.slots * self.repeat, self.head_dim)

    def _own(self, tile: Tensor, group: Group) -> Tensor:
        return tile.view(-1, self.slots * self.repeat, tile.shape[-1])[..., group.width :]
