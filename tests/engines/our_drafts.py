"""What this package drafts from a directory, to be compared with an engine's own proposals and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import modelopt_spec as mtsp
from modelopt_spec.decoding.rounds import RoundRecord


@dataclass(frozen=True)
class OurAnswer:
    """One greedy answer of our own speculative decoding; the rounds of an exact engine are the same."""

    tokens: tuple[int, ...]
    rounds: tuple[RoundRecord, ...]

    def blocks(self) -> dict[int, RoundRecord]:
        """Rounds that drafted, by the position of their anchor."""
        return {record.position: record for record in self.rounds if record.drafted}


def load(target_dir: Path, draft_dir: Path) -> nn.Module:
    """Target and drafter in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    mtsp.load_drafter(draft_dir, model, quiet=True)
    model.drafter.float()
    return model


def our_answers(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    num_draft_tokens: int,
    max_new_tokens: int,
    *,
    ignore_eos: bool = False,
) -> list[OurAnswer]:
    """Answer each prompt by itself, with up to ``num_draft_tokens`` draft tokens a round."""
    answers = []
    options = {"eos_token_id": None} if ignore_eos else {}
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        result = mtsp.generate(
            model,
            ids,
            torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            num_draft_tokens=num_draft_tokens,
            do_sample=False,
            **options,
        )
        answers.append(OurAnswer(result.outputs[0], result.rounds))
    return answers


def tau_of(answers: Sequence[OurAnswer]) -> float:
    """Accepted length over the rounds of all answers."""
    records = [record for answer in answers for record in answer.rounds]
    return sum(record.committed for record in records) / len(records)
