"""The rounds of one batch: draft, verify, commit, until every row has ended.

The host waits for the device once a round, when it reads which tokens were committed.

Legend: B rows, R rows still running, S prompt length, n draft tokens sent to the target, m draft tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from modelopt_spec.decoding.draft import BlockDrafter, DraftBlock
from modelopt_spec.decoding.rounds import RoundRecord
from modelopt_spec.decoding.sampling import Sampling, probabilities
from modelopt_spec.decoding.stopping import StopRules
from modelopt_spec.decoding.target_session import TargetSession
from modelopt_spec.decoding.verify import Verdict, verify_greedy, verify_sampled
from modelopt_spec.targets.hf import HFTarget

__all__ = ["DecodeLoop", "Timings"]


@dataclass
class Timings:
    """Wall seconds by what they were spent on; on an accelerator only ``total`` waits for the work itself."""

    prefill: float = 0.0
    draft: float = 0.0
    """Draft passes: blocks, and projecting the features of committed positions."""
    target: float = 0.0
    """Target passes over anchors and drafts, logits included."""
    records: float = 0.0
    """Probabilities that only the records need."""
    total: float = 0.0

    @property
    def loop(self) -> float:
        """Everything else: accepting, cutting, bookkeeping."""
        return self.total - self.prefill - self.draft - self.target - self.records

    @property
    def decoding(self) -> float:
        """Seconds of the rounds themselves."""
        return self.draft + self.target + self.loop


@dataclass(frozen=True)
class _Round:
    """What a round leaves behind; tensors are read when the batch is done."""

    rows: list[int]
    numbers: list[int]
    positions: list[int]
    verified: list[int]
    accepted: list[int]
    committed: list[int]
    block: DraftBlock | None
    """Without its distributions, which are R m V numbers."""
    accept_prob: Tensor | None
    draft_prob: Tensor | None

    def records(self, temperature: float) -> list[RoundRecord]:
        """One record a row."""
        drafted = [[] for _ in self.rows] if self.block is None else self.block.tokens.tolist()
        confidence = None if self.block is None or self.block.confidence is None else self.block.confidence.tolist()
        accept_prob = None if self.accept_prob is None else self.accept_prob.tolist()
        draft_prob = None if self.draft_prob is None else self.draft_prob.tolist()

        def probabilities_of(values: list[list[float]] | None, i: int) -> tuple[float, ...] | None:
            return None if values is None else tuple(values[i][: self.verified[i]])

        return [
            RoundRecord(
                prompt=row,
                round=self.numbers[i],
                position=self.positions[i],
                drafted=tuple(drafted[i]),
                verified=self.verified[i],
                accepted=self.accepted[i],
                committed=self.committed[i],
                temperature=temperature,
                context_tokens=self.positions[i],
                confidence_logits=None if confidence is None else tuple(confidence[i]),
                accept_prob=probabilities_of(accept_prob, i),
                draft_prob=probabilities_of(draft_prob, i),
            )
            for i, row in enumerate(self.rows)
        ]


class DecodeLoop:
    """One batch from its prompts to its ends."""

    def __init__(
        self,
        target: HFTarget,
        session: TargetSession,
        drafting: BlockDrafter,
        prompts: list[list[int]],
        stops: StopRules,
        *,
        scheduler: Any = None,
        on_tokens: Callable[[int, list[int]], None] | None = None,
        keep_rounds: bool = True,
        keep_probabilities: bool = False,
    ) -> None:
        self.outputs: list[list[int]] = [[] for _ in prompts]
        self.stopped = ["length"] * len(prompts)
        self.timings = Timings()
        self._target, self._session, self._drafting = target, session, drafting
        self._prompts, self._stops = prompts, stops
        self._scheduler, self._on_tokens = scheduler, on_tokens
        self._keep_rounds, self._keep_probabilities = keep_rounds, keep_probabilities
        self._sampling, self._random = drafting.sampling, drafting.random
        self._rows = list(range(len(prompts)))
        self._rounds: list[_Round] = []
        self._rounds_of = [0] * len(prompts)
        self._anchors: Tensor

    def run(self) -> None:
        """Decode until every row has ended."""
        start = time.perf_counter()
        self._prefill()
        while self._rows:
            self._round()
        self.timings.total = time.perf_counter() - start

    def records(self) -> tuple[RoundRecord, ...]:
        """All rounds, in the order in which they ran."""
        return tuple(record for item in self._rounds for record in item.records(self._sampling.temperature))

    def _prefill(self) -> None:
        """Run the prompts; the target gives every row's first token, which becomes its anchor."""
        start = time.perf_counter()
        lengths = [len(prompt) for prompt in self._prompts]
        width, device = max(lengths), self._target.device
        ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in self._prompts], device=device)
        ends = torch.tensor(lengths, device=device)
        passed = self._session.prefill(ids, lengths)
        logits = self._target.logits(passed.hidden[torch.arange(len(lengths), device=device), ends - 1])
        if self._sampling.greedy:
            anchors = logits.argmax(-1)
        else:
            anchors = self._random.categorical(probabilities(logits, self._sampling), self._rows)
        new = [[token] for token in anchors.tolist()]
        self.timings.prefill = time.perf_counter() - start
        running, _ = self._commit(new)
        self._settle(running, passed.taps, ends, lengths, anchors)

    def _round(self) -> None:
        """Draft, verify, commit."""
        start = time.perf_counter()
        positions = [len(self._prompts[row]) + len(self.outputs[row]) - 1 for row in self._rows]
        most = [min(self._stops.room(self.outputs[row]) - 1, self._drafting.num_draft_tokens) for row in self._rows]
        block = None
        if max(most) > 0 and getattr(self._scheduler, "speculates", True):
            block = self._drafting.draft(self._anchors, self._rows, most)
        self.timings.draft += time.perf_counter() - start

        lengths = self._lengths(block, most, positions)
        width = max(lengths)
        ids = self._anchors.unsqueeze(1)
        if block is not None and width:
            ids = torch.cat([ids, block.tokens[:, :width]], dim=1)
        start = time.perf_counter()
        passed = self._session.verify(ids)
        logits = self._target.logits(passed.hidden)
        self.timings.target += time.perf_counter() - start

        sent = ids[:, 1:]
        verdict, p = self._verdict(logits, block, sent, lengths)
        table = torch.cat([verdict.committed(sent), verdict.accepted.unsqueeze(1)], dim=1).tolist()
        accepted = [row[-1] for row in table]
        running, kept = self._commit([row[: row[-1] + 1] for row in table])
        if self._keep_rounds:
            self._record(positions, block, lengths, accepted, kept, logits, p)
        counts, host = verdict.accepted + 1, [count + 1 for count in accepted]
        if running:
            self._session.keep(counts, host)
        self._settle(running, passed.taps, counts, host, verdict.next_token)

    def _lengths(self, block: DraftBlock | None, most: list[int], positions: list[int]) -> list[int]:
        """Draft tokens of each row that go to the target, at most ``most``."""
        if block is None:
            return [0] * len(most)
        if self._scheduler is None:
            return most
        chosen = self._scheduler.lengths(
            None if block.confidence is None else block.confidence.float(),
            request_ids=self._rows,
            capacity=torch.tensor(most),
            context=sum(positions) / len(positions),
        )
        return [min(int(length), limit) for length, limit in zip(chosen.tolist(), most, strict=True)]

    def _verdict(
        self, logits: Tensor, block: DraftBlock | None, sent: Tensor, lengths: list[int]
    ) -> tuple[Verdict, Tensor | None]:
        """The decision and, when sampling, the target's processed distributions [R, n+1, V]."""
        width = sent.shape[1]
        if self._sampling.greedy:
            return verify_greedy(logits, sent, lengths), None
        p = probabilities(logits, self._sampling)
        q = p[:, :0] if block is None or block.probabilities is None else block.probabilities[:, :width]
        return verify_sampled(p, q, sent, self._random, self._rows, lengths), p

    def _commit(self, new: list[list[int]]) -> tuple[list[int], list[int]]:
        """Append tokens to the outputs: indices of the rows that go on, and how many tokens each row kept."""
        running, kept = [], []
        for index, (row, tokens) in enumerate(zip(self._rows, new, strict=True)):
            count, reason = self._stops.cut(self._prompts[row], self.outputs[row], tokens)
            tokens = tokens[:count]
            self.outputs[row] += tokens
            kept.append(count)
            if reason is None:
                running.append(index)
            else:
                self.stopped[row] = reason
            if self._on_tokens is not None:
                self._on_tokens(row, tokens)
        return running, kept

    def _settle(
        self, running: list[int], taps: Tensor, counts: Tensor, host_counts: list[int], anchors: Tensor
    ) -> None:
        """Let ended rows go and give the drafter the features of the positions just committed."""
        if len(running) < len(self._rows):
            if hasattr(self._scheduler, "finish"):
                ended = set(range(len(self._rows))) - set(running)
                self._scheduler.finish([self._rows[index] for index in sorted(ended)])
            self._rows = [self._rows[index] for index in running]
            if not running:
                return
            index = torch.tensor(running, device=anchors.device)
            taps, counts, anchors = taps[index], counts[index], anchors[index]
            host_counts = [host_counts[i] for i in running]
            self._session.select(running)
            self._drafting.select(index)
        self._anchors = anchors
        start = time.perf_counter()
        width = max(host_counts)
        self._drafting.extend(taps[:, :width], None if min(host_counts) == width else counts)
        self.timings.draft += time.perf_counter() - start

    def _record(
        self,
        positions: list[int],
        block: DraftBlock | None,
        lengths: list[int],
        accepted: list[int],
        kept: list[int],
        logits: Tensor,
        p: Tensor | None,
    ) -> None:
        """Note the round. Draft tokens behind an end of text count neither as verified nor as accepted."""
        start = time.perf_counter()
        accept_prob = draft_prob = None
        if self._keep_probabilities and block is not None and max(lengths):
            accept_prob, draft_prob = self._probabilities(block, max(lengths), logits, p)
        ended = [count <= stood for count, stood in zip(kept, accepted, strict=True)]
        self._rounds.append(
            _Round(
                rows=list(self._rows),
                numbers=[self._rounds_of[row] for row in self._rows],
                positions=positions,
                verified=[k if end else n for k, n, end in zip(kept, lengths, ended, strict=True)],
                accepted=[k if end else n for k, n, end in zip(kept, accepted, ended, strict=True)],
                committed=kept,
                block=None if block is None else replace(block, probabilities=None),
                accept_prob=accept_prob,
                draft_prob=draft_prob,
            )
        )
        for row in self._rows:
            self._rounds_of[row] += 1
        self.timings.records += time.perf_counter() - start

    def _probabilities(self, block: DraftBlock, width: int, logits: Tensor, p: Tensor | None) -> tuple[Tensor, Tensor]:
        """Chance that a token drawn from the draft stands, and the draft's probability of its token, [R, n] each."""
        sampling = Sampling(temperature=1.0) if self._sampling.greedy else self._sampling
        target = probabilities(logits[:, :width], sampling) if p is None else p[:, :width]
        q = self._drafting.full_distribution(block, sampling) if block.probabilities is None else block.probabilities
        q = q[:, :width]
        own = q.gather(-1, block.tokens[:, :width].unsqueeze(-1)).squeeze(-1)
        return torch.minimum(target, q).sum(-1), own
