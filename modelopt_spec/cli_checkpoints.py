"""The commands of `mtsp` that write, read and check drafts on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from modelopt_spec.cli import Json, Quiet, call, console, device_of, emit
from modelopt_spec.cli_checks import (
    FORMATS,
    LAYOUTS,
    WRITTEN_DTYPE_ALIASES,
    WRITTEN_DTYPES,
    check_choice,
    check_engines,
    check_file,
    check_place,
    check_sources,
    check_target,
    check_unused,
    checkpoint_directory,
    draft_directory,
)

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a directory that is not empty.")]
EngineNames = Annotated[list[str] | None, typer.Option("--engine", help="vllm, sglang, tensorrt_llm, llama.cpp.")]


def _check_written(layout: str | None, dtype: str | None) -> None:
    check_choice("--layout", layout, LAYOUTS)
    check_choice("--dtype", dtype, WRITTEN_DTYPES, WRITTEN_DTYPE_ALIASES)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint of `mtsp train`, or any published draft.")],
    out: Annotated[Path, typer.Argument(help="Directory to write; it appears complete or not at all.")],
    engine: EngineNames = None,
    layout: Annotated[
        str | None, typer.Option("--layout", help="Published format; default: what the engines read.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Type of the written weights.")] = None,
    scheduler: Annotated[Path | None, typer.Option("--scheduler", help="scheduler.json to ship along.")] = None,
    fold_temperature: Annotated[
        bool, typer.Option("--fold-temperature", help="Divide the confidence layer by the shared temperature: vLLM.")
    ] = False,
    gguf: Annotated[
        Path | None, typer.Option("--gguf", help="The target's GGUF file: write draft.gguf for llama.cpp too.")
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Write a draft that engines load.

    A second reader must compute the same blocks from the files before they appear.
    """
    checkpoint = checkpoint_directory(checkpoint)
    check_engines(engine)
    _check_written(layout, dtype)
    check_place(out, overwrite=overwrite)
    check_file(scheduler, "--scheduler is a scheduler.json of `mtsp calibrate` or `mtsp profile`")
    check_file(gguf, "--gguf is the target's GGUF file")
    report = call(
        "checkpoints.export:export",
        checkpoint,
        out,
        engines=tuple(engine) if engine else None,
        layout=layout,
        dtype=dtype,
        scheduler=scheduler,
        fold_temperature=fold_temperature,
        gguf=gguf,
        overwrite=overwrite,
        quiet=quiet,
    )
    emit(report.to_dict(), json_path)


def quantize(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint of `mtsp train`, or any published draft.")],
    out: Annotated[Path, typer.Argument(help="Directory to write; it appears complete or not at all.")],
    format: Annotated[str, typer.Option("--format", help="fp8, nvfp4 or int8 (weights only).")],
    prompts: Annotated[list[str], typer.Option("--prompts", help="JSONL prompts that accepted length is measured on.")],
    calibration: Annotated[
        list[str] | None, typer.Option("--calibration", help="JSONL prompts to calibrate on; default: --prompts.")
    ] = None,
    target: Annotated[str | None, typer.Option("--target", help="Target model; default: the recorded one.")] = None,
    engine: EngineNames = None,
    layout: Annotated[str | None, typer.Option("--layout", help="Published format.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Type of the weights that are not quantised.")] = "bfloat16",
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", help="Modules that stay; replaces the default list.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Prompts of each file.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens of each answer.")] = 128,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, cuda, ...; default: cuda if there is one.")
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Quantise a draft, measure what it costs, export it.

    Activations are calibrated on the blocks that it drafts; accepted length is measured before and after.
    """
    checkpoint = checkpoint_directory(checkpoint)
    check_target(target)
    check_choice("--format", format, FORMATS)
    check_engines(engine)
    _check_written(layout, dtype)
    check_place(out, overwrite=overwrite)
    check_sources([*prompts, *(calibration or [])])
    model, tokenizer = call("checkpoints.opening:open_checkpoint", checkpoint, target, device=device_of(device))
    report = call(
        "checkpoints.quantised_export:quantize",
        model,
        tokenizer,
        out,
        format=format,
        prompts=prompts,
        calibration=calibration,
        engines=tuple(engine) if engine else None,
        layout=layout,
        dtype=dtype,
        limit=limit,
        max_new_tokens=max_new_tokens,
        overwrite=overwrite,
        quiet=quiet,
        **({"exclude": tuple(exclude)} if exclude else {}),
    )
    emit(report, json_path)


def distill(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint of `mtsp train` with a gated, rnn or vanilla head.")],
    out: Annotated[Path, typer.Argument(help="Run directory of the new drafter.")],
    head: Annotated[str, typer.Option("--head", help="The new head: vanilla, gated or rnn.")] = "vanilla",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps; the backbone is frozen.")] = 300,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override of the recipe, key=value.")] = None,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Train another head on a frozen backbone.

    For an engine that does not serve the head that it has.
    """
    checkpoint = checkpoint_directory(checkpoint)
    check_unused(out)
    result = call(
        "checkpoints.distill:distill",
        checkpoint,
        out,
        head=head,
        steps=steps,
        overrides=settings or (),
        quiet=quiet,
    )
    if not quiet:
        console.print(f"{head} head in {result.checkpoint}", highlight=False)
    emit(result.report, json_path)


def engines(quiet: Quiet = False, json_path: Json = None) -> None:
    """Show what each engine serves."""
    table = call("checkpoints.engines.table:support_table")
    if not quiet:
        call("checkpoints.engines.table:print_support_table", table, console)
    emit(table, json_path)


def check(
    directory: Annotated[Path, typer.Argument(help="Exported draft directory.")],
    target: Annotated[str | None, typer.Option("--target", help="Target model; default: the one of the card.")] = None,
    engine: EngineNames = None,
    static: Annotated[bool, typer.Option("--static", help="Compare settings only; do not run the draft.")] = False,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Prove that what was trained is what will be served.

    Exit status 1 on any disagreement.
    """
    directory = draft_directory(directory)
    check_engines(engine)
    check_target(target)
    name = target or call("checkpoints.opening:recorded_target", directory)
    model = call("targets.load:load_target", name) if name else None
    tokenizer = call("targets.load:load_tokenizer", name) if name else None
    report = call(
        "checkpoints.preflight:check",
        directory,
        model,
        tuple(engine) if engine else None,
        tokenizer=tokenizer,
        dynamic=not static,
        quiet=quiet,
    )
    emit(report.to_dict(), json_path)
    raise typer.Exit(report.exit_status)


def import_draft(
    source: Annotated[Path, typer.Argument(help="Published draft directory, in any known layout.")],
    out: Annotated[Path, typer.Argument(help="Checkpoint directory to write.")],
    target: Annotated[str, typer.Option("--target", help="The target that the draft was trained for.")],
    layout: Annotated[str | None, typer.Option("--layout", help="Read it as this layout.")] = None,
    allow_contradictions: Annotated[
        bool, typer.Option("--allow-contradictions", help="Take the key that the layout names first.")
    ] = False,
    ignore_unknown: Annotated[bool, typer.Option("--ignore-unknown", help="Leave out unknown tensors.")] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Turn a published draft into a checkpoint.

    The checkpoint trains on, evaluates and exports as if it had been trained here.
    """
    source = draft_directory(source)
    check_choice("--layout", layout, LAYOUTS)
    check_place(out, overwrite=overwrite)
    check_target(target)
    account = call(
        "checkpoints.importing:import_checkpoint",
        source,
        call("targets.load:load_target", target, device=device_of(None)),
        out,
        layout=layout,
        allow_contradictions=allow_contradictions,
        ignore_unknown=ignore_unknown,
        overwrite=overwrite,
        quiet=quiet,
    )
    emit(account.to_dict(), json_path)


import_draft.__name__ = "import"

COMMANDS: tuple[Callable[..., None], ...] = (export, check, import_draft, quantize, distill, engines)
