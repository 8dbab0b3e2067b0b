"""Draft one block for every row: one backbone pass, base logits of all slots at once, then the head slot by slot.

Only the head's latent and the choice of a token wait for the slot before; everything else of a block is done together.

Legend: R rows, K slots of a block, m draft tokens, D hidden, V vocabulary, T taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_spec.arguments import whole_number
from modelopt_spec.conventions import first_drafting_slot
from modelopt_spec.decoding.pruned_argmax import PrunedArgmax
from modelopt_spec.decoding.randomness import RowRandom
from modelopt_spec.decoding.sampling import Sampling, probabilities
from modelopt_spec.drafter.drafter import Drafter

__all__ = ["BlockDrafter", "DraftBlock", "check_num_draft_tokens"]


@dataclass(frozen=True)
class DraftBlock:
    """m draft tokens of each row and what they were drawn from."""

    tokens: Tensor
    """[R, m] ids of the target's vocabulary."""
    probabilities: Tensor | None
    """[R, m, V] processed distribution that each token was drawn from; None when greedy."""
    confidence: Tensor | None
    """[R, m] confidence logits; None without a confidence head."""
    hidden: Tensor
    """[R, m, D] hidden states of the slots that the tokens come from."""
    prev_ids: Tensor
    """[R, m] token before each draft token: the anchor, then the draft tokens."""


def check_num_draft_tokens(drafter: Drafter, num_draft_tokens: int | None) -> int:
    """The asked number of draft tokens a round, by default all that the trained block gives.

    Raises:
        ConfigError: none, or more than the block was trained for.
    """
    trained = drafter.num_draft_tokens
    if num_draft_tokens is None:
        return trained
    block = f"block of {drafter.config.block_size} slots ({drafter.config.layout})"
    return whole_number(
        "num_draft_tokens", num_draft_tokens, 1, trained, f": the drafter's {block} drafts 1 to {trained} tokens"
    )


class BlockDrafter:
    """A drafter with the cache of one batch: takes features of committed positions, gives blocks."""

    def __init__(
        self, drafter: Drafter, batch_size: int, num_draft_tokens: int, sampling: Sampling, random: RowRandom
    ) -> None:
        self.drafter = drafter
        self.num_draft_tokens = num_draft_tokens
        self.sampling = sampling
        self.random = random
        self.cache = drafter.new_cache(batch_size)
        # slots that the run leaves out stand at the block's end: a shorter block, as engines build it
        self.num_slots = drafter.config.block_size - (drafter.num_draft_tokens - num_draft_tokens)
        self.first_slot = first_drafting_slot(drafter.config.layout)
        self._d2t: Tensor | None = None
        if drafter.config.draft_vocab_size is not None:
            assert isinstance(drafter.d2t, Tensor)
            self._d2t = drafter.d2t
        self._pruned: PrunedArgmax | None = None
        if sampling.greedy and drafter.head is not None and PrunedArgmax.pays(drafter.head.out, batch_size):
            self._pruned = PrunedArgmax(drafter.head.out.weight)

    def extend(self, taps: Tensor, counts: Tensor | None = None) -> None:
        """Append target features [R, n, T*D] of newly committed positions; row r takes its first counts[r]."""
        self.drafter.extend(self.cache, taps, counts)

    def select(self, rows: Tensor) -> None:
        """Keep these rows only."""
        self.cache.select(rows)

    def draft(self, anchors: Tensor, rows: Sequence[int], limits: Sequence[int]) -> DraftBlock:
        """Draft m tokens behind the anchors [R].

        Args:
            anchors: [R] last committed token of each row.
            rows: [R] the rows' indices in the source of chance.
            limits: [R] draft tokens that a row can use; those behind them are padding.
        """
        hidden, confidence_hidden, base = self.backbone(anchors)
        tokens, drawn_from = self.sequential(anchors, hidden, base, rows, limits)
        prev_ids = torch.cat([anchors.unsqueeze(1), tokens[:, :-1]], dim=1)
        confidence = self.drafter.confidence(confidence_hidden, prev_ids)
        return DraftBlock(tokens, drawn_from, confidence, hidden, prev_ids)

    def backbone(self, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The parallel part: hidden and confidence hidden [R, m, D], base logits [R, m, V] of the drafting slots."""
        ids = anchors.new_full((anchors.shape[0], self.num_slots), self.drafter.mask_token_id)
        ids[:, 0] = anchors
        hidden, confidence_hidden = self.drafter.decode(self.cache, ids)
        drafting = slice(self.first_slot, self.first_slot + self.num_draft_tokens)
        hidden, confidence_hidden = hidden[:, drafting], confidence_hidden[:, drafting]
        base = self.drafter.base_logits(hidden)
        if self._pruned is not None:
            self._pruned.start(base[0])
        return hidden, confidence_hidden, base

    def sequential(
        self, anchors: Tensor, hidden: Tensor, base: Tensor, rows: Sequence[int], limits: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """The part that waits for each token: [R, m] tokens and, when sampling, [R, m, V] what they were drawn from."""
        head = self.drafter.head
        if head is None and self.sampling.greedy:
            return self._to_target(base.argmax(-1)), None
        state = None if head is None else head.initial_state(hidden[:, 0])
        previous, tokens, distributions = anchors, [], []
        for k in range(self.num_draft_tokens):
            latent = None
            if head is not None:
                latent, state = head.step(previous, hidden[:, k], state, self.first_slot + k)
            if self.sampling.greedy:
                previous = self._to_target(self._best(k, base[:, k], latent))
            else:
                logits = base[:, k] if latent is None or head is None else base[:, k] + head.out(latent)
                distribution = self._spread(probabilities(logits, self.sampling))
                distributions.append(distribution)
                previous = self.random.categorical(distribution, rows, [limit > k for limit in limits])
            tokens.append(previous)
        return torch.stack(tokens, dim=1), torch.stack(distributions, dim=1) if distributions else None

    def full_distribution(self, block: DraftBlock, sampling: Sampling) -> Tensor:
        """[R, m, V] processed distribution of every slot along the drafted path, whatever chose the tokens."""
        head = self.drafter.head
        logits = self.drafter.base_logits(block.hidden)
        if head is not None:
            state = head.initial_state(block.hidden[:, 0])
            latents = []
            for k in range(block.tokens.shape[1]):
                latent, state = head.step(block.prev_ids[:, k], block.hidden[:, k], state, self.first_slot + k)
                latents.append(latent)
            logits = logits + head.out(torch.stack(latents, dim=1))
        return self._spread(probabilities(logits, sampling))

    def _best(self, k: int, base: Tensor, latent: Tensor | None) -> Tensor:
        """Argmax of the corrected logits of the k-th draft token: base [R, V], latent [R, rank] -> [R]."""
        head = self.drafter.head
        if latent is None or head is None:
            return base.argmax(-1)
        if self._pruned is not None:
            return self._pruned.best(k, latent[0])
        return (base + head.out(latent)).argmax(-1)

    def _to_target(self, ids: Tensor) -> Tensor:
        """Ids of a reduced draft vocabulary as the target's."""
        return ids if self._d2t is None else ids + self._d2t[ids]

    def _spread(self, distribution: Tensor) -> Tensor:
        """[..., V_draft] over a reduced vocabulary -> [..., V]."""
        if self._d2t is None:
            return distribution
        ids = torch.arange(len(self._d2t), device=self._d2t.device) + self._d2t
        full = distribution.new_zeros((*distribution.shape[:-1], self.drafter.config.vocab_size or 0))
        return full.index_copy_(-1, ids, distribution)
