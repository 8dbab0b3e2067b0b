"""The maths of the loss on a tile of rows: from logits to term values and to the gradient of the logits.

For one row with draft logits x, label y, draft distribution p and target distribution q:

    CE   = lse(x) - x_y                         dCE/dx  = p - onehot(y)
    L1   = sum |p - q|                          dL1/dx  = p * (s - <s, p>),  s = sign(p - q)
    KL   = <q, log q> - <q, x> + lse(x)         dKL/dx  = p - q
    acceptance = 1 - L1 / 2

(the gradients by hand from the softmax Jacobian diag(p) - p p^T). Their weighted sum is

    G = p * (ce + kl - tv <s, p> + tv s) - kl q - ce onehot(y)

The weight of the row is left out here: it is applied to h and u, which are far narrower than V.
Every reduction over the vocabulary goes through :class:`VocabReduce`.

Legend: r rows of a tile, V vocabulary (of this rank).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_spec.training.vocab_reduce import VocabReduce

__all__ = ["TileTerms", "TileValues", "base_tile", "dpace_weights", "draft_tile", "softmax_tile", "target_tile"]

_GROUP = 1024


@dataclass(frozen=True)
class TileTerms:
    """Which terms the corrected logits carry, and what else is asked of them."""

    ce: float
    tv: float
    kl: float
    acceptance: bool
    gradient: bool


@dataclass(frozen=True)
class TileValues:
    """Values of a tile's rows, [r] each."""

    ce: Tensor
    predicted: Tensor
    """Token of the largest logit, the first one of equals."""
    l1: Tensor | None = None
    kl: Tensor | None = None


def row_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit of each row and its first index, [r, V] -> [r], [r].

    Plain argmax is not vectorised on CPUs: maxima of groups find the group, argmax runs inside of that group only.
    """
    rows, width = logits.shape
    groups = width // _GROUP
    if logits.device.type != "cpu" or groups < 2:
        return torch.max(logits, dim=-1)
    grouped = logits[:, : groups * _GROUP].view(rows, groups, _GROUP)
    group = grouped.amax(-1).argmax(-1)
    inside = grouped.gather(1, group.view(rows, 1, 1).expand(rows, 1, _GROUP)).squeeze(1)
    value, index = inside.max(-1)
    index = index + group * _GROUP
    if groups * _GROUP < width:
        rest, rest_index = logits[:, groups * _GROUP :].max(-1)
        index = torch.where(rest > value, rest_index + groups * _GROUP, index)
        value = torch.maximum(value, rest)
    return value, index


def softmax_tile(logits: Tensor, out: Tensor, vocab: VocabReduce) -> tuple[Tensor, Tensor]:
    """Softmax of [r, V] logits in the type of ``out``.

    Returns:
        log-sum-exp [r] and argmax token [r]. The former follows from the largest logit, whose probability is never
        below 1/V, so no second pass over the exponentials is needed.
    """
    if logits.shape[1] == 0:
        value = logits.new_full((len(logits),), -torch.inf)
        index, lse = torch.zeros_like(value, dtype=torch.long), value.to(out.dtype)
    else:
        value, index = row_argmax(logits)
        torch.softmax(logits, dim=-1, dtype=out.dtype, out=out)
        lse = value.to(out.dtype) - out.gather(1, index.unsqueeze(1)).squeeze(1).log()
    if vocab.sharded:
        whole = vocab.logsumexp(lse)
        out.mul_((lse - whole).exp().unsqueeze(1))
        lse = whole
    return lse, vocab.argmax(value, index)


def target_tile(logits: Tensor, out: Tensor, vocab: VocabReduce, entropy: bool) -> Tensor | None:
    """Target distribution of [r, V] logits into ``out``; ``<q, log q>`` [r] if ``entropy`` is asked for."""
    lse, _ = softmax_tile(logits, out, vocab)
    return vocab.sum((out * logits).sum(-1)) - lse if entropy else None


def draft_tile(
    logits: Tensor,
    labels: Tensor,
    target: Tensor | None,
    negentropy: Tensor | None,
    terms: TileTerms,
    probs: Tensor,
    vocab: VocabReduce,
) -> TileValues:
    """Term values of corrected logits, and their gradient in place of the logits.

    Args:
        logits: [r, V]; overwritten with G if ``terms.gradient``. labels: [r].
        target: [r, V] q of each row, None if no term reads it. negentropy: [r] <q, log q>, for KL.
        probs: [r, V] scratch in the type of the softmax.
    """
    label_logit = vocab.at_labels(logits, labels).to(probs.dtype)
    cross = None
    if terms.kl and target is not None:
        cross = vocab.sum(torch.mul(target, logits, out=probs).sum(-1))
    lse, predicted = softmax_tile(logits, probs, vocab)
    l1 = difference = None
    if terms.acceptance and target is not None:
        difference = probs - target
        l1 = vocab.sum(difference.abs().sum(-1))
    kl = None if cross is None or negentropy is None else negentropy - cross + lse
    if terms.gradient:
        gradient = logits if logits.dtype == probs.dtype else torch.empty_like(probs)
        common = terms.ce + (terms.kl if cross is not None else 0.0)
        if terms.tv and difference is not None:
            sign = difference.sign_()
            mean_sign = vocab.sum(torch.mul(sign, probs, out=gradient).sum(-1, keepdim=True))
            torch.mul(probs, torch.add(common - terms.tv * mean_sign, sign, alpha=terms.tv, out=sign), out=gradient)
        else:
            torch.mul(probs, common, out=gradient)
        if cross is not None and target is not None:
            gradient.sub_(target, alpha=terms.kl)
        if terms.ce:
            vocab.add_at_labels(gradient, labels, -terms.ce)
        if gradient is not logits:
            logits.copy_(gradient)
    return TileValues(lse - label_logit, predicted, l1, kl)


def base_tile(
    logits: Tensor,
    labels: Tensor,
    weight: float,
    added: Tensor | None,
    gradient: bool,
    probs: Tensor,
    vocab: VocabReduce,
) -> TileValues:
    """Cross entropy of base logits [r, V] times ``weight``; with ``gradient`` they become its gradient plus ``added``.

    ``added`` [r, V] is the gradient of the corrected logits (None: it is zero), since lm_head(h) is a part of both.
    """
    label_logit = vocab.at_labels(logits, labels).to(probs.dtype)
    lse, predicted = softmax_tile(logits, probs, vocab)
    if gradient:
        vocab.add_at_labels(probs.mul_(weight), labels, -weight)
        logits.copy_(probs if added is None else probs.add_(added))
    return TileValues(lse - label_logit, predicted)


def dpace_weights(ce: Tensor, blocks: Tensor, slots: Tensor, num_slots: int, alpha: float) -> Tensor:
    """D-PACE's position weights of whole blocks of rows (arXiv 2605.18810, equations 7 and 8).

    With q_i = exp(-CE_i) of a block's supervised slots and q~_i = (1 - alpha) q_i + alpha, the weight of slot j is
    ``sum_{m >= j} prod_{i <= m} q~_i``. Slots that are not supervised have no row and change nothing.

    Args:
        ce: [m]. blocks: [m], equal values together. slots: [m], ascending in a block, below ``num_slots``.

    Returns:
        [m].
    """
    _, place = torch.unique_consecutive(blocks, return_inverse=True)
    smoothed = alpha + (1 - alpha) * torch.exp(-ce)
    grid = torch.ones(int(place[-1]) + 1, num_slots, dtype=ce.dtype, device=ce.device)
    grid[place, slots] = smoothed
    prefix = grid.cumprod(-1)[place, slots]
    supervised = torch.zeros_like(grid)
    supervised[place, slots] = prefix
    return supervised.flip(-1).cumsum(-1).flip(-1)[place, slots]
