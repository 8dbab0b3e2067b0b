"""Calibrate, profile and simulate from a model and files: what the commands and the public API call."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from modelopt_spec.arguments import check_paths, check_seed, number, whole_number
from modelopt_spec.errors import CheckpointError, ConfigError
from modelopt_spec.outputs import check_outputs
from modelopt_spec.scheduling.calibrate import calibrate_rounds, calibration_section
from modelopt_spec.scheduling.calibration import CalibrationOptions
from modelopt_spec.scheduling.cost import cost_from_dict
from modelopt_spec.scheduling.metrics import Binning
from modelopt_spec.scheduling.model_steps import ModelSteps
from modelopt_spec.scheduling.profile import profile_cost, read_cost
from modelopt_spec.scheduling.rounds import RoundTable, read_rounds
from modelopt_spec.scheduling.scheduler_file import (
    SCHEDULER_FILE,
    Identity,
    PolicySection,
    SchedulerFile,
    current_hardware,
    load_scheduler,
    save_scheduler,
)
from modelopt_spec.scheduling.sweep import DEFAULT_POLICIES, Load, compare_measured, simulate_loads
from modelopt_spec.text_files import read_json_object
from modelopt_spec.versions import __version__

__all__ = ["calibrate", "identity_of", "open_policy", "profile", "simulate"]

ENGINE = "modelopt-spec"
MEASURED = "a file of measured throughput (mtsp.measured_throughput)"


def calibrate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Path],
    *,
    out: str | Path | None = None,
    rounds: str | Path | RoundTable | None = None,
    rounds_out: str | Path | None = None,
    temperature: float = 0.0,
    num_draft_tokens: int | None = None,
    max_new_tokens: int = 256,
    batch_size: int = 8,
    limit: int | None = None,
    seed: int = 0,
    bins: int = 15,
    adaptive_bins: bool = False,
    refine: bool = False,
    offset: bool = False,
    bootstrap: int = 100,
    held_out_share: float = 0.3,
    folds: int = 0,
    max_noise: float | None = None,
    min_events: int | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """Collect real rounds on prompts that were not trained on, fit temperatures, and write them.

    Args:
        model: a model with a drafter that has a confidence head.
        tokenizer: the target's.
        prompts: JSONL prompt files. A share of the prompts is kept out of the fit and judged on.
        out: ``scheduler.json`` to write, or to complete where it holds this drafter's cost table; None writes nothing.
        rounds: already recorded full-block rounds of this drafter (a file or a table) instead of collecting them.
        rounds_out: keep the collected rounds here.
        temperature: sampling temperature, as served; with ``rounds`` what their header says wins.
        num_draft_tokens: draft tokens a block; default what the block was trained for.
        max_new_tokens: of each answer.
        batch_size: prompts decoded together while rounds are collected; what is accepted does not depend on it.
        limit: prompts of each file at most.
        seed: of the sampling, the split and the intervals.
        bins: bins of the calibration error.
        adaptive_bins: bins of equal count instead of equal width.
        refine: golden-section search after the grid.
        offset: also fit one number that is added to all logits; an export puts it into the confidence layer's bias.
        bootstrap: replicates for the intervals.
        held_out_share: share of the prompts that is not fitted on.
        folds: cross-validate over so many folds of prompts too; 0 for none.
        max_noise: see :class:`modelopt_spec.scheduling.calibration.CalibrationOptions`.
        min_events: see the same.
        quiet: no progress on the terminal.

    Returns:
        The report of :mod:`modelopt_spec.scheduling.calibrate`, with ``scheduler_file`` where one was written.
    """
    whole_number("folds", folds, 0, note="; 0 is none")
    if folds == 1:
        raise ConfigError("folds is 1: cross-validation needs 2 or more, or 0 for none")
    whole_number("bootstrap", bootstrap, 0, note="; 0 is none")
    whole_number("bins", bins, 1)
    whole_number("batch_size", batch_size, 1)
    check_seed("seed", seed)
    number("held_out_share", held_out_share, 0, 1 - 1e-9, wanted="a share of the prompts, from 0 to below 1")
    if max_noise is not None:
        number("max_noise", max_noise, 0, wanted="0 or a positive number")
    if min_events is not None:
        whole_number("min_events", min_events, 0)
    number("temperature", temperature, 0, wanted="0 (greedy) or a positive number")
    prompts = check_paths("prompts", prompts, "a JSONL prompt file")
    if rounds is not None and not isinstance(rounds, str | Path | RoundTable):
        raise ConfigError(f"rounds is a {type(rounds).__name__}: it must be a round file or a RoundTable")
    read = [*prompts, rounds if isinstance(rounds, str | Path) else None]
    check_outputs({"rounds_out": rounds_out}, read, stdout=False)
    limits = {"max_noise": max_noise, "min_events": min_events}
    options = CalibrationOptions(
        binning=Binning(bins, adaptive_bins),
        refine=refine,
        offset=offset,
        bootstrap=bootstrap,
        seed=seed,
        **{name: value for name, value in limits.items() if value is not None},  # type: ignore[arg-type]
    )
    collect = {
        "temperatures": (temperature,),
        "num_draft_tokens": num_draft_tokens,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "limit": limit,
        "seed": seed,
        "quiet": quiet,
    }
    with tempfile.TemporaryDirectory() as scratch:
        if rounds is None:
            path = Path(rounds_out or Path(scratch) / "rounds.jsonl")
            _collect(model, tokenizer, prompts, path, collect)
            table = read_rounds(path)
        else:
            table = rounds if isinstance(rounds, RoundTable) else read_rounds(rounds)
            temperature = float(table.header.get("temperature", temperature))
    identity = identity_of(model, tokenizer)
    _same_drafter(table, identity)
    dataset = ", ".join(Path(prompt).stem for prompt in prompts)
    report = calibrate_rounds(table, held_out_share=held_out_share, folds=folds, options=options, dataset=dataset)
    if out is not None:
        file = _existing(Path(out), table.gamma, identity)
        file = dataclasses.replace(
            file,
            identity=dataclasses.replace(identity, **_machine(file)) if file.cost is not None else identity,
            sampling_temperature=temperature,
            calibration=calibration_section(report),
        )
        report["scheduler_file"] = str(save_scheduler(out, file))
    return report


def profile(
    model: nn.Module,
    tokenizer: Any,
    *,
    out: str | Path | None = None,
    requests: Sequence[int] = (1, 2, 4, 8, 16),
    contexts: Sequence[int] = (256,),
    num_draft_tokens: int | None = None,
    repeats: int = 7,
    warmup: int = 2,
    check: bool = True,
    cpu_time: bool = False,
    seed: int = 0,
    quiet: bool = True,
) -> dict[str, Any]:
    """Time this machine's verification and draft passes and write them as a cost table.

    The table describes this package's own decoding, which pads a step to its longest request; the written policy says
    so (``padded``). An engine's step times must come from that engine.

    Args:
        model: a model with a drafter.
        tokenizer: the target's.
        out: ``scheduler.json`` to write, or to complete where it holds this drafter's temperatures; None: nothing.
        requests: batch sizes.
        contexts: cached tokens a request.
        num_draft_tokens: draft tokens a block; default what the block was trained for.
        repeats: timed visits of each cell.
        warmup: untimed visits of each cell.
        check: refuse a flat or inert table.
        cpu_time: count processor seconds instead of wall time: on a shared machine, with one thread and no accelerator.
        seed: of the contexts and the order of visits.
        quiet: kept for the commands; nothing is printed.

    Returns:
        The report of :mod:`modelopt_spec.scheduling.profile`, with ``scheduler_file`` where one was written.
    """
    counts = [whole_number("requests", value, 1) for value in requests]
    lengths = [whole_number("contexts", value, 1) for value in contexts]
    whole_number("repeats", repeats, 3, note=": their median counts")
    whole_number("warmup", warmup, 0)
    check_seed("seed", seed)
    steps = ModelSteps(model, num_draft_tokens, seed)
    with steps.running():
        report = profile_cost(
            steps.step,
            requests=counts,
            gamma=steps.gamma,
            contexts=lengths,
            draft_fn=steps.draft,
            repeats=repeats,
            warmup=warmup,
            uniform=True,
            check=check,
            clock=time.process_time if cpu_time else time.perf_counter,
            seed=seed,
        )
    if out is not None:
        identity = identity_of(model, tokenizer)
        file = _existing(Path(out), steps.gamma, identity)
        file = dataclasses.replace(
            file, identity=identity, cost=cost_from_dict(report["cost"]), policy=PolicySection(padded=True)
        )
        report["scheduler_file"] = str(save_scheduler(out, file))
    return report


def simulate(
    rounds: str | Path,
    cost: str | Path | None = None,
    *,
    scheduler: str | Path | None = None,
    loads: Sequence[float],
    load: Load = "concurrency",
    policies: Sequence[str] = DEFAULT_POLICIES,
    measured: str | Path | None = None,
    padded: bool | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Simulate serving from files.

    Args:
        rounds: round file of an evaluation without a scheduler.
        cost: any file with a cost table (ours or an engine's); default the scheduler file's.
        scheduler: ``scheduler.json`` for temperatures, policy and cost table.
        loads: see :func:`modelopt_spec.scheduling.sweep.simulate_loads`.
        load: what ``loads`` means.
        policies: short names.
        measured: JSON of measured throughput; the report then carries ``comparison``.
        padded: the engine pads; default what the scheduler file says.
        settings: further arguments of ``simulate_loads``.

    Returns:
        The report of :mod:`modelopt_spec.scheduling.sweep`.
    """
    table = read_rounds(rounds)
    file = None if scheduler is None else load_scheduler(scheduler, gamma=table.gamma)
    if file is not None:
        _same_drafter(table, file.identity)
    steps = read_cost(cost) if cost is not None else None if file is None else file.cost
    if steps is None:
        raise ConfigError("no cost table: pass cost, or a scheduler file that has one (profile the machine first)")
    policy: dict[str, Any] = {}
    if file is not None:
        policy = {k: v for k, v in dataclasses.asdict(file.policy).items() if k not in ("method", "padded")}
        padded = file.policy.padded if padded is None else padded
    calibration = None if file is None else file.calibration
    report = simulate_loads(
        table,
        steps,
        loads=loads,
        load=load,
        policies=policies,
        temperatures=None if calibration is None else calibration.temperatures,
        offset=0.0 if calibration is None else calibration.offset,
        padded=bool(padded),
        scheduler_settings=policy,
        **settings,
    )
    if measured is not None:
        report["comparison"] = compare_measured(report, read_json_object(Path(measured), MEASURED))
    return report


def open_policy(scheduler: Any, model: nn.Module, tokenizer: Any = None, *, gamma: int) -> Any:
    """The length policy to decode with: a path is read and checked, anything else is one already (or None).

    Args:
        scheduler: ``scheduler.json``, the directory that holds it, or a policy.
        model: the model that will decode.
        tokenizer: its tokenizer, compared too where it is given.
        gamma: draft tokens a round.

    Raises:
        CheckpointError: the file is of another gamma, drafter, tokenizer, machine or dtype. ConfigError: no cost table.
    """
    if scheduler is not None and not isinstance(scheduler, str | os.PathLike) and not hasattr(scheduler, "lengths"):
        raise ConfigError(
            f"scheduler is a {type(scheduler).__name__}: pass the path of a scheduler.json, or a length policy of "
            "modelopt_spec.scheduling"
        )
    if not isinstance(scheduler, str | os.PathLike):
        return scheduler
    return load_scheduler(Path(scheduler), gamma=gamma, here=identity_of(model, tokenizer)).scheduler()


def identity_of(model: nn.Module, tokenizer: Any = None) -> Identity:
    """Identity of a converted model on this machine, as ``scheduler.json`` stores it."""
    from modelopt_spec.checkpoints.store import fingerprint
    from modelopt_spec.data.dataset import tokenizer_fingerprint

    drafter = getattr(model, "drafter", None)
    if drafter is None:
        raise CheckpointError(f"this {type(model).__name__} has no drafter: convert it or restore a checkpoint first")
    config: Any = getattr(model, "config", None)
    name = getattr(config, "name_or_path", "") or None
    parameter = next(model.parameters())
    return Identity(
        model=None if name is None else Path(name).name,
        drafter_fingerprint=fingerprint(drafter),
        tokenizer=None if tokenizer is None else Path(str(tokenizer.name_or_path)).name or None,
        tokenizer_fingerprint=None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        hardware=current_hardware(),
        engine=ENGINE,
        engine_version=__version__,
        dtype=str(parameter.dtype).removeprefix("torch."),
    )


def _collect(
    model: nn.Module, tokenizer: Any, prompts: Sequence[str | Path], path: Path, options: Mapping[str, Any]
) -> None:
    """Record full-block rounds of an evaluation without a scheduler."""
    from modelopt_spec.decoding.evaluate import evaluate

    off: dict[str, Any] = dict.fromkeys(("baseline", "control", "probabilities"), False)
    evaluate(model, tokenizer, prompts, rounds_out=path, **off, **options)


def _same_drafter(table: RoundTable, identity: Identity) -> None:
    """Refuse rounds whose header names another drafter."""
    recorded, known = table.header.get("drafter_fingerprint"), identity.drafter_fingerprint
    if recorded and known and recorded != known:
        raise CheckpointError(
            f"the rounds were recorded with another drafter (fingerprint {str(recorded)[:12]}, here {known[:12]}; the "
            "dtype counts): record them with this one"
        )


def _existing(out: Path, gamma: int, identity: Identity) -> SchedulerFile:
    """The file to complete: of the same drafter, else an empty one. A cost table of another machine is dropped."""
    target = out / SCHEDULER_FILE if out.is_dir() else out
    if not target.is_file():
        return SchedulerFile(gamma, identity)
    return load_scheduler(target, gamma=gamma, here=identity, other_machine="drop_cost")


def _machine(file: SchedulerFile) -> dict[str, Any]:
    names = ("hardware", "engine", "engine_version", "dtype")
    return {name: getattr(file.identity, name) for name in names}
