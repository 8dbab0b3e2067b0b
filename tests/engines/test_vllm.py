"""vLLM serves our drafts: its own tokens, and every block that it proposes is the one that we would draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engines.conftest import MAX_NEW_TOKENS
from tests.engines.our_drafts import load, our_answers, our_blocks
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


def assert_blocks_are_ours(
    target_dir: Path, draft_dir: Path, prompts: Prompts, generations: list[VllmGeneration], count: int
) -> None:
    model = load(target_dir, draft_dir)
    for prompt, generation in zip(prompts, generations):
        row = prompt + generation.tokens
        blocks = generation.blocks
        assert [row[block.position] for block in blocks] == [block.anchor for block in blocks]
        ours = our_blocks(model, row, [block.position for block in blocks], count)
        assert [block.drafted for block in blocks] == [block.drafted for block in ours]
        for theirs, own in zip(blocks, ours):
            if own.confidence_logits is None:
                assert theirs.confidence_logits is None
                continue
            gap = torch.tensor(theirs.confidence_logits).sigmoid() - torch.tensor(own.confidence_logits).sigmoid()
            assert gap.abs().max() < 1e-5


def test_a_draft_changes_no_token(plain: Prompts, drafted: list[VllmGeneration], answers: Prompts) -> None:
    assert [generation.tokens for generation in drafted] == list(plain)
    assert plain == answers


def test_every_block_is_ours(
    target_dir: Path, draft_dir: Path, prompts: Prompts, drafted: list[VllmGeneration], block_size: int
) -> None:
    assert_blocks_are_ours(target_dir, draft_dir, prompts, drafted, block_size)


def test_accepted_tokens_and_rounds(
    target_dir: Path, draft_dir: Path, prompts: Prompts, drafted: list[VllmGeneration], block_size: int
) -> None:
    for prompt, generation in zip(prompts, drafted):
        row = prompt + generation.tokens
        stood = accepted_in(generation.blocks, row)
        assert generation.verified_rounds == sum(block.position < len(row) - 1 for block in generation.blocks)
        assert generation.accepted >= sum(stood), "tokens behind an end of text count as accepted there, not here"
    _, ours = our_answers(load(target_dir, draft_dir), prompts, block_size, MAX_NEW_TOKENS)
    committed = sum(len(generation.tokens) - 1 for generation in drafted)
    assert committed / sum(generation.verified_rounds for generation in drafted) == pytest.approx(ours, rel=0.03)
    assert ours > 1.0, "nothing was accepted: this draft proves nothing"


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
    assert_blocks_are_ours(target_dir, draft, prompts, generations, count)
