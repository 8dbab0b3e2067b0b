"""The trainer's arithmetic: accumulation, packing, weights that are known late, features kept, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelopt_spec.config import LossConfig
from modelopt_spec.data.collate import collate_rows
from modelopt_spec.data.packing import pack_samples
from modelopt_spec.data.store import Sample
from modelopt_spec.training.blocks import row_generators
from modelopt_spec.training.features import MemoryFeatures, OnlineFeatures
from modelopt_spec.training.loss_reference import draft_loss_reference
from modelopt_spec.training.loss_types import gather_rows
from modelopt_spec.training.trainer import DraftTrainer, NonFiniteLossError
from tests.training.tiny_run import curve, make_trainer, random_rows, state_of

DPACE = {"position_weights": "dpace", "dpace_alpha": 0.3}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dspark", {}),
    ("dflash", {}),
    ("domino", {}),
    ("dspark", DPACE),
    ("dflash", {"kl": 0.5, "stop_at_gap": False}),
]


def trained(trainer: DraftTrainer) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer.train()
    return curve(trainer), state_of(trainer.module.drafter)


def assert_same(first: tuple, second: tuple, tolerance: float = 1e-9) -> None:
    """Weights in float64; the Trainer adds logged losses up in float32."""
    np.testing.assert_allclose(first[0], second[0], rtol=1e-6)
    assert first[1].keys() == second[1].keys()
    for name, tensor in first[1].items():
        torch.testing.assert_close(tensor, second[1][name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("mode", "loss"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_accumulation_equals_one_large_batch(mode: str, loss: dict, tmp_path: Path) -> None:
    rows = random_rows(22)
    runs = [
        trained(
            make_trainer(
                rows,
                tmp_path,
                mode=mode,
                loss=loss,
                max_steps=4,
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=accumulation,
            )
        )
        for batch, accumulation in ((8, 1), (2, 4), (1, 8))
    ]
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


def reference_gradients(trainer: DraftTrainer, parts: list[list[int]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step over some rows, with plain functions: no fused loss, no trainer."""
    module = trainer.module
    rows = [trainer.train_dataset[i] for part in parts for i in part]
    batch: dict[str, Any] = collate_rows(rows, 0)
    blocks = module.blocks(batch, row_generators(trainer.args.seed, 0, [row["row"] for row in rows]))
    features = module.source.features(batch["input_ids"], [], [], None)
    output = module.drafter(features, blocks, None)
    gathered = gather_rows(output, blocks, features.last_hidden)
    result = draft_loss_reference(gathered, module.projection(), module.weights(0.0))
    module.drafter.zero_grad()
    result.loss.backward()
    return result.loss.item(), {n: p.grad.clone() for n, p in module.drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss", [{}, DPACE], ids=["exp", "dpace"])
def test_one_step_is_plain_gradient_descent_on_the_plain_loss(loss: dict, tmp_path: Path) -> None:
    """Three micro-batches through trainer and fused loss against one plain pass: loss and every weight after SGD."""
    rate, rows = 0.1, random_rows(6)
    options = {"loss": loss, "optim": "sgd", "learning_rate": rate, "lr_scheduler_type": "constant", "max_steps": 1}
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "weight_decay": 0.0}
    trainer = make_trainer(rows, tmp_path, **options, **settings)
    before = state_of(trainer.module.drafter)
    expected, gradients = reference_gradients(trainer, [list(range(6))])
    trainer.module.drafter.zero_grad()
    found, after = trained(trainer)
    np.testing.assert_allclose(found, [expected], rtol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(after[name], before[name] - rate * gradient, rtol=1e-6, atol=1e-8, msg=name)


def test_packed_rows_train_like_the_rows_apart(tmp_path: Path) -> None:
    rows = random_rows(6, longest=30)
    samples = [Sample(row["input_ids"], row["loss_mask"]) for row in rows]
    packed = [
        {"input_ids": s.input_ids, "loss_mask": s.loss_mask, "segment_ids": s.segment_ids}
        for s in pack_samples(samples, max_length=60)
    ]
    assert 1 < len(packed) < len(rows)
    options = {"num_anchors": 10_000, "max_steps": 2, "optim": "sgd", "learning_rate": 0.1}
    apart = trained(make_trainer(rows, tmp_path, per_device_train_batch_size=len(rows), **options))
    together = trained(make_trainer(packed, tmp_path, per_device_train_batch_size=len(packed), **options))
    assert_same(apart, together, 1e-8)


def test_rows_of_any_length_train(tmp_path: Path) -> None:
    rows = random_rows(6)
    for length in (2, 3, 255, 600):
        rows.append({"input_ids": np.full(length, 5, np.int32), "loss_mask": np.ones(length, bool)})
    trainer = make_trainer(rows, tmp_path, per_device_train_batch_size=3, max_steps=4)
    trainer.train()
    assert len(curve(trainer)) == 4
    assert trainer.rows_without_supervision() == []


def test_rows_without_supervision_are_counted_and_teach_nothing(tmp_path: Path) -> None:
    rows = random_rows(8)
    untaught = [*rows[:4], {**rows[4], "loss_mask": np.zeros_like(rows[4]["loss_mask"])}]
    options = {"per_device_train_batch_size": 5, "num_train_epochs": 2, "max_steps": -1, "seed": 5}
    trainer = make_trainer(untaught, tmp_path, **options)
    with_row = trained(trainer)
    assert trainer.rows_without_supervision() == [4]
    without = trained(make_trainer(rows[:4], tmp_path, **options))
    assert_same(with_row, without)


def test_a_step_without_any_supervised_row_changes_nothing(tmp_path: Path) -> None:
    rows = [{**row, "loss_mask": np.zeros_like(row["loss_mask"])} for row in random_rows(3)]
    trainer = make_trainer(rows, tmp_path, max_steps=2, weight_decay=0.0)
    before = state_of(trainer.module.drafter)
    losses, after = trained(trainer)
    assert losses == [0.0, 0.0]
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name])


def test_only_the_drafter_is_optimized(tmp_path: Path) -> None:
    trainer = make_trainer(random_rows(8), tmp_path)
    target = {n: p.detach().clone() for n, p in trainer.module.model.named_parameters() if "drafter" not in n}
    trainer.train()
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in trainer.module.drafter.parameters()}
    for name, parameter in trainer.module.model.named_parameters():
        if name in target:
            assert not parameter.requires_grad
            assert parameter.grad is None
            assert torch.equal(parameter, target[name])
    assert not trainer.module.model.training


class CountingSource(OnlineFeatures):
    """Online features that remember which rows went through the target."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.drafter.target, model.drafter.config.target_layer_ids)
        self.seen: list[int] = []

    def features(self, input_ids: Any, lengths: Any, rows: Any, position_ids: Any) -> Any:
        self.seen += rows
        return super().features(input_ids, lengths, rows, position_ids)


def test_memory_features_equal_online_ones_and_are_computed_once(tmp_path: Path) -> None:
    rows, held_out = random_rows(9), random_rows(4, seed=8)
    options = {"per_device_train_batch_size": 3, "num_train_epochs": 3, "max_steps": -1, "eval_strategy": "epoch"}
    online = make_trainer(rows, tmp_path, evaluate=held_out, **options)
    expected = trained(online)
    memory = make_trainer(
        rows, tmp_path, evaluate=held_out, source=lambda model: MemoryFeatures(CountingSource(model)), **options
    )
    assert_same(expected, trained(memory))
    np.testing.assert_allclose(curve(online, "eval_loss"), curve(memory, "eval_loss"), rtol=1e-9)
    kept = memory.module.source
    assert len(kept.source.seen) == len(rows) + len(held_out), "each row goes through the target once"
    assert len(kept) == len(rows) + len(held_out)
    tokens = sum(len(row["input_ids"]) for row in rows + held_out)
    assert kept.nbytes == tokens * 3 * 32 * 8


def test_evaluation_counts_every_row_once_and_is_repeatable(tmp_path: Path) -> None:
    held_out = random_rows(7, seed=4)
    trainer = make_trainer(random_rows(4), tmp_path, evaluate=held_out, per_device_eval_batch_size=3)
    first = trainer.evaluate()
    second = trainer.evaluate()
    skipped = ("runtime", "per_second", "preparation")
    assert {k: v for k, v in first.items() if not any(s in k for s in skipped)} == {
        k: v for k, v in second.items() if not any(s in k for s in skipped)
    }
    for batch_size in (1, 7):
        other = make_trainer(random_rows(4), tmp_path, evaluate=held_out, per_device_eval_batch_size=batch_size)
        found = other.evaluate()
        for name in ("eval_loss", "eval_ce", "eval_tv", "eval_confidence", "eval_tau", "eval_tau_probability"):
            assert found[name] == pytest.approx(first[name], rel=1e-6), name
    weights = LossConfig(ce=0.1, tv=0.9, confidence=1.0)
    parts = (
        weights.ce * first["eval_ce"] + weights.tv * first["eval_tv"] + weights.confidence * first["eval_confidence"]
    )
    assert first["eval_loss"] == pytest.approx(parts)
    assert 1.0 <= first["eval_tau"] <= 5.0


def test_logs_are_those_of_the_plain_loss(tmp_path: Path) -> None:
    trainer = make_trainer(random_rows(5), tmp_path, per_device_train_batch_size=5, max_steps=1)
    module = trainer.module
    rows = [trainer.train_dataset[i] for i in range(5)]
    batch: dict[str, Any] = collate_rows(rows, 0)
    blocks = module.blocks(batch, row_generators(trainer.args.seed, 0, range(5)))
    features = module.source.features(batch["input_ids"], [], [], None)
    gathered = gather_rows(module.drafter(features, blocks, None), blocks, features.last_hidden)
    result = draft_loss_reference(gathered, module.projection(), module.weights())
    accepted, chances, started, correct, reached = 0.0, 0.0, 0, [0] * 4, [0] * 4
    for block in gathered.blocks.unique().tolist():
        mine = (gathered.blocks == block).nonzero().flatten().tolist()
        going, chance, started = True, 1.0, started + 1
        for i in mine:
            slot = int(gathered.slots[i])
            reached[slot] += going
            going = going and bool(result.correct[i])
            correct[slot] += going
            accepted += going
            chance *= float(result.acceptance[i])
            chances += chance
    trainer.train()
    log = trainer.state.log_history[0]
    for name, term in result.terms.items():
        assert log[name] == pytest.approx(float(term.total / term.weight), rel=1e-5)
    assert log["tau"] == pytest.approx(1 + accepted / started)
    assert log["tau_probability"] == pytest.approx(1 + chances / started, rel=1e-4)
    for k in range(4):
        if reached[k]:
            assert log[f"acceptance/{k}"] == pytest.approx(correct[k] / reached[k])


def test_domino_starts_with_base_logits_and_ends_without(tmp_path: Path) -> None:
    options = {"mode": "domino", "max_steps": 4, "loss": {"base_ce_start": 1.0, "base_ce_decay_ratio": 0.5}}
    trainer = make_trainer(random_rows(8), tmp_path, **options)
    trainer.train()
    assert curve(trainer, "lambda") == pytest.approx([0.5, 0.0, 0.0, 0.0])
    assert len(curve(trainer, "base_ce")) == 2, "the term is gone when its weight is"


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(random_rows(8), tmp_path, save_strategy="steps", save_steps=1)
    before = state_of(trainer.module.drafter)
    trainer.module.drafter.fc.weight.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(NonFiniteLossError, match=r"gradient is not finite at step 0"):
        trainer.train()
    for name, tensor in state_of(trainer.module.drafter).items():
        assert torch.equal(tensor, before[name])


def test_check_finite_can_be_switched_off(tmp_path: Path) -> None:
    trainer = make_trainer(random_rows(4), tmp_path, max_steps=1)
    trainer.check_finite = False
    trainer.module.drafter.fc.weight.register_hook(lambda gradient: gradient * torch.nan)
    trainer.train()
    assert trainer.state.global_step == 1


def test_lengths_come_from_the_column_or_the_rows(tmp_path: Path) -> None:
    rows = random_rows(30)
    trainer = make_trainer(rows, tmp_path, train_sampling_strategy="group_by_length", per_device_train_batch_size=5)
    assert trainer.train_dataset.lengths().tolist() == [len(row["input_ids"]) for row in rows]
    trainer.train()
    order = trainer.epochs.sampler.order()
    assert trainer.epochs.sampler.group == 5
    spread = [max(part) - min(part) for part in trainer.epochs.sampler.lengths[order].view(-1, 5).tolist()]
    assert max(spread) < 16
