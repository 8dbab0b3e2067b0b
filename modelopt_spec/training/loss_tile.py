"""The maths of the loss on a chunk of rows: from logits to term values and to the gradient of the logits.

For one row with draft logits x, label y, draft distribution p and target distribution q:

    CE   = lse(x) - x_y                         dCE/dx  = p - onehot(y)
    L1   = sum |p - q|                          dL1/dx  = p * (s - <s, p>),  s = sign(p - q)
    KL   = <q, log q> - <q, x> + lse(x)         dKL/dx  = p - q
    acceptance = 1 - L1 / 2

(the gradients by hand from the softmax Jacobian diag(p) - p p^T). Their weighted sum is

    G = p * (ce + kl - tv <s, p> + tv s) - kl q - ce onehot(y)

The weight of the row is left out here: it is applied to h and u, which are far narrower than V.
The V-wide passes run over tiles of a few rows, which stay in cache from softmax to G; what is one number a row is
done once for the chunk. lse(x) follows from the largest logit and its probability, which is never below 1/V.
Every reduction over the vocabulary goes through :class:`VocabReduce`.

Legend: m rows of a chunk, r rows of a tile, C rows of the target buffer, V vocabulary (of this rank).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_spec.training.vocab_reduce import VocabReduce

__all__ = ["DraftTerms", "RowValues", "TileScratch", "base_rows", "dpace_weights", "draft_rows", "target_rows"]

_GROUP = 1024


@dataclass(frozen=True)
class DraftTerms:
    """Which terms the corrected logits carry, and what else is asked of them."""

    ce: float
    tv: float
    kl: float
    acceptance: bool
    gradient: bool


@dataclass(frozen=True)
class RowValues:
    """Values of a chunk's rows, [m] each."""

    ce: Tensor
    predicted: Tensor
    """Token of the largest logit, the first one of equals."""
    l1: Tensor | None = None
    kl: Tensor | None = None


class TileScratch:
    """Memory of one tile, [r, V] each, in the type of the softmax.

    A tile of logits in the same type serves as the third one: it is free between the softmax and the gradient.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        logits_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
        with_target: bool,
    ) -> None:
        def make(needed: bool) -> Tensor:
            return torch.empty(rows if needed else 0, width, dtype=dtype, device=device)

        self.rows, self.dtype = rows, dtype
        self.probs, self.target = make(True), make(with_target)
        self._product = make(with_target and logits_dtype != dtype)

    def product(self, logits: Tensor) -> Tensor:
        """Where products of the tile of ``logits`` may go; writing there may destroy the logits."""
        return logits if logits.dtype == self.dtype else self._product[: len(logits)]


def row_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit of each row and its first index, [m, V] -> [m], [m].

    Plain argmax is not vectorised on CPUs: maxima of groups find the group, argmax runs inside of that group only.
    """
    rows, width = logits.shape
    if width == 0:
        return logits.new_full((rows,), -torch.inf), torch.zeros(rows, dtype=torch.long, device=logits.device)
    groups = width // _GROUP
    if logits.device.type != "cpu" or groups < 2:
        return torch.max(logits, dim=-1)
    grouped = logits[:, : groups * _GROUP].unflatten(1, (groups, _GROUP))
    group = grouped.amax(-1).argmax(-1)
    inside = grouped.gather(1, group.view(rows, 1, 1).expand(rows, 1, _GROUP)).squeeze(1)
    value, index = inside.max(-1)
    index = index + group * _GROUP
    if groups * _GROUP < width:
        rest, rest_index = logits[:, groups * _GROUP :].max(-1)
        index = torch.where(rest > value, rest_index + groups * _GROUP, index)
        value = torch.maximum(value, rest)
    return value, index


class _Softmax:
    """Softmax of a chunk's logits, tile by tile, and their log-sum-exp.

    ``lse`` [m] is complete after the last tile.
    """

    def __init__(self, logits: Tensor, dtype: torch.dtype, vocab: VocabReduce, rows: int) -> None:
        self.vocab = vocab
        value, index = row_argmax(logits)
        self.predicted = vocab.argmax(value, index)
        self._value = value.to(dtype)
        self._values, self._indices = self._value.split(rows), index.unsqueeze(1).split(rows)
        self._top_prob = torch.ones(len(logits), 1, dtype=dtype, device=logits.device)
        self._top_probs = self._top_prob.split(rows)
        self._whole: list[Tensor] = []

    def tile(self, number: int, logits: Tensor, out: Tensor) -> None:
        """Probabilities of the tile's logits [r, V] into ``out``."""
        torch.softmax(logits, dim=-1, dtype=out.dtype, out=out)
        if out.shape[1]:
            torch.gather(out, 1, self._indices[number], out=self._top_probs[number])
        if self.vocab.sharded:
            local = self._values[number] - self._top_probs[number].squeeze(1).log()
            self._whole.append(self.vocab.logsumexp(local))
            out.mul_((local - self._whole[-1]).exp().unsqueeze(1))

    @property
    def lse(self) -> Tensor:
        """[m], over the whole vocabulary."""
        return torch.cat(self._whole) if self._whole else self._value - self._top_prob.squeeze(1).log()


def target_rows(
    logits: Tensor, out: Tensor, scratch: TileScratch, vocab: VocabReduce, negentropy: Tensor | None
) -> None:
    """Target distributions q of logits [n, V] into ``out`` [n, V], which may be the same memory.

    ``negentropy`` [n] is filled with <q, log q> if it is given.
    """
    softmax = _Softmax(logits, out.dtype, vocab, scratch.rows) if vocab.sharded or negentropy is not None else None
    dots = None if negentropy is None else negentropy.split(scratch.rows)
    for number, (x, q) in enumerate(zip(logits.split(scratch.rows), out.split(scratch.rows), strict=True)):
        probs = scratch.probs[: len(x)]
        if softmax is None:
            torch.softmax(x, dim=-1, dtype=probs.dtype, out=probs)
        else:
            softmax.tile(number, x, probs)
        if dots is not None:
            torch.sum(torch.mul(probs, x, out=scratch.product(x)), -1, out=dots[number])
        q.copy_(probs)
    if negentropy is not None and softmax is not None:
        negentropy.copy_(vocab.sum(negentropy) - softmax.lse)


def draft_rows(
    logits: Tensor,
    labels: Tensor,
    target: Tensor | None,
    index: Tensor,
    negentropy: Tensor | None,
    terms: DraftTerms,
    scratch: TileScratch,
    vocab: VocabReduce,
) -> RowValues:
    """Term values of corrected logits, and their gradient in place of the logits.

    Args:
        logits: [m, V]; overwritten with G if ``terms.gradient``.
        labels: [m].
        target: [C, V] target distributions; None if no term reads them.
        index: [m] row of ``target`` for each row.
        negentropy: [C] <q, log q>, needed by KL.
        terms: weights of the terms.
        scratch: memory of a tile.
        vocab: reductions over the vocabulary.
    """
    rows, dtype = scratch.rows, scratch.dtype
    label_logit = vocab.at_labels(logits, labels).to(dtype)
    softmax = _Softmax(logits, dtype, vocab, rows)
    l1, cross = (torch.empty(len(logits), dtype=dtype, device=logits.device) for _ in range(2))
    l1s, crosses, indices = l1.split(rows), cross.split(rows), index.split(rows)
    with_kl, with_tv = bool(terms.kl), bool(terms.tv)
    common = terms.ce + terms.kl
    for number, x in enumerate(logits.split(rows)):
        probs, q, product = scratch.probs[: len(x)], scratch.target[: len(x)], scratch.product(x)
        if target is not None:
            torch.index_select(target, 0, indices[number], out=q)
        if with_kl:
            torch.sum(torch.mul(q, x, out=probs), -1, out=crosses[number])
        softmax.tile(number, x, probs)
        if terms.acceptance:
            difference = torch.sub(probs, q, out=q)
            torch.sum(torch.abs(difference, out=product), -1, out=l1s[number])
        if not terms.gradient:
            continue
        gradient = probs if with_kl else x
        if with_tv:
            sign = difference.sign_()
            mean_sign = vocab.sum(torch.sum(torch.mul(sign, probs, out=product), -1, keepdim=True))
            factor = torch.add(common - terms.tv * mean_sign, sign, alpha=terms.tv, out=sign)
            torch.mul(probs, factor, out=gradient)
        else:
            torch.mul(probs, common, out=gradient)
        if with_kl and target is not None:
            if terms.acceptance:
                torch.index_select(target, 0, indices[number], out=q)
            torch.sub(gradient, q, alpha=terms.kl, out=x)
    if terms.gradient and terms.ce:
        vocab.add_at_labels(logits, labels, -terms.ce)
    lse = softmax.lse
    return RowValues(
        ce=lse - label_logit,
        predicted=softmax.predicted,
        l1=vocab.sum(l1) if terms.acceptance else None,
        kl=negentropy[index] - vocab.sum(cross) + lse if with_kl and negentropy is not None else None,
    )


def base_rows(
    logits: Tensor,
    labels: Tensor,
    weight: float,
    added: Tensor | None,
    gradient: bool,
    scratch: TileScratch,
    vocab: VocabReduce,
) -> RowValues:
    """Cross entropy of base logits [m, V] times ``weight``; with ``gradient`` they become its gradient plus ``added``.

    ``added`` [m, V] is the gradient of the corrected logits (None: it is zero), since lm_head(h) is a part of both.
    """
    rows = scratch.rows
    label_logit = vocab.at_labels(logits, labels).to(scratch.dtype)
    softmax = _Softmax(logits, scratch.dtype, vocab, rows)
    others = None if added is None else added.split(rows)
    for number, x in enumerate(logits.split(rows)):
        probs = scratch.probs[: len(x)]
        softmax.tile(number, x, probs)
        if gradient and others is None:
            torch.mul(probs, weight, out=x)
        elif gradient and others is not None:
            torch.add(others[number], probs, alpha=weight, out=x)
    if gradient:
        vocab.add_at_labels(logits, labels, -weight)
    return RowValues(softmax.lse - label_logit, softmax.predicted)


def dpace_weights(ce: Tensor, blocks: Tensor, slots: Tensor, num_slots: int, alpha: float) -> Tensor:
    """D-PACE's position weights of whole blocks of rows, [m] (arXiv 2605.18810, equations 7 and 8).

    With q_i = exp(-CE_i) of a block's supervised slots and q~_i = (1 - alpha) q_i + alpha, the weight of slot j is
    ``sum_{m >= j} prod_{i <= m} q~_i``. Slots that are not supervised have no row and change nothing.

    ``ce``, ``blocks`` (equal values together) and ``slots`` (ascending in a block, below ``num_slots``) are [m].
    """
    _, place = torch.unique_consecutive(blocks, return_inverse=True)
    smoothed = alpha + (1 - alpha) * torch.exp(-ce)
    grid = torch.ones(int(place[-1]) + 1, num_slots, dtype=ce.dtype, device=ce.device)
    grid[place, slots] = smoothed
    prefix = grid.cumprod(-1)[place, slots]
    supervised = torch.zeros_like(grid)
    supervised[place, slots] = prefix
    return supervised.flip(-1).cumsum(-1).flip(-1)[place, slots]
