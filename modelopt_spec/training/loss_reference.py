"""The loss as its formulas stand: all logits at once, gradients by autograd. Slow, large, and what tests compare with.

Legend: M rows, P distinct target positions, D hidden, R head rank, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from modelopt_spec.training.loss_types import WEIGHT_EPSILON, LossResult, LossWeights, Projection, SlotRows, TermSum

__all__ = ["dpace_weights_reference", "draft_loss_reference"]


def dpace_weights_reference(ce: Tensor, blocks: Tensor, alpha: float) -> Tensor:
    """D-PACE's position weights by its definition, one block and one slot at a time.

    ``w_j = sum_{m >= j} prod_{i <= m} ((1 - alpha) exp(-CE_i) + alpha)`` over the rows of a block
    (arXiv 2605.18810, equations 7 and 8).
    """
    weights = torch.zeros_like(ce)
    for block in blocks.unique().tolist():
        rows = (blocks == block).nonzero().squeeze(1).tolist()
        product, products = 1.0, []
        for row in rows:
            product = product * ((1 - alpha) * torch.exp(-ce[row]).item() + alpha)
            products.append(product)
        for place, row in enumerate(rows):
            weights[row] = sum(products[place:])
    return weights


def draft_loss_reference(
    rows: SlotRows, projection: Projection, weights: LossWeights, divisor: Tensor | float | None = None
) -> LossResult:
    """Same arguments and result as :func:`modelopt_spec.training.loss.draft_loss`; [M, V] tensors throughout."""

    def project(hidden: Tensor) -> Tensor:
        if projection.weight is not None:
            return hidden @ projection.weight.T
        assert projection.logits is not None
        return projection.logits(hidden)

    base_logits = project(rows.hidden)
    logits = base_logits
    if rows.latents is not None and projection.head_out is not None:
        logits = base_logits + rows.latents @ projection.head_out.T
    log_p = logits.log_softmax(-1)
    values = {"ce": functional.cross_entropy(logits, rows.labels, reduction="none")}
    if weights.base_ce:
        values["base_ce"] = functional.cross_entropy(base_logits, rows.labels, reduction="none")
    acceptance = None
    if rows.target_hidden is not None and rows.target_index is not None:
        with torch.no_grad():
            target_logits = project(rows.target_hidden)[rows.target_index]
        q = target_logits.softmax(-1)
        values["tv"] = (log_p.exp() - q).abs().sum(-1)
        acceptance = (1 - 0.5 * values["tv"].detach()).clamp(0, 1)
        values["kl"] = (q * (target_logits.log_softmax(-1) - log_p)).sum(-1)
    if rows.confidence is not None and acceptance is not None:
        values["confidence"] = functional.binary_cross_entropy_with_logits(
            rows.confidence, acceptance, reduction="none"
        )
    row_weights = rows.weights.to(logits.dtype)
    if weights.dpace_alpha is not None:
        row_weights = row_weights * dpace_weights_reference(values["ce"].detach(), rows.blocks, weights.dpace_alpha)
    if divisor is None:
        divisor = row_weights.sum() + WEIGHT_EPSILON
    loss = logits.sum() * 0
    terms = {}
    for name in ("ce", "tv", "confidence", "kl", "base_ce"):
        alpha = getattr(weights, name)
        if alpha or name == "ce":
            total = (row_weights * values[name]).sum()
            loss = loss + alpha * total / divisor
            terms[name] = TermSum(total.detach(), row_weights.sum())
    return LossResult(
        loss=loss,
        terms=terms,
        weights=row_weights,
        ce=values["ce"].detach(),
        correct=logits.argmax(-1) == rows.labels,
        acceptance=acceptance,
        base_correct=base_logits.argmax(-1) == rows.labels if weights.base_ce else None,
        values={name: value.detach() for name, value in values.items()},
    )
