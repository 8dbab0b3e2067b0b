"""Two gloo ranks train what one process trains: DDP, FSDP2, a sharded target, accumulation, resumes, accidents."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from modelopt_spec.records import TargetFeatures
from modelopt_spec.training import run_checkpoints, sharding
from modelopt_spec.training import train as train_module
from modelopt_spec.training.features import OnlineFeatures
from modelopt_spec.training.trainer import NonFiniteLossError
from tests.training.tiny_run import (
    curve,
    losses,
    make_recipe,
    make_target,
    make_trainer,
    random_rows,
    state_of,
    write_chats,
)
from tests.training.two_ranks import allow_fsdp_on_cpu, run_ranks

Outcome = tuple[list[float], dict[str, torch.Tensor]]
DPACE = {"position_weights": "dpace", "dpace_alpha": 0.3}


def outcome(rows: list[dict], output_dir: Path, **options: Any) -> Outcome:
    """Losses and weights of a run; on every rank the whole weights."""
    if options.get("fsdp"):
        allow_fsdp_on_cpu()
    trainer = make_trainer(rows, output_dir, **options)
    trainer.train()
    if options.get("fsdp"):
        assert any(isinstance(p, DTensor) for p in trainer.module.drafter.parameters())
    return curve(trainer), state_of(sharding.whole_drafter(trainer.module.drafter))


def assert_same(found: Outcome, expected: Outcome, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=max(tolerance, 1e-6))
    assert found[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("options", "fsdp"),
    [
        ({"mode": "dspark"}, False),
        ({"mode": "dflash"}, False),
        ({"mode": "domino"}, False),
        ({"mode": "dspark", "loss": DPACE}, False),
        ({"mode": "dspark", "loss": {"confidence": 0.0}}, False),
        ({"mode": "dspark", "train_sampling_strategy": "group_by_length"}, False),
        ({"mode": "dspark"}, True),
        ({"mode": "domino", "loss": DPACE}, True),
    ],
    ids=["dspark", "dflash", "domino", "dpace", "idle-confidence", "by-length", "fsdp2", "fsdp2-dpace"],
)
def test_two_ranks_equal_one_process_with_their_rows(options: dict, fsdp: bool, tmp_path: Path) -> None:
    """Rows that do not fill the last step, two micro-batches a step on each rank, clipping: loss and weights."""
    rows = random_rows(14)
    common = {**options, "max_steps": 3, "max_grad_norm": 0.05}
    expected = outcome(rows, tmp_path, per_device_train_batch_size=8, **common)
    shared = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **common}
    if fsdp:
        shared |= {"fsdp": True, "fsdp_config": {}}
    first, second = run_ranks(lambda: outcome(rows, tmp_path, **shared), directory=tmp_path / "ranks")
    assert_same(first, second, 0.0)
    assert_same(first, expected)


def untaught(rows: list[dict]) -> list[dict]:
    return [{**row, "loss_mask": np.zeros_like(row["loss_mask"])} for row in rows]


@pytest.mark.parametrize(
    "options", [{}, {"loss": DPACE}, {"fsdp": True, "fsdp_config": {}}], ids=["exp", "dpace", "fsdp2"]
)
def test_a_rank_without_a_supervised_row_adds_nothing(options: dict, tmp_path: Path) -> None:
    rows = random_rows(6)
    mixed = [*rows[:2], *untaught(rows[2:4])]
    common = {"max_steps": 2, "train_sampling_strategy": "sequential", "weight_decay": 0.0}

    def job() -> tuple[Outcome, list[int]]:
        if options.get("fsdp"):
            allow_fsdp_on_cpu()
        trainer = make_trainer(mixed, tmp_path, per_device_train_batch_size=2, **common, **options)
        trainer.train()
        weights = state_of(sharding.whole_drafter(trainer.module.drafter))
        return (curve(trainer), weights), trainer.rows_without_supervision()

    (first, counted), (second, also) = run_ranks(job, directory=tmp_path / "ranks")
    assert counted == also == [2, 3]
    assert_same(first, second, 0.0)
    plain = {name: value for name, value in options.items() if "fsdp" not in name}
    assert_same(first, outcome(rows[:2], tmp_path, per_device_train_batch_size=2, **common, **plain))


def test_bf16_autocast_on_two_ranks_keeps_float32_weights_and_moments(tmp_path: Path) -> None:
    rows = random_rows(8)

    def job(fsdp: bool) -> tuple[Outcome, set]:
        if fsdp:
            allow_fsdp_on_cpu()
        extra = {"fsdp": True, "fsdp_config": {}} if fsdp else {}
        trainer = make_trainer(rows, tmp_path, dtype=torch.float32, per_device_train_batch_size=2, bf16=True, **extra)
        trainer.train()
        drafter = trainer.module.drafter
        moments = sharding.whole_optimizer_state(drafter, trainer.optimizer)["state"].values()
        kinds = {p.dtype for p in drafter.parameters()} | {values["exp_avg"].dtype for values in moments}
        return (curve(trainer), state_of(sharding.whole_drafter(drafter))), kinds

    expected = outcome(rows, tmp_path, dtype=torch.float32, per_device_train_batch_size=4, bf16=True)
    exact = outcome(rows, tmp_path, dtype=torch.float32, per_device_train_batch_size=4)
    assert expected[0] != exact[0]
    for fsdp in (False, True):
        (first, kinds), (second, _) = run_ranks(lambda fsdp=fsdp: job(fsdp), directory=tmp_path / f"ranks-{fsdp}")
        assert kinds == {torch.float32}
        assert_same(first, second, 0.0)
        np.testing.assert_allclose(first[0], expected[0], rtol=2e-3)
        np.testing.assert_allclose(first[0], exact[0], rtol=2e-2)


def test_evaluation_on_two_ranks_counts_every_row_once(tmp_path: Path) -> None:
    held_out = random_rows(7, seed=4)

    def scores(batch: int) -> dict[str, float]:
        trainer = make_trainer(random_rows(4), tmp_path, evaluate=held_out, per_device_eval_batch_size=batch)
        found = trainer.evaluate()
        return {name: value for name, value in found.items() if "per_second" not in name and "time" not in name}

    expected = scores(4)
    for found in run_ranks(lambda: scores(2), directory=tmp_path / "ranks"):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-6), name


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("material")
    return make_target(root / "target"), write_chats(root / "chats.jsonl", 14)


def run(material, output_dir: Path, *, resume: bool = False, **training: Any) -> Outcome:
    if training.get("fsdp"):
        allow_fsdp_on_cpu()
    recipe = make_recipe(*material, output_dir, save_total_limit=10, **training)
    result = train_module.train(recipe, resume=resume, quiet=True)
    return losses(result.report), state_of(result.model.drafter)


@pytest.fixture(scope="module")
def whole(material, tmp_path_factory) -> tuple[Path, Outcome]:
    """One process, four rows a step."""
    output_dir = tmp_path_factory.mktemp("whole")
    return output_dir, run(material, output_dir)


SHARED = {"per_device_train_batch_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "sharded-target": {"shard_target": True},
    "fsdp2": {"fsdp": True, "fsdp_config": {}},
    "fsdp2-sharded-target": {"fsdp": True, "fsdp_config": {}, "shard_target": True},
    "memory": {"features": "memory"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_recipe_on_two_ranks_ends_like_on_one(material, whole, layout: str, tmp_path: Path) -> None:
    options = {**SHARED, **LAYOUTS[layout]}
    first, second = run_ranks(lambda: run(material, tmp_path / "run", **options), directory=tmp_path / "ranks")
    assert_same(first, second, 0.0)
    assert_same(first, whole[1], 2e-4)
    for step in (2, 4, 6):
        assert run_checkpoints.is_intact(tmp_path / "run" / f"checkpoint-{step}")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-6",
        "drafter",
        "report.json",
    ]


def test_two_ranks_write_a_feature_cache_together(material, whole, tmp_path: Path) -> None:
    options = {**SHARED, "features": "cached", "cache_dir": str(tmp_path / "cache")}
    first, second = run_ranks(lambda: run(material, tmp_path / "run", **options), directory=tmp_path / "ranks")
    assert_same(first, second, 0.0)
    assert_same(first, whole[1], 2e-4)


@pytest.mark.parametrize("step", [2, 4])
def test_one_rank_goes_on_where_two_were_and_the_other_way_round(material, whole, step: int, tmp_path: Path) -> None:
    """Step 4 ends an epoch, step 2 lies inside of one; FSDP2 resumes what DDP wrote and DDP what FSDP2 wrote."""
    fsdp = {"fsdp": True, "fsdp_config": {}}
    run_ranks(lambda: run(material, tmp_path / "two", **SHARED, **fsdp), directory=tmp_path / "ranks")
    for place in ("two-to-one", "two-to-two"):
        shutil.copytree(tmp_path / "two" / f"checkpoint-{step}", tmp_path / place / f"checkpoint-{step}")
    assert_same(run(material, tmp_path / "two-to-one", resume=True), whole[1], 2e-4)
    for name, options in (("two-to-two", {}), ("one-to-two", fsdp)):
        if name == "one-to-two":
            interrupted_copy(whole[0], tmp_path / name, step)
        resumed = run_ranks(
            lambda name=name, options=options: run(material, tmp_path / name, resume=True, **SHARED, **options),
            directory=tmp_path / f"ranks-{name}",
        )
        assert_same(resumed[0], whole[1], 2e-4)


def interrupted_copy(source: Path, output_dir: Path, step: int) -> None:
    shutil.copytree(source / f"checkpoint-{step}", output_dir / f"checkpoint-{step}")


def test_a_bad_row_on_one_rank_stops_both(material, tmp_path: Path, monkeypatch) -> None:
    healthy = OnlineFeatures.features

    def features(self, input_ids, lengths, rows, position_ids) -> TargetFeatures:
        found = healthy(self, input_ids, lengths, rows, position_ids)
        if 9 not in rows:
            return found
        taps = found.taps.clone()
        taps[list(rows).index(9)] = torch.nan
        return TargetFeatures(taps, found.last_hidden)

    def job() -> str:
        try:
            run(material, tmp_path / "run", **SHARED)
        except NonFiniteLossError as error:
            return str(error)
        return ""

    monkeypatch.setattr(OnlineFeatures, "features", features)
    first, second = run_ranks(job, directory=tmp_path / "ranks")
    assert first == second
    assert "in row(s) 9 of the training data" in first
    step = int(first.rsplit("checkpoint-", 1)[1])
    assert run_checkpoints.newest_intact(tmp_path / "run").name == f"checkpoint-{step}"


def test_sigterm_to_one_rank_stops_both_with_their_state(material, whole, tmp_path: Path) -> None:
    from modelopt_spec.training.interrupt import Interrupt

    def job() -> str | None:
        original = Interrupt.on_step_end

        def signalled(self, args, state, control, **kwargs):
            if state.global_step == 3 and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            original(self, args, state, control, **kwargs)

        Interrupt.on_step_end = signalled
        recipe = make_recipe(*material, tmp_path / "run", **SHARED)
        return train_module.train(recipe, quiet=True).stopped_by

    assert run_ranks(job, directory=tmp_path / "ranks") == ["SIGTERM", "SIGTERM"]
    assert run_checkpoints.newest_intact(tmp_path / "run").name == "checkpoint-3"
    resumed = run_ranks(
        lambda: run(material, tmp_path / "run", resume=True, **SHARED), directory=tmp_path / "ranks-resumed"
    )
    assert_same(resumed[0], whole[1], 2e-4)
