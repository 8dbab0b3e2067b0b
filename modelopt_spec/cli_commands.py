"""The commands of `mtsp` that measure a drafter and fit its scheduler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from modelopt_spec import cli_checkpoints, cli_data, cli_moe, cli_plan, cli_report
from modelopt_spec.arguments import MAX_SEED, check_seed, check_temperatures, comma_separated, number, whole_number
from modelopt_spec.cli import Device, Dtype, Json, Limit, Quiet, Target, call, console, device_of, emit, print_table
from modelopt_spec.cli_checks import (
    DTYPES,
    check_choice,
    check_file,
    check_recipe,
    check_sources,
    check_target,
    checkpoint_directory,
    load_checked,
)
from modelopt_spec.outputs import check_outputs

Checkpoint = Annotated[Path, typer.Argument(help="Checkpoint (mtsp train), or an exported or published draft.")]
Prompts = Annotated[list[str], typer.Option("--prompts", help="JSONL prompt file; give it several times for more.")]
DraftTokens = Annotated[
    int | None, typer.Option("--num-draft-tokens", "-k", min=1, help="K; default: the trained block.")
]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens of each answer.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=MAX_SEED)]
Out = Annotated[Path, typer.Option("--out", help="scheduler.json to write or to complete.")]
Scheduler = Annotated[Path | None, typer.Option("--scheduler", help="scheduler.json of `mtsp calibrate`/`profile`.")]


def _open(checkpoint: Path, target: str | None, dtype: str, device: str | None) -> tuple[Any, Any]:
    return call("checkpoints.opening:open_checkpoint", checkpoint, target, dtype=dtype, device=device_of(device))


def _look(
    checkpoint: Path,
    target: str | None,
    dtype: str,
    prompts: list[str] | None = None,
    scheduler: Path | None = None,
) -> Path:
    """The directory of the drafter, once everything that a command reads is there."""
    check_choice("--dtype", dtype, DTYPES)
    directory = checkpoint_directory(checkpoint)
    check_target(target)
    check_sources(prompts or ())
    check_file(scheduler, "scheduler.json is what `mtsp calibrate` and `mtsp profile` write")
    return directory


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Argument(help="User message, rendered with the target's chat template.")],
    target: Target = None,
    dtype: Dtype = "auto",
    device: Device = None,
    num_draft_tokens: DraftTokens = None,
    max_new_tokens: NewTokens = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Keep the likeliest tokens of this probability.")
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=0, help="0 keeps all.")] = None,
    seed: Seed = 0,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    scheduler: Scheduler = None,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Answer one prompt: the target's own tokens, drafted."""
    check_temperatures([temperature])
    checkpoint = _look(checkpoint, target, dtype, scheduler=scheduler)
    model, tokenizer = _open(checkpoint, target, dtype, device)
    result = call(
        "decoding.answer:answer",
        model,
        tokenizer,
        prompt,
        raw=raw,
        scheduler=scheduler,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
    )
    typer.echo(result["text"])
    shown = ("new_tokens", "rounds", "tau", "tokens_per_second")
    rows = [[name, "-" if result[name] is None else result[name]] for name in shown]
    if not quiet:
        print_table("", ["", ""], rows)
    emit(result, json_path)


def evaluate(
    checkpoint: Checkpoint,
    prompts: Prompts,
    target: Target = None,
    dtype: Dtype = "auto",
    device: Device = None,
    num_draft_tokens: DraftTokens = None,
    max_new_tokens: NewTokens = 256,
    temperature: Annotated[list[float] | None, typer.Option("--temperature", help="Give it several times.")] = None,
    limit: Limit = None,
    seed: Seed = 0,
    baseline: Annotated[bool, typer.Option("--baseline/--no-baseline", help="Measure plain decoding too.")] = True,
    control: Annotated[bool, typer.Option("--control/--no-control", help="Shuffled features must lower tau.")] = True,
    against: Annotated[
        Path | None, typer.Option("--against", help="Second checkpoint, compared prompt by prompt.")
    ] = None,
    scheduler: Scheduler = None,
    rounds: Annotated[Path | None, typer.Option("--rounds", help="Write every round here (JSON lines).")] = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="Write a figure here.")] = None,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Measure accepted length in real rounds on held-out prompts."""
    options = {
        "num_draft_tokens": num_draft_tokens,
        "max_new_tokens": max_new_tokens,
        "temperatures": tuple(temperature or (0.0,)),
        "limit": limit,
        "seed": seed,
        "quiet": quiet,
    }
    check_temperatures(temperature or [])
    check_outputs({"--rounds": rounds, "--figure": figure, "--json": json_path}, [*prompts, scheduler])
    checkpoint = _look(checkpoint, target, dtype, prompts, scheduler)
    against = checkpoint_directory(against) if against is not None else None
    model, tokenizer = _open(checkpoint, target, dtype, device)
    if against is not None:
        other, _ = _open(against, target, dtype, device)
        result = call("decoding.compare:compare_checkpoints", model, other, tokenizer, prompts, **options)
    else:
        result = call(
            "decoding.evaluate:evaluate",
            model,
            tokenizer,
            prompts,
            baseline=baseline,
            control=control,
            scheduler=scheduler,
            rounds_out=rounds,
            **options,
        )
    if not quiet:
        call("reports.evaluation:print_evaluation", result, console)
    if figure is not None:
        call("reports.evaluation:draw_evaluation", result, figure)
    emit(result, json_path)


def compare(
    recipes: Annotated[list[str], typer.Argument(help="RECIPE or RECIPE:key=value,key=value ...")],
    prompts: Prompts,
    out: Annotated[Path, typer.Option("--out", help="Directory of runs, comparison.json and figure.")],
    seeds: Annotated[str, typer.Option("--seeds", help="Comma separated; each recipe is trained with each.")] = "0,1",
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override of all recipes, key=value.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=2, help="Tokens of each answer.")] = 128,
    limit: Limit = None,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Train recipes on the same data and put them side by side.

    Each is trained with each seed and evaluated on the same prompts; a stopped comparison goes on.
    """
    numbers = [check_seed("--seeds", seed) for seed in comma_separated(seeds, "--seeds")]
    check_sources(prompts or ())
    for entry in recipes:
        recipe, _, own = entry.partition(":")
        loaded = load_checked(recipe, [*(settings or []), *(part for part in own.split(",") if part)])
        check_recipe(loaded, resume=True)
    result = call(
        "training.comparison:compare_recipes",
        recipes,
        out,
        prompts,
        seeds=numbers,
        overrides=settings or [],
        limit=limit,
        max_new_tokens=max_new_tokens,
        quiet=quiet,
    )
    call("reports.comparison:draw_comparison", result, out / "comparison.png")
    from modelopt_spec.reports.comparison import COLUMNS, comparison_rows

    print_table("same data, seeds and steps", list(COLUMNS), comparison_rows(result), quiet=quiet)
    emit(result, json_path)


def calibrate(
    checkpoint: Checkpoint,
    prompts: Prompts,
    out: Out = Path("scheduler.json"),
    target: Target = None,
    dtype: Dtype = "auto",
    device: Device = None,
    num_draft_tokens: DraftTokens = None,
    temperature: Annotated[float, typer.Option("--temperature", help="Sampling temperature, as served.")] = 0.0,
    max_new_tokens: NewTokens = 256,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Prompts decoded together.")] = 8,
    limit: Limit = None,
    seed: Seed = 0,
    rounds: Annotated[
        Path | None, typer.Option("--rounds", help="Fit on this round file of the drafter; collect nothing.")
    ] = None,
    rounds_out: Annotated[Path | None, typer.Option("--rounds-out", help="Keep the collected rounds here.")] = None,
    held_out: Annotated[float, typer.Option("--held-out", help="Share of the prompts to judge on, not to fit.")] = 0.3,
    folds: Annotated[
        int, typer.Option("--folds", min=0, help="Cross-validate over so many folds of prompts; 0: not.")
    ] = 0,
    bins: Annotated[int, typer.Option("--bins", min=1, help="Bins of the calibration error.")] = 15,
    adaptive_bins: Annotated[bool, typer.Option("--adaptive-bins", help="Bins of equal count, not width.")] = False,
    refine: Annotated[bool, typer.Option("--refine", help="Golden-section search after the grid.")] = False,
    offset: Annotated[bool, typer.Option("--offset", help="Fit one offset of all logits too.")] = False,
    bootstrap: Annotated[int, typer.Option("--bootstrap", min=0, help="Replicates for the intervals; 0: none.")] = 100,
    max_noise: Annotated[
        float | None, typer.Option("--max-noise", help="Refuse where the ECE's own noise is larger (0.04).")
    ] = None,
    min_events: Annotated[
        int | None,
        typer.Option("--min-events", min=0, help="Refuse where a slot was accepted or rejected less often (10)."),
    ] = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="Write the reliability diagram here.")] = None,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Calibrate the confidence head on held-out prompts."""
    check_temperatures([temperature])
    number("--held-out", held_out, 0, 1 - 1e-9, wanted="a share of the prompts, from 0 to below 1")
    written = {"--out": out, "--rounds-out": rounds_out, "--figure": figure, "--json": json_path}
    check_outputs(written, [*prompts, rounds])
    checkpoint = _look(checkpoint, target, dtype, prompts if rounds is None else None)
    check_file(rounds, "--rounds is a round file of `mtsp evaluate --rounds` or `mtsp calibrate --rounds-out`")
    model, tokenizer = _open(checkpoint, target, dtype, device)
    report = call(
        "scheduling.api:calibrate",
        model,
        tokenizer,
        prompts,
        out=out,
        rounds=rounds,
        rounds_out=rounds_out,
        temperature=temperature,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        limit=limit,
        seed=seed,
        bins=bins,
        adaptive_bins=adaptive_bins,
        refine=refine,
        offset=offset,
        bootstrap=bootstrap,
        held_out_share=held_out,
        folds=folds,
        max_noise=max_noise,
        min_events=min_events,
        quiet=quiet,
    )
    if not quiet:
        call("reports.scheduling:print_calibration", report, console)
    if figure is not None:
        call("reports.scheduling:draw_reliability", report, figure)
    emit(report, json_path)


def profile(
    checkpoint: Checkpoint,
    out: Out = Path("scheduler.json"),
    target: Target = None,
    dtype: Dtype = "auto",
    device: Device = None,
    num_draft_tokens: DraftTokens = None,
    requests: Annotated[str, typer.Option("--requests", help="Batch sizes, comma separated.")] = "1,2,4,8,16",
    contexts: Annotated[str, typer.Option("--contexts", help="Cached tokens a request, comma separated.")] = "256",
    repeats: Annotated[int, typer.Option("--repeats", min=3, help="Timed visits of each cell; the median counts.")] = 7,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Untimed visits of each cell before.")] = 2,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Processor seconds: for one thread of a shared machine.")
    ] = False,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Refuse a flat or inert table.")] = True,
    seed: Seed = 0,
    figure: Annotated[Path | None, typer.Option("--figure", help="Draw the table here.")] = None,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Measure step times of this machine: the cost table."""
    check_outputs({"--out": out, "--figure": figure, "--json": json_path})
    checkpoint = _look(checkpoint, target, dtype)
    batches = [whole_number("--requests", value, 1) for value in comma_separated(requests, "--requests")]
    lengths = [whole_number("--contexts", value, 1) for value in comma_separated(contexts, "--contexts")]
    model, tokenizer = _open(checkpoint, target, dtype, device)
    report = call(
        "scheduling.api:profile",
        model,
        tokenizer,
        out=out,
        requests=batches,
        contexts=lengths,
        num_draft_tokens=num_draft_tokens,
        repeats=repeats,
        warmup=warmup,
        check=check,
        cpu_time=cpu_time,
        seed=seed,
        quiet=quiet,
    )
    if not quiet:
        call("reports.scheduling:print_profile", report, console)
    if figure is not None:
        call("reports.scheduling:cost_figure", report, figure)
    emit(report, json_path)


def simulate(
    rounds: Annotated[Path, typer.Argument(help="Round file of `mtsp evaluate --rounds`.")],
    loads: Annotated[str, typer.Option("--loads", help="Concurrent requests (or requests/s), comma separated.")],
    cost: Annotated[Path | None, typer.Option("--cost", help="Cost table: ours, SGLang's or TensorRT-LLM's.")] = None,
    scheduler: Scheduler = None,
    load: Annotated[str, typer.Option("--load", help="concurrency, rate or batch (drained, as generate does).")] = (
        "concurrency"
    ),
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="none, fixed, fixed:K, threshold:P, scheduler, early_stop.")
    ] = None,
    padded: Annotated[
        bool | None, typer.Option("--padded/--ragged", help="Steps padded to the longest request; default: the file's.")
    ] = None,
    max_running: Annotated[
        int, typer.Option("--max-running", min=1, help="Requests at once where loads are rates.")
    ] = 256,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Requests in all; default 4 x the load.")
    ] = None,
    output_tokens: Annotated[int | None, typer.Option("--output-tokens", min=1, help="Default: as recorded.")] = None,
    acceptance: Annotated[str, typer.Option("--acceptance", help="sequential or bootstrap.")] = "sequential",
    extrapolate: Annotated[
        bool, typer.Option("--extrapolate", help="Continue the table beyond what was measured.")
    ] = False,
    measured: Annotated[Path | None, typer.Option("--measured", help="Measured throughput to compare with.")] = None,
    seed: Seed = 0,
    figure: Annotated[Path | None, typer.Option("--figure", help="Write the throughput curves here.")] = None,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Simulate serving under load with each policy.

    Prints throughput against speed per user for each verification policy.
    """
    check_outputs({"--figure": figure, "--json": json_path}, [rounds, cost, scheduler, measured])
    check_file(rounds, "name a round file of `mtsp evaluate --rounds`")
    check_file(cost, "--cost is a cost table, as in the scheduler.json of `mtsp profile`")
    check_file(scheduler, "scheduler.json is what `mtsp calibrate` and `mtsp profile` write")
    check_file(measured, "--measured is a file of measured throughput")
    options: dict[str, Any] = {"policies": tuple(policy)} if policy else {}
    wanted = "a positive number" + (" of requests a second" if load == "rate" else ": it counts requests")
    amounts = [number("--loads", v, 0, above=True, wanted=wanted) for v in comma_separated(loads, "--loads", float)]
    if load != "rate":
        amounts = [whole_number("--loads", value, 1) for value in amounts]
    report = call(
        "scheduling.api:simulate",
        rounds,
        cost,
        scheduler=scheduler,
        loads=amounts,
        load=load,
        padded=padded,
        measured=measured,
        max_running=max_running,
        requests=requests,
        output_tokens=output_tokens,
        acceptance=acceptance,
        extrapolate=extrapolate,
        seed=seed,
        **options,
    )
    if not quiet:
        call("reports.scheduling:print_simulation", report, console)
    if figure is not None:
        call("reports.scheduling:throughput_figure", report, figure)
    emit(report, json_path)


def register(app: typer.Typer) -> None:
    """Add the commands to the application, in the order of the path."""
    measuring: list[Callable[..., None]] = [evaluate, compare, generate, calibrate, profile, simulate]
    commands: list[Callable[..., None]] = [*measuring, *cli_checkpoints.COMMANDS, cli_plan.plan, cli_report.report]
    commands.append(cli_moe.export_beside)
    for command in commands:
        app.command()(command)
    app.add_typer(cli_data.app, name="data")
