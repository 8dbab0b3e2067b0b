"""vLLM serves our drafts: its own tokens, and every block that it proposes is the one that we would draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engines.conftest import MAX_NEW_TOKENS
from tests.engines.our_drafts import OurAnswer, load, our_answers, tau_of
from tests.engines.vllm_runner import VllmGeneration, VllmRequest, accepted_in, run_vllm

pytestmark = pytest.mark.engines

Prompts = tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def plain(vllm: Path, target_dir: Path, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    request = VllmRequest(str(target_dir), prompts, max_tokens=MAX_NEW_TOKENS)
    generations = run_vllm(request, vllm, tmp_path_factory.mktemp("plain"))
    return tuple(generation.tokens for generation in generations)


@pytest.fixture(scope="module")
def drafted(
    vllm: Path,
    target_dir: Path,
    draft_dir: Path,
    block_size: int,
    prompts: Prompts,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[VllmGeneration]:
    request = VllmRequest(
        str(target_dir), prompts, str(draft_dir), num_draft_tokens=block_size, max_tokens=MAX_NEW_TOKENS
    )
    return run_vllm(request, vllm, tmp_path_factory.mktemp("drafted"))


def assert_blocks_are_ours(prompts: Prompts, generations: list[VllmGeneration], ours: list[OurAnswer]) -> None:
    """Compare every block that our decoding drafts; vLLM also drafts before a last plain step and behind the end."""
    for prompt, generation, answer in zip(prompts, generations, ours):
        assert generation.tokens == answer.tokens
        row = prompt + generation.tokens
        theirs = {block.position: block for block in generation.blocks}
        assert all(row[block.position] == block.anchor for block in generation.blocks)
        assert set(answer.blocks()) <= set(theirs)
        assert all(position >= len(row) - 2 for position in set(theirs) - set(answer.blocks()))
        for position, own in answer.blocks().items():
            block = theirs[position]
            assert block.drafted == own.drafted
            assert (block.confidence_logits is None) == (own.confidence_logits is None)
            if block.confidence_logits is not None:
                pair = torch.tensor([block.confidence_logits, own.confidence_logits]).sigmoid()
                assert (pair[0] - pair[1]).abs().max() < 1e-5


@pytest.fixture(scope="module")
def ours(target_dir: Path, draft_dir: Path, prompts: Prompts, block_size: int) -> list[OurAnswer]:
    return our_answers(load(target_dir, draft_dir), prompts, block_size, MAX_NEW_TOKENS)


def test_a_draft_changes_no_token(plain: Prompts, drafted: list[VllmGeneration], answers: Prompts) -> None:
    assert [generation.tokens for generation in drafted] == list(plain)
    assert plain == answers


def test_every_block_is_ours(prompts: Prompts, drafted: list[VllmGeneration], ours: list[OurAnswer]) -> None:
    assert_blocks_are_ours(prompts, drafted, ours)


def test_accepted_tokens_and_rounds(prompts: Prompts, drafted: list[VllmGeneration], ours: list[OurAnswer]) -> None:
    for prompt, generation in zip(prompts, drafted):
        row = prompt + generation.tokens
        assert generation.verified_rounds == sum(block.position < len(row) - 1 for block in generation.blocks)
        stood = sum(accepted_in(generation.blocks, row))
        assert generation.accepted >= stood, "tokens behind an end of text count as accepted there, not here"
    committed = sum(len(generation.tokens) - 1 for generation in drafted)
    theirs = committed / sum(generation.verified_rounds for generation in drafted)
    assert theirs == pytest.approx(tau_of(ours), rel=0.03)
    assert theirs > 1.0, "nothing was accepted: this draft proves nothing"


@pytest.mark.parametrize("kind", ["dspark", "dflash_bonus_anchor"])
def test_every_block_of_a_random_draft_is_ours(
    kind: str,
    vllm: Path,
    make_draft: Callable[..., Path],
    target_dir: Path,
    prompts: Prompts,
    answers: Prompts,
    tmp_path: Path,
) -> None:
    """Random drafts, so that backbone, taps and head all matter for each proposed token."""
    draft = make_draft(kind)
    method, count = ("dflash", 6) if kind == "dflash_bonus_anchor" else ("dspark", 7)
    request = VllmRequest(str(target_dir), prompts[:2], str(draft), method, count, max_tokens=16)
    generations = run_vllm(request, vllm, tmp_path)
    assert [generation.tokens for generation in generations] == [answer[:16] for answer in answers[:2]]
    ours = our_answers(load(target_dir, draft), prompts[:2], count, 16)
    assert_blocks_are_ours(prompts[:2], generations, ours)
