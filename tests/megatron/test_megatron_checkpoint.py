"""Distributed checkpoints: saved at one layout, loaded at another, exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_workers import WorkerPool

pytestmark = pytest.mark.megatron

PAIRS: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = [
    ("vanilla", {"tp": 2}, {}, True),
    ("vanilla", {"tp": 2}, {"tp": 2, "sp": True}, True),
    ("vanilla", {"pp": 2}, {"tp": 2}, True),
    ("gru", {}, {"tp": 2, "pp": 2}, True),
    ("rnn", {"tp": 2, "pp": 2}, {"pp": 2}, False),
    ("none", {"tp": 2}, {"tp": 2, "pp": 2}, False),
]


def world_of(layout: dict[str, Any]) -> int:
    return layout.get("tp", 1) * layout.get("pp", 1)


def only(results: list[dict[str, Any]], key: str) -> dict[str, torch.Tensor]:
    """The value of the ranks that have one; they must agree."""
    found = [r[key] for r in results if r[key] is not None]
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in found[0])
    return found[0]


@pytest.mark.parametrize(("mode", "saved", "loaded", "target"), PAIRS, ids=str)
def test_saved_at_one_layout_loads_at_another(
    pool: WorkerPool, tmp_path: Path, mode: str, saved: dict[str, Any], loaded: dict[str, Any], target: bool
) -> None:
    before = pool.run(
        "jobs_checkpoint:save", world_of(saved), directory=str(tmp_path), mode=mode, target=target, **saved
    )
    after = pool.run("jobs_checkpoint:load", world_of(loaded), directory=str(tmp_path), target=target, **loaded)
    for key in ("drafter", "target"):
        expected, got = only(before, key), only(after, key)
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[name], got[name]) for name in expected)
    embedding = only(after, "target")["model.embed_tokens.weight"]
    assert all(r["common"] == {"step": 3} for r in after)
    assert all(r["config"]["vocab_size"] == 97 for r in after)
    hosts = [r for r in after if r["embedded"] is not None]
    assert hosts
    assert all(torch.equal(r["embedded"], embedding) for r in hosts)
    assert all(name.startswith("drafter.") for r in after for name in r["trainable"])


@pytest.mark.parametrize(
    ("saved", "resumed"), [({"tp": 2}, {"tp": 2}), ({"tp": 2}, {"pp": 2}), ({"pp": 2}, {"pp": 2}), ({}, {})], ids=str
)
def test_training_goes_on_where_it_stopped(
    pool: WorkerPool, tmp_path: Path, saved: dict[str, Any], resumed: dict[str, Any]
) -> None:
    job = "jobs_checkpoint:resume"
    results = pool.run(job, world_of(saved), directory=str(tmp_path), resumed=resumed, **saved)
    expected, got = only(results, "expected"), only(results, "got")
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0 if saved == resumed else 2e-6)


def test_other_directories_are_refused(pool: WorkerPool, tmp_path: Path) -> None:
    (messages,) = pool.run("jobs_checkpoint:refusals", directory=str(tmp_path))
    assert "not a Megatron distributed checkpoint" in messages["missing"]
    assert "no modelopt_state" in messages["unconverted"]
