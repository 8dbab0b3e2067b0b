"""vLLM serves the exported draft: its own tokens, every block ours, confidences and accepted length ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.comparing import assert_vllm_blocks_are_ours
from tests.engines.conftest import MAX_NEW_TOKENS
from tests.engines.our_drafts import OurAnswer, load, our_answers
from tests.engines.proofs import Proof
from tests.engines.vllm_runner import VllmReply, VllmRequest, accepted_in, reply_of, run_vllm

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

Prompts = tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def replies(
    vllm: Path,
    target_dir: Path,
    draft_dir: Path,
    block_size: int,
    prompts: Prompts,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[VllmReply]:
    """One process: the target alone, then with the draft."""
    alone = VllmRequest(str(target_dir), prompts, max_tokens=MAX_NEW_TOKENS)
    drafted = VllmRequest(
        str(target_dir), prompts, str(draft_dir), num_draft_tokens=block_size, max_tokens=MAX_NEW_TOKENS
    )
    return [reply_of(result) for result in run_vllm([alone, drafted], vllm, tmp_path_factory.mktemp("vllm"))]


@pytest.fixture(scope="module")
def plain(replies: list[VllmReply]) -> Prompts:
    return tuple(generation.tokens for generation in replies[0].generations)


@pytest.fixture(scope="module")
def drafted(replies: list[VllmReply]) -> VllmReply:
    return replies[1]


@pytest.fixture(scope="module")
def ours(target_dir: Path, draft_dir: Path, prompts: Prompts, block_size: int) -> list[OurAnswer]:
    return our_answers(load(target_dir, draft_dir), prompts, block_size, MAX_NEW_TOKENS)


@pytest.fixture
def claim(proof: Proof, drafted: VllmReply, draft_named: str) -> Proof:
    proof.serves(
        "vllm",
        drafted.version,
        drafter="DSpark vanilla",
        layout="deepspec",
        block_layout="anchor_first",
        head="vanilla",
        draft=draft_named,
        target="SmolLM2-135M-Instruct, float32",
    )
    return proof


def test_a_draft_changes_no_token(plain: Prompts, drafted: VllmReply, answers: Prompts, claim: Proof) -> None:
    assert [generation.tokens for generation in drafted.generations] == list(plain)
    assert plain == answers
    claim.found("greedy tokens equal to vLLM's own without the draft", sum(map(len, plain)))


def test_every_block_is_ours(prompts: Prompts, drafted: VllmReply, ours: list[OurAnswer], claim: Proof) -> None:
    compared = assert_vllm_blocks_are_ours(prompts, drafted.generations, ours)
    claim.found("proposed blocks equal to ours", compared.blocks)
    if compared.confidences:
        claim.found("confidences equal to ours", compared.confidences, compared.worst_confidence)


def test_accepted_length_is_what_evaluate_says(
    prompts: Prompts, drafted: VllmReply, evaluated: dict[str, Any], claim: Proof
) -> None:
    for prompt, generation in zip(prompts, drafted.generations):
        row = prompt + generation.tokens
        assert generation.verified_rounds == sum(block.position < len(row) - 1 for block in generation.blocks)
        stood = sum(accepted_in(generation.blocks, row))
        assert generation.accepted >= stood, "tokens behind an end of text count as accepted there, not here"
    committed = sum(len(generation.tokens) - 1 for generation in drafted.generations)
    rounds = sum(generation.verified_rounds for generation in drafted.generations)
    tau = evaluated["results"][0]["pooled"]["tau"]
    assert committed / rounds == pytest.approx(tau, rel=0.03)
    assert committed / rounds > 1.0, "nothing was accepted: this draft proves nothing"
    claim.found("rounds: accepted length against mtsp evaluate", rounds, abs(committed / rounds / tau - 1))
