"""Compare what an engine proposed, answered and counted with what this package does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.engines.our_drafts import OurAnswer
from tests.engines.vllm_runner import VllmGeneration

ON_A_BUSY_MACHINE: dict[str, Any] = {"threads": 1, "start_timeout_s": 300.0}
"""llama.cpp's threads wait for each other by spinning: with one a crowded machine is slow, not stuck."""
CONFIDENCE_TOLERANCE = 1e-5

CANDIDATE = re.compile(r"draft candidate +0, pos +(\d+): +(\d+) ")
"""Best candidate of one slot in llama.cpp's debug log."""


@dataclass(frozen=True)
class Compared:
    """How much was compared and found equal."""

    blocks: int
    accepted: int
    """Draft tokens of them that stood."""
    confidences: int = 0
    worst_confidence: float = 0.0


def proposed_blocks(log: Path) -> list[list[int]]:
    """Every block that llama.cpp drafted, from a log at level 5; a slot numbered 0 starts a block."""
    blocks: list[list[int]] = []
    for slot, token in CANDIDATE.findall(log.read_text(encoding="utf-8", errors="replace")):
        if slot == "0":
            blocks.append([])
        blocks[-1].append(int(token))
    return blocks


def our_blocks(answers: Sequence[OurAnswer]) -> list[list[int]]:
    """The blocks of our own decoding, in order."""
    return [list(record.drafted) for answer in answers for record in answer.blocks().values()]


def accepted_of(answers: Sequence[OurAnswer]) -> int:
    """Draft tokens that stood in our own decoding."""
    return sum(record.accepted for answer in answers for record in answer.rounds)


def assert_vllm_blocks_are_ours(
    prompts: Sequence[Sequence[int]], generations: Sequence[VllmGeneration], ours: Sequence[OurAnswer]
) -> Compared:
    """Compare every block that our decoding drafts.

    vLLM also drafts before a last plain step, and behind the end of an answer, where a round's accepted tokens that no
    longer belong to the answer may stand in front.
    """
    blocks = confidences = 0
    worst = 0.0
    assert len(prompts) == len(generations) == len(ours)
    for prompt, generation, answer in zip(prompts, generations, ours):
        assert generation.tokens == answer.tokens
        row = (*prompt, *generation.tokens)
        theirs = {block.position: block for block in generation.blocks if block.position < len(row)}
        assert all(row[block.position] == block.anchor for block in theirs.values())
        assert set(answer.blocks()) <= set(theirs)
        assert all(position >= len(row) - 2 for position in set(theirs) - set(answer.blocks()))
        for position, own in answer.blocks().items():
            block = theirs[position]
            assert block.drafted == own.drafted
            blocks += 1
            assert (block.confidence_logits is None) == (own.confidence_logits is None)
            if block.confidence_logits is not None:
                pair = torch.tensor([block.confidence_logits, own.confidence_logits], dtype=torch.float64).sigmoid()
                worst = max(worst, float((pair[0] - pair[1]).abs().max()))
                confidences += pair.shape[1]
    assert worst < CONFIDENCE_TOLERANCE
    return Compared(blocks, accepted_of(ours), confidences, worst)
