"""Runs the loss chunk by chunk: matrix products around the tile maths, in buffers that every chunk reuses.

Legend: M rows, m rows of a chunk, P distinct target positions, n new ones of a chunk, D hidden, R head rank,
V vocabulary (of this rank), C rows of the target buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_spec.training.loss_plan import Chunk, Tiling, default_tiling, plan_chunks
from modelopt_spec.training.loss_tile import TileTerms, TileValues, base_tile, dpace_weights, draft_tile, target_tile
from modelopt_spec.training.loss_types import LossWeights, Projection, SlotRows

__all__ = ["ChunkedLoss", "Gradients", "Wanted"]

_LOW_PRECISION_COLUMNS = 32768
"""Vocabulary rows whose low-precision W_out gradient is made at once before it is added to the float32 buffer."""


@dataclass(frozen=True)
class Wanted:
    """Which gradients are needed."""

    hidden: bool = False
    latents: bool = False
    head_out: bool = False

    @property
    def any(self) -> bool:
        """Whether any is."""
        return self.hidden or self.latents or self.head_out


@dataclass
class Gradients:
    """Gradients of the summed loss; None where not wanted."""

    hidden: Tensor | None = None
    latents: Tensor | None = None
    head_out: Tensor | None = None


@dataclass(frozen=True)
class _Operands:
    """A chunk's inputs in the type of the products."""

    hidden: Tensor
    """[n + m, D]: target positions, then draft rows."""
    latents: Tensor | None
    """[m, R]."""


class ChunkedLoss:
    """One call of the loss. :meth:`run` fills the value vectors and gradients.

    Args:
        rows, projection, weights: checked against each other. acceptance: whether to compute it.
        wanted: gradients. tiling: sizes of the pieces, None for the default.
        row_scale: scalar factor on all row weights, usually 1 / divisor.
    """

    def __init__(
        self,
        rows: SlotRows,
        projection: Projection,
        weights: LossWeights,
        *,
        acceptance: bool,
        wanted: Wanted,
        tiling: Tiling | None,
        row_scale: Tensor,
    ) -> None:
        self.rows, self.projection, self.weights, self.wanted = rows, projection, weights, wanted
        device = rows.hidden.device
        self.device = device
        kind = device.type
        self._autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        self.dtype = self._product_dtype()
        self.soft_dtype = torch.promote_types(self.dtype, torch.float32)
        has_head = rows.latents is not None
        self.base_weight = weights.base_ce if has_head else 0.0
        final_ce = weights.ce if has_head else weights.ce + weights.base_ce
        final_gradient = wanted.any and bool(final_ce or weights.tv or weights.kl)
        self.terms = TileTerms(
            ce=final_ce,
            tv=weights.tv,
            kl=weights.kl,
            acceptance=acceptance,
            gradient=final_gradient,
        )
        self.has_head = has_head
        self.has_target = acceptance or bool(weights.kl)
        self.row_scale = row_scale
        vocab_size = self._vocab_size()
        self.tiling = tiling or default_tiling(vocab_size, self.dtype, device)
        self.vocab_size = vocab_size

        def vector(dtype: torch.dtype) -> Tensor:
            return torch.empty(rows.num_rows, dtype=dtype, device=device)

        self.values = {"ce": vector(self.soft_dtype)}
        self.predicted = vector(torch.long)
        self.base_predicted = vector(torch.long) if self.base_weight else None
        if self.base_weight:
            self.values["base_ce"] = vector(self.soft_dtype)
        if acceptance:
            self.values["tv"] = vector(self.soft_dtype)
        if weights.kl:
            self.values["kl"] = vector(self.soft_dtype)
        self.row_weights = rows.weights.to(self.soft_dtype, copy=True)
        self.gradients = Gradients()

    # ---- sizes and types -----------------------------------------------------------------------------------------

    def _product_dtype(self) -> torch.dtype:
        """Type of the matrix products: autocast's, else the output weight's."""
        own = self.rows.hidden.dtype if self.projection.weight is None else self.projection.weight.dtype
        enabled, dtype = self._autocast
        return dtype if enabled and own != torch.float64 else own

    def _vocab_size(self) -> int:
        if self.projection.weight is not None:
            return self.projection.weight.shape[0]
        if self.projection.head_out is not None:
            return self.projection.head_out.shape[0]
        with torch.no_grad():
            return self._module_logits(self.rows.hidden[:1]).shape[-1] if self.rows.num_rows else 1

    def _module_logits(self, hidden: Tensor) -> Tensor:
        """Call the output module as the caller would: under the caller's autocast."""
        assert self.projection.logits is not None
        enabled, dtype = self._autocast
        with torch.autocast(self.device.type, dtype=dtype, enabled=enabled):
            return self.projection.logits(hidden)

    # ---- the run -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self) -> None:
        """All chunks. Afterwards ``values``, ``predicted``, ``row_weights`` and ``gradients`` are complete."""
        rows, projection = self.rows, self.projection
        with torch.autocast(self.device.type, enabled=False):
            self._weight = None if projection.weight is None else projection.weight.detach().to(self.dtype)
            self._out = None if projection.head_out is None else projection.head_out.detach().to(self.dtype)
            self._allocate_gradients()
            index = rows.target_index if self.has_target else None
            copies = 2 if self.base_weight else 1
            chunks = plan_chunks(rows.blocks, index, self.tiling.chunk_rows, copies)
            self._allocate_buffers(chunks)
            for number, chunk in enumerate(chunks):
                self._run_chunk(chunk, first=number == 0)
            if projection.vocab.sharded:
                self._sum_over_vocabulary()

    def _allocate_gradients(self) -> None:
        rows, out, wanted = self.rows, self.projection.head_out, self.wanted
        if wanted.hidden:
            self.gradients.hidden = torch.zeros_like(rows.hidden, dtype=self.soft_dtype)
        if wanted.latents and rows.latents is not None:
            self.gradients.latents = torch.zeros_like(rows.latents, dtype=self.soft_dtype)
        if wanted.head_out and out is not None:
            written = self.terms.gradient and rows.num_rows > 0
            make = torch.empty_like if written else torch.zeros_like
            self.gradients.head_out = make(out, dtype=self.soft_dtype, memory_format=torch.contiguous_format)

    def _allocate_buffers(self, chunks: list[Chunk]) -> None:
        """The V-wide buffers. In float32 and float64 the target's rows and the draft's share one, in that order."""
        if not chunks:
            return
        width, device = self.vocab_size, self.device
        held = max(chunk.num_positions for chunk in chunks)
        products = max(len(chunk.new) + chunk.num_rows for chunk in chunks)
        draft_rows = max(chunk.num_rows for chunk in chunks)
        self._shared = self.dtype == self.soft_dtype
        if self._shared:
            both = max(chunk.num_positions + chunk.num_rows for chunk in chunks)
            self._target = self._logits = torch.empty(both, width, dtype=self.dtype, device=device)
        else:
            self._target = torch.empty(held, width, dtype=self.soft_dtype, device=device)
            self._logits = torch.empty(products, width, dtype=self.dtype, device=device)
        self._final = torch.empty(draft_rows, width, dtype=self.dtype, device=device) if self.base_weight else None
        self._entropy = torch.empty(held, dtype=self.soft_dtype, device=device) if self.weights.kl else None
        self._tile_rows = max(1, self.tiling.cells // max(width, 1))
        scratch_rows = min(self._tile_rows, max(draft_rows, held))
        self._probs = torch.empty(scratch_rows, width, dtype=self.soft_dtype, device=device)
        self._gathered = torch.empty_like(self._probs) if self.has_target else None

    def _run_chunk(self, chunk: Chunk, first: bool) -> None:
        rows = self.rows
        kept, new = len(chunk.kept), len(chunk.new)
        if kept:
            self._target[:kept] = self._target[chunk.kept]
            if self._entropy is not None:
                self._entropy[:kept] = self._entropy[chunk.kept]
        start = kept if self._shared else 0
        logits = self._logits[start : start + new + chunk.num_rows]
        base = logits[new:]
        final = base if self._final is None else self._final[: chunk.num_rows]
        latents = None if rows.latents is None else rows.latents.detach()[chunk.rows].to(self.dtype)
        graph = self._project(chunk, logits, base, final, latents)
        self._targets(logits[:new], self._target[kept : kept + new], kept)
        self._tiles(chunk, base, final)
        weights = self.row_weights[chunk.rows]
        if self.weights.dpace_alpha is not None:
            block, slot = rows.blocks[chunk.rows], rows.slots[chunk.rows]
            ce, slots = self.values["ce"][chunk.rows], self._num_slots
            weights *= dpace_weights(ce, block, slot, slots, self.weights.dpace_alpha)
        if self.wanted.any:
            self._products_of_gradient(chunk, base, final, latents, weights * self.row_scale, graph, first)

    @property
    def _num_slots(self) -> int:
        if not hasattr(self, "_slots"):
            self._slots = int(self.rows.slots.max()) + 1
        return self._slots

    # ---- 1. logits ---------------------------------------------------------------------------------------------------

    def _columns(self, step: int) -> Iterator[slice]:
        for start in range(0, self.vocab_size, step):
            yield slice(start, min(start + step, self.vocab_size))

    def _project(
        self, chunk: Chunk, logits: Tensor, base: Tensor, final: Tensor, latents: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Logits of the chunk: ``logits`` [n + m, V] = [target; draft] @ W^T, and ``final`` [m, V] += u W_out^T.

        Returns:
            Without a weight: the module's input and output for the draft rows, with their graph; else None.
        """
        rows, new = self.rows, len(chunk.new)
        hidden = rows.hidden.detach()[chunk.rows]
        graph = None
        if self._weight is None:
            if new:
                assert rows.target_hidden is not None
                logits[:new] = self._module_logits(rows.target_hidden[chunk.new])
            with torch.set_grad_enabled(self.wanted.hidden):
                hidden.requires_grad_(self.wanted.hidden)
                output = self._module_logits(hidden)
            base.copy_(output)
            graph = (hidden, output) if self.wanted.hidden else None
            stacked = None
        else:
            stacked = hidden.to(self.dtype)
            if new:
                assert rows.target_hidden is not None
                stacked = torch.cat([rows.target_hidden[chunk.new].to(self.dtype), stacked])
        for columns in self._columns(self.tiling.columns):
            if stacked is not None and self._weight is not None:
                torch.mm(stacked, self._weight[columns].t(), out=logits[:, columns])
            if latents is not None and self._out is not None:
                torch.addmm(base[:, columns], latents, self._out[columns].t(), out=final[:, columns])
        return graph

    # ---- 2. values and gradients of the logits -----------------------------------------------------------------------

    def _targets(self, logits: Tensor, probs: Tensor, kept: int) -> None:
        """Turn the new positions' logits [n, V] to distributions in the target buffer ([n, V], maybe the same memory)."""
        for start in range(0, len(logits), self._tile_rows):
            tile = slice(start, min(start + self._tile_rows, len(logits)))
            out = self._probs[: tile.stop - tile.start]
            entropy = target_tile(logits[tile], out, self.projection.vocab, self._entropy is not None)
            probs[tile] = out
            if self._entropy is not None and entropy is not None:
                self._entropy[kept + tile.start : kept + tile.stop] = entropy

    def _tiles(self, chunk: Chunk, base: Tensor, final: Tensor) -> None:
        """Values of all rows of the chunk; its logits become gradients."""
        vocab, labels = self.projection.vocab, self.rows.labels[chunk.rows]
        for start in range(0, chunk.num_rows, self._tile_rows):
            tile = slice(start, min(start + self._tile_rows, chunk.num_rows))
            place = slice(chunk.rows.start + tile.start, chunk.rows.start + tile.stop)
            probs = self._probs[: tile.stop - tile.start]
            target = entropy = None
            if self._gathered is not None:
                target = self._gathered[: tile.stop - tile.start]
                torch.index_select(self._target, 0, chunk.index[tile], out=target)
                entropy = None if self._entropy is None else self._entropy[chunk.index[tile]]
            values = draft_tile(final[tile], labels[tile], target, entropy, self.terms, probs, vocab)
            self._store(place, values, values.predicted)
            if self.base_weight:
                assert self.base_predicted is not None
                added = final[tile] if self.terms.gradient else None
                of_base = base_tile(base[tile], labels[tile], self.base_weight, added, self.wanted.any, probs, vocab)
                self.values["base_ce"][place] = of_base.ce
                self.base_predicted[place] = of_base.predicted

    def _store(self, place: slice, values: TileValues, predicted: Tensor) -> None:
        self.predicted[place] = predicted
        self.values["ce"][place] = values.ce
        if values.l1 is not None:
            self.values["tv"][place] = values.l1
        if values.kl is not None:
            self.values["kl"][place] = values.kl

    # ---- 3. gradients of hidden states, latents and W_out ------------------------------------------------------------

    def _products_of_gradient(
        self,
        chunk: Chunk,
        base: Tensor,
        final: Tensor,
        latents: Tensor | None,
        weights: Tensor,
        graph: tuple[Tensor, Tensor] | None,
        first: bool,
    ) -> None:
        """Multiply the logit gradients: ``base`` [m, V] (all that reaches h) and ``final`` [m, V] (all that reaches u)."""
        reaches_hidden = self.terms.gradient or bool(self.base_weight)
        d_hidden = self._accumulator(self.rows.hidden, chunk) if self.wanted.hidden and reaches_hidden else None
        d_latents = d_out = weighted = None
        if latents is not None and self.terms.gradient:
            d_latents = self._accumulator(latents, None) if self.wanted.latents else None
            d_out = self.gradients.head_out
            weighted = (latents * weights.unsqueeze(1)).to(self.dtype)
        for columns in self._columns(self.tiling.columns):
            if d_hidden is not None and self._weight is not None:
                d_hidden.addmm_(base[:, columns], self._weight[columns])
            if d_latents is not None and self._out is not None:
                d_latents.addmm_(final[:, columns], self._out[columns])
            if d_out is not None and weighted is not None and self._shared:
                part, transposed = d_out[columns], final[:, columns].t()
                part.addmm_(transposed, weighted, beta=0.0 if first else 1.0)
        if d_out is not None and weighted is not None and not self._shared:
            for columns in self._columns(_LOW_PRECISION_COLUMNS):
                product = torch.mm(final[:, columns].t(), weighted)
                d_out[columns].copy_(product) if first else d_out[columns].add_(product)
        if d_hidden is not None:
            if graph is not None:
                hidden, output = graph
                d_hidden = torch.autograd.grad(output, hidden, base.to(output.dtype))[0]
            assert self.gradients.hidden is not None
            torch.mul(d_hidden, weights.unsqueeze(1), out=self.gradients.hidden[chunk.rows])
        if d_latents is not None:
            assert self.gradients.latents is not None
            torch.mul(d_latents, weights.unsqueeze(1), out=self.gradients.latents[chunk.rows])

    def _accumulator(self, like: Tensor, chunk: Chunk | None) -> Tensor:
        """Zeros [m, width of ``like``] in the type of the products."""
        count = len(like) if chunk is None else chunk.num_rows
        return torch.zeros(count, like.shape[1], dtype=self.dtype, device=self.device)

    def _sum_over_vocabulary(self) -> None:
        """Each rank multiplied with its rows of W and W_out only. (A module sums its own gradient of h.)"""
        vocab = self.projection.vocab
        if self.gradients.hidden is not None and self._weight is not None:
            self.gradients.hidden = vocab.sum(self.gradients.hidden)
        if self.gradients.latents is not None:
            self.gradients.latents = vocab.sum(self.gradients.latents)
