"""Training with experts and streams through the real trainer: losses, balancing, decay, logs, resume, and progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import modelopt_spec as mtsp
from modelopt_spec.config import LossConfig
from modelopt_spec.conversion import convert
from modelopt_spec.drafter.moe_training import RoutedTraining
from modelopt_spec.training.balance import ExpertBalance, with_balance_loss
from modelopt_spec.training.blocks import make_blocks
from modelopt_spec.training.module import DraftTrainingModule, block_settings
from modelopt_spec.training.recipe import Recipe
from modelopt_spec.training.train import train
from modelopt_spec.training.trainer import DraftTrainer
from tests.moe.blocks import batch, loss_of
from tests.moe.v4 import v4_drafter, v4_target
from tests.training.tiny_run import make_target, recipe_values, write_chats

MIXED: dict[str, Any] = {"num_layers": 2, "residual": "mhc", "mlp": "moe"}
MIXED |= {"hyper_connection": {"streams": 2}, "moe": {"num_experts": 4, "experts_per_token": 2}}
V4: dict[str, Any] = {"type": "moe_mhc", "num_layers": 2, "sliding_window": 16}


def _recipe(
    tmp_path: Path, backbone: dict[str, Any], mode: str = "dspark", run: str = "run", **training: Any
) -> Recipe:
    target, data = tmp_path / "target", tmp_path / "data.jsonl"
    if not target.exists():
        make_target(target)
        write_chats(data, 24)
    values = recipe_values(target, data, tmp_path / run, mode, **training)
    values["drafter"]["backbone"] = backbone
    return Recipe(**values)


def _curves(result: Any, key: str) -> list[float]:
    return [row[key] for row in result.report["curves"] if key in row]


@pytest.mark.parametrize(("backbone", "mode"), [(V4, "dspark"), (MIXED, "dspark"), (MIXED, "domino")])
def test_training_lowers_the_loss_and_logs_the_experts(backbone: dict[str, Any], mode: str, tmp_path: Path) -> None:
    result = train(_recipe(tmp_path, backbone, mode, max_steps=12), quiet=True)
    losses = _curves(result, "loss")
    assert losses[-1] < 0.97 * losses[0]
    for layer in range(2):
        tokens = [sum(_curves(result, f"moe/{layer}/tokens/{e}")) for e in range(4)]
        assert min(tokens) >= 0 and sum(tokens) > 0
        assert all(0 < value <= 1.0 + 1e-6 for value in _curves(result, f"moe/{layer}/entropy"))
        assert all(value >= 1.0 for value in _curves(result, f"moe/{layer}/load_max"))
    assert set(_curves(result, "moe/dropped")) == {0.0}
    biases = [block.gate.e_score_correction_bias for block in result.model.drafter.experts_of_layers()]
    assert all(float(bias.abs().max()) > 0 for bias in biases)


@pytest.mark.parametrize("backbone", [V4, MIXED])
def test_a_trained_drafter_beats_an_untrained_one(backbone: dict[str, Any]) -> None:
    """Tokens committed a round on the target's own text, before and after a short fit to that text."""
    model = v4_target((0, 4))
    ids = torch.randint(3, 90, (4, 5), generator=torch.Generator().manual_seed(0))
    prompts = list(ids.unsqueeze(1))
    with torch.no_grad():
        for _ in range(32):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    torch.manual_seed(0)
    config = {"block_size": 4, "mask_token_id": 90, "head": {"type": "vanilla", "rank": 8}, "backbone": backbone}
    convert(model, ("dspark", config), quiet=True)
    drafter: Any = model.drafter

    def tau() -> float:
        drafter.eval()
        found = [mtsp.generate(model, row, max_new_tokens=20, temperature=0.0, eos_token_id=None) for row in prompts]
        return sum(result.tau for result in found) / len(found)

    untrained = tau()
    anchors = torch.arange(5, 34).expand(4, -1)
    settings = block_settings(drafter.train(), LossConfig(), anchors.shape[1])
    everywhere = torch.ones_like(ids).bool()
    blocks = make_blocks(ids, everywhere, anchors, torch.ones_like(anchors).bool(), settings)
    features = drafter.target.features(ids, drafter.config.target_layer_ids)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=8e-3)
    for _ in range(40):
        loss = loss_of(drafter, features, blocks, ce=1.0, confidence=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert tau() > untrained + 1.0


def test_resuming_goes_on_with_the_biases(tmp_path: Path) -> None:
    """A run that ends after four steps and goes on to six has the biases of one that never stopped."""
    constant = {"lr_scheduler_type": "constant"}
    whole = train(_recipe(tmp_path, V4, max_steps=6, run="whole", **constant), quiet=True)
    train(_recipe(tmp_path, V4, max_steps=4, run="parts", **constant), quiet=True)
    (tmp_path / "parts" / "report.json").unlink()
    resumed = train(_recipe(tmp_path, V4, max_steps=6, run="parts", **constant), resume=True, quiet=True)
    theirs = resumed.model.drafter.state_dict()
    biases = [name for name in theirs if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    for name in biases:
        torch.testing.assert_close(theirs[name], whole.model.drafter.state_dict()[name], msg=name)


def test_gradient_checkpointing_is_the_trainers_switch(tmp_path: Path) -> None:
    kept = train(_recipe(tmp_path, MIXED, max_steps=3, run="kept"), quiet=True)
    again = train(_recipe(tmp_path, MIXED, max_steps=3, gradient_checkpointing=True, run="again"), quiet=True)
    assert again.model.drafter.gradient_checkpointing and not kept.model.drafter.gradient_checkpointing
    assert _curves(again, "loss") == pytest.approx(_curves(kept, "loss"), rel=1e-5)
    assert _curves(again, "moe/0/tokens/0") == _curves(kept, "moe/0/tokens/0")


def test_weight_decay_skips_the_streams(tmp_path: Path) -> None:
    model = v4_target()
    drafter = v4_drafter(model, backbone={"num_layers": 2})
    arguments = TrainingArguments(output_dir=str(tmp_path), weight_decay=0.1, use_cpu=True, report_to="none")
    module = DraftTrainingModule(model, LossConfig(), 4)
    rows: Any = [{"input_ids": [3, 4, 5], "loss_mask": [1, 1, 1]}]
    decayed = DraftTrainer(module, arguments, train_dataset=rows).get_decay_parameter_names(module)
    spared = drafter.no_decay_names()
    assert not [name for name in decayed if name.endswith(tuple(spared))]
    for part in ("mlp.experts.gate_up_proj", "mlp.gate.weight", "self_attn.kv_proj.weight"):
        assert any(name.endswith(f"layers.0.{part}") for name in decayed), part
    assert {"layers.1.attn_hc.fn", "hc_head.hc_fn", "layers.0.self_attn.sinks"} <= spared


# ---- balancing -------------------------------------------------------------------------------------------------------


def _routed(balancing: str) -> tuple[Any, Any, Any]:
    model = v4_target()
    drafter = v4_drafter(model, backbone={"num_layers": 2, "moe": {"balancing": balancing, "balance_weight": 0.5}})
    _, features, blocks = batch(drafter)
    return drafter.train(), features, blocks


def test_the_auxiliary_loss_is_shared_out_by_slot_weights() -> None:
    drafter, features, blocks = _routed("loss")
    drafter(features, blocks)
    auxiliary = drafter.auxiliary_loss()
    assert auxiliary is not None and float(auxiliary) >= 0.5 * 2 * 0.99
    zero, weight = torch.zeros(()), float(blocks.weights.sum())
    assert float(with_balance_loss(zero, drafter, blocks, None)) == pytest.approx(float(auxiliary))
    assert float(with_balance_loss(zero, drafter, blocks, 4 * weight)) == pytest.approx(float(auxiliary) / 4)
    assert float(with_balance_loss(zero, drafter.eval(), blocks, None)) == 0.0
    auxiliary.backward()
    assert float(drafter.layers[0].mlp.gate.weight.grad.abs().max()) > 0


def test_the_bias_moves_by_the_whole_steps_choices_of_all_ranks() -> None:
    drafter, features, blocks = _routed("bias")
    assert drafter.auxiliary_loss() is None
    balance = ExpertBalance.of(drafter, lambda tensor: 3 * tensor)
    assert balance is not None
    gates = [block.gate for block in drafter.experts_of_layers()]
    before = [gate.e_score_correction_bias.clone() for gate in gates]
    for _ in range(2):
        drafter(features, blocks)
        balance.observe()
    counts = [2 * stats.counts for stats in drafter.routing]
    balance.on_optimizer_step(None, None, None)
    for gate, old, chosen in zip(gates, before, counts, strict=True):
        want = old + 1e-3 * torch.sign(chosen.mean() - chosen)
        torch.testing.assert_close(gate.e_score_correction_bias, want)
    found = balance.metrics()
    assert found["moe/dropped"] == 0.0
    assert sum(found[f"moe/0/tokens/{e}"] for e in range(4)) == 3 * float(counts[0].sum())
    assert 0.5 < found["moe/1/balance"] < 2.0
    assert balance.metrics() == {}


@pytest.mark.parametrize("balancing", ["loss", "none"])
def test_other_balancing_leaves_the_bias(balancing: str) -> None:
    drafter, features, blocks = _routed(balancing)
    assert isinstance(drafter, RoutedTraining)
    before = drafter.layers[0].mlp.gate.e_score_correction_bias.clone()
    drafter(features, blocks)
    drafter.balance([stats.counts for stats in drafter.routing])
    assert torch.equal(drafter.layers[0].mlp.gate.e_score_correction_bias, before)
    assert (drafter.auxiliary_loss() is None) == (balancing == "none")


def test_a_dense_drafter_has_nothing_to_balance() -> None:
    from tests.tiny import tiny

    model = tiny("llama")
    convert(model, ("dspark", {"mask_token_id": 90}), quiet=True)
    assert ExpertBalance.of(model.drafter, lambda tensor: tensor) is None
