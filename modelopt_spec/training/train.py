"""`train`: from a recipe to a trained drafter, its report and, if the recipe asks, its export."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from modelopt_spec.checkpoints.store import save
from modelopt_spec.conversion import convert
from modelopt_spec.data.dataset import load_datasets
from modelopt_spec.errors import CheckpointError, ConfigError
from modelopt_spec.progress import progress
from modelopt_spec.targets.load import load_target, load_tokenizer
from modelopt_spec.training import run_checkpoints
from modelopt_spec.training.features import FeatureSource, MemoryFeatures, OnlineFeatures
from modelopt_spec.training.module import DraftTrainingModule
from modelopt_spec.training.recipe import Recipe, load_recipe
from modelopt_spec.training.trainer import DraftTrainer, IndexedRows, collator
from modelopt_spec.versions import versions

__all__ = ["TrainResult", "train"]

REPORT = "report.json"
DRAFTER = "drafter"


@dataclass(frozen=True)
class TrainResult:
    """What :func:`train` returns."""

    model: nn.Module
    """The target with its trained drafter."""
    tokenizer: Any
    output_dir: Path
    checkpoint: Path
    """The saved drafter, for :func:`modelopt_spec.restore`, evaluate and export."""
    report: dict[str, Any]
    """Also in ``report.json``: versions, recipe, seed, data fingerprint and curves."""


class _Bar(TrainerCallback):
    """The trainer's steps on one of our progress bars."""

    def __init__(self, advance: Any) -> None:
        self.advance, self.note = advance, ""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.note = f"loss {logs['loss']:.3f}" + (f" tau {logs['tau']:.2f}" if "tau" in logs else "")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.advance(1, note=self.note)


class _Deadline(TrainerCallback):
    """Stops a run, with its state saved, when its time is over."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if time.monotonic() >= self.end:
            control.should_training_stop = True


def train(
    recipe: str | Path | Recipe,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    resume: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Train a drafter as a recipe says.

    Args:
        recipe: built-in name (``dspark/smollm2_135m``), YAML file, or a loaded :class:`Recipe`.
        overrides: ``key.path=value`` strings, for example ``training.max_steps=100``.
        resume: go on from the newest intact checkpoint of the recipe's output directory; start if there is none.
        quiet: no table and no progress bar.

    Returns:
        The model, where it was saved, and the report.

    Raises:
        SpecError: a mistake in recipe or data; a loss that is not finite (the state before it is saved).
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    if isinstance(recipe, Recipe) and overrides:
        raise ConfigError("overrides need a recipe's name or file, not a loaded Recipe")
    output_dir = Path(loaded.training.arguments().get("output_dir") or "runs/mtsp")
    checkpoint = run_checkpoints.newest_intact(output_dir) if resume else None
    if not resume and (output_dir / REPORT).exists():
        raise CheckpointError(
            f"{output_dir} holds a finished run: pass resume (--resume), or set another training.output_dir"
        )
    arguments = _arguments(loaded, output_dir)
    model_section = loaded.model
    tokenizer = load_tokenizer(
        model_section.name_or_path, revision=model_section.revision, trust_remote_code=model_section.trust_remote_code
    )
    data = load_datasets(loaded.data, tokenizer, quiet=quiet)
    model = load_target(
        model_section.name_or_path,
        dtype=model_section.dtype,
        revision=model_section.revision,
        attn_implementation=model_section.attn_implementation,
        trust_remote_code=model_section.trust_remote_code,
        device=arguments.device,
    )
    torch.manual_seed(arguments.seed)
    _attach(model, tokenizer, loaded, quiet=quiet)
    trainer = _trainer(model, tokenizer, data, loaded, arguments)
    started = time.time()
    if loaded.training.max_minutes is not None:
        trainer.add_callback(_Deadline(loaded.training.max_minutes))
    _run(trainer, checkpoint, quiet=quiet)
    save(model, output_dir / DRAFTER, overwrite=True, extra=trainer.provenance)
    report = _report(trainer, loaded, data, time.time() - started)
    _write_json(output_dir / REPORT, report)
    if loaded.export.engines:
        from modelopt_spec.checkpoints.export import export

        destination = loaded.export.output_dir or str(output_dir / "export")
        export(model, destination, engines=loaded.export.engines, overwrite=True, quiet=quiet)
    return TrainResult(model, tokenizer, output_dir, output_dir / DRAFTER, report)


def _arguments(recipe: Recipe, output_dir: Path) -> TrainingArguments:
    values: dict[str, Any] = {
        "logging_steps": 10,
        "save_total_limit": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not torch.accelerator.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
        **recipe.training.arguments(),
        "output_dir": str(output_dir),
    }
    try:
        return TrainingArguments(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"training: {error}") from None


def _attach(model: nn.Module, tokenizer: Any, recipe: Recipe, *, quiet: bool) -> None:
    """Convert the model, start from another draft if the recipe says so, and train in float32 master weights."""
    config = recipe.drafter_config
    convert(model, (recipe.mode, config), tokenizer=tokenizer, quiet=quiet)
    model.drafter.float()
    if recipe.init_from:
        from modelopt_spec.checkpoints.warm_start import warm_start

        warm_start(model, recipe.init_from)


def _trainer(model: nn.Module, tokenizer: Any, data: Any, recipe: Recipe, arguments: TrainingArguments) -> DraftTrainer:
    source = _feature_source(model, data, recipe)
    module = DraftTrainingModule(model, recipe.loss, recipe.training.num_anchors, source)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    return DraftTrainer(
        module,
        arguments,
        check_finite=recipe.training.check_finite,
        provenance={"recipe": recipe.model_dump(), "data": data.train_report.to_dict()},
        train_dataset=IndexedRows(data.train),
        eval_dataset=IndexedRows(data.validation) if data.validation is not None else None,
        data_collator=collator(pad),
    )


def _feature_source(model: Any, data: Any, recipe: Recipe) -> FeatureSource:
    """The target itself, with or without memory, or a cache on disk that is written first if it is not there."""
    drafter, section = model.drafter, recipe.training
    layer_ids = drafter.config.target_layer_ids or ()
    online = OnlineFeatures(drafter.target, layer_ids)
    if section.features == "online":
        return online
    if section.features == "memory":
        return MemoryFeatures(online)
    from modelopt_spec.data import target_fingerprint, write_cache
    from modelopt_spec.targets.cached import CachedFeatures

    if section.cache_dir is None:
        raise ConfigError("training.features is 'cached': name the directory of the cache in training.cache_dir")
    identity = {**data.identity, "target": target_fingerprint(model), "data": data.train_report.fingerprint}
    write_cache(drafter.target, data.train, layer_ids, section.cache_dir, identity)
    return CachedFeatures(section.cache_dir, layer_ids, identity, fallback=online)


def _run(trainer: DraftTrainer, checkpoint: Path | None, *, quiet: bool) -> None:
    args = trainer.args
    steps_an_epoch = -(-len(trainer.get_train_dataloader()) // args.gradient_accumulation_steps)
    total = args.max_steps if args.max_steps > 0 else int(steps_an_epoch * args.num_train_epochs)
    with progress("train", total, quiet=quiet or not args.should_log) as advance:
        trainer.add_callback(_Bar(advance))
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def _report(trainer: DraftTrainer, recipe: Recipe, data: Any, seconds: float) -> dict[str, Any]:
    history = trainer.state.log_history
    return {
        "kind": "modelopt_spec.training_report",
        "version": 1,
        "versions": versions(),
        "recipe": recipe.model_dump(),
        "seed": trainer.args.seed,
        "data": {
            "train": data.train_report.to_dict(),
            "validation": data.validation_report.to_dict() if data.validation_report is not None else None,
        },
        "steps": trainer.state.global_step,
        "seconds": seconds,
        "rows_without_supervision": trainer.unsupervised_rows,
        "trainable_parameters": sum(p.numel() for p in trainer.module.drafter.parameters()),
        "device": str(trainer.args.device),
        "world_size": trainer.args.world_size,
        "curves": history,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)
