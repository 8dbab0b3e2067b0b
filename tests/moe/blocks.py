"""Blocks, features and losses of one small batch, for any drafter that is attached to a target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelopt_spec.config import LossConfig
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.records import BlockBatch, TargetFeatures
from modelopt_spec.training.blocks import make_blocks
from modelopt_spec.training.loss import LossWeights, Projection, draft_loss, gather_rows
from modelopt_spec.training.module import block_settings

LENGTH = 24
ANCHORS = torch.tensor([[2, 5, 6, 17], [0, 9, 20, 0]])
KEEP = torch.tensor([[True, True, True, True], [True, True, True, False]])


def batch(drafter: Drafter, seed: int = 0) -> tuple[Tensor, TargetFeatures, BlockBatch]:
    """Ids [2, S], the target's features of them, and blocks (overlapping ones, one padding block)."""
    vocab = drafter.config.vocab_size or 0
    ids = torch.randint(3, vocab - 8, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    features = drafter.target.features(ids, drafter.config.target_layer_ids or ())
    settings = block_settings(drafter, LossConfig(), ANCHORS.shape[1])
    return ids, features, make_blocks(ids, torch.ones_like(ids).bool(), ANCHORS, KEEP, settings)


def loss_of(drafter: Drafter, features: TargetFeatures, blocks: BlockBatch, **weights: Any) -> Tensor:
    """DSpark's three terms, or others."""
    output = drafter(features, blocks)
    confidence = 0.3 if drafter.confidence_head is not None else 0.0
    terms = LossWeights(**(weights or {"ce": 0.4, "tv": 0.6, "confidence": confidence}))
    rows = gather_rows(output, blocks, features.last_hidden if terms.needs_target else None)
    return draft_loss(rows, Projection.of(drafter), terms).loss
