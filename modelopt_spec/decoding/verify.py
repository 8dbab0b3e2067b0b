"""Which draft tokens stand and which token follows them, so that the output is distributed as the target's own.

Greedy: a draft token stands while it is the target's argmax. Sampled (Leviathan et al. 2023, algorithm 1; Chen et al.
2023): token x drawn from q stands with probability min(1, p(x) / q(x)); at the first that falls the next token comes
from the residual max(p - q, 0) / sum, and behind a whole block from p.

Legend: R rows, n draft tokens sent to the target, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_spec.decoding.randomness import RowRandom

__all__ = ["Verdict", "verify_greedy", "verify_sampled"]


@dataclass(frozen=True)
class Verdict:
    """What one verification decided."""

    accepted: Tensor
    """[R] draft tokens that stand."""
    next_token: Tensor
    """[R] the token behind them, chosen by the target: it becomes the next anchor."""

    def committed(self, draft_tokens: Tensor) -> Tensor:
        """[R, n+1] accepted draft tokens, then the next token; entries behind it are meaningless."""
        width = draft_tokens.shape[1]
        tokens = torch.cat([draft_tokens, self.next_token.unsqueeze(1)], dim=1)
        return tokens.scatter(1, self.accepted.unsqueeze(1).clamp(max=width), self.next_token.unsqueeze(1))


def _leading(stands: Tensor, lengths: Sequence[int]) -> Tensor:
    """[R, n] bool -> [R] number of leading true entries among the first lengths[r]."""
    if lengths and min(lengths) < stands.shape[1]:
        limit = torch.tensor(lengths, device=stands.device).unsqueeze(1)
        stands = stands & (torch.arange(stands.shape[1], device=stands.device) < limit)
    return stands.long().cumprod(1).sum(1)


def verify_greedy(logits: Tensor, draft_tokens: Tensor, lengths: Sequence[int]) -> Verdict:
    """Keep what the target's argmax confirms.

    Args:
        logits: [R, n+1, V] the target's, at the anchor and at each draft token.
        draft_tokens: [R, n].
        lengths: [R] draft tokens of each row that count, at most n.
    """
    best = logits.argmax(-1)
    accepted = _leading(best[:, :-1] == draft_tokens, lengths)
    return Verdict(accepted, best.gather(1, accepted.unsqueeze(1)).squeeze(1))


def verify_sampled(
    p: Tensor,
    q: Tensor,
    draft_tokens: Tensor,
    random: RowRandom,
    rows: Sequence[int],
    lengths: Sequence[int],
) -> Verdict:
    """Exact speculative sampling.

    Args:
        p: [R, n+1, V] processed distributions of the target.
        q: [R, n, V] those that the draft tokens came from.
        draft_tokens: [R, n].
        random: the source of chance.
        rows: [R] the rows' indices in it.
        lengths: [R] draft tokens of each row that count, at most n; behind them the row's next token comes from p.
    """
    count = draft_tokens.shape[1]
    if count:
        chosen = draft_tokens.unsqueeze(-1)
        p_token, q_token = p[:, :-1].gather(-1, chosen).squeeze(-1), q.gather(-1, chosen).squeeze(-1)
        accepted = _leading(random.accept((p_token / q_token).clamp(max=1), rows, lengths), lengths)
    else:
        accepted = torch.zeros(p.shape[0], dtype=torch.long, device=p.device)
    at = accepted.view(-1, 1, 1)
    target = p.take_along_dim(at, dim=1).squeeze(1)
    if not count:
        return Verdict(accepted, random.categorical(target, rows))
    draft = q.take_along_dim(at.clamp(max=count - 1), dim=1).squeeze(1)
    rejected = accepted < torch.tensor(lengths, device=accepted.device)
    residual = (target - draft).clamp(min=0)
    # p and q may agree up to rounding; a rejection then has probability of rounding size and p itself is as good
    use = rejected & (residual.sum(-1) > 0)
    return Verdict(accepted, random.categorical(torch.where(use.unsqueeze(1), residual, target), rows))
