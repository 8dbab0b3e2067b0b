"""`mtsp plan` and `mtsp train --dry-run`: what a run will cost, and whether it can start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from modelopt_spec.arguments import MAX_RANKS, MAX_ROWS
from modelopt_spec.cli import Json, Quiet, call, console, emit
from modelopt_spec.cli_checks import check_file, load_checked
from modelopt_spec.training.machine import check_gpu

Rows = Annotated[
    int | None, typer.Option("--rows", min=1, max=MAX_ROWS, help="Plan so many rows that do not exist yet.")
]
RowTokens = Annotated[int | None, typer.Option("--row-tokens", min=1, max=MAX_ROWS, help="Mean length of those rows.")]
Gpus = Annotated[int, typer.Option("--gpus", min=1, max=MAX_RANKS, help="Ranks that train.")]
Gpu = Annotated[str | None, typer.Option("--gpu", help="h100, a100-80gb, l4 ...; default: this machine's, or its CPU.")]


def plan(
    recipe: Annotated[str, typer.Argument(help="Built-in name (dspark/qwen3_8b) or YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value ...")] = None,
    gpu: Gpu = None,
    gpus: Gpus = 1,
    efficiency: Annotated[float, typer.Option("--efficiency", help="Assumed share of the GPU's peak.")] = 0.35,
    rows: Rows = None,
    row_tokens: RowTokens = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="report.json of a shorter run: forecast tau from its curve.")
    ] = None,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Compute what a run will cost before it starts.

    Parameters, FLOPs, memory, cache and hours; with ``--report`` a forecast of tau.
    """
    quiet = quiet or str(json_path) == "-"
    check_gpu(gpu)
    loaded = load_checked(recipe, overrides or [])
    check_file(report, "--report is the report.json of a shorter run")
    found = call(
        "training.plan:plan",
        loaded,
        gpu=gpu,
        gpus=gpus,
        efficiency=efficiency,
        rows=rows,
        row_tokens=row_tokens,
        report=report,
        quiet=quiet,
    )
    if not quiet:
        call("training.plan_tables:print_plan", found, console)
    emit(found, json_path)


def dry_run(recipe: Any, *, quiet: bool, json_path: Path | None, **options: Any) -> None:
    """Print the plan and the checks; exit status 1 where one failed."""
    quiet = quiet or str(json_path) == "-"
    check_gpu(options["gpu"])
    result = call("training.dry_run:dry_run", recipe, quiet=quiet, **options)
    if not quiet:
        call("training.plan_tables:print_plan", result.plan, console)
        call("training.dry_run:print_checks", result, console)
    emit(result.to_dict(), json_path)
    raise typer.Exit(0 if result.ok else 1)
