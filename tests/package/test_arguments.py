"""Values that cannot be meant are refused by the name that the caller wrote, in functions and on the command line."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from modelopt_spec import cli, cli_run
from modelopt_spec.arguments import check_paths, check_seed, number, whole_number
from modelopt_spec.consoles import PIPE_WIDTH, stderr_console, stdout_console
from modelopt_spec.errors import CheckpointError, ConfigError, DataError
from modelopt_spec.text_files import finite, read_json_object, read_text
from modelopt_spec.training.recipe import load_recipe

BINARY = b"\x80\x02}q\x00."


@pytest.mark.parametrize("value", ["4", None, True, 1.5, math.nan, math.inf, [4], -1, 11, torch.tensor([4]), "x"])
def test_what_is_no_whole_number(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^steps is .*: it must be a whole number from 0 to 10; 0 is off$"):
        whole_number("steps", value, 0, 10, "; 0 is off")


@pytest.mark.parametrize("value", [4, 4.0, np.int64(4), torch.tensor(4), np.float32(4)])
def test_whole_numbers(value: object) -> None:
    found = whole_number("steps", value, 4)
    assert (found, type(found)) == (4, int)


@pytest.mark.parametrize("value", ["0.5", None, True, math.nan, -math.inf, 0, 1.5])
def test_what_is_no_number_of_the_range(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^share is .*: it must be a share$"):
        number("share", value, 0, 1, above=True, wanted="a share")
    assert number("share", np.float32(0.5), 0, 1) == 0.5


def test_seeds_and_paths() -> None:
    assert check_seed("seed", 2**32 - 1) == 2**32 - 1
    with pytest.raises(ConfigError, match="seed is 4294967296: it must be a whole number from 0 to 4,294,967,295"):
        check_seed("seed", 2**32)
    assert check_paths("prompts", "a.jsonl", "a file") == ["a.jsonl"]
    assert check_paths("prompts", (Path("a"), "b"), "a file") == [Path("a"), "b"]
    with pytest.raises(ConfigError, match="prompts is None: it must be a file, or a list of them"):
        check_paths("prompts", None, "a file")


def test_files_that_are_no_text_or_no_object(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(BINARY)
    (tmp_path / "list").write_text("[1]")
    (tmp_path / "cut").write_text('{"a": ')
    with pytest.raises(CheckpointError, match=r"binary is not text in UTF-8 \(byte 0 is 0x80\): name a report"):
        read_text(tmp_path / "binary", "a report", CheckpointError)
    with pytest.raises(DataError, match="list holds a list, not an object: name a report"):
        read_json_object(tmp_path / "list", "a report")
    with pytest.raises(DataError, match="cut is not JSON"):
        read_json_object(tmp_path / "cut", "a report")


def test_json_has_no_word_for_nan() -> None:
    given = {"a": math.nan, "b": [1.5, (math.inf, {"c": -math.inf})], "d": "nan", "e": None, "f": np.float64("nan")}
    assert finite(given) == {"a": None, "b": [1.5, [None, {"c": None}]], "d": "nan", "e": None, "f": None}


def test_results_on_the_command_line_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    cli.emit({"tau": math.nan}, Path("-"))
    assert json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word)) == {"tau": None}


def test_tables_that_are_piped_have_their_full_width(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, console in (("stderr", stderr_console), ("stdout", stdout_console)):
        monkeypatch.setenv("COLUMNS", "60")
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: False)
        assert console().width == PIPE_WIDTH
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True)
        assert console().width == 60


# ---- recipes ---------------------------------------------------------------------------------------------------------


def test_a_recipe_that_is_binary(tmp_path: Path) -> None:
    (tmp_path / "foreign.yaml").write_bytes(BINARY)
    with pytest.raises(ConfigError, match=r"foreign.yaml is not text in UTF-8 \(byte 0 is 0x80\): name a recipe"):
        load_recipe(tmp_path / "foreign.yaml")


@pytest.mark.parametrize("overrides", ["training.max_steps=4", {"training.max_steps": 4}, [("a", 1)], 3])
def test_overrides_are_a_list_of_texts(overrides: object) -> None:
    with pytest.raises(ConfigError, match=r"overrides .*give a list of 'key.path=value'"):
        load_recipe("dspark/smollm2_135m", overrides)  # type: ignore[arg-type]


def test_a_recipe_is_no_dict() -> None:
    with pytest.raises(ConfigError, match=r"recipe is a dict: give a built-in name, the path of a YAML file"):
        load_recipe({"model": {}})  # type: ignore[arg-type]


VALUES = {
    "training.seed=-1": "training.seed is -1: it must be a whole number from 0 to 4,294,967,295",
    "training.seed=true": "training.seed is True: it must be a whole number",
    "training.data_seed=4294967296": "training.data_seed is 4294967296: it must be",
    "training.output_dir=": "override 'training.output_dir=' has no value: give one, or write training.output_dir=null",
    "training.output_dir=''": "training.output_dir is empty: name a directory",
    "training.output_dir='  '": "training.output_dir is empty: name a directory",
    "training.num_anchors=true": "training.num_anchors is True: it must be a whole number",
    "training.learning_rate=true": "training.learning_rate is True: it must be a number",
    "drafter.block_size=true": "drafter.block_size is True: it must be a whole number",
    "drafter.head.rank=false": "drafter.head.rank is False: it must be a whole number",
    "data.max_length=true": "data.max_length is True: it must be a whole number",
    "loss.ce=true": "loss.ce is True: it must be a number",
}


@pytest.mark.parametrize("override", VALUES)
def test_values_of_a_recipe(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("dspark/smollm2_135m", [override])
    assert str(caught.value).startswith(VALUES[override])


# ---- options ---------------------------------------------------------------------------------------------------------

CHECKPOINT = ["run", "--prompts", "rows.jsonl"]
OPTIONS = {
    "seed of an evaluation": (["evaluate", *CHECKPOINT, "--seed", "-1"], "'--seed'"),
    "seeds of a comparison": (["compare", "r", "--prompts", "p", "--out", "o", "--seeds", "0,-1"], "--seeds is -1"),
    "no new tokens": (["evaluate", *CHECKPOINT, "--max-new-tokens", "0"], "'--max-new-tokens'"),
    "no draft tokens": (["generate", "run", "Hello", "-k", "0"], "'--num-draft-tokens'"),
    "temperature": (["evaluate", *CHECKPOINT, "--temperature", "nan"], "--temperature is nan"),
    "limit": (["evaluate", *CHECKPOINT, "--limit", "0"], "'--limit'"),
    "folds": (["calibrate", *CHECKPOINT, "--folds", "-2"], "'--folds'"),
    "batch size": (["calibrate", *CHECKPOINT, "--batch-size", "0"], "'--batch-size'"),
    "share": (["calibrate", *CHECKPOINT, "--held-out", "nan"], "--held-out is nan"),
    "requests of a simulation": (["simulate", "rounds.jsonl", "--loads", "1", "--requests", "-1"], "'--requests'"),
    "load that is none": (["simulate", "rounds.jsonl", "--loads", "nan"], "--loads is nan"),
    "no load": (["simulate", "rounds.jsonl", "--loads", "4,0"], "--loads is 0"),
    "half a request": (["simulate", "rounds.jsonl", "--loads", "1.5"], "--loads is 1.5"),
    "rows to show": (["data", "inspect", "rows.jsonl", "--target", "t", "--rows", "-1"], "'--rows'"),
    "ranks": (["plan", "dspark/smollm2_135m", "--gpus", "99999999999"], "'--gpus'"),
    "rows to plan": (["plan", "dspark/smollm2_135m", "--rows", "99999999999999999999"], "'--rows'"),
    "binary recipe": (["train", "binary.yaml"], "binary.yaml is not text"),
    "binary rounds": (
        ["simulate", "binary.jsonl", "--loads", "1", "--cost", "binary.yaml"],
        "binary.jsonl:1 is not JSON",
    ),
    "binary cost table": (
        ["simulate", "rounds.jsonl", "--loads", "1", "--cost", "binary.yaml"],
        "binary.yaml is not text",
    ),
    "rejects over a source": (
        ["data", "inspect", "rows.jsonl", "--target", "target", "--rejects", "rows.jsonl"],
        "--rejects rows.jsonl is a file that this command reads",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_cannot_be_meant_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.scheduling.synthetic import round_records

    monkeypatch.chdir(tmp_path)
    header, records = round_records()
    Path("rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [header, *records]))
    Path("rows.jsonl").write_text('{"prompt": "Hello"}\n')
    for path in ("binary.yaml", "binary.jsonl"):
        Path(path).write_bytes(BINARY)
    Path("target").mkdir()
    arguments, message = OPTIONS[name]
    status = cli_run.run(cli.application(), arguments, debug=False)
    err = capsys.readouterr().err
    assert status == 2, err
    assert message in err
    assert "Traceback" not in err
