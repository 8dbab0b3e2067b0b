"""`mtsp calibrate`, `profile` and `simulate` on a tiny model: every option reaches its function."""

import json

import pytest
from typer.testing import CliRunner

from modelopt_spec import cli_commands
from modelopt_spec.cli import app
from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.scheduling.scheduler_file import load_scheduler
from tests.decoding.tiny import add_drafter, tiny_target
from tests.scheduling.synthetic import round_records
from tests.scheduling.test_api import Tokenizer


@pytest.fixture(scope="module")
def run():
    """Call a command on the tiny model; errors are raised."""
    if not any(command.callback is cli_commands.simulate for command in app.registered_commands):
        cli_commands.register(app)
    model = add_drafter(tiny_target())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_commands, "_open", lambda *a: (model, Tokenizer()))
        patch.setattr(cli_commands, "checkpoint_directory", lambda path: path)
        yield lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


@pytest.fixture
def rounds(tmp_path):
    header, records = round_records(gamma=5)
    path = tmp_path / "rounds.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [header, *records]) + "\n")
    return path


def test_from_rounds_to_curves(run, rounds, tmp_path):
    out, report = tmp_path / "scheduler.json", tmp_path / "report.json"
    calibrate = ["calibrate", "checkpoint", "--prompts", "chat.jsonl", "--rounds", rounds, "--out", out]
    options = ["--adaptive-bins", "--bins", 10, "--refine", "--held-out", 0.5, "--folds", 3, "--bootstrap", 5]
    result = run(*calibrate, *options, "--max-noise", 0.3, "--min-events", 5, "--json", report)
    assert result.exit_code == 0
    assert "cross-validated over 3 folds" in result.output.replace("\n", " ")
    written = json.loads(report.read_text())
    assert written["options"]["binning"] == {"bins": 10, "adaptive": True}
    assert (written["options"]["refine"], written["options"]["min_events"]) == (True, 5)
    assert written["held_out"]["prompts"] == 30
    profile = ["profile", "checkpoint", "--out", out, "--requests", "1,2", "--contexts", "6,9", "--no-check"]
    run(*profile, "--repeats", 3, "--warmup", 0, "--cpu-time", "--json", report, "--figure", tmp_path / "cost.png")
    measured = json.loads(report.read_text())["measurements"]
    assert (measured["repeats"], measured["warmup"]) == (3, 0)
    assert {cell["context"] for cell in measured["cells"]} == {6, 9}
    assert load_scheduler(out).calibration.temperatures == tuple(written["temperatures"])
    simulate = ["simulate", rounds, "--scheduler", out, "--loads", "1,2", "--ragged", "--policy", "fixed:2"]
    run(*simulate, "--requests", 9, "--output-tokens", 7, "--acceptance", "bootstrap", "--json", report)
    curve = json.loads(report.read_text())
    assert [point["tokens"] for point in curve["policies"][0]["points"]] == [63, 63]
    assert curve["acceptance"] == "bootstrap"
    assert not curve["engine"]["padded"]


def test_user_mistakes_are_named(run, rounds, tmp_path):
    with pytest.raises(ConfigError, match="--loads is '1,two'"):
        run("simulate", rounds, "--loads", "1,two")
    with pytest.raises(ConfigError, match="no cost table"):
        run("simulate", rounds, "--loads", "1")
    with pytest.raises(DataError, match="are too few to calibrate"):
        run("calibrate", "c", "--prompts", "p", "--rounds", rounds, "--out", tmp_path / "s.json", "--max-noise", 0.001)
