"""Formulas of a step's FLOPs and memory against what torch counts and keeps when the step runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from modelopt_spec.training.blocks import row_generators
from modelopt_spec.training.costs import (
    StepShape,
    TargetCost,
    activation_bytes,
    drafter_flops,
    drafter_parts,
    memory,
    optimizer_bytes,
    target_flops,
)
from tests.tiny import tiny
from tests.training.tiny_run import make_trainer

CASES = {
    "dspark": {"mode": "dspark"},
    "dspark-ce": {"mode": "dspark", "loss": {"tv": 0.0, "confidence": 0.0, "ce": 1.0}},
    "dflash": {"mode": "dflash"},
    "domino": {"mode": "domino", "loss": {"base_ce_start": 0.0}},
}


def rows_of(length: int, count: int = 3) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    mask = np.ones(length, dtype=bool)
    mask[: length // 4] = False
    return [
        {"input_ids": generator.integers(3, 96, size=length - i).astype(np.int32), "loss_mask": mask[: length - i]}
        for i in range(count)
    ]


def prepared(tmp_path: Path, case: str, length: int = 160, **options: Any):
    """A module, a batch of rows and its blocks."""
    trainer = make_trainer(rows_of(length), tmp_path, dtype=torch.float32, num_anchors=16, **CASES[case], **options)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    blocks = trainer.module.blocks(batch, row_generators(0, 0, batch["rows"]))
    return trainer.module, batch, blocks


def counted(run: Any) -> tuple[float, float]:
    """FLOPs of a function that torch sees: matrix products, and batched ones (attention) among them."""
    mapping = {torch.ops.aten.addmm_: lambda this, a, b, *rest, out_shape=None, **kwargs: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        run()
    batched = sum(value for op, value in counter.get_flop_counts()["Global"].items() if "bmm" in str(op))
    return counter.get_total_flops(), batched


@pytest.mark.parametrize("case", CASES)
def test_flops_of_a_step_are_what_torch_counts(case: str, tmp_path: Path) -> None:
    module, batch, blocks = prepared(tmp_path, case)
    shape = StepShape.of(batch, blocks)
    features = module.source.features(batch["input_ids"], batch["lengths"], batch["rows"], None)
    module.source = type("Given", (), {"features": lambda self, *args: features})()
    total, attention = counted(lambda: module(batch, blocks)[0].backward())
    expected = drafter_flops(module.drafter, module.loss_config, shape)
    plain = sum(value for name, value in expected.items() if name != "attention")
    assert total - attention == pytest.approx(plain, rel=0.03), "a head may leave its first slots out"
    assert expected["attention"] <= attention <= 2 * expected["attention"], "tiles are larger than the mask"


def test_flops_of_the_target_are_what_torch_counts() -> None:
    model = tiny("llama")
    model.set_attn_implementation("eager")
    ids = torch.arange(2 * 40).view(2, 40)
    shape = StepShape(2, 80, 80, 2 * 40**2, 0, 0, 0, 0)
    total, attention = counted(lambda: model.model(ids))
    target = TargetCost.of(model)
    assert target_flops(target, shape, attended=0.0) == pytest.approx(total - attention, rel=1e-3)
    assert target_flops(target, shape, attended=1.0) == pytest.approx(total, rel=0.01)


def test_experts_count_by_what_a_token_passes() -> None:
    routed = TargetCost.of(tiny("qwen3_moe"))
    attention, router, experts = 2 * 32 * 32 + 2 * 16 * 32, 4 * 32, 4 * (48 * 32 + 24 * 32)
    assert routed.active == 6 * (attention + router + experts * 2 / 4)
    assert routed.layer_parameters > 6 * (attention + router + experts)


class KeepsNoScores(torch.autograd.Function):
    """Stands for flash attention: keeps its inputs and its output."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        out = tensors[0].clone()
        ctx.save_for_backward(*tensors, out)
        return out


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
def test_activations_are_what_autograd_keeps(autocast: bool, layers: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "modelopt_spec.drafter.layers.block_attention",
        lambda q, k, v, k2, v2, plan, scale, sinks: KeepsNoScores.apply(q, k, v, k2, v2),
    )
    monkeypatch.setattr("modelopt_spec.drafter.norm._takes_tiles", lambda *tensors: False)
    module, batch, blocks = prepared(tmp_path, "dspark", layers=layers)
    features = module.source.features(batch["input_ids"], batch["lengths"], batch["rows"], None)
    own = {p.untyped_storage().data_ptr() for p in module.model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        output = module.drafter(features, blocks, None)
    weights = sum(p.numel() * 2 for p in module.drafter.parameters() if p.ndim > 1) if autocast else 0
    assert output.hidden.requires_grad
    found = sum(storage.nbytes() for storage in kept.values()) - weights
    config, shape = module.drafter.config, StepShape.of(batch, blocks)
    expected = activation_bytes(config, shape, autocast=autocast)
    assert found == pytest.approx(expected, rel=0.15)
    if layers > 1:
        less = activation_bytes(config, shape, autocast=autocast, checkpointing=True)
        assert less < 0.6 * expected


def test_memory_follows_sharding_and_optimizer(tmp_path: Path) -> None:
    module, batch, blocks = prepared(tmp_path, "dspark")
    target, shape = TargetCost.of(module.model), StepShape.of(batch, blocks)
    parameters = sum(p.numel() for p in module.drafter.parameters())

    def found(**options: Any) -> dict[str, float]:
        settings = {"optimizer": "adamw_torch", "autocast": False, **options}
        return memory(module.drafter, target, module.loss_config, shape, **settings)

    alone = found()
    assert alone["weights"] == alone["gradients"] == 4 * parameters
    assert alone["optimizer"] == 8 * parameters
    assert alone["target"] == 4 * target.parameters
    assert found(optimizer="sgd")["optimizer"] == 0
    assert found(optimizer="adamw_bnb_8bit")["optimizer"] == 2 * parameters
    spread = found(ranks=4, shard_drafter=True, shard_target=True)
    assert spread["weights"] == alone["weights"] / 4
    assert spread["gradients"] == alone["gradients"] / 4
    assert spread["target"] == 4 * (target.parameters - target.layer_parameters * 3 / 4)
    assert found(ranks=4)["gradients"] == 2 * alone["gradients"], "DDP keeps buckets beside the gradients"
    for parameter in module.drafter.parameters():
        parameter.requires_grad_(False)
    assert found()["gradients"] == found()["optimizer"] == 0


@pytest.mark.parametrize(
    ("name", "size"), [("adamw_torch_fused", 8), ("adamw_8bit", 2), ("adafactor", 0.1), ("sgd", 0), ("lion_32bit", 4)]
)
def test_optimizer_state(name: str, size: float) -> None:
    assert optimizer_bytes(name) == size


def test_parts_add_up(tmp_path: Path) -> None:
    module, _, _ = prepared(tmp_path, "dspark")
    parts = drafter_parts(module.drafter)
    assert sum(parts.values()) == sum(p.numel() for p in module.drafter.parameters())
    assert all(parts[name] > 0 for name in ("context", "layers", "head", "confidence", "other"))


def test_shapes_average(tmp_path: Path) -> None:
    _, batch, blocks = prepared(tmp_path, "dspark")
    one = StepShape.of(batch, blocks)
    assert one.rows == 3
    assert one.positions == 3 * 160
    assert one.tokens == 160 + 159 + 158
    assert one.supervised == float(blocks.supervised.sum())
    double = dataclasses.replace(one, rows=9)
    mean = StepShape.mean([one, double], micro_batches=2)
    assert mean.rows == 12
    assert mean.tokens == 2 * one.tokens
