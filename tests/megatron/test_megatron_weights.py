"""The Hugging Face <-> Megatron weight map: equal logits at every layout, and the same weights back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron_workers import WorkerPool

LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3", 1, {}),
    ("qwen3", 2, {"tp": 2}),
    ("qwen3", 2, {"tp": 2, "sp": True}),
    ("qwen3", 2, {"pp": 2}),
    ("qwen3", 4, {"tp": 2, "pp": 2}),
    ("qwen3", 4, {"tp": 2, "pp": 2, "sp": True, "tie_word_embeddings": True}),
    ("llama", 1, {}),
    ("llama", 2, {"tp": 2, "tie_word_embeddings": True}),
    ("llama", 2, {"pp": 2, "tie_word_embeddings": True}),
    ("llama", 2, {"pp": 2}),
    ("qwen3_moe", 1, {}),
    ("qwen3_moe", 1, {"norm_topk_prob": False, "decoder_sparse_step": 2}),
    ("qwen3_moe", 2, {"tp": 2}),
    ("qwen3_moe", 2, {"ep": 2}),
    ("qwen3_moe", 2, {"tp": 2, "ep": 2, "sp": True}),
    ("qwen3_moe", 4, {"ep": 2, "pp": 2}),
]


@pytest.mark.megatron
@pytest.mark.parametrize(("family", "world", "layout"), LAYOUTS, ids=lambda v: str(v).replace("'", ""))
def test_logits_equal_and_weights_come_back(pool: WorkerPool, family: str, world: int, layout: dict[str, Any]) -> None:
    results = pool.run("jobs_weights:logits_and_roundtrip", world, family=family, **layout)
    differences = [r["difference"] for r in results if r["difference"] is not None]
    assert differences, "no rank of the last stage compared its logits"
    assert max(differences) < 1e-5 * max(1.0, results[0]["scale"])
    assert results[0]["roundtrip"] is True


@pytest.mark.megatron
def test_experts_stored_one_by_one_are_understood(pool: WorkerPool) -> None:
    assert pool.run("jobs_weights:per_expert_names") == [True]


@pytest.mark.megatron
def test_a_saved_directory_is_read(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run("jobs_weights:from_directory", directory=str(tmp_path)) == [0.0]
