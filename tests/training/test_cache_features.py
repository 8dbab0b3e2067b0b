"""`mtsp data cache`: what it writes is what training would write, and training reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelopt_spec import cli, cli_run
from modelopt_spec.training.train import train
from tests.training.tiny_run import make_target, recipe_values, write_chats, write_recipe


def test_training_reads_what_the_command_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, rows = make_target(tmp_path / "target"), write_chats(tmp_path / "rows.jsonl", 12)
    recipe = write_recipe(tmp_path / "recipe.yaml", recipe_values(target, rows, tmp_path / "run", max_steps=3))
    cache, written = tmp_path / "cache", tmp_path / "cache.json"
    command = [
        "data",
        "cache",
        str(recipe),
        "--out",
        str(cache),
        "training.cache.positions=all",
        "--json",
        str(written),
    ]
    assert cli_run.run(cli.application(), command, debug=True) == 0
    out, err = capsys.readouterr()
    report = json.loads(written.read_text())
    assert (report["rows"], report["dtype"], report["shards"]) == (12, "float32", 1)
    stored = {file: file.read_bytes() for file in cache.glob("*.safetensors")}
    assert report["bytes"] == pytest.approx(sum(map(len, stored.values())), rel=0.05)
    assert "GiB for 12 rows" in err
    assert " ".join(report["overrides"]) in out
    result = train(recipe, [*report["overrides"], "training.cache.positions=all"], quiet=True)
    assert {file: file.read_bytes() for file in cache.glob("*.safetensors")} == stored
    straight = train(recipe, [f"training.output_dir={tmp_path / 'online'}"], quiet=True)
    losses = [[entry["loss"] for entry in run.report["curves"] if "loss" in entry] for run in (result, straight)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
