"""The Megatron target against the Hugging Face one on the same weights, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_workers import WorkerPool

pytestmark = pytest.mark.megatron

LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3", 1, {}),
    ("qwen3", 2, {"tp": 2}),
    ("qwen3", 2, {"tp": 2, "sp": True}),
    ("qwen3", 2, {"pp": 2}),
    ("qwen3_moe", 2, {"ep": 2}),
    ("qwen3", 4, {"tp": 2, "pp": 2}),
    ("llama", 4, {"tp": 2, "pp": 2, "sp": True, "tie_word_embeddings": True}),
    ("qwen3", 4, {"pp": 4}),
]


@pytest.mark.parametrize(("family", "world", "layout"), LAYOUTS, ids=lambda v: str(v).replace("'", ""))
def test_features_equal_hugging_face(pool: WorkerPool, family: str, world: int, layout: dict[str, Any]) -> None:
    results = [r for r in pool.run("jobs_target:features", world, family=family, **layout) if r]
    assert results
    for result in results:
        assert max(result.values()) < 1e-5, result
        assert result["embed"] == 0.0


@pytest.mark.parametrize("sp", [False, True])
def test_gradient_through_sharded_logits_is_summed(pool: WorkerPool, sp: bool) -> None:
    assert max(pool.run("jobs_target:logits_gradient", 2, tp=2, sp=sp)) < 1e-5


def test_defaults_and_names_are_those_of_hugging_face(pool: WorkerPool) -> None:
    (alone,) = pool.run("jobs_target:same_defaults", 1, pp=1)
    first, last = pool.run("jobs_target:same_defaults", 2, pp=2)
    assert alone["ours"] == alone["theirs"] == last["ours"]
    assert alone["trainable"]
    assert all(name.startswith("drafter.") for name in alone["trainable"])
    assert first["trainable"] == []


def test_what_is_not_supported_is_refused_with_a_reason(pool: WorkerPool) -> None:
    (messages,) = pool.run("jobs_target:refusals")
    assert "2 model chunks" in messages["chunks"]
    assert "starts with padding" in messages["left"]
    assert "position_ids" in messages["packed"]
    assert "packed rows" in messages["mask"]
    assert "vocab_size is 10000" in messages["vocabulary"]
    assert "draft_vocab_size is 8" in messages["reduced"]
    assert "context_parallel_size is 2" in pool.run("jobs_target:context_parallel", 2)[0]
    assert "5 tokens do not divide" in pool.run("jobs_target:odd_length", 2)[0]


@pytest.mark.parametrize("tp", [1, 2])
def test_padded_rows_never_win(pool: WorkerPool, tp: int) -> None:
    results = pool.run("jobs_target:padding_never_wins", tp, tp=tp)
    assert all(r["same"] for r in results)
    assert [r["width"] for r in results] == ([97] if tp == 1 else [97, 0])


def test_a_model_that_was_made_elsewhere(pool: WorkerPool) -> None:
    (result,) = pool.run("jobs_target:foreign_model")
    assert result == {"padded": 104, "named": 97, "rope_theta": 10000.0, "width": 97}
