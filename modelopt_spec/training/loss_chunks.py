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
from modelopt_spec.training.loss_tile import DraftTerms, TileScratch, base_rows, dpace_weights, draft_rows, target_rows
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


@dataclass
class _Work:
    """One chunk on its way from hidden states to gradients."""

    chunk: Chunk
    logits: Tensor
    """[n + m, V]: logits of the new target positions, then of the draft."""
    base: Tensor
    """[m, V], the second part of ``logits``: lm_head(h), then the gradient of all that reaches h."""
    final: Tensor
    """[m, V]: corrected logits, then their gradient. The same memory as ``base`` unless both have terms."""
    latents: Tensor | None
    """[m, R] u in the type of the products."""
    module: tuple[Tensor, Tensor] | None = None
    """Without a weight: the output module's input and output for the draft rows, with their graph."""


class ChunkedLoss:
    """One call of the loss. :meth:`run` fills ``values``, ``predicted``, ``row_weights`` and ``gradients``.

    Args:
        rows: supervised slots, checked against ``projection`` and ``weights``.
        projection: what turns them to logits.
        weights: of the terms.
        acceptance: whether to compare draft and target token by token.
        wanted: gradients to compute.
        tiling: sizes of the pieces, None for the default.
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
        self.row_scale, self.device = row_scale, rows.hidden.device
        kind = self.device.type
        self._autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        self.dtype = self._product_dtype()
        self.soft_dtype = torch.promote_types(self.dtype, torch.float32)
        has_head = rows.latents is not None
        self.base_weight = weights.base_ce if has_head else 0.0
        ce = weights.ce if has_head else weights.ce + weights.base_ce
        gradient = wanted.any and bool(ce or weights.tv or weights.kl)
        self.terms = DraftTerms(ce, weights.tv, weights.kl, acceptance, gradient)
        self.has_target = acceptance or bool(weights.kl)
        self.vocab_size = self._vocab_size()
        self.copies = 2 if self.base_weight else 1
        self.tiling = tiling or default_tiling(self.vocab_size, self.dtype, self.device, self.copies)
        names = {"ce": True, "tv": acceptance, "kl": weights.kl, "base_ce": self.base_weight}
        self.values = {name: self._vector(self.soft_dtype) for name, needed in names.items() if needed}
        self.predicted = self._vector(torch.long)
        self.base_predicted = self._vector(torch.long) if self.base_weight else None
        self.row_weights = rows.weights.to(self.soft_dtype, copy=True)
        self.num_slots = int(rows.slots.max()) + 1 if weights.dpace_alpha is not None and rows.num_rows else 0
        self.gradients = Gradients()

    def _vector(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.rows.num_rows, dtype=dtype, device=self.device)

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
            chunks = plan_chunks(rows.blocks, index, self.tiling.chunk_rows, self.copies)
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
        draft = max(chunk.num_rows for chunk in chunks)
        self._shared = self.dtype == self.soft_dtype
        if self._shared:
            both = max(chunk.num_positions + chunk.num_rows for chunk in chunks)
            self._target = self._logits = torch.empty(both, width, dtype=self.dtype, device=device)
        else:
            self._target = torch.empty(held, width, dtype=self.soft_dtype, device=device)
            self._logits = torch.empty(products, width, dtype=self.dtype, device=device)
        self._final = torch.empty(draft, width, dtype=self.dtype, device=device) if self.base_weight else None
        self._negentropy = torch.empty(held, dtype=self.soft_dtype, device=device) if self.weights.kl else None
        tile_rows = max(1, round(self.tiling.cells / max(width, 1)))
        if self.projection.vocab.sharded:
            tile_rows = draft
        tile_rows = min(tile_rows, max(draft, held))
        self._scratch = TileScratch(tile_rows, width, self.dtype, self.soft_dtype, device, self.has_target)

    def _run_chunk(self, chunk: Chunk, first: bool) -> None:
        kept, new = len(chunk.kept), len(chunk.new)
        if kept:
            self._target[:kept] = self._target[chunk.kept]
            if self._negentropy is not None:
                self._negentropy[:kept] = self._negentropy[chunk.kept]
        start = kept if self._shared else 0
        logits = self._logits[start : start + new + chunk.num_rows]
        base = logits[new:]
        final = base if self._final is None else self._final[: chunk.num_rows]
        latents = None if self.rows.latents is None else self.rows.latents.detach()[chunk.rows].to(self.dtype)
        work = _Work(chunk, logits, base, final, latents)
        self._project(work)
        if new:
            negentropy = None if self._negentropy is None else self._negentropy[kept : kept + new]
            probs = self._target[kept : kept + new]
            target_rows(logits[:new], probs, self._scratch, self.projection.vocab, negentropy)
        self._evaluate(work)
        if self.wanted.any:
            self._backpropagate(work, self.row_weights[chunk.rows].unsqueeze(1) * self.row_scale, first)

    # ---- 1. logits ---------------------------------------------------------------------------------------------------

    def _columns(self, step: int) -> Iterator[slice]:
        for start in range(0, self.vocab_size, step):
            yield slice(start, min(start + step, self.vocab_size))

    def _project(self, work: _Work) -> None:
        """Fill the logits: [target; draft] @ W^T in one product, and u W_out^T added to the draft's part."""
        rows, new = self.rows, work.chunk.new
        hidden = rows.hidden.detach()[work.chunk.rows]
        target = rows.target_hidden[new] if rows.target_hidden is not None and len(new) else None
        if self._weight is None:
            stacked = None
            if target is not None:
                work.logits[: len(new)] = self._module_logits(target)
            with torch.set_grad_enabled(self.wanted.hidden):
                hidden.requires_grad_(self.wanted.hidden)
                output = self._module_logits(hidden)
            work.base.copy_(output)
            work.module = (hidden, output) if self.wanted.hidden else None
        else:
            stacked = hidden.to(self.dtype)
            if target is not None:
                stacked = torch.cat([target.to(self.dtype), stacked])
        for columns in self._columns(self.tiling.columns):
            if stacked is not None and self._weight is not None:
                torch.mm(stacked, self._weight[columns].t(), out=work.logits[:, columns])
            if work.latents is not None and self._out is not None:
                base, out = work.base[:, columns], self._out[columns]
                torch.addmm(base, work.latents, out.t(), out=work.final[:, columns])

    # ---- 2. values and gradients of the logits -----------------------------------------------------------------------

    def _evaluate(self, work: _Work) -> None:
        """Values of all rows of the chunk; its logits become gradients."""
        chunk, rows, vocab, scratch = work.chunk, self.rows, self.projection.vocab, self._scratch
        labels, place = rows.labels[chunk.rows], chunk.rows
        target = self._target if self.has_target else None
        values = draft_rows(work.final, labels, target, chunk.index, self._negentropy, self.terms, scratch, vocab)
        self.predicted[place] = values.predicted
        self.values["ce"][place] = values.ce
        if values.l1 is not None:
            self.values["tv"][place] = values.l1
        if values.kl is not None:
            self.values["kl"][place] = values.kl
        if self.weights.dpace_alpha is not None:
            position = dpace_weights(
                values.ce, rows.blocks[place], rows.slots[place], self.num_slots, self.weights.dpace_alpha
            )
            self.row_weights[place] *= position
        if self.base_predicted is not None:
            added = work.final if self.terms.gradient else None
            values = base_rows(work.base, labels, self.base_weight, added, self.wanted.any, scratch, vocab)
            self.values["base_ce"][place] = values.ce
            self.base_predicted[place] = values.predicted

    # ---- 3. gradients of hidden states, latents and W_out ------------------------------------------------------------

    def _backpropagate(self, work: _Work, weights: Tensor, first: bool) -> None:
        """Multiply the gradient of the logits with W, W_out and u; ``weights`` [m, 1] are the rows' weights."""
        place, latents, gradients = work.chunk.rows, work.latents, self.gradients
        d_hidden = d_latents = d_out = weighted = None
        if gradients.hidden is not None and (self.terms.gradient or self.base_weight):
            d_hidden = torch.zeros_like(gradients.hidden[place], dtype=self.dtype)
        if latents is not None and self.terms.gradient:
            d_latents = torch.zeros_like(latents) if gradients.latents is not None else None
            d_out, weighted = gradients.head_out, (latents * weights).to(self.dtype)
        for columns in self._columns(self.tiling.columns):
            if d_hidden is not None and self._weight is not None:
                d_hidden.addmm_(work.base[:, columns], self._weight[columns])
            if d_latents is not None and self._out is not None:
                d_latents.addmm_(work.final[:, columns], self._out[columns])
            if d_out is not None and weighted is not None and self._shared:
                d_out[columns].addmm_(work.final[:, columns].t(), weighted, beta=0.0 if first else 1.0)
        if d_out is not None and weighted is not None and not self._shared:
            for columns in self._columns(_LOW_PRECISION_COLUMNS):
                product = torch.mm(work.final[:, columns].t(), weighted)
                d_out[columns].copy_(product) if first else d_out[columns].add_(product)
        if d_hidden is not None and gradients.hidden is not None:
            if work.module is not None:
                hidden, output = work.module
                d_hidden = torch.autograd.grad(output, hidden, work.base.to(output.dtype))[0]
            torch.mul(d_hidden, weights, out=gradients.hidden[place])
        if d_latents is not None and gradients.latents is not None:
            torch.mul(d_latents, weights, out=gradients.latents[place])

    def _sum_over_vocabulary(self) -> None:
        """Each rank multiplied with its rows of W and W_out only. (A module sums its own gradient of h.)"""
        vocab = self.projection.vocab
        if self.gradients.hidden is not None and self._weight is not None:
            self.gradients.hidden = vocab.sum(self.gradients.hidden)
        if self.gradients.latents is not None:
            self.gradients.latents = vocab.sum(self.gradients.latents)
