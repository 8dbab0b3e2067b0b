"""`mtsp report`: one page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modelopt_spec.cli import Json, Quiet, call, emit
from modelopt_spec.errors import CheckpointError, ConfigError
from modelopt_spec.outputs import check_outputs


def report(
    run_dir: Annotated[Path, typer.Argument(help="Directory of `mtsp train`, with the results written beside it.")],
    out: Annotated[Path | None, typer.Option("--out", help="HTML file; default: report.html in the run.")] = None,
    include: Annotated[list[Path] | None, typer.Option("--include", help="Result file from elsewhere.")] = None,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Write one HTML page of a run that opens without a network.

    Shows whatever the directory holds: training curves, evaluations, calibration, step times, simulated throughput,
    comparisons, exports, and where all of it came from.
    """
    if not run_dir.is_dir():
        raise CheckpointError(f"{run_dir} is not a directory: name a run's output_dir (it holds report.json)")
    if out is not None and out.suffix not in (".html", ".htm"):
        raise ConfigError(f"--out {out} is not named as a page: give a name that ends in .html")
    check_outputs({"--out": out, "--json": json_path}, include or [])
    result = call("reports.page:write_report", run_dir, out, more=include or [])
    if not quiet and str(json_path) != "-":
        typer.echo(f"{result['file']}: {', '.join(result['sections'])}")
    emit(result, json_path)
