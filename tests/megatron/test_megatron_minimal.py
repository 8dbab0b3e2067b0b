"""The one Megatron case of every test run, where megatron-core is installed; `make megatron` runs the rest."""

from __future__ import annotations

from megatron_workers import WorkerPool


def test_a_step_at_tp2_is_that_of_hugging_face(pool: WorkerPool) -> None:
    for worst in pool.run("jobs_train:train", 2, family="qwen3", mode="vanilla", steps=1, microbatches=1, tp=2):
        assert max(worst[name] for name in ("loss", "terms", "norm", "gradients")) < 1e-5, worst
        assert worst["weights"] < 1e-4, worst
