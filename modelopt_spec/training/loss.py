"""The fused loss: logits, terms and gradients of a few hundred rows at a time, in one pass.

Of the V-wide tensors only a chunk's exist, in buffers that every chunk reuses. Each chunk

1. multiplies its hidden states, and the target's at positions not seen before, with W in one product, and adds
   W_out u to the draft's part in place;
2. turns logits to term values and to their gradient, a cache-sized tile of rows at a time (loss_tile.py);
3. multiplies the gradient with W, W_out and u while it is there.

The gradients of hidden states, latents and W_out are complete before backward starts, which only scales them: nothing
is kept for it and nothing recomputed. The plain version stands in loss_reference.py.

Legend: M rows (supervised slots), P distinct target positions, D hidden, R head rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from modelopt_spec.training.loss_chunks import ChunkedLoss, Gradients, Wanted
from modelopt_spec.training.loss_plan import Tiling
from modelopt_spec.training.loss_types import (
    WEIGHT_EPSILON,
    LossResult,
    LossWeights,
    Projection,
    SlotRows,
    TermSum,
    check_inputs,
    first_nonfinite_row,
    gather_rows,
)

__all__ = [
    "WEIGHT_EPSILON",
    "Divisor",
    "LossResult",
    "LossWeights",
    "Projection",
    "SlotRows",
    "TermSum",
    "draft_loss",
    "first_nonfinite_row",
    "gather_rows",
]

Divisor = Tensor | float | Callable[[Tensor], Tensor] | None


class _GivenGradients(torch.autograd.Function):
    """A sum whose gradients are known already; backward scales them."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: Gradients, *inputs: Tensor | None) -> Tensor:
        ctx.gradients = gradients
        ctx.dtypes = [None if value is None else value.dtype for value in inputs]
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "backward ran twice through one draft_loss: its gradients are scaled in place and handed out once; "
                "call draft_loss again, or add the losses before backward"
            )
        factor = grad_outputs[0]
        parts = [gradients.hidden, gradients.latents, gradients.head_out]
        if factor.device.type != "cpu" or factor.item() != 1.0:
            parts = [None if part is None else part.mul_(factor) for part in parts]
        scaled = [part if part is None else part.to(dtype) for part, dtype in zip(parts, ctx.dtypes, strict=True)]
        return (None, None, *scaled)


def draft_loss(
    rows: SlotRows,
    projection: Projection,
    weights: LossWeights,
    divisor: Divisor = None,
    *,
    measure_acceptance: bool = False,
    tiling: Tiling | None = None,
) -> LossResult:
    """The weighted sum of the loss's terms over supervised slots, with gradients of the drafter's outputs and of W_out.

    Args:
        rows: of :func:`gather_rows`. M = 0 gives a loss of 0 with zero gradients.
        projection: the target's output projection and the head's.
        weights: of the terms.
        divisor: what every term is divided by. None: the sum of these rows' weights plus 1e-6. A number or scalar
            tensor is used as it is (but at least 1e-6): for a loss over several ranks and accumulation steps, the sum
            over all of them. A function is given the sum of these rows' weights, a scalar tensor, after the forward
            pass: D-PACE's weights, unlike others, are known only then.
        measure_acceptance: fill ``acceptance`` even if no term needs it (evaluation).
        tiling: sizes of the pieces; None chooses by vocabulary, type and device.

    Returns:
        The loss and its parts. Products run in the type of the output weight, or autocast's; softmax and everything
        after it in float32 (float64 for float64 weights).

    Raises:
        ConfigError, DataError: parts that are missing or do not fit each other.
    """
    check_inputs(rows, projection, weights, measure_acceptance)
    inputs = (rows.hidden, rows.latents, projection.head_out)
    needs = [torch.is_grad_enabled() and value is not None and value.requires_grad for value in inputs]
    late = weights.dpace_alpha is not None and (divisor is None or callable(divisor))
    row_scale = torch.ones((), device=rows.hidden.device) if late else 1.0 / _divide_by(divisor, rows.weights)
    job = ChunkedLoss(
        rows,
        projection,
        weights,
        acceptance=weights.needs_acceptance or measure_acceptance,
        wanted=Wanted(*needs),
        tiling=tiling,
        row_scale=row_scale,
    )
    job.run()
    row_weights = job.row_weights
    scale = (1.0 / _divide_by(divisor, row_weights) if late else row_scale).to(job.soft_dtype)
    acceptance = (1 - 0.5 * job.values["tv"]).clamp_(0, 1) if "tv" in job.values else None
    if weights.confidence:
        assert rows.confidence is not None
        target = acceptance if acceptance is not None else row_weights
        confidence = rows.confidence.to(job.soft_dtype)
        errors = functional.binary_cross_entropy_with_logits(confidence, target, reduction="none")
        job.values["confidence"] = errors.detach()
    given = {name: (row_weights * value).sum() for name, value in job.values.items()}
    alphas = {"ce": job.terms.ce, "tv": weights.tv, "kl": weights.kl, "base_ce": job.base_weight}
    total = torch.zeros((), dtype=job.soft_dtype, device=job.device)
    for name, alpha in alphas.items():
        if alpha:
            total = total + alpha * given[name]
    if any(needs):
        total = _GivenGradients.apply(total if late else total * scale, job.gradients, *inputs)
        loss = total * scale if late else total
    else:
        loss = total * scale
    if weights.confidence:
        loss = loss + weights.confidence * scale * (row_weights * errors).sum()
    shown = {name: value for name, value in job.values.items() if name != "tv" or weights.tv}
    weight_sum = row_weights.sum()
    return LossResult(
        loss=loss,
        terms={name: TermSum(given[name], weight_sum) for name in shown},
        weights=row_weights,
        ce=job.values["ce"],
        correct=job.predicted == rows.labels,
        acceptance=acceptance,
        base_correct=None if job.base_predicted is None else job.base_predicted == rows.labels,
        values=job.values,
    )


def _divide_by(divisor: Divisor, row_weights: Tensor) -> Tensor:
    """The divisor as a scalar tensor."""
    total = row_weights.sum(dtype=torch.float64)
    if divisor is None:
        return total + WEIGHT_EPSILON
    value = divisor(total) if callable(divisor) and not isinstance(divisor, Tensor) else divisor
    return torch.as_tensor(value, dtype=torch.float64, device=row_weights.device).detach().clamp(min=WEIGHT_EPSILON)
