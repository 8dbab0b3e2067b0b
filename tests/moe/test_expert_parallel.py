"""Experts on two gloo ranks: outputs, losses, gradients and trained weights equal those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PrinterCallback, TrainingArguments

import modelopt_spec as mtsp
from modelopt_spec.config import LossConfig, MoEConfig
from modelopt_spec.drafter.experts_parallel import shard_experts, spread_for_training
from modelopt_spec.drafter.moe import MoE
from modelopt_spec.errors import ConfigError
from modelopt_spec.training import sharding
from modelopt_spec.training.module import DraftTrainingModule
from modelopt_spec.training.recipe import LOSS_DEFAULTS
from modelopt_spec.training.trainer import Collator, DraftTrainer, IndexedRows
from tests.tiny import tiny
from tests.training.tiny_run import curve, random_rows, state_of
from tests.training.two_ranks import allow_fsdp_on_cpu, run_ranks

WIDTH = 8
CONFIG = MoEConfig(
    num_experts=6,
    experts_per_token=2,
    intermediate_size=10,
    scoring="sqrtsoftplus",
    normalize_weights=True,
    routed_scaling_factor=1.5,
    swiglu_limit=0.9,
)


def _block(config: MoEConfig = CONFIG) -> MoE:
    torch.manual_seed(0)
    block = MoE(config, WIDTH).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.4)
    return block


def _tokens(rank: int) -> tuple[Tensor, Tensor]:
    """Another number of tokens on each rank, and a cotangent."""
    generator = torch.Generator().manual_seed(rank)
    count = (7, 4)[rank]
    return tuple(torch.randn(count, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))  # type: ignore[return-value]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _run(block: MoE, tokens: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    x = tokens.clone().requires_grad_(True)
    out, stats = block(x)
    (out * cotangent).sum().backward()
    found = {"out": out.detach(), "x": x.grad, "counts": stats.counts}
    return found | {name: _whole(p.grad).clone() for name, p in block.named_parameters()}  # type: ignore[arg-type, misc]


@pytest.mark.parametrize("crowded", [False, True], ids=["spread", "all on one rank"])
def test_two_ranks_equal_one_process(crowded: bool, tmp_path: Path) -> None:
    """Each rank's own outputs, and gradients that average to those of all tokens at once."""

    def prepare() -> MoE:
        block = _block()
        if crowded:
            block.gate.e_score_correction_bias[:2] = 100.0
        return block

    def job() -> dict[str, Tensor]:
        from torch import distributed

        distributed.init_process_group("gloo")
        block = prepare()
        shard_experts(block, torch.device("cpu"))
        assert block.experts.gate_up_proj.to_local().shape[0] == 3
        return _run(block, *_tokens(distributed.get_rank()))

    ranks = run_ranks(job, directory=tmp_path / "ranks")
    tokens, cotangents = (torch.cat(parts) for parts in zip(_tokens(0), _tokens(1), strict=True))
    whole = _run(prepare(), tokens, cotangents)
    torch.testing.assert_close(torch.cat([found["out"] for found in ranks]), whole["out"], rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([found["x"] for found in ranks]), whole["x"], rtol=0, atol=1e-12)
    assert torch.equal(ranks[0]["counts"] + ranks[1]["counts"], whole["counts"])
    for name in dict(prepare().named_parameters()):
        split = "experts." in name and "shared" not in name
        found = ranks[0][name] if split else (ranks[0][name] + ranks[1][name]) / 2
        torch.testing.assert_close(found, whole[name] / 2, rtol=0, atol=1e-12, msg=name)
        assert not split or torch.equal(ranks[0][name], ranks[1][name])


# ---- training ------------------------------------------------------------------------------------------------------


def _trained(output_dir: Path, backbone: dict[str, Any], *, spread: bool = False, **arguments: Any) -> Any:
    """Losses, the step's gradient norms and the whole weights of three steps with clipping."""
    if arguments.get("fsdp"):
        allow_fsdp_on_cpu()
    model = tiny(dtype=torch.float64)
    torch.manual_seed(1)
    config = {"target_layer_ids": (1, 3), "block_size": 4, "mask_token_id": 96, "head": {"type": "vanilla", "rank": 8}}
    mtsp.convert(model, ("dspark", {**config, "backbone": {"num_layers": 2, **backbone}}), quiet=True)
    drafter: Any = model.drafter
    drafter.double()
    fixed: dict[str, Any] = {
        "output_dir": str(output_dir),
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "max_grad_norm": 0.05,
        "dataloader_pin_memory": False,
    }
    settings = TrainingArguments(**fixed, **arguments)
    if spread:
        spread_for_training(drafter, settings)
    module = DraftTrainingModule(model, LossConfig(**LOSS_DEFAULTS["dspark"], decay=3.0), 6)
    rows: Any = IndexedRows(random_rows(14))
    trainer = DraftTrainer(module, settings, train_dataset=rows, data_collator=Collator(0))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    experts = trainer.module.drafter.layers[0].mlp.experts  # type: ignore[union-attr]
    assert isinstance(experts.gate_up_proj, DTensor) == bool(arguments.get("fsdp"))
    norms = [sharding.number(value) for value in curve(trainer, "grad_norm")]
    return curve(trainer), norms, state_of(sharding.whole_drafter(trainer.module.drafter))


MHC = {"residual": "mhc", "hyper_connection": {"streams": 2}}
ROUTED = {"mlp": "moe", "moe": {"num_experts": 4, "experts_per_token": 2, "intermediate_size": 16}}
FSDP = {"fsdp": True, "fsdp_config": {}}


@pytest.mark.parametrize("options", [{}, FSDP, {**FSDP, "spread": True}], ids=["ddp", "fsdp2", "expert-parallel"])
def test_training_on_two_ranks_equals_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    """Losses, gradient norms over all ranks' experts, weights and routers' biases after three clipped steps."""
    backbone = {**MHC, **ROUTED}
    losses, norms, weights = _trained(tmp_path, backbone, per_device_train_batch_size=8)
    shared = {**options, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    first, second = run_ranks(lambda: _trained(tmp_path, backbone, **shared), directory=tmp_path / "ranks")
    assert first[0] == second[0] and first[0] == pytest.approx(losses, rel=1e-6)
    assert first[1] == pytest.approx(norms, rel=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(first[2][name], tensor, rtol=1e-9, atol=1e-9, msg=name)
        assert torch.equal(first[2][name], second[2][name]), name
    assert all(bool(w.abs().max() > 0) for name, w in weights.items() if "e_score_correction_bias" in name)


def test_one_rank_or_no_fsdp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least two ranks"):
        _trained(tmp_path, ROUTED, spread=True)


def test_autocast_multiplies_in_16_bit(tmp_path: Path) -> None:
    def job() -> Any:
        from torch import distributed

        distributed.init_process_group("gloo")
        block = _block().float()
        shard_experts(block, torch.device("cpu"))
        tokens = _tokens(distributed.get_rank())[0].float()
        exact = block(tokens)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = block(tokens)[0]
        rounded.float().sum().backward()
        assert block.experts.down_proj.grad.dtype == torch.float32
        return float((rounded.float() - exact).abs().max()), float(exact.abs().max())

    for off, size in run_ranks(job, directory=tmp_path / "ranks"):
        assert 0 < off < 0.05 * max(size, 1.0)


def test_what_cannot_be_spread_is_refused(tmp_path: Path) -> None:
    def job() -> list[str]:
        from torch import distributed

        distributed.init_process_group("gloo")
        messages = []
        for module in (_block(CONFIG.replace(num_experts=5)), torch.nn.Linear(2, 2)):
            with pytest.raises(ConfigError) as caught:
                shard_experts(module, torch.device("cpu"))
            messages.append(str(caught.value))
        return messages

    for messages in run_ranks(job, directory=tmp_path / "ranks"):
        assert "5 experts cannot be spread evenly over 2 ranks" in messages[0]
        assert "needs a drafter with experts" in messages[1]
