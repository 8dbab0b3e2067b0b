"""Answers of the target: nothing lost, nothing twice, whatever the server and the machine do."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from modelopt_spec.data.answering import LocalModel
from modelopt_spec.data.config import RegenerateConfig, SamplingConfig
from modelopt_spec.data.ledger import Ledger
from modelopt_spec.data.regeneration import regenerate
from modelopt_spec.errors import DataError
from tests.data import tiny
from tests.data.fake_server import FakeServer, answer_to


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def settings(server: FakeServer, prompts: str, output: Path, **changes) -> RegenerateConfig:
    values = {
        "base_url": server.url,
        "model": "tiny",
        "concurrency": 8,
        "backoff": 0.01,
        "max_backoff": 0.05,
        "retries": 3,
    }
    values |= changes.pop("at", {})
    return RegenerateConfig(prompts=prompts, output=str(output), server=values, **changes)


def prompts_of(count: int) -> list[dict]:
    return [tiny.chat(f"Question {i}?", "someone else's answer") for i in range(count)]


def test_answers_replace_those_of_the_source(tmp_path) -> None:
    prompts = write(tmp_path / "p.jsonl", [*prompts_of(20), *prompts_of(2), {"text": "x"}])
    with FakeServer(delay=0.02) as server:
        report = regenerate(settings(server, prompts, tmp_path / "out.jsonl"), quiet=True)
    rows = read(tmp_path / "out.jsonl")
    assert (report.prompts, report.written, report.skipped) == (20, 20, {"no_prompt": 1, "duplicate": 2})
    assert server.most_in_flight > 3
    assert {row["messages"][0]["content"] for row in rows} == {f"Question {i}?" for i in range(20)}
    for row in rows:
        assert row["messages"][1] == {"role": "assistant", "content": answer_to(row["messages"][:1])}
        assert (row["finish_reason"], row["completion_tokens"], row["looping"]) == ("stop", 7, False)
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["settings"]["sampling"]["temperature"] == 0.7
    assert meta["settings"]["model"] == "tiny"
    assert meta["answerer"] == {"models": ["tiny"]}
    assert (meta["rows"], meta["complete"]) == (20, True)
    request = server.requests[0]
    assert (request["temperature"], request["top_p"], request["max_tokens"]) == (0.7, 0.95, 1024)
    assert len({request["seed"] for request in server.requests}) == 20


def test_every_turn_is_on_policy_or_only_the_last(tmp_path) -> None:
    source = [tiny.chat("First?", "old", "Second?", "old", system="Be brief.")]
    prompts = write(tmp_path / "p.jsonl", source)
    with FakeServer() as server:
        regenerate(settings(server, prompts, tmp_path / "all.jsonl"), quiet=True)
        regenerate(settings(server, prompts, tmp_path / "last.jsonl", turns="last"), quiet=True)
    (row,) = read(tmp_path / "all.jsonl")
    start = source[0]["messages"][:2]
    first = {"role": "assistant", "content": answer_to(start)}
    assert row["messages"][:4] == [*start, first, source[0]["messages"][3]]
    assert row["messages"][4]["content"] == answer_to(row["messages"][:4])
    (row,) = read(tmp_path / "last.jsonl")
    assert row["messages"][:4] == source[0]["messages"][:4]
    assert row["messages"][4]["content"] == answer_to(source[0]["messages"][:4])


def test_turns_prompts_tools_and_cut_answers(tmp_path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    history = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    rows = [
        {"turns": ["LONG story?", "never asked"]},
        {"prompt": "Hello?"},
        {"messages": [*history, {"role": "assistant", "content": "old"}], "tools": tools},
    ]
    prompts = write(tmp_path / "p.jsonl", rows)
    with FakeServer() as server:
        report = regenerate(settings(server, prompts, tmp_path / "out.jsonl"), quiet=True)
    written = {row["messages"][0]["content"]: row for row in read(tmp_path / "out.jsonl")}
    assert report.cut == 1
    assert len(written["LONG story?"]["messages"]) == 2
    assert written["LONG story?"]["finish_reason"] == "length"
    assert written["1 + 2?"]["messages"][:3] == history
    assert written["1 + 2?"]["tools"] == tools
    assert [request["tools"] for request in server.requests if "tools" in request] == [tools]


def test_thinking_is_mixed_by_share_and_recorded(tmp_path) -> None:
    prompts = write(tmp_path / "p.jsonl", prompts_of(60))
    with FakeServer() as server:
        regenerate(settings(server, prompts, tmp_path / "out.jsonl", thinking_share=0.5), quiet=True)
    rows = read(tmp_path / "out.jsonl")
    modes = [row["chat_template_kwargs"]["enable_thinking"] for row in rows]
    assert 15 < sum(modes) < 45
    for row, thinking in zip(rows, modes, strict=True):
        assert ("reasoning_content" in row["messages"][1]) == thinking


def test_failures_are_tried_again_and_then_reported(tmp_path) -> None:
    prompts = write(tmp_path / "p.jsonl", [*prompts_of(10), {"prompt": "EMPTY"}])
    with FakeServer(failures=[500, 503, 429, 500]) as server:
        report = regenerate(settings(server, prompts, tmp_path / "out.jsonl"), quiet=True)
        assert report.failed == {"empty_answer": 1}
        assert report.written == 10
        server.failures = [400]
        again = regenerate(settings(server, prompts, tmp_path / "out.jsonl"), quiet=True)
        assert (again.resumed, again.written, again.failed) == (10, 0, {"http_400": 1})
    assert not json.loads((tmp_path / "out.jsonl.meta.json").read_text())["complete"]


def test_a_server_that_stays_away_or_refuses_ends_the_run(tmp_path) -> None:
    prompts = write(tmp_path / "p.jsonl", prompts_of(3))
    with FakeServer(failures=[401] * 50) as server:
        with pytest.raises(DataError, match=r"401: the API key was refused.*OPENAI_API_KEY"):
            regenerate(settings(server, prompts, tmp_path / "out.jsonl"), quiet=True)
        server.failures = [500] * 50
        with pytest.raises(DataError, match="failed 4 times, last with status 500"):
            regenerate(settings(server, prompts, tmp_path / "out.jsonl"), quiet=True)
        server.failures = []
        assert regenerate(settings(server, prompts, tmp_path / "out.jsonl"), quiet=True).written == 3
    with pytest.raises(DataError, match="does not answer"):
        regenerate(settings(server, prompts, tmp_path / "out.jsonl"), quiet=True)


def test_too_many_failures_end_the_run(tmp_path) -> None:
    prompts = write(tmp_path / "p.jsonl", [{"prompt": f"EMPTY {i}"} for i in range(120)])
    with FakeServer() as server, pytest.raises(DataError, match=r"max_failed_share 0.05.*empty_answer"):
        regenerate(settings(server, prompts, tmp_path / "out.jsonl"), quiet=True)


def test_a_ledger_goes_on_only_with_the_same_settings_and_one_writer(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    with Ledger(path, {"temperature": 1.0}) as ledger:
        ledger.append({"id": "a"})
        with pytest.raises(DataError, match="another process"):
            Ledger(path, {"temperature": 1.0})
        with pytest.raises(DataError, match="already"):
            ledger.append({"id": "a"})
    with pytest.raises(DataError, match=r"temperature 1.0, now it is 0.5"):
        Ledger(path, {"temperature": 0.5})
    with open(path, "ab") as file:
        file.write(b'{"id": "b", "mess')
    with Ledger(path, {"temperature": 1.0}) as ledger:
        assert ledger.ids == {"a"}
        ledger.append({"id": "b"})
    assert read(path) == [{"id": "a"}, {"id": "b"}]
    path.write_bytes(b'{"id": "a"}\n{"id"\n{"id": "c"}\n')
    with pytest.raises(DataError, match="line 2"):
        Ledger(path, {"temperature": 1.0})


@pytest.mark.parametrize("content", ['{"prompt": "Hello"}\n', '{"prompt": "Hel', "plain text\n"])
def test_a_file_of_other_data_is_neither_appended_to_nor_cut(content: str, tmp_path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(
        DataError, match=r"mine.jsonl' is no file of answers that this command began .*name another file"
    ):
        Ledger(path, {"temperature": 1.0})
    assert path.read_text() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.jsonl"]


def test_killed_five_times_and_resumed_gives_the_same_rows_once(tmp_path) -> None:
    """The killed process is a child; each time it dies by SIGKILL at another moment."""
    prompts = write(tmp_path / "p.jsonl", prompts_of(240))
    output = tmp_path / "out.jsonl"
    generator = random.Random(3)
    with FakeServer(delay=0.02) as server:
        config = settings(server, prompts, output, at={"concurrency": 4})
        for kill in range(1, 6):
            child = multiprocessing.get_context("fork").Process(
                target=regenerate, args=(config,), kwargs={"quiet": True}
            )
            child.start()
            wanted = kill * 35 + generator.randrange(5)
            while child.is_alive() and (not output.exists() or output.read_bytes().count(b"\n") < wanted):
                time.sleep(0.005)
            assert child.is_alive(), "the run ended before it could be killed"
            child.kill()
            child.join()
            assert child.exitcode == -signal.SIGKILL
            if kill == 3:
                with open(output, "ab") as file:
                    file.write(b'{"id": "torn')
        before = len(read(output)) if output.read_bytes().endswith(b"\n") else None
        report = regenerate(config, quiet=True)
    with FakeServer() as clean:
        regenerate(settings(clean, prompts, tmp_path / "clean.jsonl", at={"concurrency": 4}), quiet=True)
    rows, expected = read(output), read(tmp_path / "clean.jsonl")
    assert before is not None
    assert before == report.resumed
    assert report.resumed >= 5 * 35
    assert Counter(row["id"] for row in rows) == Counter({row["id"]: 1 for row in expected})
    assert sorted(rows, key=lambda row: row["id"]) == sorted(expected, key=lambda row: row["id"])


def test_in_process_answers_are_what_generate_gives(tmp_path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny.make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompts = write(tmp_path / "p.jsonl", [{"turns": [f"Question {'x' * i}?", "And then?"]} for i in range(5)])
    sampling = SamplingConfig(temperature=0, max_tokens=12)
    answerer = LocalModel(model, tokenizer, sampling, batch_size=3)
    config = RegenerateConfig(prompts=prompts, output=str(tmp_path / "out.jsonl"), sampling=sampling, batch_size=3)
    report = regenerate(config, answerer, quiet=True)
    rows = read(tmp_path / "out.jsonl")
    assert report.written + sum(report.failed.values()) == 5
    assert rows
    for row in rows:
        ids = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )["input_ids"]
        ones = torch.ones_like(ids)  # generate would take the first special token for padding
        output = model.generate(ids, attention_mask=ones, do_sample=False, max_new_tokens=12, pad_token_id=0)[
            0, ids.shape[1] :
        ]
        assert row["messages"][1]["content"] == tokenizer.decode(output, skip_special_tokens=True)
        ended = tokenizer.eos_token_id in output.tolist()
        assert (len(row["messages"]) > 2) == ended
