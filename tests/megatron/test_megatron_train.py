"""Training through Megatron's schedules against the plain loop on the same weights and data."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_workers import WorkerPool

pytestmark = pytest.mark.megatron

RUNS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("qwen3", "vanilla", 1, {}),
    ("qwen3", "vanilla", 2, {"tp": 2}),
    ("qwen3", "vanilla", 2, {"tp": 2, "sp": True}),
    ("qwen3", "vanilla", 2, {"pp": 2}),
    ("qwen3", "vanilla", 2, {}),
    ("qwen3_moe", "vanilla", 2, {"ep": 2}),
    ("qwen3", "vanilla", 4, {"tp": 2, "pp": 2}),
    ("qwen3", "rnn", 2, {"tp": 2}),
    ("qwen3", "gru", 2, {"tp": 2, "config": {"tie_word_embeddings": True}}),
    ("llama", "gru", 2, {"pp": 2}),
    ("qwen3", "none", 2, {"tp": 2}),
    ("qwen3", "moe", 2, {"tp": 2}),
    ("qwen3", "moe", 2, {}),
    ("llama", "rnn", 4, {"tp": 2, "pp": 2, "sp": True, "config": {"tie_word_embeddings": True}}),
    ("qwen3", "gru", 4, {"tp": 2}),
    ("qwen3_moe", "vanilla", 4, {"tp": 2, "ep": 2}),
    ("qwen3", "vanilla", 4, {"pp": 4, "microbatches": 5, "options": {"deallocate_pipeline_outputs": True}}),
    ("qwen3", "vanilla", 2, {"ddp": {"overlap_grad_reduce": True, "grad_reduce_in_fp32": True}}),
]


@pytest.mark.parametrize(("family", "mode", "world", "layout"), RUNS, ids=lambda v: str(v).replace("'", ""))
def test_three_steps_are_those_of_hugging_face(
    pool: WorkerPool, family: str, mode: str, world: int, layout: dict[str, Any]
) -> None:
    for worst in pool.run("jobs_train:train", world, family=family, mode=mode, **layout):
        assert max(worst[name] for name in ("loss", "terms", "norm", "gradients", "evaluation")) < 1e-5, worst
        assert worst["later_norm"] < 1e-3, worst
        assert worst["weights"] < 1e-4, worst


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_mixed_precision_as_on_gpus(pool: WorkerPool, tp: int, pp: int) -> None:
    for result in pool.run("jobs_train:bf16_step", 2, tp=tp, pp=pp):
        assert result["copies"] == 0.0
        assert 0 < result["norm"] < 100
        assert result["last"] < result["first"]
