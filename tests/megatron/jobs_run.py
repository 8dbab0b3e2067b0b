"""Jobs of test_megatron_run.py: the example and the training loop around it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron_tiny import gpt_model, hf_config, hf_model, initialize

import modelopt_spec.conversion as mtsp
from modelopt_spec.errors import SpecError
from modelopt_spec.training.megatron_run import RunPlan, batches_of_step, run
from modelopt_spec.training.recipe import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[2]


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("train_dspark", ROOT / "examples" / "megatron" / "train_dspark.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example(directory: str, layout: list[str]) -> None:
    """Run the example on the tiny recipe: half of it, then resumed to the end."""
    overrides = [f"training.output_dir={directory}", "training.save_steps=2", *layout]
    main = _example().main
    recipe = str(ROOT / "examples" / "megatron" / "tiny.yaml")
    main([recipe, "training.max_steps=2", *overrides])
    parallel_state.destroy_model_parallel()
    main([recipe, "training.max_steps=4", "--resume", *overrides])


def learns() -> list[float]:
    """Losses of a run that sees the same few rows again and again."""
    initialize()
    config = hf_config("qwen3")
    torch.manual_seed(0)
    model = gpt_model(hf_model(config), config)
    settings = {"mask_token_id": 96, "block_size": 4, "head": {"rank": 8}, "backbone": {"num_layers": 1}}
    mtsp.convert(model, ("dspark", settings), quiet=True)
    rows = [{"input_ids": torch.arange(24) % (5 + i), "loss_mask": torch.ones(24)} for i in range(4)]
    training = {"max_steps": 30, "per_device_train_batch_size": 4, "learning_rate": 3e-2, "num_anchors": 8}
    recipe = Recipe(drafter={"mode": "dspark"}, data={"max_length": 24}, loss={"ce": 1.0, "tv": 0.0}, training=training)
    return [report.terms["ce"] for report in run(model, rows, recipe)]


def batches_cover_the_rows() -> dict[str, Any]:
    """Row indices of one epoch over two ranks, of the second epoch, and of a repeated call."""
    recipe = Recipe(
        data={"max_length": 16},
        training={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 4},
    )
    rows = [{"input_ids": [1] * (8 + i % 5), "loss_mask": [1] * (8 + i % 5)} for i in range(24)]
    plan = RunPlan.of(recipe, len(rows), ranks=2)

    def indices(step: int) -> list[int]:
        batches = [b for r in range(2) for b in batches_of_step(rows, plan, step, ranks=2, rank=r, pad_token_id=0)]
        assert all(b["input_ids"].shape == (2, 16) for b in batches)
        return [i for b in batches for i in b["rows"]]

    return {"first": [indices(0), indices(1)], "second": [indices(2), indices(3)], "again": indices(0)}


def refusals() -> dict[str, str]:
    """Messages for settings that a Megatron run does not have."""
    cases: dict[str, tuple[dict[str, Any], int]] = {
        "unknown": ({"training": {"optim": "sgd"}}, 100),
        "memory": ({"training": {"features": "memory"}}, 100),
        "packed": ({"data": {"pack": True}}, 100),
        "few": ({"training": {"gradient_accumulation_steps": 8}}, 7),
    }
    messages = {}
    for name, (values, rows) in cases.items():
        try:
            RunPlan.of(Recipe(**values), rows, 1)
        except SpecError as error:
            messages[name] = str(error)
    try:
        Recipe(megatron={"sequence": True})
    except SpecError as error:
        messages["sequence"] = str(error)
    recipe = load_recipe("dspark/megatron_qwen3_8b")
    RunPlan.of(recipe, 1000, 4)
    messages["built-in"] = recipe.metadata.name
    return messages


def not_finite(pp: int) -> str:
    """Message, on every rank, of a step whose target gives a NaN."""
    initialize(1, pp)
    config = hf_config("qwen3")
    model = gpt_model(None, config)
    mtsp.convert(model, ("dspark", {"mask_token_id": 96, "block_size": 4}), quiet=True)
    if model.pre_process:
        with torch.no_grad():
            model.embedding.word_embeddings.weight[7] = float("nan")
    good, bad = torch.full((16,), 3), torch.full((16,), 7)
    rows = [{"input_ids": ids, "loss_mask": torch.ones(16)} for ids in (good, bad)]
    recipe = Recipe(data={"max_length": 16}, training={"max_steps": 1, "gradient_accumulation_steps": 2})
    try:
        run(model, rows, recipe)
    except SpecError as error:
        return str(error)
    return ""
