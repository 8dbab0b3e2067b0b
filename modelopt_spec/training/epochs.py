"""Where in an epoch a run is: for the sampler, and to know rows that ranks see twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments

from modelopt_spec.training.sampling import EpochSampler

__all__ = ["EpochPlace"]


class EpochPlace(TrainerCallback):
    """Follows the epochs of a run, also after a resume in the middle of one.

    Args:
        args: of the run.
        num_rows: of the training set.
    """

    def __init__(self, args: TrainingArguments, num_rows: int) -> None:
        self.args, self.num_rows = args, num_rows
        self.sampler: EpochSampler | None = None
        """Is told the epoch when one begins."""
        self._batches = 0

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step, over all ranks and micro-batches."""
        return self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        return max(1, -(-self.num_rows // self.rows_per_step))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Choose the permutation and find the place in it."""
        if self.sampler is not None:
            self.sampler.set_epoch(int(state.epoch or 0))
        done = 0 if self.args.ignore_data_skip else state.global_step % self.steps
        self._batches = done * self.args.gradient_accumulation_steps

    def repeated(self, count: int) -> Tensor | None:
        """Which rows of this rank's next batch ([count] bool) were dealt out before in this epoch; None if none was.

        Accelerate deals the epoch's batches to the ranks in turn and fills the last ones up from the epoch's beginning.
        One process would not see those rows again, so they must not count. Call it once for every batch.
        """
        args = self.args
        first = (self._batches * args.world_size + args.process_index) * args.train_batch_size
        self._batches += 1
        if args.world_size <= 1 or first + count <= self.num_rows:
            return None
        return torch.arange(first, first + count) >= self.num_rows
