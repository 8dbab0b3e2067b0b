"""Training a drafter with Megatron-Core's own schedules, optimizer and gradient finalisation.

The target's layers run inside the pipeline as in any Megatron training, but without gradients; their taps travel with
the hidden states. The last stage runs the drafter and the vocabulary-parallel loss and returns the pair (sum, count)
that Megatron's schedules take; gradients are summed over micro-batches and data-parallel ranks and divided once by the
sum of all slot weights. Earlier stages get zero gradients, because a schedule sends something in each direction.

    model = mtsp.convert(gpt_model, ("dspark", {...}), tokenizer=tokenizer)
    step = MegatronForwardStep(model, loss, num_anchors=64)
    wrapped = wrap_for_training(model, step)
    optimizer, scheduler = make_optimizer(wrapped, lr=6e-4, total_steps=1000)
    for batches in data:                                    # the micro-batches of one optimizer step
        report = train_step(step, wrapped, optimizer, batches, scheduler)

Legend: B batch, S sequence, D hidden, T taps, K slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_spec.config import LossConfig
from modelopt_spec.errors import ConfigError, DataError, SpecError
from modelopt_spec.records import TargetFeatures
from modelopt_spec.targets.megatron import MegatronTarget, drafter_config
from modelopt_spec.training.balance import ExpertBalance
from modelopt_spec.training.blocks import row_generators
from modelopt_spec.training.curves import StepStatistics
from modelopt_spec.training.loss import LossResult, Projection, first_nonfinite_row
from modelopt_spec.training.module import DraftTrainingModule, lambda_at
from modelopt_spec.training.vocab_reduce import GroupReduce

__all__ = [
    "MegatronForwardStep",
    "StepReport",
    "evaluate_step",
    "make_optimizer",
    "projection_of",
    "train_step",
    "wrap_for_training",
]

Batch = dict[str, Any]
TERMS = ("ce", "base_ce", "tv", "confidence", "kl")


def projection_of(drafter: Any) -> Projection:
    """The output projection of one tensor-parallel rank: its rows of W and W_out, and reductions over the group."""
    target: MegatronTarget = drafter.target
    shard = target.vocab_shard
    if shard.size == 1:
        return Projection.of(drafter)
    return Projection(
        weight=target.output_weight_shard(),
        logits=target.logits_shard,
        head_out=None if drafter.head is None else drafter.head.out.weight[: shard.width],
        vocab=GroupReduce(shard.group, shard.start),
    )


class _GivenFeatures:
    """A feature source that gives what the pipeline brought."""

    def __init__(self) -> None:
        self.now: TargetFeatures | None = None

    def features(
        self, input_ids: Tensor, lengths: Sequence[int], rows: Sequence[int], position_ids: Tensor | None
    ) -> TargetFeatures:
        """The features of the micro-batch that runs."""
        assert self.now is not None
        return self.now


class _StageModule(DraftTrainingModule):
    """Blocks, draft pass and loss of the last pipeline stage."""

    def projection(self) -> Projection:
        """Sharded over the tensor-parallel group."""
        return projection_of(self.drafter)


class _Relay(torch.autograd.Function):
    """[hidden; taps] in one tensor for the next stage; what came from the stage before gets a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, carried: Tensor, value: Tensor) -> Tensor:
        ctx.like = carried.new_empty(0), carried.shape
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        empty, shape = ctx.like
        return empty.new_zeros(shape), grads[0] if ctx.needs_input_grad[1] else None


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step (or evaluation) saw, over all micro-batches and data-parallel ranks; on every rank."""

    step: int
    loss: float
    """Weighted sum of the terms, divided by the summed slot weights."""
    terms: dict[str, float]
    tau: float
    """Tokens committed per round on the data's text, bonus included."""
    slots: int
    """Supervised slots."""
    grad_norm: float | None = None


class MegatronForwardStep:
    """The ``forward_step_func`` of Megatron's schedules for a converted model.

    Args:
        model: the ``GPTModel`` of this rank after :func:`modelopt_spec.convert`.
        loss: weights of the terms. num_anchors: blocks cut from each row.
        seed: with the step and a row's index it decides the row's anchors, whatever the layout.
        total_steps: of the run, for Domino's curriculum.

    Batches are dicts of right-padded ``input_ids`` [B, S] and ``loss_mask`` [B, S] with ``rows``, the index of each row
    in the data set. Every rank reads the batches of its data-parallel rank; with a pipeline all have the same B and S.
    """

    def __init__(
        self, model: nn.Module, loss: LossConfig, num_anchors: int, *, seed: int = 0, total_steps: int = 0
    ) -> None:
        from megatron.core import parallel_state as mpu

        self.model: Any = model
        self.loss, self.seed, self.total_steps = loss, seed, total_steps
        config = drafter_config(model)
        self.layer_ids = config.target_layer_ids or ()
        self.block_size = config.block_size
        self._source = _GivenFeatures()
        self.module: _StageModule | None = None
        self._balance: ExpertBalance | None = None
        drafter = getattr(model, "drafter", None)
        if drafter is not None:
            self.module = _StageModule(model, loss, num_anchors, self._source)
            self.target: MegatronTarget = drafter.target
            self._balance = ExpertBalance.of(drafter, self._over_data_ranks)
        else:
            self.target = MegatronTarget(model)
        self._mpu = mpu
        self.step = 0
        self.begin()

    def _over_data_ranks(self, values: Tensor) -> Tensor:
        """Sum over data-parallel ranks; tensor-parallel ranks see the same blocks."""
        total = values.clone()
        torch.distributed.all_reduce(total, group=self._mpu.get_data_parallel_group(with_context_parallel=True))
        return total

    def finish(self) -> None:
        """After the optimizer's step: count it, and move the biases of a drafter's routers."""
        if self._balance is not None:
            self._balance.on_optimizer_step(None, None, None)
        self.step += 1

    def begin(self) -> None:
        """Forget the sums of the last step; called before each."""
        self._weights = torch.zeros((), dtype=torch.float64, device=self.target.device)
        self._sums = torch.zeros(2 * len(TERMS) + 5, dtype=torch.float64, device=self.target.device)
        self._bad_row = torch.full((), -1, dtype=torch.long, device=self.target.device)

    def __call__(self, data_iterator: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        """Run this stage for the next micro-batch."""
        batch = next(data_iterator)
        if batch.get("segment_ids") is not None:
            raise DataError("packed rows are not supported with Megatron targets: set data.pack to false")
        carried = None if self.model.pre_process else self.model.decoder.input_tensor
        result = self.target.run_stage(batch["input_ids"], self.layer_ids, carried)
        if isinstance(result, Tensor):
            output = result if carried is None else _Relay.apply(carried, result)
            return output, partial(self._pair, None)
        total, outcome = self._draft(batch, result)
        return (total if carried is None else _Relay.apply(carried, total)), partial(self._pair, outcome)

    def _draft(self, batch: Batch, features: TargetFeatures) -> tuple[Tensor, LossResult]:
        """The drafter's loss summed (not averaged) over the slots of a micro-batch."""
        assert self.module is not None
        when: int | str = self.step if self.model.training else "eval"
        blocks = self.module.blocks(batch, row_generators(self.seed, when, batch["rows"]))
        self._source.now = features
        batch = {"lengths": [features.taps.shape[1]] * len(batch["input_ids"]), **batch}
        base_ce = lambda_at(self.step, self.total_steps, self.loss)
        total, seen, rows, outcome = self.module(batch, blocks, divisor=1.0, base_ce=base_ce)
        self._source.now = None
        if self.model.training and self._balance is not None:
            self._balance.observe()
        self._count(seen, total)
        if not bool(torch.isfinite(total)):
            slot = first_nonfinite_row(rows, outcome)
            place = 0 if slot is None else int(rows.blocks[slot]) // blocks.keep.shape[1]
            self._bad_row.fill_(int(batch["rows"][place]))
        return total, outcome

    def _count(self, seen: StepStatistics, total: Tensor) -> None:
        values = dict(zip(seen.names, seen.terms.view(-1, 2), strict=True))
        for i, name in enumerate(TERMS):
            if name in values:
                self._sums[2 * i : 2 * i + 2] += values[name]
        counted = [seen.blocks, seen.slots[0].sum().view(1), total.detach().double().view(1)]
        self._sums[-5:] += torch.cat(counted)
        self._weights += values["ce"][1]

    def _pair(
        self, outcome: LossResult | None, output: Tensor, non_loss_data: bool = False
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(sum, count, logs). Megatron counts in int32, so this counts slots; :meth:`finalize` knows their weights."""
        assert outcome is not None
        count = torch.tensor(outcome.weights.numel(), dtype=torch.int, device=output.device)
        weight = outcome.terms["ce"].weight
        return output, count, {"loss": torch.stack([output.detach().double(), weight.double()])}

    # ---- what Megatron calls -----------------------------------------------------------------------------------------

    def adjust_tensor_shapes(self, received: list, sent: list) -> tuple[list, list]:
        """Make room for the taps in the tensors between stages (``adjust_tensor_shapes_fn`` of the schedules)."""
        here = self.target.carried_width(self.layer_ids, sent=False)
        there = self.target.carried_width(self.layer_ids, sent=True)
        return [(*shape[:-1], here) for shape in received], [(*shape[:-1], there) for shape in sent]

    def finalize(self, model: list[nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
        """Megatron's ``finalize_model_grads`` with the summed slot weights, which are no integers, as the count."""
        from megatron.core.distributed import finalize_model_grads

        if num_tokens is None:
            raise ConfigError(
                "calculate_per_token_loss is false: wrap the model with wrap_for_training before training"
            )
        finalize_model_grads(model, self._weights.clone(), **kwargs)

    def report(self, grad_norm: float | None = None) -> StepReport:
        """Sums over micro-batches and data-parallel ranks, from the last stage to every rank; a collective."""
        mpu = self._mpu
        sums = self._sums.clone()
        bad = self._bad_row.clone()
        group, stages = mpu.get_data_parallel_group(with_context_parallel=True), mpu.get_pipeline_model_parallel_group()
        torch.distributed.all_reduce(sums, group=group)
        torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX, group=group)
        last = mpu.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast(sums, src=last, group=stages)
        torch.distributed.broadcast(bad, src=last, group=stages)
        if int(bad) >= 0:
            raise SpecError(
                f"the loss is not finite at step {self.step}, row {int(bad)} of the training data: inspect that row, "
                "lower the learning rate, or train in float32. The optimizer has not taken this step"
            )
        values = sums.tolist()
        weight = max(values[1], 1e-12)
        blocks, committed, _, slots, total = values[-5:]
        terms = {
            name: values[2 * i] / max(values[2 * i + 1], 1e-12) for i, name in enumerate(TERMS) if values[2 * i + 1]
        }
        return StepReport(self.step, total / weight, terms, committed / max(blocks, 1.0), int(slots), grad_norm)


# ---- a training loop's parts -----------------------------------------------------------------------------------------


def wrap_for_training(model: Any, step: MegatronForwardStep, ddp_config: Any = None) -> Any:
    """Wrap a converted model in Megatron's ``DistributedDataParallel`` and tell its config how losses are averaged.

    The target's weights are frozen, so they get no gradient buffers.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model.config.calculate_per_token_loss = True
    model.config.finalize_model_grads_func = step.finalize
    ddp_config = ddp_config or DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, ddp_config, model)
    if wrapped.ddp_config.overlap_grad_reduce:
        model.config.no_sync_func = wrapped.no_sync
    return wrapped


def _run(step: MegatronForwardStep, wrapped: Any, batches: Sequence[Batch], forward_only: bool) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    shapes = {tuple(batch["input_ids"].shape) for batch in batches}
    piped = step._mpu.get_pipeline_model_parallel_world_size() > 1
    if piped and len(shapes) > 1:
        raise DataError(
            f"the micro-batches of a step have shapes {sorted(shapes)}: with a pipeline they must be equal, pad all "
            "rows to data.max_length and drop the last incomplete batch"
        )
    step.begin()
    rows, length = next(iter(shapes))
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=wrapped,
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=rows,
        forward_only=forward_only,
        adjust_tensor_shapes_fn=step.adjust_tensor_shapes if piped else None,
    )


def make_optimizer(
    wrapped: Any,
    *,
    lr: float,
    total_steps: int,
    weight_decay: float = 0.0,
    warmup_steps: int = 0,
    decay_style: str = "cosine",
    clip_grad: float = 1.0,
    **options: Any,
) -> tuple[Any, Any]:
    """Megatron's Adam and its parameter scheduler, which also exempts norms and biases from weight decay.

    Args:
        wrapped: of :func:`wrap_for_training`.
        lr: highest learning rate, reached after ``warmup_steps`` and taken to 0 over ``total_steps``.
        total_steps: of the run.
        weight_decay: of matrices.
        warmup_steps: linear warm-up.
        decay_style: ``constant``, ``linear``, ``cosine`` or another that Megatron knows.
        clip_grad: largest gradient norm, 0 for none.
        options: more fields of Megatron's ``OptimizerConfig``, such as ``use_distributed_optimizer``.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    half = {"bf16": wrapped.config.params_dtype == torch.bfloat16, "fp16": wrapped.config.params_dtype == torch.float16}
    min_lr = lr if decay_style == "constant" else 0.0
    given = {"optimizer": "adam", "lr": lr, "min_lr": min_lr, "weight_decay": weight_decay, "clip_grad": clip_grad}
    config = OptimizerConfig(**{**given, **half, **options})
    optimizer = get_megatron_optimizer(config, [wrapped])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if warmup_steps else lr,
        max_lr=lr,
        min_lr=min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(total_steps, warmup_steps + 1),
        lr_decay_style=decay_style,
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=max(total_steps, 1),
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def train_step(
    step: MegatronForwardStep, wrapped: Any, optimizer: Any, batches: Sequence[Batch], scheduler: Any = None
) -> StepReport:
    """One optimizer step over the micro-batches of this data-parallel rank; every rank together.

    Without Megatron's parameter scheduler the optimizer decays norms and biases too.

    Raises:
        SpecError: a loss that is not finite, on every rank and before the optimizer moves.
    """
    if not batches:
        raise DataError("a training step needs at least one micro-batch")
    step.model.train()
    step.model.config.grad_scale_func = optimizer.scale_loss
    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    _run(step, wrapped, batches, forward_only=False)
    report = step.report()
    _, grad_norm, _ = optimizer.step()
    if scheduler is not None:
        scheduler.step(increment=1)
    step.finish()
    return StepReport(**{**report.__dict__, "grad_norm": None if grad_norm is None else float(grad_norm)})


@torch.no_grad()
def evaluate_step(step: MegatronForwardStep, wrapped: Any, batches: Sequence[Batch]) -> StepReport:
    """Loss and statistics of batches without training; anchors depend on the rows alone."""
    step.model.eval()
    _run(step, wrapped, batches, forward_only=True)
    return step.report()
