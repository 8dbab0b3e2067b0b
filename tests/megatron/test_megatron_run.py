"""Whole runs: the example script, resuming, settings, bad rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_workers import WorkerPool

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    "layout",
    [["megatron.tensor=2", "megatron.sequence=true"], ["megatron.pipeline=2"], []],
    ids=lambda v: "-".join(v) or "data parallel",
)
def test_the_example_trains_resumes_and_exports(pool: WorkerPool, tmp_path: Path, layout: list[str]) -> None:
    pool.run("jobs_run:example", 2, directory=str(tmp_path), layout=layout)
    assert (tmp_path / "latest.txt").read_text() == "step-4"
    assert (tmp_path / "step-2" / "metadata.json").is_file()
    assert (tmp_path / "drafter" / "drafter.json").is_file()
    assert (tmp_path / "export" / "config.json").is_file()
    assert list((tmp_path / "export").glob("*.safetensors"))


def test_a_run_learns(pool: WorkerPool) -> None:
    (losses,) = pool.run("jobs_run:learns")
    assert len(losses) == 30
    assert losses[-1] < 0.5 * losses[0]


def test_every_row_is_seen_once_an_epoch(pool: WorkerPool) -> None:
    (seen,) = pool.run("jobs_run:batches_cover_the_rows")
    first, second = (sorted(i for step in seen[epoch] for i in step) for epoch in ("first", "second"))
    assert first == second == list(range(24))
    assert seen["first"] != seen["second"]
    assert seen["again"] == seen["first"][0]


def test_settings_that_do_not_apply_are_refused(pool: WorkerPool) -> None:
    (messages,) = pool.run("jobs_run:refusals")
    assert "training.optim is 'sgd'" in messages["unknown"]
    assert "'memory'" in messages["memory"]
    assert "data.pack" in messages["packed"]
    assert "7 rows, one step takes 8" in messages["few"]
    assert "megatron.tensor is 1" in messages["sequence"]
    assert messages["built-in"] == "dspark/megatron_qwen3_8b"


@pytest.mark.parametrize("pp", [1, 2])
def test_a_loss_that_is_not_finite_stops_every_rank_before_the_step(pool: WorkerPool, pp: int) -> None:
    for message in pool.run("jobs_run:not_finite", pp, pp=pp):
        assert "not finite at step 0, row 1 of the training data" in message
