"""A transformers Trainer for drafters: anchors, loss over all ranks and accumulation steps, logs, checkpoints.

Everything else (optimizers, schedules, mixed precision, accumulation, DDP and FSDP through accelerate, tensorboard,
evaluation) is the Trainer's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from modelopt_spec.checkpoints.store import read_description, read_weights, write_drafter
from modelopt_spec.data.collate import collate_rows
from modelopt_spec.errors import SpecError
from modelopt_spec.training import run_checkpoints
from modelopt_spec.training.blocks import anchor_generator
from modelopt_spec.training.loss import WEIGHT_EPSILON, first_nonfinite_row
from modelopt_spec.training.module import DraftTrainingModule, StepStatistics, lambda_at

__all__ = ["DraftTrainer", "IndexedRows", "NonFiniteLossError", "collator"]


class NonFiniteLossError(SpecError):
    """A loss became NaN or infinite; the run stopped and saved its state."""


class IndexedRows(torch.utils.data.Dataset):
    """A data set whose rows know their index, so that a bad one can be named and features can be kept."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], "row": index}


class collator:
    """Rows of :class:`IndexedRows` -> a batch with ``lengths`` and ``rows`` beside the tensors."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate."""
        batch: dict[str, Any] = collate_rows(rows, self.pad_token_id)
        batch["lengths"] = [len(row["input_ids"]) for row in rows]
        batch["rows"] = [int(row["row"]) for row in rows]
        return batch


class DraftTrainer(Trainer):
    """Trains ``module.drafter`` only.

    Args:
        module: target and drafter in a :class:`DraftTrainingModule`. check_finite: stop at a loss that is not finite.
        provenance: entries for the ``drafter.json`` of every checkpoint.
    """

    def __init__(
        self,
        module: DraftTrainingModule,
        args: TrainingArguments,
        *,
        check_finite: bool = True,
        provenance: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        args.remove_unused_columns = False
        args.label_names = []
        self.keep_checkpoints = args.save_total_limit
        args.save_total_limit = None
        super().__init__(model=module, args=args, **kwargs)
        self.model_accepts_loss_kwargs = True
        self.module = module
        self.check_finite = check_finite
        self.provenance = provenance or {}
        self._sums: dict[str, StepStatistics] = {}
        self.unsupervised_rows = 0

    # ---- batches -----------------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | None]:
        """The micro-batches of one optimizer step with their blocks, and the weight sum that its loss divides by.

        Anchors depend on the seed, the step, the micro-batch and the rank alone: a resumed run draws the same.
        """
        batches = []
        for _ in range(num_batches):
            try:
                batches.append(next(epoch_iterator))
            except StopIteration:
                break
        total = torch.zeros((), dtype=torch.float64, device=device)
        for index, batch in enumerate(batches):
            place = (self.state.global_step * num_batches + index) * self.args.world_size + self.args.process_index
            batch["blocks"] = self.module.blocks(batch, anchor_generator(self.args.seed, place))
            self.unsupervised_rows += int((~batch["blocks"].supervised.flatten(1).any(1)).sum())
            total += batch["blocks"].weights.sum(dtype=torch.float64).to(device)
        return batches, self.accelerator.reduce(total) if batches else None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """The share of this micro-batch in the step's loss.

        Gradients are averaged over ranks by DDP and FSDP, so the share is multiplied by the number of ranks. D-PACE's
        weights are known after the draft pass only: each micro-batch divides by its own weight sum and counts in
        proportion to its supervised slots.
        """
        batch = dict(inputs)
        blocks = batch.pop("blocks")
        base_ce = lambda_at(self.state.global_step, self.state.max_steps, self.module.loss_config)
        dpace = self.module.loss_config.position_weights == "dpace"
        divisor = None if dpace or num_items_in_batch is None else num_items_in_batch + WEIGHT_EPSILON
        loss, statistics, rows, result = model(batch, blocks, divisor=divisor, base_ce=base_ce)
        if model.training and self.check_finite and not torch.isfinite(loss):
            self._stop_at(batch, blocks, rows, result)
        self._count("train" if model.training else "eval", statistics)
        if num_items_in_batch is not None:
            share = blocks.weights.sum() / num_items_in_batch.clamp(min=WEIGHT_EPSILON) if dpace else 1.0
            loss = loss * share * self.args.world_size
        return (loss, {"loss": loss}) if return_outputs else loss

    def _stop_at(self, batch: dict[str, Any], blocks: Any, rows: Any, result: Any) -> None:
        """Save the state before the bad step and say which row of the data set it was."""
        slot = first_nonfinite_row(rows, result)
        names = batch["rows"]
        if slot is not None:
            names = [batch["rows"][int(rows.blocks[slot]) // blocks.keep.shape[1]]]
        self._save_checkpoint(self.model, trial=None)
        raise NonFiniteLossError(
            f"the loss is not finite at step {self.state.global_step} in row(s) {names} of the training data: inspect "
            f"them with `mtsp data inspect`, lower the learning rate, or train in float32. The state before this step "
            f"is in {Path(self.args.output_dir) / f'checkpoint-{self.state.global_step}'}"
        )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        """Evaluation loss of one batch, with anchors that depend on its rows only."""
        batch = self._prepare_inputs(inputs)
        batch["blocks"] = self.module.blocks(batch, anchor_generator(self.args.seed, 2**40 + batch["rows"][0]))
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, batch)
        return loss.detach(), None, None

    # ---- logs --------------------------------------------------------------------------------------------------------

    def _count(self, split: str, new: StepStatistics) -> None:
        old = self._sums.get(split)
        if old is None or old.names != new.names:
            self._sums[split] = new
        else:
            self._sums[split] = StepStatistics(
                old.terms + new.terms, old.names, old.slots + new.slots, old.blocks + new.blocks
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add loss terms, estimated accepted length and acceptance per slot since the last log."""
        split = "eval" if any(key.startswith("eval_") for key in logs) else "train"
        if split in self._sums and ("loss" in logs or split == "eval"):
            logs.update(self._summary(self._sums.pop(split), "eval_" if split == "eval" else ""))
            if split == "train" and self.module.loss_config.base_ce_start:
                logs["lambda"] = lambda_at(self.state.global_step, self.state.max_steps, self.module.loss_config)
        super().log(logs, start_time)

    def _summary(self, sums: StepStatistics, prefix: str) -> dict[str, float]:
        terms = self.accelerator.reduce(sums.terms).tolist()
        slots = self.accelerator.reduce(sums.slots).tolist()
        blocks, greedy, by_probability = self.accelerator.reduce(sums.blocks).tolist()
        values = {f"{prefix}{name}": terms[2 * i] / max(terms[2 * i + 1], 1e-12) for i, name in enumerate(sums.names)}
        values[f"{prefix}tau"] = greedy / max(blocks, 1.0)
        values[f"{prefix}tau_probability"] = by_probability / max(blocks, 1.0)
        supervised, reached, passed, accept = slots
        for k in range(len(supervised)):
            if reached[k]:
                values[f"{prefix}acceptance/{k}"] = passed[k] / reached[k]
            if supervised[k]:
                values[f"{prefix}acceptance_probability/{k}"] = accept[k] / supervised[k]
        return {name: value for name, value in values.items() if math.isfinite(value)}

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Write the drafter alone, in the form that :func:`modelopt_spec.restore` reads."""
        directory = Path(output_dir or self.args.output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        name = str(getattr(getattr(self.module.model, "config", None), "name_or_path", "") or "")
        write_drafter(self.module.drafter, directory, target=name, extra=self.provenance)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save, seal with checksums, and only then drop older checkpoints."""
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            run_checkpoints.seal(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")
            run_checkpoints.prune(Path(self.args.output_dir), self.keep_checkpoints)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the drafter's weights of a checkpoint."""
        description = read_description(resume_from_checkpoint)
        self.module.drafter.load_state_dict(read_weights(resume_from_checkpoint, description))
