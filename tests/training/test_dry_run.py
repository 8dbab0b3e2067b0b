"""`mtsp plan`, `mtsp train --dry-run` and what `mtsp train` says on each rank and after SIGTERM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from modelopt_spec import cli, cli_commands
from modelopt_spec.errors import CheckpointError, DataError
from modelopt_spec.training import dry_run as dry_run_module
from modelopt_spec.training import run_checkpoints
from modelopt_spec.training.dry_run import checkpoint_bytes, dry_run
from modelopt_spec.training.interrupt import Interrupt
from modelopt_spec.training.machine import GPUS, choose_machine, gpu_key
from modelopt_spec.training.train import train
from tests.training.tiny_run import make_recipe, make_target, recipe_values, write_chats, write_recipe
from tests.training.two_ranks import run_ranks


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("material")
    return make_target(root / "target"), write_chats(root / "chats.jsonl", 14)


@pytest.fixture(scope="module", autouse=True)
def commands() -> None:
    if not any(command.callback.__name__ == "plan" for command in cli.app.registered_commands):
        cli_commands.register(cli.app)


def mtsp(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def failed(result: Any) -> dict[str, str]:
    return {check.name: check.detail for check in result.checks if not check.ok}


# ---- checks ----------------------------------------------------------------------------------------------------------


def test_a_healthy_recipe_passes_and_nothing_is_written(material, tmp_path: Path) -> None:
    result = dry_run(make_recipe(*material, tmp_path / "run", features="memory"))
    assert result.ok, failed(result)
    assert [check.name for check in result.checks] == ["data", "output_dir", "disk", "host_memory"]
    assert list(tmp_path.iterdir()) == []
    assert result.to_dict()["steps"]["total"] == 6
    json.dumps(result.to_dict())


def test_data_that_is_not_there_fails_beside_the_other_checks(material, tmp_path: Path) -> None:
    recipe = make_recipe(material[0], tmp_path / "later.jsonl", tmp_path / "run")
    result = dry_run(recipe)
    assert "later.jsonl" in failed(result)["data"]
    assert len(result.checks) == 4
    assert result.plan["data"]["assumed"]
    assert result.plan["data"]["rows"] == 100_000
    assert "--row-tokens" in failed(result)["data"]
    cut = make_recipe(material[0], tmp_path / "later.jsonl", tmp_path / "run", features="memory")
    cut = cut.model_copy(update={"data": cut.data.replace(max_samples=7)})
    few = dry_run(cut)
    assert few.plan["data"]["rows"] == 7
    assert set(failed(few)) == {"data"}
    everything = dry_run(make_recipe(material[0], tmp_path / "later.jsonl", tmp_path / "run", features="memory"))
    assert set(failed(everything)) == {"data"}, "features of rows that nobody has counted fill no memory"
    announced = dry_run(recipe, rows=1000, row_tokens=100)
    assert announced.ok
    assert "1,000 rows" in announced.checks[0].detail


def test_an_output_directory_that_is_taken_or_closed_fails(material, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("x")
    assert "is a file" in failed(dry_run(make_recipe(*material, tmp_path / "file" / "run")))["output_dir"]
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    recipe = make_recipe(*material, tmp_path / "run")
    assert "--resume" in failed(dry_run(recipe))["output_dir"]
    assert dry_run(recipe, resume=True).ok
    monkeypatch.setattr(run_checkpoints.os, "access", lambda *args: False)
    assert "cannot be written to" in failed(dry_run(recipe, resume=True))["output_dir"]


def test_disks_are_summed_where_they_are_one(material, tmp_path: Path, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    recipe = make_recipe(*material, tmp_path / "run", features="cached", cache_dir=str(tmp_path / "cache"))
    found = dry_run(recipe)
    (disk,) = [check for check in found.checks if check.name == "disk"]
    assert "checkpoints" in disk.detail
    assert "cached features" in disk.detail
    needed = checkpoint_bytes(recipe, found.plan["drafter"]["parameters"]) + found.plan["cache"]["bytes"]
    for free, ok in ((needed + 2**28 + 4096, True), (needed + 2**28 - 4096, False)):
        monkeypatch.setattr(dry_run_module.shutil, "disk_usage", lambda path, free=free: usage(free, 0, free))
        assert ("disk" not in failed(dry_run(recipe))) == ok
    nameless = make_recipe(*material, tmp_path / "run", features="cached")
    assert "training.cache_dir" in failed(dry_run(nameless))["disk"]


def test_memory_is_that_of_the_named_gpu_or_of_this_machine(material, tmp_path: Path, monkeypatch) -> None:
    recipe = make_recipe(*material, tmp_path / "run")
    named = dry_run(recipe, gpu="l4")
    assert [check.name for check in named.checks][-1] == "gpu_memory"
    assert "l4" in named.checks[-1].detail
    assert named.ok
    monkeypatch.setitem(GPUS, "l4", (121, 1e-6))
    assert "num_anchors" in failed(dry_run(recipe, gpu="l4"))["gpu_memory"]
    monkeypatch.setattr(dry_run_module, "available_memory", lambda: 1000)
    assert set(failed(dry_run(recipe))) == {"host_memory"}


def test_training_and_the_dry_run_refuse_the_same_directories(material, tmp_path: Path) -> None:
    (tmp_path / "run" / "drafter").mkdir(parents=True)
    (tmp_path / "run" / "notes.txt").write_text("beside a run, in nobody's way")
    recipe = make_recipe(*material, tmp_path / "run")
    assert dry_run(recipe).ok, "an empty directory is replaced, other files stay"
    (tmp_path / "run" / "drafter" / "sketch.dwg").write_text("of something else")
    with pytest.raises(CheckpointError, match="would replace") as refused:
        train(recipe, quiet=True)
    assert failed(dry_run(recipe)) == {"output_dir": str(refused.value)}
    assert (tmp_path / "run" / "drafter" / "sketch.dwg").exists()


def test_a_plan_is_for_this_machine_unless_told(material, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    here = choose_machine(None)
    assert (here.kind, here.here, here.peak_from) == ("cpu", True, "measured here")
    assert 1e-4 < here.peak_tflops < 50
    assert here.memory_gb * 1e9 <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert (choose_machine(None, 8).name, choose_machine(None, 8).here) == ("h100", False)
    assert choose_machine("l4").memory_gb == 24
    file = write_recipe(tmp_path / "recipe.yaml", recipe_values(*material, tmp_path / "run"))
    told = " ".join(mtsp("plan", file).output.split())
    assert "this machine's CPU" in told
    assert "measured here; the share is assumed); --gpu plans for another" in told
    assert "no GPU is here, so this one is assumed" in " ".join(mtsp("plan", file, "--gpus", 2).output.split())


@pytest.mark.parametrize(
    ("device", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla T4", None),
    ],
)
def test_drivers_names_of_gpus(device: str, key: str | None) -> None:
    assert gpu_key(device) == key


@pytest.mark.parametrize("options", [{}, {"save_only_model": True}, {"save_strategy": "no"}, {"save_total_limit": 1}])
def test_checkpoints_take_what_the_check_says(material, tmp_path: Path, options: dict[str, Any]) -> None:
    """Of the run's directory at its largest: the kept ones and one more in the making."""
    recipe = make_recipe(*material, tmp_path / "run", **options)
    parameters = train(recipe, quiet=True).report["trainable_parameters"]
    files = [file for file in (tmp_path / "run").rglob("*") if file.suffix in (".safetensors", ".pt")]
    checkpoints = sorted((tmp_path / "run").glob("checkpoint-*"))
    written = sum(file.stat().st_size for file in files)
    one = sum(file.stat().st_size for file in files if checkpoints and checkpoints[0] in file.parents)
    assert checkpoint_bytes(recipe, parameters) == pytest.approx(written + one, rel=0.25)


# ---- commands --------------------------------------------------------------------------------------------------------


def test_plan_prints_and_writes(material, tmp_path: Path) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", recipe_values(*material, tmp_path / "run"))
    result = mtsp("plan", file, "training.max_steps=20", "--gpu", "l4", "--gpus", 2, "--json", tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    assert "2 x l4 at 35%" in " ".join(result.output.split())
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["steps"]["total"] == 20
    assert found["time"]["gpus"] == 2
    only_json = mtsp("plan", file, "--rows", 50_000, "--row-tokens", 90, "--efficiency", 0.5, "--json", "-")
    assert json.loads(only_json.stdout)["data"]["rows"] == 50_000


def test_plan_forecasts_from_a_report(material, tmp_path: Path) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", recipe_values(*material, tmp_path / "run", max_steps=20))
    train(file, ["training.save_strategy=no"], quiet=True)
    result = mtsp("plan", file, "training.max_steps=100", "--report", tmp_path / "run" / "report.json")
    assert "forecast: tau" in result.output
    with pytest.raises(DataError, match=r"needs 8"):
        mtsp_raising("plan", file, "--report", cut_report(tmp_path))


def cut_report(directory: Path) -> Path:
    report = json.loads((directory / "run" / "report.json").read_text())
    report["curves"] = report["curves"][:4]
    (directory / "cut.json").write_text(json.dumps(report))
    return directory / "cut.json"


def mtsp_raising(*arguments: Any) -> None:
    result = mtsp(*arguments)
    assert result.exception is not None
    raise result.exception


def test_a_dry_run_ends_with_what_it_found(material, tmp_path: Path) -> None:
    values = recipe_values(*material, tmp_path / "run")
    file = write_recipe(tmp_path / "recipe.yaml", values)
    healthy = mtsp("train", file, "--dry-run", "--json", tmp_path / "dry.json")
    assert healthy.exit_code == 0, healthy.output
    assert "drafter" in healthy.output
    assert "ok   data: 14 rows" in healthy.output
    assert json.loads((tmp_path / "dry.json").read_text())["ok"]
    assert not (tmp_path / "run").exists()
    assert mtsp("train", file, "--dry-run", "--gpus", 0).exit_code == 2
    assert mtsp("train", file, "--dry-run", "--rows", -1).exit_code == 2
    broken = mtsp("train", file, "--dry-run", f"data.train={tmp_path}/none.jsonl")
    assert broken.exit_code == 1
    assert "FAIL data" in broken.output
    assert (
        mtsp(
            "train", file, "--dry-run", f"data.train={tmp_path}/none.jsonl", "--rows", 500, "--row-tokens", 90
        ).exit_code
        == 0
    )


def in_rank(arguments: list[str], output: Path) -> None:
    """The command as a process of its own would run it, with its output in a file."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.argv = ["mtsp", *arguments]
    cli.console.file = sys.stdout
    cli.app(standalone_mode=False)
    sys.stdout.flush()


def test_only_the_first_rank_reports(material, tmp_path: Path) -> None:
    values = recipe_values(*material, tmp_path / "run", per_device_train_batch_size=2)
    file = str(write_recipe(tmp_path / "recipe.yaml", values))

    def job() -> None:
        rank = os.environ["RANK"]
        in_rank(["train", file, "--json", str(tmp_path / f"result-of-{rank}.json")], tmp_path / f"out-{rank}")

    run_ranks(job, directory=tmp_path / "ranks")
    assert "trained" in (tmp_path / "out-0").read_text()
    assert (tmp_path / "out-1").read_text().strip() == ""
    assert json.loads((tmp_path / "result-of-0.json").read_text())["steps"] == 6
    assert not (tmp_path / "result-of-1.json").exists()


def test_sigterm_ends_the_command_with_0_and_says_what_was_saved(material, tmp_path: Path) -> None:
    file = str(write_recipe(tmp_path / "recipe.yaml", recipe_values(*material, tmp_path / "run")))

    def job() -> None:
        original = Interrupt.on_step_end

        def signalled(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            original(self, args, state, control, **kwargs)

        Interrupt.on_step_end = signalled  # type: ignore[method-assign]
        in_rank(["train", file, "--json", str(tmp_path / "stopped.json")], tmp_path / "out")

    run_ranks(job, directory=tmp_path / "ranks", world=1)
    told = " ".join((tmp_path / "out").read_text().split())
    assert "stopped by SIGTERM after step 3" in told
    assert "checkpoint-3" in told
    assert json.loads((tmp_path / "stopped.json").read_text())["stopped_by"] == "SIGTERM"
    assert not (tmp_path / "run" / "report.json").exists()
    resumed = mtsp("train", file, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "trained" in resumed.output
    shutil.rmtree(tmp_path / "run")
