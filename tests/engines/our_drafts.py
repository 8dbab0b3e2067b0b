"""What this package drafts from a directory, to be compared with an engine's own proposals and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import modelopt_spec as mtsp
from modelopt_spec.decoding.draft import BlockDrafter
from modelopt_spec.decoding.randomness import RowRandom
from modelopt_spec.decoding.sampling import GREEDY
from modelopt_spec.targets.base import open_target


@dataclass(frozen=True)
class OurBlock:
    """One block of our drafter."""

    drafted: tuple[int, ...]
    confidence_logits: tuple[float, ...] | None


def load(target_dir: Path, draft_dir: Path) -> nn.Module:
    """Target and drafter in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    mtsp.load_drafter(draft_dir, model, quiet=True)
    model.drafter.float()
    return model


@torch.no_grad()
def our_blocks(model: nn.Module, row: Sequence[int], anchors: Sequence[int], num_draft_tokens: int) -> list[OurBlock]:
    """The greedy blocks behind each anchor position of a row of token ids."""
    drafter = model.drafter
    taps = open_target(model).features(torch.tensor([list(row)]), drafter.config.target_layer_ids).taps
    blocks = []
    for position in anchors:
        draft = BlockDrafter(drafter, 1, num_draft_tokens, GREEDY, RowRandom(1, seed=0))
        draft.extend(taps[:, :position])
        block = draft.draft(torch.tensor([row[position]]), [0])
        confidence = None if block.confidence is None else tuple(block.confidence[0].tolist())
        blocks.append(OurBlock(tuple(block.tokens[0].tolist()), confidence))
    return blocks


def our_answers(
    model: nn.Module, prompts: Sequence[Sequence[int]], num_draft_tokens: int, max_new_tokens: int
) -> tuple[list[tuple[int, ...]], float]:
    """Our own speculative greedy answers and their accepted length, rounds of all prompts pooled."""
    outputs, committed, rounds = [], 0, 0
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        result = mtsp.generate(
            model, ids, torch.ones_like(ids), max_new_tokens=max_new_tokens, num_draft_tokens=num_draft_tokens
        )
        outputs.append(result.outputs[0])
        committed += sum(record.committed for record in result.rounds)
        rounds += len(result.rounds)
    return outputs, committed / rounds
