"""What llama.cpp's ``timings`` say about drafting, in the words of this package.

llama.cpp reports two sums a request: ``draft_n``, the draft tokens that it verified, and ``draft_n_accepted``. The
number of rounds is not among them, and neither sum may be divided by K blindly:

* The first token of an answer comes from the prompt's own forward pass; it belongs to no round.
* A round with ``r`` tokens still allowed drafts ``min(K, r - 1)``; with one token left it is a plain step.
* A round keeps its accepted drafts and one bonus token. After an end-of-text token the rest of that round is dropped
  from the answer, but still counted in ``draft_n_accepted``.

So an answer of G tokens that ran into its limit took exactly ``G - 1 - accepted`` rounds (a last plain step is a round
that commits one token, as in this package's own decoding). An answer that ended by itself at least K tokens before
its limit drafted K tokens in every round: ``draft_n / K`` rounds. In between, only the server's own count tells.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from modelopt_spec.errors import SpecError

__all__ = ["AcceptedLength", "Generation", "rounds_from_timings", "tau_from_timings"]


@dataclass(frozen=True)
class Generation:
    """One answer of the server."""

    tokens: tuple[int, ...]
    """Generated token ids, the end-of-text token included."""
    stopped_at_eos: bool
    """False when the answer reached ``max_new_tokens``."""
    max_new_tokens: int
    draft_n: int
    """Draft tokens that were verified; 0 without a draft."""
    draft_n_accepted: int
    predicted_ms: float
    """Wall time of everything after the first token, in milliseconds."""
    prompt_ms: float
    verified_rounds: int | None = None
    """The server's own count of rounds that verified a draft, where it was read (a last plain step is not in it)."""


@dataclass(frozen=True)
class AcceptedLength:
    """Accepted length over several answers: all tokens but the first of each, over all rounds."""

    committed: int
    rounds: int

    @property
    def tau(self) -> float:
        """Tokens committed per round, bonus token included; 1.0 where no draft was ever accepted."""
        return self.committed / self.rounds


def rounds_from_timings(generation: Generation, num_draft_tokens: int) -> int:
    """Rounds of one answer of a server that drafts up to ``num_draft_tokens`` (K) tokens, plain steps included.

    Raises:
        SpecError: the answer ended by itself within K tokens of its limit and the server's own count is unknown, or
            the numbers contradict each other.
    """
    count = len(generation.tokens)
    if count == 0:
        return 0
    if not generation.stopped_at_eos or count == generation.max_new_tokens:
        rounds = count - 1 - generation.draft_n_accepted
    elif count <= generation.max_new_tokens - num_draft_tokens:
        rounds, rest = divmod(generation.draft_n, num_draft_tokens)
        if rest:
            raise SpecError(
                f"draft_n is {generation.draft_n}, no multiple of K={num_draft_tokens}: drafts were shortened, for "
                "example by a confidence threshold or by a K above the draft's block size"
            )
    elif generation.verified_rounds is not None:
        rounds = generation.verified_rounds
    else:
        raise SpecError(
            f"the answer ended {generation.max_new_tokens - count} tokens before its limit of "
            f"{generation.max_new_tokens}: its rounds cannot be told from draft_n; allow at least "
            f"{count + num_draft_tokens} tokens, or read the server's own count"
        )
    if not 0 <= rounds <= max(count - 1, 0):
        raise SpecError(f"{generation} would have taken {rounds} rounds of K={num_draft_tokens}: timings contradict")
    return rounds


def tau_from_timings(generations: Iterable[Generation], num_draft_tokens: int) -> AcceptedLength:
    """Accepted length of several answers, to be compared with ``mtsp evaluate`` on the same prompts and K."""
    committed = rounds = 0
    for generation in generations:
        committed += max(len(generation.tokens) - 1, 0)
        rounds += rounds_from_timings(generation, num_draft_tokens)
    if rounds == 0:
        raise SpecError("no answer has a token after its first: there is no round to measure")
    return AcceptedLength(committed, rounds)
