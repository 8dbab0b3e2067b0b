"""llama.cpp serves our drafts: its own tokens, our blocks, our accepted length."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelopt_spec.checkpoints.engines.llama_cpp_measure import measure_in_llama_cpp
from modelopt_spec.checkpoints.engines.llama_cpp_runner import LlamaServer, ServerSettings
from modelopt_spec.checkpoints.engines.llama_cpp_timings import Generation, rounds_from_timings, tau_from_timings
from modelopt_spec.checkpoints.engines.llama_cpp_tools import LlamaCppTools, convert_to_gguf, spec_type_of
from modelopt_spec.errors import UnsupportedError
from tests.engines.conftest import MAX_NEW_TOKENS, QUESTIONS
from tests.engines.draft_maker import KINDS
from tests.engines.our_drafts import load, our_answers, tau_of

pytestmark = pytest.mark.engines

ON_A_BUSY_MACHINE: dict[str, Any] = {"threads": 1, "start_timeout_s": 300.0}
"""The engine's threads wait for each other by spinning: with one thread a crowded machine is slow, not stuck."""

CANDIDATE = re.compile(r"draft candidate +0, pos +(\d+): +(\d+) ")
"""Best candidate of one slot in the server's debug log."""


def proposed_blocks(log: Path) -> list[list[int]]:
    """Every block that the server drafted, from a log at level 5; a slot numbered 0 starts a block."""
    blocks: list[list[int]] = []
    for slot, token in CANDIDATE.findall(log.read_text(encoding="utf-8", errors="replace")):
        if slot == "0":
            blocks.append([])
        blocks[-1].append(int(token))
    return blocks


@pytest.fixture(scope="module")
def draft_gguf(
    draft_dir: Path, target_dir: Path, llama_cpp: LlamaCppTools, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    output = tmp_path_factory.mktemp("gguf") / "draft.gguf"
    return convert_to_gguf(draft_dir, output, llama_cpp, target_dir=target_dir)


@pytest.fixture(scope="module")
def plain(llama_cpp: LlamaCppTools, target_gguf: Path, prompts: tuple[tuple[int, ...], ...]) -> list[Generation]:
    with LlamaServer(llama_cpp, ServerSettings(target_gguf, **ON_A_BUSY_MACHINE)) as server:
        chats = [server.chat_ids([{"role": "user", "content": question}]) for question in QUESTIONS]
        assert [tuple(chat) for chat in chats] == list(prompts), "the engine's template and tokenizer differ from ours"
        return [server.generate(prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module", params=["whole block", "three tokens"])
def num_draft_tokens(request: pytest.FixtureRequest, block_size: int) -> int:
    return block_size if request.param == "whole block" else min(3, block_size)


@pytest.fixture(scope="module")
def drafted(
    llama_cpp: LlamaCppTools,
    target_gguf: Path,
    draft_gguf: Path,
    draft_dir: Path,
    num_draft_tokens: int,
    prompts: tuple[tuple[int, ...], ...],
) -> list[Generation]:
    settings = ServerSettings(target_gguf, draft_gguf, spec_type_of(draft_dir), num_draft_tokens, **ON_A_BUSY_MACHINE)
    with LlamaServer(llama_cpp, settings) as server:
        return [server.generate(prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts]


def test_plain_answers_are_those_of_transformers(plain: list[Generation], answers: tuple[tuple[int, ...], ...]) -> None:
    assert [generation.tokens for generation in plain] == list(answers)
    assert all(generation.draft_n == 0 for generation in plain)
    assert {generation.stopped_at_eos for generation in plain} == {True, False}, "both ends of an answer must be seen"


def test_a_draft_changes_no_token(plain: list[Generation], drafted: list[Generation]) -> None:
    assert [generation.tokens for generation in drafted] == [generation.tokens for generation in plain]
    assert all(generation.draft_n > 0 for generation in drafted)


def test_rounds_follow_from_the_timings(drafted: list[Generation], num_draft_tokens: int) -> None:
    """The server's own count of verified drafts, which timings do not carry, agrees with what they imply."""
    for generation in drafted:
        assert generation.verified_rounds is not None
        alone = replace(generation, verified_rounds=None)
        plain_steps = rounds_from_timings(alone, num_draft_tokens) - generation.verified_rounds
        assert plain_steps == 0 or (plain_steps == 1 and not generation.stopped_at_eos)


def test_accepted_length_is_ours(
    drafted: list[Generation],
    num_draft_tokens: int,
    target_dir: Path,
    draft_dir: Path,
    prompts: tuple[tuple[int, ...], ...],
) -> None:
    ours = our_answers(load(target_dir, draft_dir), prompts, num_draft_tokens, MAX_NEW_TOKENS)
    theirs = tau_from_timings(drafted, num_draft_tokens).tau
    assert [answer.tokens for answer in ours] == [generation.tokens for generation in drafted]
    assert theirs == pytest.approx(tau_of(ours), rel=0.03)
    assert theirs > 1.0, "nothing was accepted: this draft proves nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_is_ours(
    kind: str,
    make_draft: Callable[..., Path],
    target_dir: Path,
    target_gguf: Path,
    llama_cpp: LlamaCppTools,
    prompts: tuple[tuple[int, ...], ...],
    tmp_path: Path,
) -> None:
    """Random drafts, so that backbone, taps and head all matter for each proposed token."""
    draft = make_draft(kind)
    count = 6 if kind == "dflash_bonus_anchor" else 7
    gguf = convert_to_gguf(draft, tmp_path / "draft.gguf", llama_cpp, target_dir=target_dir)
    settings = ServerSettings(
        target_gguf, gguf, spec_type_of(draft), count, extra_args=("-lv", "5"), **ON_A_BUSY_MACHINE
    )
    log = tmp_path / "server.log"
    with LlamaServer(llama_cpp, settings, log) as server:
        generation = server.generate(prompts[1], max_new_tokens=12, ignore_eos=True)
    (ours,) = our_answers(load(target_dir, draft), prompts[1:2], count, 12, ignore_eos=True)
    assert ours.tokens == generation.tokens
    assert proposed_blocks(log) == [list(record.drafted) for record in ours.blocks().values()]


def test_a_head_that_it_cannot_serve_is_refused(
    make_draft: Callable[..., Path], target_dir: Path, llama_cpp: LlamaCppTools, tmp_path: Path
) -> None:
    draft = make_draft()
    config: dict[str, Any] = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    (draft / "config.json").write_text(json.dumps(config | {"markov_head_type": "gated"}), encoding="utf-8")
    with pytest.raises(UnsupportedError, match="unsupported markov_head_type 'gated'"):
        convert_to_gguf(draft, tmp_path / "draft.gguf", llama_cpp, target_dir=target_dir)
    assert not list(tmp_path.iterdir())


def test_measurement(draft_dir: Path, target_dir: Path, llama_cpp: LlamaCppTools) -> None:
    told: list[tuple[int, int]] = []
    measured = measure_in_llama_cpp(
        target_dir,
        draft_dir,
        [[{"role": "user", "content": question}] for question in QUESTIONS[:2]],
        draft_token_counts=[1, 3],
        max_new_tokens=24,
        threads=1,
        tools=llama_cpp,
        on_answer=lambda done, total: told.append((done, total)),
    )
    assert told == [(done, 6) for done in range(1, 7)]
    assert [draft.num_draft_tokens for draft in measured.drafts] == [1, 3]
    assert all(draft.same_tokens for draft in measured.drafts)
    assert all(1.0 <= draft.tau <= draft.num_draft_tokens + 1 for draft in measured.drafts)
    assert measured.best in measured.drafts
    assert json.loads(json.dumps(measured.as_dict()))["tokens"] == measured.tokens
