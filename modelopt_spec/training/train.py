"""`train`: from a recipe to a trained drafter, its report and, if the recipe asks, its export."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from modelopt_spec import noise
from modelopt_spec.checkpoints.store import DESCRIPTION, restore, save
from modelopt_spec.conversion import convert
from modelopt_spec.data.dataset import load_datasets
from modelopt_spec.drafter.experts_parallel import spread_for_training
from modelopt_spec.errors import CheckpointError, ConfigError
from modelopt_spec.progress import progress
from modelopt_spec.targets.load import load_target, load_tokenizer
from modelopt_spec.text_files import finite
from modelopt_spec.training import ranks, run_checkpoints, sharding
from modelopt_spec.training.features import FeatureSource, MemoryFeatures, OnlineFeatures
from modelopt_spec.training.interrupt import Interrupt
from modelopt_spec.training.module import DraftTrainingModule
from modelopt_spec.training.recipe import Recipe, load_recipe
from modelopt_spec.training.run_checkpoints import DRAFTER, REPORT
from modelopt_spec.training.sizes import show_sizes
from modelopt_spec.training.trainer import Collator, DraftTrainer, IndexedRows
from modelopt_spec.versions import versions

__all__ = ["TrainResult", "train"]


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
    stopped_by: str | None = None
    """``"SIGTERM"`` or ``"max_minutes"`` where the run ended before its last step; ``resume`` goes on from there."""
    rank: int = 0
    """Of this process; only the first one has something to tell."""


class _Bar(TrainerCallback):
    """The trainer's steps on one of our progress bars."""

    def __init__(self, advance: Any) -> None:
        self.advance, self.note = advance, ""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.note = f"loss {logs['loss']:.3f}" + (f" tau {logs['tau']:.2f}" if "tau" in logs else "")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.advance(1, note=self.note)


def train(
    recipe: str | Path | Recipe,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    resume: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Train a drafter as a recipe says.

    SIGTERM ends the run after the step in progress with its state saved; it returns, and ``resume`` goes on from there.
    With several ranks (torchrun, accelerate, SLURM) every rank calls this and the first one writes.

    Args:
        recipe: built-in name (``dspark/smollm2_135m``), YAML file, or a loaded :class:`Recipe`.
        overrides: ``key.path=value`` strings, for example ``training.max_steps=100``.
        resume: go on from the newest intact checkpoint of the recipe's output directory; start if there is none.
        quiet: no table and no progress bar.

    Returns:
        The model, where it was saved, and the report.

    Raises:
        SpecError: a mistake in recipe or data, an output directory that cannot be written or holds another run, a disk
            that is full (earlier checkpoints stay), or a loss that is not finite (the state before it is saved).
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    if isinstance(recipe, Recipe) and overrides:
        raise ConfigError("overrides need a recipe's name or file, not a loaded Recipe")
    output_dir = loaded.output_dir
    arguments = _arguments(loaded, output_dir)
    checkpoint = _begin(output_dir, loaded.export_dir, resume, arguments)
    with run_checkpoints.locked(output_dir) if arguments.should_save else contextlib.nullcontext():
        return _train(loaded, arguments, output_dir, checkpoint, quiet=quiet)


def _train(
    loaded: Recipe, arguments: TrainingArguments, output_dir: Path, checkpoint: Path | None, *, quiet: bool
) -> TrainResult:
    """The run, from ``checkpoint`` on where there is one."""
    model_section = loaded.model
    shard = loaded.training.shard_target and arguments.world_size > 1
    with _one_after_the_other(arguments):
        tokenizer = load_tokenizer(
            model_section.name_or_path,
            revision=model_section.revision,
            trust_remote_code=model_section.trust_remote_code,
        )
        data = load_datasets(loaded.data, tokenizer, quiet=quiet or not arguments.should_log)
    model = _load(loaded, None if shard else arguments.device)
    if shard:
        sharding.shard_target(model, arguments.device)
    torch.manual_seed(arguments.seed)
    _attach(model, tokenizer, loaded, quiet=quiet or not arguments.should_log)
    drafter: Any = model.drafter
    if not quiet and arguments.should_log:
        show_sizes(drafter, arguments, length=loaded.data.max_length, num_anchors=loaded.training.num_anchors)
    if loaded.training.expert_parallel:
        spread_for_training(drafter, arguments)
    trainer = _trainer(model, tokenizer, data, loaded, arguments, quiet=quiet)
    started = time.time()
    stopped_by = None
    if checkpoint is not None and run_checkpoints.step_of(checkpoint) >= _steps(trainer):
        if loaded.training.expert_parallel:
            raise CheckpointError(
                f"{checkpoint} is the last step of the run, and with training.expert_parallel only more training reads "
                "it: raise training.max_steps, or export the checkpoint"
            )
        finished = _finished(model, output_dir)
        if finished is not None:
            if not quiet and arguments.should_log:
                print(f"{output_dir} is finished: nothing was trained, nothing was written", file=sys.stderr)
            stopped = finished["stopped_by"]
            return TrainResult(
                model, tokenizer, output_dir, output_dir / DRAFTER, finished, stopped, arguments.process_index
            )
        restore(model, checkpoint)
        trainer.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    else:
        stopped_by = _run(trainer, checkpoint, loaded.training.max_minutes, quiet=quiet)
    report = _report(trainer, loaded, data, time.time() - started, stopped_by)
    saved = output_dir / DRAFTER
    if stopped_by == "SIGTERM":
        saved = run_checkpoints.checkpoint_dir(output_dir, trainer.state.global_step)
        return TrainResult(model, tokenizer, output_dir, saved, report, stopped_by, arguments.process_index)
    model.drafter = sharding.whole_drafter(trainer.module.drafter)
    if arguments.should_save:
        save(model, saved, overwrite=True, extra=trainer.provenance)
        _write_json(output_dir / REPORT, report)
        if loaded.export_dir is not None:
            from modelopt_spec.checkpoints.export import export

            export(model, loaded.export_dir, engines=loaded.export.engines, overwrite=True, quiet=quiet)
    ranks.wait(arguments)
    return TrainResult(model, tokenizer, output_dir, saved, report, stopped_by, arguments.process_index)


def _load(recipe: Recipe, device: torch.device | None) -> nn.Module:
    """The target; where a server runs it, its ends only."""
    section = recipe.model
    common: dict[str, Any] = {
        "dtype": section.dtype,
        "revision": section.revision,
        "trust_remote_code": section.trust_remote_code,
        "device": device,
    }
    if recipe.training.features == "remote":
        from modelopt_spec.targets.ends import load_ends

        return load_ends(section.name_or_path, **common)
    return load_target(section.name_or_path, attn_implementation=section.attn_implementation, **common)


def _begin(output_dir: Path, export: Path | None, resume: bool, arguments: TrainingArguments) -> Path | None:
    """Check the output directory before anything expensive; the checkpoint to go on from, the same on every rank."""
    checkpoint = None
    if arguments.should_save:
        run_checkpoints.check_free(output_dir, resume=resume, export=export)
        run_checkpoints.check_writable(output_dir)
        checkpoint = run_checkpoints.newest_intact(output_dir) if resume else None
    found = ranks.gather([str(checkpoint)] if checkpoint else [], arguments)[0]
    return Path(found[0]) if found else None


@contextlib.contextmanager
def _one_after_the_other(arguments: TrainingArguments) -> Iterator[None]:
    """Prepared files are made once: by the first rank, then the first of each other machine, then read by the rest."""
    with arguments.main_process_first(local=False), arguments.main_process_first(local=True):
        yield


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


def _attach(model: Any, tokenizer: Any, recipe: Recipe, *, quiet: bool) -> None:
    """Convert the model, start from another draft if the recipe says so, and train in float32 master weights."""
    config = recipe.drafter_config
    convert(model, (recipe.mode, config), tokenizer=tokenizer, quiet=quiet)
    model.drafter.float()
    if recipe.init_from:
        from modelopt_spec.checkpoints.warm_start import warm_start

        warm_start(model, recipe.init_from)
    if recipe.freeze:
        from modelopt_spec.checkpoints.warm_start import freeze_parts

        freeze_parts(model.drafter, recipe.freeze)


def _trainer(
    model: nn.Module, tokenizer: Any, data: Any, recipe: Recipe, arguments: TrainingArguments, *, quiet: bool
) -> DraftTrainer:
    source = _feature_source(model, data, recipe, arguments, quiet=quiet or not arguments.should_log)
    module = DraftTrainingModule(model, recipe.loss, recipe.training.num_anchors, source)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    trainer = DraftTrainer(
        module,
        arguments,
        check_finite=recipe.training.check_finite,
        provenance={"recipe": recipe.model_dump(), "data": data.train_report.to_dict()},
        train_dataset=IndexedRows(data.train),
        eval_dataset=IndexedRows(data.validation) if data.validation is not None else None,
        data_collator=Collator(pad),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _feature_source(
    model: Any, data: Any, recipe: Recipe, arguments: TrainingArguments, *, quiet: bool
) -> FeatureSource:
    """The target itself, with or without memory, or a cache on disk that is written first if it is not there."""
    drafter, section = model.drafter, recipe.training
    layer_ids = drafter.config.target_layer_ids or ()
    if section.features == "remote":
        return _remote(model, recipe, layer_ids)
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
    rank, world = arguments.process_index, arguments.world_size
    write = functools.partial(
        write_cache, drafter.target, data.train, layer_ids, section.cache_dir, identity, section.cache, world_size=world
    )
    if world > 1:
        no_shards = world
        with arguments.main_process_first(local=False):
            write(rank=no_shards, quiet=True)
    write(rank=rank, quiet=quiet)
    ranks.wait(arguments)
    return CachedFeatures(section.cache_dir, layer_ids, identity, fallback=online)


def _remote(model: Any, recipe: Recipe, layer_ids: Sequence[int]) -> FeatureSource:
    """Features of the server that the recipe names."""
    from modelopt_spec.targets.ends import final_norm
    from modelopt_spec.targets.remote import RemoteFeatures, file_transfer

    section = recipe.training.remote
    return RemoteFeatures(
        section.base_url,
        section.model or recipe.model.name_or_path,
        layer_ids,
        final_norm(model),
        file_transfer(section.directory, section.fp8),
        dtype=model.get_input_embeddings().weight.dtype,
        concurrency=section.concurrency,
        timeout=section.timeout,
        retries=section.retries,
        backoff=section.backoff,
    )


def _steps(trainer: DraftTrainer) -> int:
    """Steps of the whole run."""
    args = trainer.args
    return args.max_steps if args.max_steps > 0 else int(trainer.epochs.steps * args.num_train_epochs)


def _finished(model: nn.Module, output_dir: Path) -> dict[str, Any] | None:
    """The report of a run that has written its result, and the result's weights; None where it died before that."""
    drafter, report = output_dir / DRAFTER, output_dir / REPORT
    if not report.is_file() or not (drafter / DESCRIPTION).is_file():
        return None
    restore(model, drafter)
    loaded: dict[str, Any] = json.loads(report.read_text())
    return loaded


def _run(trainer: DraftTrainer, checkpoint: Path | None, max_minutes: float | None, *, quiet: bool) -> str | None:
    """Train; what ended the run before its last step, if anything did."""
    args = trainer.args
    title = "train" if max_minutes is None else f"train, {max_minutes:g} minutes at most"
    with (
        progress(title, _steps(trainer), quiet=quiet or not args.should_log) as advance,
        Interrupt(max_minutes) as interrupt,
        noise.filtered(),
    ):
        trainer.add_callback(_Bar(advance))
        trainer.add_callback(interrupt)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return interrupt.reason


def _report(trainer: DraftTrainer, recipe: Recipe, data: Any, seconds: float, stopped_by: str | None) -> dict[str, Any]:
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
        "stopped_by": stopped_by,
        "seconds": seconds,
        "rows_without_supervision": len(trainer.rows_without_supervision()),
        "rows_per_step": trainer.epochs.rows_per_step,
        "trainable_parameters": sum(p.numel() for p in trainer.module.drafter.parameters()),
        "device": str(trainer.args.device),
        "world_size": trainer.args.world_size,
        "curves": history,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(finite(value), indent=2, allow_nan=False) + "\n")
    temporary.replace(path)
