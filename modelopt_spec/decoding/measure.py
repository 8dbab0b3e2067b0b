"""Answer prompts with the drafter's help, batch by batch and turn by turn, and keep every round.

Each batch and turn has a sampling seed of its own, so a prompt's rounds do not depend on what ran before it.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_spec.data.chat import ChatRenderer
from modelopt_spec.decoding.generate import GenerateResult, generate
from modelopt_spec.decoding.prompts import Dialogue, PromptFile
from modelopt_spec.decoding.rounds import RoundRecord
from modelopt_spec.decoding.sampling import Sampling
from modelopt_spec.decoding.settings import neutral_config
from modelopt_spec.errors import ConfigError
from modelopt_spec.progress import progress

__all__ = [
    "Answer",
    "MeasureSettings",
    "Measured",
    "check_tokenizer",
    "end_tokens",
    "generate_batch",
    "measure",
    "numbered",
    "pad_prompts",
]


@dataclass(frozen=True)
class MeasureSettings:
    """What every generation of a measurement is asked for."""

    num_draft_tokens: int
    max_new_tokens: int
    sampling: Sampling
    seed: int
    batch_size: int
    scheduler: Any = None
    eos_token_ids: tuple[int, ...] = ()
    probabilities: bool = True


@dataclass(frozen=True)
class Answer:
    """One answered turn."""

    prompt: int
    """Number of the prompt, over all files."""
    turn: int
    prompt_ids: list[int]
    tokens: tuple[int, ...]
    text: str
    stopped: str
    rounds: tuple[RoundRecord, ...]
    """With the prompt's number; rounds of later turns are counted on."""


@dataclass
class Measured:
    """All answers to some prompts, and the seconds that they took."""

    answers: list[Answer] = field(default_factory=list)
    seconds: Counter[str] = field(default_factory=Counter)

    @property
    def rounds(self) -> list[RoundRecord]:
        """The rounds of all answers."""
        return [record for answer in self.answers for record in answer.rounds]


def numbered(files: Sequence[PromptFile], each: int | None = None) -> list[tuple[int, Dialogue]]:
    """Dialogues by their number over all files; the first ``each`` of every file."""
    found, number = [], 0
    for file in files:
        chosen = file.dialogues if each is None else file.dialogues[:each]
        found += list(enumerate(chosen, start=number))
        number += len(file.dialogues)
    return found


def measure(
    model: nn.Module,
    renderer: ChatRenderer,
    dialogues: Sequence[tuple[int, Dialogue]],
    settings: MeasureSettings,
    *,
    title: str = "evaluate",
    quiet: bool = True,
) -> Measured:
    """Answer numbered dialogues."""
    measured, rounds, tokens = Measured(), 0, 0
    with progress(title, len(dialogues), quiet=quiet) as advance:
        for start in range(0, len(dialogues), settings.batch_size):
            batch = dialogues[start : start + settings.batch_size]
            for answers, result in _turns(model, renderer, batch, settings):
                measured.answers += answers
                for name in ("prefill", "draft", "target", "loop", "records"):
                    measured.seconds[name] += getattr(result.timings, name)
                rounds += len(result.rounds)
                tokens += sum(record.committed for record in result.rounds)
            advance(len(batch), note=f"tau {tokens / rounds:.2f}" if rounds else "")
    return measured


def _turns(
    model: nn.Module, renderer: ChatRenderer, batch: Sequence[tuple[int, Dialogue]], settings: MeasureSettings
) -> Iterator[tuple[list[Answer], GenerateResult]]:
    """The turns of a batch of dialogues; those with fewer turns leave early."""
    said: dict[int, list[str]] = {number: [] for number, _ in batch}
    done: Counter[int] = Counter()
    for turn in range(max(len(dialogue.turns) for _, dialogue in batch)):
        asked = [(number, dialogue) for number, dialogue in batch if turn < len(dialogue.turns)]
        ids = [dialogue.prompt(renderer, turn, said[number]) for number, dialogue in asked]
        result = generate_batch(model, ids, settings, _seed(settings.seed, asked[0][0], turn))
        answers = []
        for row, (number, _) in enumerate(asked):
            tokens = result.outputs[row]
            text = str(renderer.tokenizer.decode(list(tokens), skip_special_tokens=True))
            said[number].append(text)
            mine = [record for record in result.rounds if record.prompt == row]
            rounds = tuple(replace(r, prompt=number, round=r.round + done[number]) for r in mine)
            done[number] += len(mine)
            answers.append(Answer(number, turn, ids[row], tokens, text, result.stopped[row], rounds))
        yield answers, result


def _seed(seed: int, number: int, turn: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{number}/{turn}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def pad_prompts(prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Left-padded ids and their mask, [B, S] each."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def generate_batch(
    model: nn.Module, prompts: Sequence[list[int]], settings: MeasureSettings, seed: int
) -> GenerateResult:
    """One batch of prompts, by the settings alone: the model's own generation config has no say."""
    ids, mask = pad_prompts(prompts)
    sampling = settings.sampling
    return generate(
        model,
        ids,
        mask,
        generation_config=neutral_config(),
        max_new_tokens=settings.max_new_tokens,
        do_sample=not sampling.greedy,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        num_draft_tokens=settings.num_draft_tokens,
        eos_token_id=list(settings.eos_token_ids),
        seed=seed,
        scheduler=settings.scheduler,
        record_probabilities=settings.probabilities,
    )


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse what is no tokenizer.

    Raises:
        ConfigError: None, a name, data or a model.
    """
    if tokenizer is None or isinstance(tokenizer, str | os.PathLike | Sequence | Mapping | nn.Module):
        raise ConfigError(
            f"tokenizer is {str(tokenizer)[:80]!r}, a {type(tokenizer).__name__}: pass the target's tokenizer "
            "(transformers.AutoTokenizer.from_pretrained(...))"
        )


def end_tokens(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """End-of-text ids of the target's generation config and of the tokenizer."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(found if isinstance(found, list | tuple) else [] if found is None else [found])
    if getattr(tokenizer, "eos_token_id", None) is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))
