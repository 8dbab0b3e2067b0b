"""llama.cpp serves the exported draft: its own tokens, every block ours, the accepted length that evaluation says."""

from __future__ import annotations

import json
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
from tests.engines.comparing import ON_A_BUSY_MACHINE, our_blocks, proposed_blocks
from tests.engines.conftest import MAX_NEW_TOKENS, QUESTIONS
from tests.engines.our_drafts import OurAnswer, load, our_answers
from tests.engines.proofs import Proof

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


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
def served(
    llama_cpp: LlamaCppTools,
    target_gguf: Path,
    draft_gguf: Path,
    draft_dir: Path,
    num_draft_tokens: int,
    prompts: tuple[tuple[int, ...], ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[Generation], Path]:
    """Answers, and the server's log."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    kind = spec_type_of(draft_dir)
    settings = ServerSettings(
        target_gguf, draft_gguf, kind, num_draft_tokens, extra_args=("-lv", "5"), **ON_A_BUSY_MACHINE
    )
    with LlamaServer(llama_cpp, settings, log) as server:
        return [server.generate(prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts], log


@pytest.fixture(scope="module")
def drafted(served: tuple[list[Generation], Path]) -> list[Generation]:
    return served[0]


@pytest.fixture(scope="module")
def ours(
    target_dir: Path, draft_dir: Path, prompts: tuple[tuple[int, ...], ...], num_draft_tokens: int
) -> list[OurAnswer]:
    return our_answers(load(target_dir, draft_dir), prompts, num_draft_tokens, MAX_NEW_TOKENS)


@pytest.fixture
def claim(proof: Proof, llama_cpp_version: str, draft_named: str) -> Proof:
    proof.serves(
        "llama.cpp",
        llama_cpp_version,
        drafter="DSpark vanilla",
        layout="deepspec",
        block_layout="anchor_first",
        head="vanilla",
        draft=draft_named,
        target="SmolLM2-135M-Instruct, float32",
    )
    return proof


def test_plain_answers_are_those_of_transformers(plain: list[Generation], answers: tuple[tuple[int, ...], ...]) -> None:
    assert [generation.tokens for generation in plain] == list(answers)
    assert all(generation.draft_n == 0 for generation in plain)
    assert {generation.stopped_at_eos for generation in plain} == {True, False}, "both ends of an answer must be seen"


def test_a_draft_changes_no_token(plain: list[Generation], drafted: list[Generation], claim: Proof) -> None:
    assert [generation.tokens for generation in drafted] == [generation.tokens for generation in plain]
    assert all(generation.draft_n > 0 for generation in drafted)
    claim.found("greedy tokens equal to llama.cpp's own without the draft", sum(len(own.tokens) for own in plain))


def test_every_block_is_ours(served: tuple[list[Generation], Path], ours: list[OurAnswer], claim: Proof) -> None:
    blocks = our_blocks(ours)
    assert [generation.tokens for generation in served[0]] == [answer.tokens for answer in ours]
    assert proposed_blocks(served[1]) == blocks
    claim.found("proposed blocks equal to ours", len(blocks))


def test_rounds_follow_from_the_timings(drafted: list[Generation], num_draft_tokens: int) -> None:
    """The server's own count of verified drafts, which timings do not carry, agrees with what they imply."""
    for generation in drafted:
        assert generation.verified_rounds is not None
        alone = replace(generation, verified_rounds=None)
        plain_steps = rounds_from_timings(alone, num_draft_tokens) - generation.verified_rounds
        assert plain_steps == 0 or (plain_steps == 1 and not generation.stopped_at_eos)


def test_accepted_length_is_what_evaluate_says(
    drafted: list[Generation],
    num_draft_tokens: int,
    evaluate_draft: Callable[[int], dict[str, Any]],
    claim: Proof,
) -> None:
    theirs = tau_from_timings(drafted, num_draft_tokens)
    said = evaluate_draft(num_draft_tokens)["results"][0]["pooled"]["tau"]
    assert theirs.tau == pytest.approx(said, rel=0.03)
    assert theirs.tau > 1.0, "nothing was accepted: this draft proves nothing"
    claim.found("rounds: accepted length against mtsp evaluate", theirs.rounds, abs(theirs.tau / said - 1))


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
