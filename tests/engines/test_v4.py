"""llama.cpp serves a DeepSeek-V4 draft on a CPU: its own tokens, every proposed block ours, our accepted count.

Float32 GGUF files, window rule ``query`` (llama.cpp's own), answers that run past the window.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from modelopt_spec.checkpoints.beside_target import export_beside_target
from modelopt_spec.checkpoints.engines.llama_cpp_runner import LlamaServer, ServerSettings
from modelopt_spec.checkpoints.engines.llama_cpp_timings import Generation
from modelopt_spec.checkpoints.engines.llama_cpp_tools import LlamaCppTools
from modelopt_spec.config import LossConfig
from modelopt_spec.conversion import convert
from modelopt_spec.training.blocks import make_blocks
from modelopt_spec.training.module import block_settings
from tests.engines.comparing import our_blocks, proposed_blocks
from tests.engines.our_drafts import OurAnswer, our_answers
from tests.engines.proofs import Proof
from tests.engines.v4_maker import write_target
from tests.moe.blocks import loss_of
from tests.moe.v4 import shake

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

PROMPTS = (tuple(range(1000, 1024)), (5, 77, 1234, 9, 40000, 321))
NEW_TOKENS, SLOTS, MASK = 24, 5, 17
BACKBONE: dict[str, Any] = {"type": "moe_mhc", "num_layers": 2, "window_rule": "query"}
CONVERTER = Path(__file__).with_name("v4_convert.py")


@dataclass(frozen=True)
class Served:
    """The same prompts answered by llama.cpp and by this package."""

    theirs: list[Generation]
    ours: list[OurAnswer]
    blocks: list[list[int]]


def to_gguf(tools: LlamaCppTools, directory: Path, output: Path, *options: str) -> Path:
    """Convert with float32 experts."""
    command = [sys.executable, str(CONVERTER), str(tools.converter.parent), str(directory), "--outtype", "f32"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, *options, "--outfile", str(output)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return output


def settings(target: Path, draft: Path | None = None) -> ServerSettings:
    extra = ("-lv", "5") if draft else ()
    return ServerSettings(
        target, draft, "draft-dspark", SLOTS, threads=1, start_timeout_s=300.0, context_tokens=512, extra_args=extra
    )


@pytest.fixture(scope="module")
def v4_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's directory, with the tokenizer of SmolLM2."""
    directory = tmp_path_factory.mktemp("v4") / "target"
    write_target(directory, target_dir)
    return directory


@pytest.fixture(scope="module")
def v4_gguf(v4_dir: Path, llama_cpp: LlamaCppTools) -> Path:
    return to_gguf(llama_cpp, v4_dir, v4_dir.parent / "target.gguf")


@pytest.fixture(scope="module")
def plain(v4_gguf: Path, llama_cpp: LlamaCppTools) -> list[tuple[int, ...]]:
    """The engine's answers without a draft."""
    with LlamaServer(llama_cpp, settings(v4_gguf)) as server:
        return [server.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True).tokens for prompt in PROMPTS]


def load_target(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def fit(model: Any, answers: list[tuple[int, ...]]) -> None:
    """Teach the drafter the answers: a few steps of cross entropy on every block of each text."""
    drafter = model.drafter.train()
    batches = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        anchors = torch.arange(len(prompt), ids.shape[1] - 1).unsqueeze(0)
        config = block_settings(drafter, LossConfig(), anchors.shape[1])
        everywhere = torch.ones_like(ids).bool()
        blocks = make_blocks(ids, everywhere, anchors, torch.ones_like(anchors).bool(), config)
        batches.append((drafter.target.features(ids, drafter.config.target_layer_ids), blocks))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        for features, blocks in batches:
            loss_of(drafter, features, blocks, ce=1.0, confidence=0.1).backward()
        optimizer.step()
    drafter.eval()


@pytest.fixture(scope="module", params=["random", "trained"])
def served(
    request: pytest.FixtureRequest,
    v4_dir: Path,
    v4_gguf: Path,
    plain: list[tuple[int, ...]],
    llama_cpp: LlamaCppTools,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Served]:
    model, place = load_target(v4_dir), tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = {"block_size": SLOTS, "mask_token_id": MASK, "head": {"type": "vanilla", "rank": 16}, "backbone": BACKBONE}
    convert(model, ("dspark", config), quiet=True)
    if request.param == "random":
        shake(model.drafter, 0.08)
    else:
        fit(model, plain)
    export_beside_target(model, v4_dir, place / "both", quiet=True)
    options = ("--dspark", "--target-model-dir", str(v4_dir))
    gguf = to_gguf(llama_cpp, place / "both", place / "draft.gguf", *options)
    log = place / "server.log"
    with LlamaServer(llama_cpp, settings(v4_gguf, gguf), log) as server:
        theirs = [server.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    ours = our_answers(model, PROMPTS, SLOTS, NEW_TOKENS, ignore_eos=True)
    return request.param, Served(theirs, ours, proposed_blocks(log))


@pytest.fixture
def claim(proof: Proof, served: tuple[str, Served], llama_cpp_version: str) -> Proof:
    proof.serves(
        "llama.cpp",
        llama_cpp_version,
        drafter="DSpark, DeepSeek-V4 stages, window rule query, float32 experts",
        layout="deepseek_v4, converter told to keep float32",
        block_layout="anchor_first",
        head="vanilla",
        draft={"random": "random", "trained": "fitted to two answers"}[served[0]],
        target="random DeepSeek-V4 of 3 layers, float32",
    )
    return proof


def test_a_v4_draft_changes_no_token(served: tuple[str, Served], plain: list[tuple[int, ...]], claim: Proof) -> None:
    assert [generation.tokens for generation in served[1].theirs] == plain
    assert [answer.tokens for answer in served[1].ours] == plain
    claim.found("greedy tokens equal to llama.cpp's own without the draft", sum(map(len, plain)))


def test_every_v4_block_is_ours(served: tuple[str, Served], claim: Proof) -> None:
    mine = our_blocks(served[1].ours)
    assert len(mine) > 4 and served[1].blocks == mine
    claim.found("proposed blocks equal to ours", len(mine))


def test_the_accepted_count_of_v4_drafts_is_ours(served: tuple[str, Served], claim: Proof) -> None:
    kind, result = served
    accepted = [sum(record.accepted for record in answer.rounds) for answer in result.ours]
    assert [generation.draft_n_accepted for generation in result.theirs] == accepted
    assert kind == "random" or sum(accepted) > len(PROMPTS) * NEW_TOKENS // 3
    claim.found(
        "answers with equal counts of accepted tokens" + (f", {sum(accepted)} in all" if sum(accepted) else ""), 2
    )
