"""Measure an exported draft in llama.cpp: accepted length and tokens per second, with and without it.

All servers (plain, and one for each number of draft tokens) run at once and answer each prompt in turn, so that a
disturbance of the machine meets them alike; only one of them works at any time.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelopt_spec.checkpoints.engines.llama_cpp_runner import LlamaServer, ServerSettings
from modelopt_spec.checkpoints.engines.llama_cpp_timings import Generation, tau_from_timings
from modelopt_spec.checkpoints.engines.llama_cpp_tools import (
    LlamaCppTools,
    cached_gguf,
    convert_to_gguf,
    find_llama_cpp,
    spec_type_of,
)
from modelopt_spec.errors import SpecError

__all__ = ["DraftMeasurement", "EngineMeasurement", "measure_in_llama_cpp"]


@dataclass(frozen=True)
class DraftMeasurement:
    """The draft with K tokens a round."""

    num_draft_tokens: int
    tau: float
    """Accepted length by the engine's own counts, bonus token included."""
    tokens_per_s: float
    speedup: float
    """Median over prompts of plain time over drafted time for the same tokens."""
    same_tokens: bool
    """Whether every answer is token for token the one without the draft."""


@dataclass(frozen=True)
class EngineMeasurement:
    """One target with one draft."""

    plain_tokens_per_s: float
    drafts: tuple[DraftMeasurement, ...]
    prompts: int
    tokens: int
    """Tokens of all plain answers."""
    dtype: str
    threads: int

    @property
    def best(self) -> DraftMeasurement:
        """The number of draft tokens with the greatest speed-up."""
        return max(self.drafts, key=lambda draft: draft.speedup)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure_in_llama_cpp(
    target_dir: Path,
    draft_dir: Path,
    chats: Sequence[Sequence[Mapping[str, str]]],
    *,
    draft_token_counts: Sequence[int],
    max_new_tokens: int = 128,
    dtype: str = "f32",
    threads: int = 2,
    context_tokens: int = 2048,
    tools: LlamaCppTools | None = None,
    on_answer: Callable[[int, int], None] | None = None,
) -> EngineMeasurement:
    """Answer every chat greedily without the draft and with each number of draft tokens.

    Args:
        target_dir: Hugging Face directory of the target; its GGUF file is kept in the user cache.
        draft_dir: an exported draft.
        chats: prompts as message lists (role, content), rendered by the engine with the target's template.
        draft_token_counts: numbers of draft tokens to try, each at most the draft's block size.
        max_new_tokens: limit of each answer.
        dtype: of both GGUF files: f32 compares with float32 evaluation, f16 and bf16 are faster.
        threads: of the engine. They wait by spinning: more than there are idle cores is slower.
        context_tokens: room for a prompt and its answer.
        tools: where llama.cpp is; found by :func:`find_llama_cpp` when not given.
        on_answer: told how many answers are done, and how many there will be.

    Raises:
        UnsupportedError: llama.cpp is not installed or refuses the draft. EngineError: the engine failed.
    """
    if not chats or not draft_token_counts:
        raise SpecError("chats and draft_token_counts must each name at least one")
    tools = tools or find_llama_cpp()
    target = cached_gguf(target_dir, tools, dtype=dtype)
    common: dict[str, Any] = {"threads": threads, "context_tokens": context_tokens}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mtsp-gguf-")))
        draft = convert_to_gguf(draft_dir, folder / "draft.gguf", tools, target_dir=target_dir, dtype=dtype)
        kind = spec_type_of(draft_dir)
        settings = [ServerSettings(target, **common)]
        settings += [ServerSettings(target, draft, kind, count, **common) for count in draft_token_counts]
        servers = [stack.enter_context(LlamaServer(tools, setting)) for setting in settings]
        answers: list[list[Generation]] = [[] for _ in servers]
        for done, chat in enumerate(chats):
            prompt = servers[0].chat_ids(chat)
            for i, server in enumerate(servers):
                answers[i].append(server.generate(prompt, max_new_tokens=max_new_tokens))
                if on_answer is not None:
                    on_answer(done * len(servers) + i + 1, len(chats) * len(servers))
    plain, *drafted = answers
    return EngineMeasurement(
        plain_tokens_per_s=_tokens_per_s(plain),
        drafts=tuple(_compare(plain, own, count) for own, count in zip(drafted, draft_token_counts)),
        prompts=len(chats),
        tokens=sum(len(generation.tokens) for generation in plain),
        dtype=dtype,
        threads=threads,
    )


def _compare(plain: Sequence[Generation], drafted: Sequence[Generation], num_draft_tokens: int) -> DraftMeasurement:
    ratios = [
        before.predicted_ms / after.predicted_ms
        for before, after in zip(plain, drafted)
        if len(before.tokens) > 1 and len(before.tokens) == len(after.tokens)
    ]
    if not ratios:
        raise SpecError("no answer has a token after its first in both runs: ask for longer answers")
    return DraftMeasurement(
        num_draft_tokens=num_draft_tokens,
        tau=tau_from_timings(drafted, num_draft_tokens).tau,
        tokens_per_s=_tokens_per_s(drafted),
        speedup=statistics.median(ratios),
        same_tokens=all(before.tokens == after.tokens for before, after in zip(plain, drafted)),
    )


def _tokens_per_s(generations: Sequence[Generation]) -> float:
    """Decoding speed: the prompt's own pass, which gives the first token, is not timed."""
    tokens = sum(max(len(generation.tokens) - 1, 0) for generation in generations)
    seconds = sum(generation.predicted_ms for generation in generations if len(generation.tokens) > 1) / 1000
    if not tokens:
        raise SpecError("no answer has a token after its first: ask for longer answers")
    return tokens / seconds
