"""A whole Megatron training run: rows to batches, steps, logs, resumable checkpoints. Takes the same recipes.

Legend: B batch, S sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelopt_spec.data.collate import collate_rows
from modelopt_spec.errors import ConfigError, DataError, nearest
from modelopt_spec.targets.megatron_checkpoint import load_checkpoint, save_checkpoint
from modelopt_spec.training.megatron import (
    Batch,
    MegatronForwardStep,
    StepReport,
    make_optimizer,
    train_step,
    wrap_for_training,
)
from modelopt_spec.training.recipe import Recipe

__all__ = ["RunPlan", "batches_of_step", "run"]

LATEST = "latest.txt"
_SETTINGS: dict[str, Any] = {
    "output_dir": "runs/megatron",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 6e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0,
    "num_train_epochs": 1,
    "max_steps": -1,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "save_steps": 0,
    "logging_steps": 10,
    "seed": 0,
    "bf16": True,
}
"""What a Megatron run reads of a recipe's training section, by transformers' names."""


@dataclass(frozen=True)
class RunPlan:
    """A recipe's training section for a number of rows and data-parallel ranks."""

    settings: dict[str, Any]
    micro_batch: int
    count: int
    """Micro-batches of a step on each data-parallel rank."""
    rows_per_step: int
    total_steps: int
    length: int
    """Tokens that every row is padded to."""

    @classmethod
    def of(cls, recipe: Recipe, num_rows: int, ranks: int) -> RunPlan:
        """Read and check the settings.

        Raises:
            ConfigError: a setting that a Megatron run does not have. DataError: fewer rows than one step takes.
        """
        given = recipe.training.arguments()
        for name, value in given.items():
            if name not in _SETTINGS:
                raise ConfigError(
                    f"training.{name} is {value!r}, which a Megatron run does not read.{nearest(name, _SETTINGS)} "
                    f"It reads {', '.join(_SETTINGS)}"
                )
        if recipe.training.features != "online":
            raise ConfigError(
                "training.features is 'memory': Megatron runs compute features online, remove the setting"
            )
        if recipe.data.pack:
            raise ConfigError("data.pack is true: packed rows are not supported with Megatron targets, set it to false")
        settings = {**_SETTINGS, **given}
        micro, count = settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
        rows_per_step = micro * count * ranks
        if num_rows < rows_per_step:
            raise DataError(
                f"the data has {num_rows} rows, one step takes {rows_per_step} ({micro} a micro-batch, {count} "
                f"micro-batches, {ranks} data-parallel ranks): use more data or smaller steps"
            )
        steps = settings["max_steps"]
        if steps <= 0:
            steps = math.ceil(settings["num_train_epochs"] * (num_rows // rows_per_step))
        return cls(settings, micro, count, rows_per_step, steps, recipe.data.max_length)


def batches_of_step(
    rows: Sequence[Any], plan: RunPlan, step: int, *, ranks: int, rank: int, pad_token_id: int, device: Any = None
) -> list[Batch]:
    """The micro-batches of one data-parallel rank at a step; every epoch has its own order, decided by the seed."""
    steps_an_epoch = len(rows) // plan.rows_per_step
    epoch, place = divmod(step, steps_an_epoch)
    generator = torch.Generator().manual_seed(plan.settings["seed"] * 1_000_003 + epoch)
    order = torch.randperm(len(rows), generator=generator)
    batches = []
    for index in range(plan.count):
        first = place * plan.rows_per_step + (index * ranks + rank) * plan.micro_batch
        chosen = order[first : first + plan.micro_batch].tolist()
        batch: Batch = dict(collate_rows([rows[i] for i in chosen], pad_token_id, pad_to_multiple_of=plan.length))
        if batch["input_ids"].shape[1] > plan.length:
            raise DataError(f"a row of the data is longer than data.max_length {plan.length}: prepare the data again")
        batches.append(
            {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in batch.items()} | {"rows": chosen}
        )
    return batches


def run(
    model: Any,
    rows: Sequence[Any],
    recipe: Recipe,
    *,
    pad_token_id: int = 0,
    resume: bool = False,
    log: Callable[[StepReport], None] | None = None,
) -> list[StepReport]:
    """Train a converted model's drafter; every rank must call it with the same rows.

    Args:
        model: the unwrapped ``GPTModel``, converted.
        rows: each with ``input_ids`` and ``loss_mask``, as of :func:`modelopt_spec.data.load_datasets`.
        recipe: loss, training and data.max_length are read.
        pad_token_id: fills the ends of rows; any id does.
        resume: go on from the newest checkpoint in ``training.output_dir``, if there is one.
        log: called on rank 0 every ``logging_steps`` steps and after the last.

    Returns:
        The reports of all steps of this call. Checkpoints hold drafter and optimizer, not the target.
    """
    from megatron.core import parallel_state as mpu

    ranks, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    plan = RunPlan.of(recipe, len(rows), ranks)
    settings, root = plan.settings, Path(plan.settings["output_dir"])
    step = MegatronForwardStep(
        model, recipe.loss, recipe.training.num_anchors, seed=settings["seed"], total_steps=plan.total_steps
    )
    wrapped = wrap_for_training(model, step)
    optimizer, scheduler = make_optimizer(
        wrapped,
        lr=settings["learning_rate"],
        total_steps=plan.total_steps,
        weight_decay=settings["weight_decay"],
        warmup_steps=settings["warmup_steps"],
        decay_style=settings["lr_scheduler_type"],
        clip_grad=settings["max_grad_norm"],
        adam_beta1=settings["adam_beta1"],
        adam_beta2=settings["adam_beta2"],
        adam_eps=settings["adam_epsilon"],
    )
    if resume and (root / LATEST).is_file():
        common = load_checkpoint(model, root / (root / LATEST).read_text().strip(), target=False, optimizer=optimizer)
        scheduler.load_state_dict(common["scheduler"])
        step.step = common["step"]
    device = step.target.device
    reports = []
    while step.step < plan.total_steps:
        batches = batches_of_step(
            rows, plan, step.step, ranks=ranks, rank=rank, pad_token_id=pad_token_id, device=device
        )
        reports.append(train_step(step, wrapped, optimizer, batches, scheduler))
        last = step.step == plan.total_steps
        if (
            log is not None
            and torch.distributed.get_rank() == 0
            and (last or step.step % settings["logging_steps"] == 0)
        ):
            log(reports[-1])
        if settings["save_steps"] and (last or step.step % settings["save_steps"] == 0):
            common = {"step": step.step, "scheduler": scheduler.state_dict()}
            name = f"step-{step.step}"
            save_checkpoint(model, root / name, target=False, optimizer=optimizer, common=common)
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:
                (root / f".{LATEST}").write_text(name)
                (root / f".{LATEST}").replace(root / LATEST)
    torch.distributed.barrier()
    return reports
