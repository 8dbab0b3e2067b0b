"""What a run leaves behind when it is killed, told to stop, fed a bad row or out of disk, and how it resumes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

import modelopt_spec as mtsp
from modelopt_spec.checkpoints.export import export
from modelopt_spec.errors import CheckpointError
from modelopt_spec.records import TargetFeatures
from modelopt_spec.targets.load import load_target
from modelopt_spec.training import run_checkpoints, trainer
from modelopt_spec.training import train as train_module
from modelopt_spec.training.features import OnlineFeatures
from modelopt_spec.training.trainer import NonFiniteLossError
from tests.tiny import tiny
from tests.training.tiny_run import losses, make_recipe, make_target, state_of, write_chats

STEPS = 6


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> tuple[Path, Path]:
    """A target and 14 conversations: with batches of 4, epochs of 4 steps of which the last is incomplete."""
    root = tmp_path_factory.mktemp("material")
    return make_target(root / "target"), write_chats(root / "chats.jsonl", 14)


def run(material, output_dir: Path, *, resume: bool = False, mode: str = "dspark", **training: Any):
    return train_module.train(make_recipe(*material, output_dir, mode, **training), resume=resume, quiet=True)


@pytest.fixture(scope="module")
def whole(material, tmp_path_factory):
    """The uninterrupted run that the others are compared with; every checkpoint is kept."""
    return run(material, tmp_path_factory.mktemp("whole"), save_total_limit=10)


def assert_same_end(result, whole) -> None:
    assert losses(result.report)[-1] == losses(whole.report)[-1]
    assert result.report["steps"] == whole.report["steps"] == STEPS
    for name, tensor in state_of(result.model.drafter).items():
        assert torch.equal(tensor, whole.model.drafter.state_dict()[name]), name


def interrupted(whole, output_dir: Path, step: int) -> Path:
    """A run directory as it is just after the checkpoint of a step."""
    name = f"checkpoint-{step}"
    shutil.copytree(whole.output_dir / name, output_dir / name)
    return output_dir


def in_child(function: Any, *args: Any) -> multiprocessing.Process:
    """Run a function in a forked process, with one thread (threads do not survive a fork)."""

    def body() -> None:
        torch.set_num_threads(1)
        function(*args)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    return process


def wait_for(condition: Any, process: multiprocessing.Process, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.is_alive(), f"the child ended with {process.exitcode}"
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


class Slow(TrainerCallback):
    """Writes the step that is done to a file and gives others time to interfere."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.path.write_text(str(state.global_step))
        time.sleep(0.05)


@pytest.fixture
def slow(monkeypatch, tmp_path) -> Path:
    """Every run reports its steps in a file."""
    path = tmp_path / "step"
    original = trainer.DraftTrainer.__init__

    def init(self, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.add_callback(Slow(path))

    monkeypatch.setattr(trainer.DraftTrainer, "__init__", init)
    return path


# ---- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_run_ends_like_the_uninterrupted_one(material, whole, tmp_path, step: int) -> None:
    result = run(material, interrupted(whole, tmp_path / "run", step), resume=True)
    assert_same_end(result, whole)
    assert losses(result.report) == losses(whole.report)


def test_a_finished_run_is_left_as_it_is(material, tmp_path) -> None:
    first = run(material, tmp_path / "run")
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    again = run(material, tmp_path / "run", resume=True)
    assert_same_end(again, first)
    assert again.report == json.loads((tmp_path / "run" / "report.json").read_text())
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == files


def test_a_finished_run_with_spread_experts_says_what_reads_its_checkpoint(material, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("modelopt_spec.training.train.spread_for_training", lambda drafter, arguments: None)
    run(material, tmp_path / "run", expert_parallel=True)
    with pytest.raises(CheckpointError, match=r"checkpoint-6 is the last step .*raise training\.max_steps"):
        run(material, tmp_path / "run", resume=True, expert_parallel=True)


def test_a_run_that_died_before_its_result_writes_it(material, whole, tmp_path) -> None:
    result = run(material, interrupted(whole, tmp_path / "run", STEPS), resume=True)
    assert_same_end(result, whole)
    assert losses(json.loads((tmp_path / "run" / "report.json").read_text())) == losses(whole.report)
    assert (tmp_path / "run" / "drafter" / "drafter.json").is_file()


def test_a_second_process_is_kept_out(material, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    hold = (
        "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path / "run")], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(CheckpointError, match="another process trains into"):
            run(material, tmp_path / "run")
    finally:
        holder.kill()
        holder.wait()
    run(material, tmp_path / "run")


def test_dominos_curriculum_goes_on_where_it_was(material, tmp_path) -> None:
    options = {"mode": "domino", "train_sampling_strategy": "group_by_length"}
    expected = run(material, tmp_path / "whole", save_total_limit=5, **options)
    result = run(material, interrupted(expected, tmp_path / "run", 2), resume=True, **options)
    assert_same_end(result, expected)
    lambdas = [entry["lambda"] for entry in result.report["curves"] if "lambda" in entry]
    assert lambdas == [entry["lambda"] for entry in expected.report["curves"] if "lambda" in entry]
    assert lambdas[0] > lambdas[1] > lambdas[-1] == 0.0


def test_resume_without_a_checkpoint_starts(material, whole, tmp_path) -> None:
    assert_same_end(run(material, tmp_path / "run", resume=True), whole)


def test_optimizer_moments_are_saved_by_name_in_float32(whole) -> None:
    state = torch.load(whole.output_dir / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert state["state"].keys() == set(dict(whole.model.drafter.named_parameters()))
    for values in state["state"].values():
        assert values["exp_avg"].dtype == values["exp_avg_sq"].dtype == torch.float32


def test_the_position_in_other_data_is_refused(material, whole, tmp_path) -> None:
    output_dir = interrupted(whole, tmp_path / "run", 2)
    with pytest.raises(CheckpointError, match=r"4 rows a step \(1 ranks\), this run has 2"):
        run(material, output_dir, resume=True, per_device_train_batch_size=2)
    other = write_chats(tmp_path / "other.jsonl", 14, seed=9)
    with pytest.raises(CheckpointError, match="other data"):
        run((material[0], other), output_dir, resume=True)
    result = run((material[0], other), output_dir, resume=True, ignore_data_skip=True)
    assert result.report["steps"] == STEPS


def test_the_same_rows_a_step_in_other_micro_batches_resume(material, whole, tmp_path) -> None:
    output_dir = interrupted(whole, tmp_path / "run", 2)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    result = run(material, output_dir, resume=True, **options)
    np.testing.assert_allclose(losses(result.report), losses(whole.report), rtol=1e-5)


def test_another_drafter_is_refused(material, whole, tmp_path) -> None:
    output_dir = interrupted(whole, tmp_path / "run", 2)
    with pytest.raises(CheckpointError, match=r"another drafter than the recipe's: .*head"):
        run(material, output_dir, resume=True, mode="dflash")


def test_a_checkpoint_without_optimizer_is_not_resumed(material, tmp_path) -> None:
    run(material, tmp_path / "run", max_steps=2, save_only_model=True)
    with pytest.raises(CheckpointError, match=r"no optimizer\.pt, scheduler\.pt"):
        run(material, tmp_path / "run", resume=True)


def test_every_checkpoint_restores_onto_the_target(whole, material) -> None:
    for step in (2, 4, 6):
        model = load_target(str(material[0]))
        mtsp.restore(model, whole.output_dir / f"checkpoint-{step}")
        assert model.drafter.config == whole.model.drafter.config


@pytest.mark.parametrize("step", [2, 4, 6])
def test_every_checkpoint_can_be_exported(whole, material, tmp_path, step: int) -> None:
    directory = tmp_path / "draft"
    export(whole.output_dir / f"checkpoint-{step}", directory, engines=("vllm", "llama.cpp"), quiet=True)
    found = mtsp.load_drafter(directory, load_target(str(material[0])), quiet=True).drafter
    original = mtsp.restore(load_target(str(material[0])), whole.output_dir / f"checkpoint-{step}").drafter
    assert found.config.block_size == original.config.block_size
    for name, tensor in original.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name].float(), tensor, rtol=1e-2, atol=1e-2)


# ---- directories -----------------------------------------------------------------------------------------------------


def test_other_runs_are_not_overwritten(material, whole, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="holds a finished run"):
        run(material, whole.output_dir)
    output_dir = interrupted(whole, tmp_path / "run", 2)
    with pytest.raises(CheckpointError, match="holds checkpoints of an earlier run"):
        run(material, output_dir)


def test_an_output_directory_that_cannot_be_written_ends_before_anything_is_loaded(material, tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        run(("/does/not/exist", material[1]), tmp_path / "file" / "run")


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(material, whole, tmp_path) -> None:
    output_dir = interrupted(whole, tmp_path / "run", 2)
    interrupted(whole, output_dir, 4)
    weights = output_dir / "checkpoint-4" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert run_checkpoints.newest_intact(output_dir) == output_dir / "checkpoint-2"
    assert_same_end(run(material, output_dir, resume=True), whole)
    assert run_checkpoints.is_intact(output_dir / "checkpoint-4"), "written again over the damaged one"
    for path in output_dir.glob("checkpoint-*"):
        (path / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"every checkpoint of .* is damaged \(checkpoint-6, checkpoint-4\)"):
        run_checkpoints.newest_intact(output_dir)


def fake(run_dir: Path, step: int, sealed: bool = True) -> Path:
    path = run_checkpoints.checkpoint_dir(run_dir, step)
    path.mkdir(parents=True)
    for name in ("trainer_state.json", "optimizer.pt", "scheduler.pt"):
        (path / name).write_text(f"{name} {step}")
    if sealed:
        run_checkpoints.seal(path)
    return path


def names(run_dir: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in run_dir.glob("checkpoint-*"))


def test_pruning_keeps_the_newest_and_the_best_and_removes_torn_ones(tmp_path) -> None:
    for step in (10, 20, 30, 40, 110):
        fake(tmp_path, step)
    fake(tmp_path, 35, sealed=False)
    newer = fake(tmp_path, 120, sealed=False)
    run_checkpoints.prune(tmp_path, None)
    assert names(tmp_path) == [10, 20, 30, 40, 110, 120]
    run_checkpoints.prune(tmp_path, 2, protect=str(tmp_path / "checkpoint-10"))
    assert names(tmp_path) == [10, 40, 110, 120]
    assert newer.exists(), "an unsealed one newer than all sealed ones may be in the making"
    assert run_checkpoints.newest_intact(tmp_path) == tmp_path / "checkpoint-110"


def test_nothing_is_pruned_without_a_sealed_checkpoint(tmp_path) -> None:
    fake(tmp_path, 1, sealed=False)
    run_checkpoints.prune(tmp_path, 1)
    assert names(tmp_path) == [1]
    assert run_checkpoints.newest_intact(tmp_path) is None


def test_a_seal_notices_changed_missing_and_extra_bytes(tmp_path) -> None:
    path = fake(tmp_path, 1)
    assert run_checkpoints.is_intact(path)
    (path / "optimizer.pt").write_text("other")
    assert not run_checkpoints.is_intact(path)
    (path / "optimizer.pt").unlink()
    assert not run_checkpoints.is_intact(path)
    (path / run_checkpoints.SEAL).write_text("{")
    assert not run_checkpoints.is_intact(path)


def test_the_best_checkpoint_stays_and_is_loaded_at_the_end(material, tmp_path) -> None:
    recipe = make_recipe(
        *material,
        tmp_path / "run",
        save_total_limit=1,
        save_steps=1,
        eval_steps=1,
        eval_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
        learning_rate=0.05,
    )
    recipe = recipe.replace(data=recipe.data.replace(validation_share=0.3))
    result = train_module.train(recipe, quiet=True)
    scores = [entry["eval_loss"] for entry in result.report["curves"] if "eval_loss" in entry]
    worst = int(np.argmax(scores)) + 1
    assert worst < STEPS, "the metric is chosen so that an early checkpoint wins"
    assert names(tmp_path / "run") == sorted({worst, STEPS})
    saved = run_checkpoints.checkpoint_dir(tmp_path / "run", worst)
    model = mtsp.restore(tiny("llama", vocab_size=result.model.config.vocab_size, num_hidden_layers=4), saved)
    for name, tensor in model.drafter.state_dict().items():
        assert torch.equal(tensor, result.model.drafter.state_dict()[name])


# ---- accidents -------------------------------------------------------------------------------------------------------


def test_a_killed_run_resumes_to_the_same_end(material, whole, slow, tmp_path) -> None:
    child = in_child(run, material, tmp_path / "run")
    wait_for(lambda: slow.exists() and slow.read_text() == "5", child)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert names(tmp_path / "run") == [2, 4]
    assert_same_end(run(material, tmp_path / "run", resume=True), whole)


def test_sigterm_saves_and_exits_with_0(material, whole, slow, tmp_path) -> None:
    def body() -> None:
        result = run(material, tmp_path / "run")
        (tmp_path / "result").write_text(json.dumps([result.stopped_by, str(result.checkpoint)]))

    before = signal.getsignal(signal.SIGTERM)
    child = in_child(body)
    wait_for(lambda: slow.exists() and slow.read_text() == "1", child)
    os.kill(child.pid, signal.SIGTERM)
    child.join(300)
    assert child.exitcode == 0
    reason, checkpoint = json.loads((tmp_path / "result").read_text())
    assert reason == "SIGTERM"
    step = int(checkpoint.rsplit("-", 1)[1])
    assert 1 <= step < STEPS
    assert run_checkpoints.newest_intact(tmp_path / "run") == Path(checkpoint)
    assert not (tmp_path / "run" / "report.json").exists(), "the run is not finished"
    assert_same_end(run(material, tmp_path / "run", resume=True), whole)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_deadline_ends_the_run_with_a_report_and_its_state(material, whole, tmp_path) -> None:
    result = run(material, tmp_path / "run", max_minutes=1e-6)
    assert result.stopped_by == result.report["stopped_by"] == "max_minutes"
    assert result.report["steps"] == 1
    assert run_checkpoints.newest_intact(tmp_path / "run").name == "checkpoint-1"
    assert json.loads((tmp_path / "run" / "report.json").read_text())["steps"] == 1
    assert_same_end(run(material, tmp_path / "run", resume=True), whole)


def test_a_bad_row_is_named_and_the_state_before_it_is_saved(material, whole, tmp_path, monkeypatch) -> None:
    healthy = OnlineFeatures.features
    poisoned = 9

    def features(self, input_ids, lengths, rows, position_ids) -> TargetFeatures:
        found = healthy(self, input_ids, lengths, rows, position_ids)
        if poisoned not in rows:
            return found
        taps = found.taps.clone()
        taps[list(rows).index(poisoned)] = torch.nan
        return TargetFeatures(taps, found.last_hidden)

    with monkeypatch.context() as patch:
        patch.setattr(OnlineFeatures, "features", features)
        with pytest.raises(NonFiniteLossError, match=r"in row\(s\) 9 of the training data") as caught:
            run(material, tmp_path / "run")
        step = int(str(caught.value).rsplit("checkpoint-", 1)[1])
        assert f"at step {step} " in str(caught.value)
        before = run_checkpoints.newest_intact(tmp_path / "run")
        assert before.name == f"checkpoint-{step}"
        with pytest.raises(NonFiniteLossError):
            run(material, tmp_path / "run", resume=True)
        assert run_checkpoints.newest_intact(tmp_path / "run") == before
    result = run(material, tmp_path / "run", resume=True)
    assert_same_end(result, whole)


@pytest.mark.parametrize("writer", ["optimizer", "weights", "seal"])
def test_a_full_disk_leaves_everything_before_intact(material, whole, tmp_path, monkeypatch, writer: str) -> None:
    def full(original: Any, allowed: int) -> Any:
        calls = []

        def write(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) > allowed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **kwargs)

        return write

    owner, name, allowed = {
        "optimizer": (trainer.torch, "save", 4),
        "weights": (trainer, "write_drafter", 1),
        "seal": (run_checkpoints, "seal", 1),
    }[writer]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full(getattr(owner, name), allowed))
        with pytest.raises(CheckpointError, match=r"checkpoint of step 4 could not be written .*No space left"):
            run(material, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-2"]
    assert run_checkpoints.is_intact(tmp_path / "run" / "checkpoint-2")
    assert_same_end(run(material, tmp_path / "run", resume=True), whole)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_lose_no_checkpoint(material, slow, tmp_path) -> None:
    """Kills while a step runs and while a checkpoint is being written; the end is that of the run left alone."""
    steps, options = 60, {"save_steps": 1, "save_total_limit": 3}
    expected = run(material, tmp_path / "whole", max_steps=steps, **options)
    moments = np.random.default_rng(0)
    run_dir, kills, newest, in_a_save = tmp_path / "run", 0, 0, 0
    while kills < 20:
        slow.unlink(missing_ok=True)
        child = in_child(lambda: run(material, run_dir, resume=True, max_steps=steps, **options))
        until = newest + int(moments.integers(1, 4))
        wait_for(lambda until=until: slow.exists() and int(slow.read_text() or 0) >= until, child)
        if kills % 2:
            staging = run_checkpoints.staging_dir(run_dir)
            wait_for(lambda staging=staging: any(staging.glob("*/*")), child)
            time.sleep(float(moments.uniform(0, 0.004)))
            in_a_save += 1
        else:
            time.sleep(float(moments.uniform(0, 0.1)))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
        kills += 1
        for path in run_dir.glob("checkpoint-*"):
            assert run_checkpoints.is_intact(path), "a checkpoint that stands in its place is whole"
        found = run_checkpoints.newest_intact(run_dir)
        step = int(found.name.split("-")[1]) if found else 0
        assert step >= newest, f"kill {kills} lost checkpoint {newest}"
        newest = step
    assert in_a_save == 10
    result = run(material, run_dir, resume=True, max_steps=steps, **options)
    assert losses(result.report) == losses(expected.report)
    for name, tensor in state_of(result.model.drafter).items():
        assert torch.equal(tensor, expected.model.drafter.state_dict()[name]), name
