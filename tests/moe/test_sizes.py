"""Sizes that are shown before a run, against what torch really holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from modelopt_spec.config import LossConfig
from modelopt_spec.conversion import convert
from modelopt_spec.training.costs import StepShape, drafter_flops
from modelopt_spec.training.sizes import active_parameters, sizes
from tests.moe.blocks import ANCHORS, LENGTH, batch
from tests.tiny import tiny

WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
BACKBONES: dict[str, dict[str, Any]] = {
    "dense": {"num_layers": 2},
    "moe": {"num_layers": 2, "mlp": "moe"},
    "mhc": {"num_layers": 2, "residual": "mhc"},
    "v4": {"num_layers": 2, "type": "moe_mhc"},
}


def _drafter(name: str) -> Any:
    model = tiny("llama", **WIDE)
    convert(model, ("dspark", {"block_size": 5, "mask_token_id": 90, "backbone": BACKBONES[name]}), quiet=True)
    return model.drafter


def test_active_parameters_count_the_chosen_experts() -> None:
    drafter = _drafter("moe")
    moe = drafter.config.backbone.moe
    one = 3 * 64 * moe.intermediate_size
    idle = 2 * (moe.num_experts - moe.experts_per_token) * one
    table = drafter.head.markov_w1
    expected = sum(p.numel() for p in drafter.parameters()) - idle - (table.weight.numel() - table.embedding_dim)
    assert active_parameters(drafter) == expected
    assert active_parameters(_drafter("dense")) < sum(p.numel() for p in _drafter("dense").parameters())


def test_weights_gradients_and_optimizer_are_exact() -> None:
    drafter = _drafter("v4")
    found = sizes(drafter, rows=2, length=LENGTH, num_anchors=ANCHORS.shape[1])
    optimizer = torch.optim.AdamW(drafter.parameters())
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = sum(state[key].nbytes for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    assert found.optimizer_bytes == moments
    assert found.gradient_bytes == sum(p.grad.nbytes for p in drafter.parameters())
    assert found.weight_bytes == sum(p.nbytes for p in drafter.parameters())
    assert found.total_bytes > found.optimizer_bytes


@pytest.mark.parametrize("name", BACKBONES)
def test_activations_are_estimated_within_a_third(name: str) -> None:
    """Against the storage that autograd keeps for the backward pass of the layers."""
    drafter = _drafter(name).train()
    _, features, blocks = batch(drafter)
    weights = {p.untyped_storage().data_ptr() for p in drafter.target.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    alive = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (alive.append(pack(t)), t)[1], lambda t: t):
        drafter.encode(drafter.context(features.taps), blocks, None)
    estimate = sizes(drafter, rows=2, length=LENGTH, num_anchors=ANCHORS.shape[1]).activation_bytes
    assert 0.66 < estimate / sum(kept.values()) < 1.5, (name, estimate, sum(kept.values()))


def test_the_table_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    sizes(_drafter("v4"), rows=1, length=64, num_anchors=4).show()
    shown = capsys.readouterr().err
    assert "active for a slot" in shown and "optimizer" in shown and "MB" in shown


@pytest.mark.parametrize("name", BACKBONES)
def test_planned_flops_are_those_of_a_step(name: str) -> None:
    """What a plan counts, against every product that torch runs forward and backward in the backbone.

    A plan leaves out small products (scores of the router, mixing of streams) and counts the first layer's inputs as if
    they needed gradients.
    """
    drafter = _drafter(name).train()
    drafter.requires_grad_(True)
    ids, features, blocks = batch(drafter)
    shape = StepShape.of({"input_ids": ids, "lengths": [ids.shape[1]] * 2}, blocks)
    planned = drafter_flops(drafter, LossConfig(ce=1.0), shape)
    with FlopCounterMode(display=False) as counter:
        hidden, _ = drafter.encode(drafter.context(features.taps), blocks, None)
        hidden.sum().backward()
    wanted = planned["context"] + planned["blocks"]
    attention = planned["attention"]
    assert wanted * 0.85 < counter.get_total_flops() < (wanted + 3 * attention) * 1.15
