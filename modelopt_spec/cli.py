"""`mtsp ...`: parses, calls, prints. Every command does what the function of the same name does."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from modelopt_spec import cli_checks, cli_run, interrupts
from modelopt_spec.arguments import MAX_RANKS, MAX_ROWS
from modelopt_spec.consoles import stdout_console
from modelopt_spec.errors import ConfigError
from modelopt_spec.outputs import check_outputs
from modelopt_spec.text_files import finite
from modelopt_spec.versions import __version__

app = typer.Typer(
    name="mtsp",
    cls=cli_run.CommandPath,
    help="Drafters for speculative decoding: train, measure, calibrate, export, serve.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = stdout_console()


def _json_place(path: Path | None) -> Path | None:
    check_outputs({"--json": path})
    return path


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No tables and no progress bars.")]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="Write the result to this file ('-' for stdout).", callback=_json_place),
]
Target = Annotated[str | None, typer.Option("--target", help="Target model; default: the one it was trained for.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1 ...; default: cuda if there is one.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Prompts of each file.")]


def call(path: str, *args: Any, **kwargs: Any) -> Any:
    """Import ``module:function`` when a command needs it, and call it."""
    module, name = path.split(":")
    return getattr(importlib.import_module(f"modelopt_spec.{module}"), name)(*args, **kwargs)


def emit(result: Any, json_path: Path | None) -> None:
    """Write a result where --json asks for it."""
    if json_path is None:
        return
    text = json.dumps(finite(result), indent=2, default=str, allow_nan=False) + "\n"
    if str(json_path) == "-":
        sys.stdout.write(text)
    else:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(text)


def print_table(title: str, columns: list[str], rows: list[list[Any]], *, quiet: bool = False) -> None:
    """A table on standard output."""
    if quiet:
        return
    table = Table(*columns, title=title, title_justify="left", show_edge=False)
    for row in rows:
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else escape(str(cell)) for cell in row))
    console.print(table)


def device_of(device: str | None) -> str:
    """The device asked for, else the first GPU, else the CPU; an error where it is not there."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ConfigError(f"--device is {device!r}: give cpu, cuda, cuda:1 ... or another torch device") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device is {device!r} but torch sees no GPU here: use cpu, or install torch's CUDA build")
    return device


@app.callback(invoke_without_command=True)
def main_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors; anywhere on the line.")] = False,
) -> None:
    """Options of all commands."""
    if version:
        typer.echo(f"modelopt-spec {__version__}")
        raise typer.Exit


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="Built-in name (dspark/smollm2_135m) or YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value ...")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest intact checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, check data, disk and memory; train nothing.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="With --dry-run: h100, l4 ...; default: this machine's, or its CPU.")
    ] = None,
    gpus: Annotated[
        int, typer.Option("--gpus", min=1, max=MAX_RANKS, help="With --dry-run: ranks that will train.")
    ] = 1,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, max=MAX_ROWS, help="With --dry-run: rows that do not exist yet.")
    ] = None,
    row_tokens: Annotated[
        int | None, typer.Option("--row-tokens", min=1, max=MAX_ROWS, help="With --dry-run: mean length of those rows.")
    ] = None,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Train a drafter from a recipe."""
    planning = {"--gpu": gpu, "--gpus": gpus if gpus > 1 else None, "--rows": rows, "--row-tokens": row_tokens}
    given = [name for name, value in planning.items() if value is not None]
    if given and not dry_run:
        raise ConfigError(f"{given[0]} is for --dry-run, which only plans: torchrun or accelerate start several ranks")
    loaded = cli_checks.load_checked(recipe, overrides or [])
    if dry_run:
        options: dict[str, Any] = {"resume": resume, "gpu": gpu, "gpus": gpus, "rows": rows, "row_tokens": row_tokens}
        call("cli_plan:dry_run", loaded, quiet=quiet, json_path=json_path, **options)
    cli_checks.check_recipe(loaded, resume=resume)
    result = call("training.train:train", loaded, resume=resume, quiet=quiet)
    if result.rank:
        return
    if result.stopped_by == "SIGTERM":
        if not quiet:
            typer.echo(
                f"stopped by SIGTERM after step {result.report['steps']}: the state is saved in {result.checkpoint}; "
                "the same command with --resume goes on from there"
            )
    else:
        last: dict[str, Any] = next((entry for entry in reversed(result.report["curves"]) if "loss" in entry), {})
        rows_of = [["checkpoint", result.checkpoint]]
        rows_of += [[name, result.report[name]] for name in ("steps", "seconds")]
        rows_of += [[name, last[name]] for name in ("loss", "tau", "tau_probability") if name in last]
        print_table("trained", ["", ""], rows_of, quiet=quiet)
    emit(result.report, json_path)


@app.command()
def heads(json_path: Json = None) -> None:
    """List the correction heads."""
    from modelopt_spec.drafter.heads import head_class, head_names

    rows = [["none", "plain DFlash: no correction"]]
    for name in head_names()[1:]:
        rows.append([name, (head_class(name).__doc__ or "").strip().splitlines()[0]])
    print_table(
        "correction heads", ["head.type", "equation"], rows, quiet=json_path is not None and str(json_path) == "-"
    )
    emit(dict(rows), json_path)


def application() -> typer.Typer:
    """The app with all its commands."""
    from modelopt_spec import cli_commands

    if not any(command.callback is cli_commands.evaluate for command in app.registered_commands):
        cli_commands.register(app)
    return app


def main() -> None:
    """Entry point: user mistakes are one line on standard error and exit status 2."""
    interrupts.install()
    arguments, debug = cli_run.take_debug(sys.argv[1:])
    cli_run.fit_to_pipe(console, arguments)
    sys.exit(cli_run.run(application(), arguments, debug=debug))


if __name__ == "__main__":
    importlib.import_module("modelopt_spec.cli").main()
