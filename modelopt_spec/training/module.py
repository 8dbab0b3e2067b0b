"""The module that a trainer wraps: batch in, loss and statistics out. Its only submodule is the drafter.

Legend: B batch, S sequence, N anchors, K slots, M supervised slots, D hidden.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_spec.config import DrafterConfig, LossConfig
from modelopt_spec.conventions import BlockLayout
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.errors import ConfigError
from modelopt_spec.records import BlockBatch
from modelopt_spec.training.balance import with_balance_loss
from modelopt_spec.training.blocks import AnchorGenerator, BlockSettings, make_blocks, sample_anchors, valid_anchors
from modelopt_spec.training.curves import StepStatistics, statistics
from modelopt_spec.training.features import FeatureSource, OnlineFeatures
from modelopt_spec.training.loss import LossResult, LossWeights, Projection, SlotRows, draft_loss, gather_rows

__all__ = ["DraftTrainingModule", "StepStatistics", "block_settings", "lambda_at", "nonfinite_rows", "statistics"]


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


class DraftTrainingModule(nn.Module):
    """Features, blocks, draft pass and loss of one batch.

    The target is used but is no submodule: what wraps this module (DDP, FSDP, optimizers) sees the drafter alone. It
    stays frozen and in eval mode, and is placed (and sharded) by whoever loads it.

    Args:
        model: a converted model.
        loss: weights of the terms.
        num_anchors: blocks cut from each row.
        source: where features come from; None runs the target.
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
        self._model = (model,)
        self.drafter = drafter
        self._no_split_modules = sorted({type(layer).__name__ for layer in getattr(drafter, "layers", ())})
        """Layer classes that accelerate's FSDP shards one by one."""
        self.loss_config = loss
        self.settings = block_settings(drafter, loss, num_anchors)
        self.source = (
            OnlineFeatures(drafter.target, drafter.config.target_layer_ids or ()) if source is None else source
        )

    @property
    def model(self) -> nn.Module:
        """The target with its drafter."""
        return self._model[0]

    def train(self, mode: bool = True) -> DraftTrainingModule:
        """Training mode for the drafter; the target stays in eval mode."""
        super().train(mode)
        self.model.eval()
        self.drafter.train(mode)
        return self

    def blocks(self, batch: dict[str, Any], generator: AnchorGenerator) -> BlockBatch:
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
        result = draft_loss(rows, self.projection(), self.weights(base_ce), divisor)
        loss = with_balance_loss(result.loss, self.drafter, blocks, divisor)
        return loss, statistics(rows, result, blocks), _detached(rows), dataclasses.replace(result, loss=loss.detach())

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Called by the Trainer: the drafter's layers are computed again in the backward pass."""
        self.drafter.gradient_checkpointing = True

    def projection(self) -> Projection:
        """How the drafter's outputs become logits; targets that share the vocabulary over ranks have their own."""
        return Projection.of(self.drafter)

    def weights(self, base_ce: float = 0.0) -> LossWeights:
        """Weights of the terms where Domino's lambda is ``base_ce``."""
        config = self.loss_config
        return LossWeights(
            ce=config.ce * (1.0 - base_ce),
            base_ce=config.ce * base_ce,
            tv=config.tv,
            confidence=config.confidence,
            kl=config.kl,
            dpace_alpha=config.dpace_alpha if config.position_weights == "dpace" else None,
        )


def _detached(rows: SlotRows) -> SlotRows:
    """Rows that carry no gradient: what a module returns beside its loss looks used to DDP."""
    latents = None if rows.latents is None else rows.latents.detach()
    confidence = None if rows.confidence is None else rows.confidence.detach()
    return dataclasses.replace(rows, hidden=rows.hidden.detach(), latents=latents, confidence=confidence)


def nonfinite_rows(rows: SlotRows, result: LossResult, blocks: BlockBatch) -> list[int]:
    """Rows of the batch with a slot whose weight or loss term is NaN or infinite; all of them if no slot has one."""
    values = torch.stack([value.double() for value in (result.weights, *result.values.values())])
    bad = (~torch.isfinite(values)).any(0)
    found = (rows.blocks[bad] // blocks.keep.shape[1]).unique().tolist()
    return found or list(range(blocks.keep.shape[0]))
