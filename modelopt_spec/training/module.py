"""The module that a trainer wraps: batch in, loss and statistics out. Target and drafter are inside of it.

Legend: B batch, S sequence, N anchors, K slots, M supervised slots, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from modelopt_spec.config import DrafterConfig, LossConfig
from modelopt_spec.conventions import BlockLayout
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.errors import ConfigError
from modelopt_spec.records import BlockBatch
from modelopt_spec.training.blocks import BlockSettings, make_blocks, sample_anchors, valid_anchors
from modelopt_spec.training.features import FeatureSource, OnlineFeatures
from modelopt_spec.training.loss import LossResult, LossWeights, Projection, SlotRows, draft_loss, gather_rows

__all__ = ["DraftTrainingModule", "StepStatistics", "block_settings", "lambda_at"]


def stops_at_gap(config: DrafterConfig, loss: LossConfig) -> bool:
    """Whether supervision ends at the first unsupervised token: the loss's choice, else the method's reference."""
    if loss.stop_at_gap is not None:
        return loss.stop_at_gap
    return config.algorithm != "domino" and config.layout == BlockLayout.ANCHOR_FIRST


def block_settings(drafter: Drafter, loss: LossConfig, num_anchors: int) -> BlockSettings:
    """How this drafter's blocks are cut and weighted."""
    return BlockSettings(
        block_size=drafter.config.block_size,
        layout=drafter.config.layout,
        mask_token_id=drafter.mask_token_id,
        num_anchors=num_anchors,
        decay=loss.decay if loss.position_weights == "exp" else None,
        stop_at_gap=stops_at_gap(drafter.config, loss),
    )


def lambda_at(step: int, total_steps: int, loss: LossConfig) -> float:
    """Domino's weight of the base logits: ``start * (1 - min(step / (total * decay_ratio), 1))``, a function of the
    step alone, so a resumed run goes on where it was. 0 when the number of steps is unknown.
    """
    if not loss.base_ce_start or total_steps <= 0:
        return 0.0
    decay_steps = max(1, int(total_steps * loss.base_ce_decay_ratio))
    return loss.base_ce_start * (1.0 - min(step / decay_steps, 1.0))


@dataclass(frozen=True)
class StepStatistics:
    """Sums over the supervised slots of a batch; the trainer adds them up over batches and ranks."""

    terms: Tensor
    """[2 * terms] sum and weight sum of each loss term, in the order of ``names``."""
    names: tuple[str, ...]
    slots: Tensor
    """[4, K]: supervised, reached with all earlier slots correct, correct among those, acceptance by probability."""
    blocks: Tensor
    """[3]: blocks, tokens committed by greedy agreement, and by acceptance probability (bonus included)."""


class DraftTrainingModule(nn.Module):
    """Features, blocks, draft pass and loss of one batch.

    The target stays frozen and in eval mode; only ``model.drafter`` has gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossConfig,
        num_anchors: int,
        source: FeatureSource | None = None,
    ) -> None:
        super().__init__()
        drafter = getattr(model, "drafter", None)
        if not isinstance(drafter, Drafter):
            raise ConfigError(f"this {type(model).__name__} has no drafter: call modelopt_spec.convert first")
        self.model = model
        self.loss_config = loss
        self.settings = block_settings(drafter, loss, num_anchors)
        self.source = (
            OnlineFeatures(drafter.target, drafter.config.target_layer_ids or ()) if source is None else source
        )

    @property
    def drafter(self) -> Drafter:
        """The module that is trained."""
        return cast(Drafter, self.model.drafter)

    def train(self, mode: bool = True) -> DraftTrainingModule:
        """Training mode for the drafter; the target stays in eval mode."""
        super().train(mode)
        self.model.eval()
        self.drafter.train(mode)
        return self

    def blocks(self, batch: dict[str, Any], generator: torch.Generator | None) -> BlockBatch:
        """Draw anchors and lay out the blocks of a batch of token rows."""
        segments = batch.get("segment_ids")
        anchors, keep = sample_anchors(
            valid_anchors(batch["loss_mask"], segments), self.settings.num_anchors, generator
        )
        return make_blocks(
            batch["input_ids"],
            batch["loss_mask"],
            anchors,
            keep,
            self.settings,
            position_ids=batch["position_ids"] if segments is not None else None,
            segment_ids=segments,
        )

    def forward(
        self,
        batch: dict[str, Any],
        blocks: BlockBatch,
        divisor: Tensor | float | None = None,
        base_ce: float = 0.0,
    ) -> tuple[Tensor, StepStatistics, SlotRows, LossResult]:
        """Loss of one batch.

        Args:
            batch: as of ``collate_rows``, plus ``lengths`` and ``rows``. blocks: of :meth:`blocks`.
            divisor: sum of the slot weights over everything that the loss is averaged over (all ranks and accumulation
                steps); None for this batch alone.
            base_ce: Domino's lambda.
        """
        positions = batch["position_ids"] if batch.get("segment_ids") is not None else None
        features = self.source.features(batch["input_ids"], batch["lengths"], batch["rows"], positions)
        output = self.drafter(features, blocks, positions)
        last_hidden = features.last_hidden if self.loss_config.needs_target else None
        rows = gather_rows(output, blocks, last_hidden)
        result = draft_loss(rows, self.projection(), self._weights(base_ce), divisor)
        return result.loss, statistics(rows, result, blocks), rows, result

    def projection(self) -> Projection:
        """How the drafter's outputs become logits; targets that share the vocabulary over ranks have their own."""
        return Projection.of(self.drafter)

    def _weights(self, base_ce: float) -> LossWeights:
        config = self.loss_config
        return LossWeights(
            ce=config.ce * (1.0 - base_ce),
            base_ce=config.ce * base_ce,
            tv=config.tv,
            confidence=config.confidence,
            kl=config.kl,
            dpace_alpha=config.dpace_alpha if config.position_weights == "dpace" else None,
        )


@torch.no_grad()
def statistics(rows: SlotRows, result: LossResult, blocks: BlockBatch) -> StepStatistics:
    """What a training log shows, as sums.

    Slots are counted on from the first supervised one of each block. Greedy agreement compares the argmax of the
    corrected logits with the data's token; on text that the target wrote greedily it is the real acceptance.
    """
    n_blocks, size = blocks.keep.numel(), blocks.input_ids.shape[-1]
    device = rows.labels.device

    def grid(values: Tensor) -> Tensor:
        full = torch.zeros(n_blocks, size, device=device)
        full[rows.blocks, rows.slots] = values.float()
        return full

    supervised = grid(torch.ones_like(rows.weights))
    correct = grid(result.correct)
    passed = torch.where(supervised.bool(), correct, 1.0).cumprod(1) * supervised
    before = torch.where(supervised.bool(), correct, 1.0).cumprod(1).roll(1, 1)
    before[:, 0] = 1.0
    reached = before * supervised
    has_any = supervised.any(1)
    accept = grid(result.acceptance) if result.acceptance is not None else correct
    by_probability = torch.where(supervised.bool(), accept, 1.0).cumprod(1) * supervised
    slots = torch.stack([supervised.sum(0), reached.sum(0), passed.sum(0), (accept * supervised).sum(0)])
    totals = torch.stack([has_any.sum().float(), passed.sum() + has_any.sum(), by_probability.sum() + has_any.sum()])
    names = tuple(result.terms)
    sums = [value for name in names for value in result.terms[name]]
    terms = (
        torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in sums]) if sums else torch.zeros(0)
    )
    return StepStatistics(terms=terms, names=names, slots=slots.double(), blocks=totals.double())
