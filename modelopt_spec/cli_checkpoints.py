"""The commands of `mtsp` that write, read and check drafts on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from modelopt_spec.cli import Json, Quiet, call, console, device_of, emit

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a directory that is not empty.")]
EngineNames = Annotated[list[str] | None, typer.Option("--engine", help="vllm, sglang, tensorrt_llm, llama.cpp.")]


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
    allow_contradictions: Annotated[bool, typer.Option("--allow-contradictions", help="Top-level keys win.")] = False,
    ignore_unknown: Annotated[bool, typer.Option("--ignore-unknown", help="Leave out unknown tensors.")] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Turn a published draft into a checkpoint.

    The checkpoint trains on, evaluates and exports as if it had been trained here.
    """
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

COMMANDS: tuple[Callable[..., None], ...] = (export, check, import_draft, engines)
