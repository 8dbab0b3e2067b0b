"""A transformers Trainer for drafters: anchors, loss over all ranks and accumulation steps, logs, checkpoints.

Everything else (optimizers, schedules, mixed precision, accumulation, DDP and FSDP through accelerate, tensorboard,
evaluation) is the Trainer's own.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from modelopt_spec.checkpoints.store import config_of, read_description, read_weights, write_drafter
from modelopt_spec.errors import CheckpointError, SpecError
from modelopt_spec.records import BlockBatch
from modelopt_spec.training import ranks, run_checkpoints, sharding
from modelopt_spec.training.balance import ExpertBalance
from modelopt_spec.training.batches import Collator, IndexedRows
from modelopt_spec.training.blocks import row_generators
from modelopt_spec.training.curves import LogSums, summary
from modelopt_spec.training.epochs import EpochPlace
from modelopt_spec.training.loss import WEIGHT_EPSILON
from modelopt_spec.training.module import DraftTrainingModule, lambda_at, nonfinite_rows
from modelopt_spec.training.sampling import EpochSampler

__all__ = ["Collator", "DraftTrainer", "IndexedRows", "NonFiniteLossError"]


OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"


class NonFiniteLossError(SpecError):
    """A loss or gradient became NaN or infinite; the run stopped and saved its state."""


def _only(blocks: BlockBatch, rows: Tensor) -> BlockBatch:
    """Blocks of which only some rows ([B] bool) are taught."""
    mine = rows.to(blocks.keep.device).view(-1, 1, 1)
    return dataclasses.replace(blocks, supervised=blocks.supervised & mine, weights=blocks.weights * mine)


class DraftTrainer(Trainer):
    """Trains ``module.drafter`` only.

    Args:
        module: target and drafter in a :class:`DraftTrainingModule`.
        args: of transformers. ``save_total_limit`` counts complete checkpoints, the best one aside.
        check_finite: stop at a loss or gradient that is not finite.
        provenance: entries for the ``drafter.json`` of every checkpoint.
        kwargs: of the Trainer; data sets are :class:`IndexedRows`.
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
        self.run_dir = Path(args.output_dir or "")
        self.keep_checkpoints = args.save_total_limit
        args.save_total_limit = None
        if args.n_gpu > 1:
            args._n_gpu = 1
        self._staging: Path | None = None
        sharding.prepare_arguments(args, module.drafter, module.loss_config)
        super().__init__(model=module, args=args, **kwargs)
        self.epochs = EpochPlace(args, self.num_rows)
        self.add_callback(self.epochs)
        self.model_accepts_loss_kwargs = True
        self.module = module
        self.experts = ExpertBalance.of(module.drafter, self.accelerator.reduce)
        if self.experts is not None:
            self.add_callback(self.experts)
        self.check_finite = check_finite
        self.provenance = provenance or {}
        self.unsupervised: set[int] = set()
        """Rows seen by this rank from which no slot could be taught."""
        self._sums = {"train": LogSums(), "eval": LogSums()}
        self._bad_rows: set[int] = set()
        self._dpace = module.loss_config.position_weights == "dpace"
        self._dpace_weight = torch.zeros((), dtype=torch.float64)
        self._dpace_loss = torch.zeros(())
        self._evaluated: set[int] = set()

    # ---- batches -----------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows of the training set."""
        rows: Any = self.train_dataset
        return len(rows)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Shuffled or balanced by length, as a function of seed and epoch; ``sequential`` is the Trainer's own."""
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy == "sequential":
            return super()._get_train_sampler(rows)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        lengths = rows.lengths() if self.args.train_sampling_strategy == "group_by_length" else None
        self.epochs.sampler = EpochSampler(len(rows), seed, lengths=lengths, group=self.epochs.rows_per_step)
        return self.epochs.sampler

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | None]:
        """The micro-batches of one optimizer step with their blocks, and the weight sum that its loss divides by.

        Anchors depend on the seed, the step and the row alone: they are the same after a resume, with other
        micro-batches and on other ranks.
        """
        batches = []
        for _ in range(num_batches):
            try:
                batches.append(next(epoch_iterator))
            except StopIteration:
                break
        total = torch.zeros((), dtype=torch.float64, device=device)
        for batch in batches:
            generators = row_generators(self.args.seed, self.state.global_step, batch["rows"])
            batch["blocks"] = self.module.blocks(batch, generators)
            repeated = self.epochs.repeated(len(batch["rows"]))
            if repeated is not None:
                batch["blocks"] = _only(batch["blocks"], ~repeated)
            taught = batch["blocks"].supervised.flatten(1).any(1).tolist()
            unknown = [False] * len(taught) if repeated is None else repeated.tolist()
            seen = zip(batch["rows"], taught, unknown, strict=True)
            self.unsupervised.update(row for row, any_slot, skip in seen if not any_slot and not skip)
            total += batch["blocks"].weights.sum(dtype=torch.float64).to(device)
        self._bad_rows = set()
        self._dpace_weight = torch.zeros((), dtype=torch.float64, device=device)
        self._dpace_loss = torch.zeros((), device=device)
        return batches, self.accelerator.reduce(total) if batches else None

    def rows_without_supervision(self) -> list[int]:
        """Rows, over all ranks, that were seen and taught nothing."""
        return sorted(set().union(*ranks.gather(sorted(self.unsupervised), self.args)))

    # ---- loss --------------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The share of this micro-batch in the step's loss.

        Gradients are averaged over ranks by DDP and FSDP, so the share is multiplied by the number of ranks.
        """
        batch = dict(inputs)
        blocks = batch.pop("blocks")
        base_ce = lambda_at(self.state.global_step, self.state.max_steps, self.module.loss_config)
        divisor = None if num_items_in_batch is None else num_items_in_batch + WEIGHT_EPSILON
        loss, statistics, rows, result = model(batch, blocks, divisor=divisor, base_ce=base_ce)
        if model.training and self.check_finite and not torch.isfinite(loss):
            self._bad_rows.update(batch["rows"][i] for i in nonfinite_rows(rows, result, blocks))
        if model.training and self.experts is not None:
            self.experts.observe()
        if model.training and self._dpace:
            self._dpace_weight += statistics.weight_sum
        self._sums["train" if model.training else "eval"].add(statistics)
        if num_items_in_batch is not None:
            loss = loss * self.args.world_size
        return (loss, {"loss": loss}) if return_outputs else loss

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The Trainer's choice without what the drafter names: hyper-connections and attention sinks."""
        excluded = tuple(f"drafter.{name}" for name in self.module.drafter.no_decay_names())
        return [name for name in super().get_decay_parameter_names(model) if not name.endswith(excluded)]

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of one micro-batch.

        D-PACE's weights are known after the draft pass only. The loss divides by the weights without them; when the
        last micro-batch is done, gradients and loss are scaled by the ratio of the two sums, over all ranks.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self._dpace or num_items_in_batch is None:
            return loss
        if not self.accelerator.gradient_state.sync_gradients:
            self._dpace_loss += loss
            return loss
        total = self.accelerator.reduce(self._dpace_weight) + WEIGHT_EPSILON
        ratio = float((num_items_in_batch + WEIGHT_EPSILON) / total)
        for parameter in self.module.drafter.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(ratio)
        return (self._dpace_loss + loss) * ratio - self._dpace_loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The step's gradient norm; the run ends before the optimizer step if it, or a loss, is not finite."""
        norm = super()._get_grad_norm(model, grad_norm)
        if self.check_finite:
            scaled = getattr(self.accelerator, "scaler", None) is not None
            exploded = not (scaled or math.isfinite(sharding.number(norm)))
            if ranks.any_rank(bool(self._bad_rows) or exploded, self.args):
                self._stop(sorted(set().union(*ranks.gather(sorted(self._bad_rows), self.args))))
        return norm

    def _stop(self, bad_rows: list[int]) -> None:
        """Save the state before the bad step and say which rows of the data set it came from."""
        step = self.state.global_step
        self._save_checkpoint(self.module, trial=None)
        if bad_rows:
            shown = ", ".join(map(str, bad_rows[:8])) + (" ..." if len(bad_rows) > 8 else "")
            what = f"the loss is not finite at step {step} in row(s) {shown} of the training data"
        else:
            what = f"the gradient is not finite at step {step}, though the loss is"
        raise NonFiniteLossError(
            f"{what}: inspect the data with `mtsp data inspect`, lower the learning rate, or train in float32. The "
            f"state before this step is in {run_checkpoints.checkpoint_dir(self.run_dir, step)}"
        )

    # ---- evaluation and logs -----------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The Trainer's evaluation; loss terms, tau and acceptance count every row of the set once."""
        self._evaluated = set()
        return super().evaluate(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        """Evaluation loss of one batch, with anchors that depend on its rows only."""
        batch: dict[str, Any] = self._prepare_inputs(inputs)
        blocks = self.module.blocks(batch, row_generators(self.args.seed, "eval", batch["rows"]))
        batch["blocks"] = _only(blocks, torch.tensor(self._not_seen_yet(batch["rows"])))
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, batch)
        return loss.detach(), None, None

    def _not_seen_yet(self, rows: list[int]) -> list[bool]:
        """Which rows count here: data loaders fill the last batches of the ranks up with rows that were seen."""
        fresh: list[bool] = []
        for rank, part in enumerate(ranks.gather(rows, self.args)):
            new = [row not in self._evaluated and row not in part[:i] for i, row in enumerate(part)]
            self._evaluated.update(part)
            fresh = new if rank == self.args.process_index else fresh
        return fresh

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add loss terms, estimated accepted length and acceptance per slot since the last log."""
        split = "eval" if any(key.startswith("eval_") for key in logs) else "train"
        sums = self._sums[split]
        if sums and ("loss" in logs or split == "eval"):
            base_ce = lambda_at(self.state.global_step, self.state.max_steps, self.module.loss_config)
            total = self.accelerator.reduce(sums.tensor(self.args.device))
            found = summary(total, self.module.weights(base_ce), "eval_" if split == "eval" else "")
            sums.clear()
            if split == "train":
                found.pop("loss", None)
                found |= self.experts.metrics() if self.experts is not None else {}
                if self.module.loss_config.base_ce_start:
                    found["lambda"] = base_ce
            logs.update(found)
        super().log(logs, start_time)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        """The run's directory, or the place where a checkpoint is being written."""
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the drafter alone, in the form that :func:`modelopt_spec.restore` reads."""
        drafter = sharding.whole_drafter(self.module.drafter)
        if self.args.should_save:
            directory = Path(output_dir or self.run_dir)
            directory.mkdir(parents=True, exist_ok=True)
            name = str(getattr(getattr(self.module.model, "config", None), "name_or_path", "") or "")
            write_drafter(drafter, directory, target=name, extra=self.provenance)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Optimizer state by parameter name and whole, however it is sharded: any number of ranks resumes it."""
        if self.is_deepspeed_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = sharding.whole_optimizer_state(self.module.drafter, self.optimizer)
        if self.args.should_save:
            assert self.lr_scheduler is not None
            torch.save(state, Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint beside its place, seal it with checksums, rename it, and only then drop older ones."""
        run_dir, step, main = self.run_dir, self.state.global_step, self.args.should_save
        place = run_checkpoints.checkpoint_dir(run_dir, step)
        if ranks.any_rank(main and run_checkpoints.is_intact(place), self.args):
            return
        if main:
            run_checkpoints.clear_staging(run_dir)
        ranks.wait(self.args)
        if self.state.best_global_step:
            self.state.best_model_checkpoint = str(run_checkpoints.checkpoint_dir(run_dir, self.state.best_global_step))
        unsupervised = self.rows_without_supervision()
        self._staging = run_checkpoints.staging_dir(run_dir)
        try:
            super()._save_checkpoint(model, trial)
            if main:
                run = {**self._run_identity(), "rows_without_supervision": unsupervised}
                (self._staging / place.name / run_checkpoints.RUN).write_text(json.dumps(run, indent=1))
            ranks.wait(self.args)
            if main:
                run_checkpoints.publish(run_dir, step)
                run_checkpoints.prune(run_dir, self.keep_checkpoints, self.state.best_model_checkpoint)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(self._staging, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {run_dir} ({error}): make room or name another "
                "training.output_dir. Earlier checkpoints are as they were; --resume goes on from the newest"
            ) from error
        finally:
            self._staging = None
        ranks.wait(self.args)

    def _run_identity(self) -> dict[str, Any]:
        """What the position in the data means something for."""
        return {
            "rows_per_step": self.epochs.rows_per_step,
            "rows": self.num_rows,
            "data": self.provenance.get("data", {}).get("fingerprint"),
            "data_seed": self.args.seed if self.args.data_seed is None else self.args.data_seed,
            "order": str(self.args.train_sampling_strategy),
            "ranks": self.args.world_size,
        }

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the drafter's weights of a checkpoint, after checking that it is of this drafter and this data."""
        description = read_description(resume_from_checkpoint)
        theirs, ours = config_of(description), self.module.drafter.config
        if theirs != ours:
            differing = [name for name in type(ours).model_fields if getattr(theirs, name) != getattr(ours, name)]
            raise CheckpointError(
                f"{resume_from_checkpoint} is of another drafter than the recipe's: {', '.join(differing)} differ"
            )
        run = run_checkpoints.read_run(resume_from_checkpoint)
        if not self.args.ignore_data_skip:
            run_checkpoints.check_position(run, self._run_identity(), resume_from_checkpoint)
        self.unsupervised.update(run.get("rows_without_supervision", ()))
        sharding.load_drafter(self.module.drafter, read_weights(resume_from_checkpoint, description))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Counterpart of :meth:`_save_optimizer_and_scheduler`."""
        if checkpoint is None or self.is_deepspeed_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.lr_scheduler is not None
        state = torch.load(Path(checkpoint) / OPTIMIZER, map_location="cpu", weights_only=True)
        sharding.load_optimizer_state(self.module.drafter, self.optimizer, state)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    def _load_best_model(self) -> None:
        """Bring back the drafter of the best checkpoint."""
        path = self.state.best_model_checkpoint
        assert path is not None
        sharding.load_drafter(self.module.drafter, read_weights(path, read_description(path)))
