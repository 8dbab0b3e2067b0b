"""`mtsp data ...`: prepare, regenerate, inspect and cache training data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from modelopt_spec.cli import Device, Json, Quiet, call, console, device_of, emit, print_table
from modelopt_spec.cli_checks import (
    check_place,
    check_recipe_data,
    check_sources,
    check_target,
    load_checked,
)
from modelopt_spec.errors import ConfigError
from modelopt_spec.outputs import check_outputs

app = typer.Typer(help="Prepare, regenerate, inspect and cache training data.", no_args_is_help=True)

Sources = Annotated[list[str], typer.Argument(help="JSONL or parquet files, directories, or `datasets` names.")]
TargetName = Annotated[str, typer.Option("--target", help="Whose tokenizer and chat template.")]
MaxLength = Annotated[int, typer.Option("--max-length", min=8, help="Tokens of a row.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="More data settings, key=value; repeatable.")]


def _config(kind: str, values: dict[str, Any], settings: list[str] | None) -> Any:
    from omegaconf import OmegaConf

    from modelopt_spec.data import config

    extra = OmegaConf.to_container(OmegaConf.from_dotlist(list(settings or [])))
    assert isinstance(extra, dict)
    return getattr(config, kind)(**{**values, **extra})


@app.command()
def prepare(
    sources: Sources,
    out: Annotated[Path, typer.Option("--out", help="Directory of the prepared rows.")],
    target: TargetName,
    max_length: MaxLength = 2048,
    settings: Settings = None,
    overwrite: Annotated[bool, typer.Option("--overwrite")] = False,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Render, tokenize, mask, shuffle, deduplicate and split conversations once."""
    config = _config("DataConfig", {"train": tuple(sources), "max_length": max_length}, settings)
    check_sources(sources)
    check_target(target)
    check_place(out, overwrite=overwrite)
    tokenizer = call("targets.load:load_tokenizer", target)
    data = call("data:prepare", config, tokenizer, out, overwrite=overwrite, quiet=quiet)
    if not quiet:
        typer.echo(data.train_report.summary())
    emit(data.train_report.to_dict(), json_path)


@app.command()
def regenerate(
    prompts: Sources,
    out: Annotated[Path, typer.Option("--out", help="JSONL file that answers are appended to.")],
    server: Annotated[str | None, typer.Option("--server", help="OpenAI-compatible base URL; else in process.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model name at the server, or target in process.")
    ] = None,
    settings: Settings = None,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Let the target itself answer the prompts; a killed run goes on where it was."""
    values: dict[str, Any] = {"prompts": tuple(prompts), "output": str(out)}
    if server:
        values["server"] = {"base_url": server, **({"model": model} if model else {})}
    config = _config("RegenerateConfig", values, settings)
    check_sources(prompts)
    call("data.ledger:check_begun", out)
    answerer = None if server else _local_model(model, config)
    report = call("data:regenerate", config, answerer, quiet=quiet)
    emit(vars(report), json_path)


def _local_model(name: str | None, config: Any) -> Any:
    if not name:
        raise ConfigError("neither --server nor --model is given: name a server's URL, or the target to run in process")
    check_target(name)
    from modelopt_spec.data.answering import LocalModel

    model = call("targets.load:load_target", name, device=device_of(None))
    tokenizer = call("targets.load:load_tokenizer", name)
    return LocalModel(model, tokenizer, config.sampling, config.batch_size)


@app.command()
def inspect(
    sources: Sources,
    target: TargetName,
    max_length: MaxLength = 2048,
    rows: Annotated[int, typer.Option("--rows", min=0, help="Rows to show, supervised tokens marked.")] = 2,
    rejects: Annotated[
        Path | None, typer.Option("--rejects", help="Write the rows that cannot be used here (JSON lines).")
    ] = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="Write histograms here.")] = None,
    settings: Settings = None,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Show what a drafter would be taught: marked rows, lengths, supervision, looping.

    Rows that cannot be used are counted by reason, however many there are.
    """
    config = _config("DataConfig", {"train": tuple(sources), "max_length": max_length}, settings)
    check_sources(sources)
    check_target(target)
    check_outputs({"--rejects": rejects, "--figure": figure, "--json": json_path}, sources)
    tokenizer = call("targets.load:load_tokenizer", target)
    tolerant = config.replace(max_bad_share=1.0)
    data = call("data:load_datasets", tolerant, tokenizer, quiet=quiet, rejects=rejects)
    report = data.train_report
    result = call("data:inspect_rows", data.train, report)
    if not quiet:
        for index in range(min(rows, len(data.train))):
            console.print(call("data:marked_row", data.train[index], tokenizer))
            console.rule()
        typer.echo(report.summary())
        keys = ("samples", "tokens", "supervised_tokens", "looping_share")
        print_table("data", ["", ""], [[key, result[key]] for key in keys if result.get(key) is not None])
        left_out = sorted(report.skipped.items(), key=lambda item: -item[1])
        if left_out:
            shown = [[reason, count, report.examples.get(reason, "")] for reason, count in left_out]
            print_table("rows left out", ["reason", "rows", "for example"], shown)
        if report.bad_share > config.max_bad_share:
            typer.echo(
                f"{report.bad} of {report.rows_read} rows cannot be used: training stops there, as that is more than "
                f"data.max_bad_share {config.max_bad_share}"
            )
    if figure is not None:
        call("reports.data:data_figure", result, figure)
    emit(result, json_path)


@app.command()
def cache(
    recipe: Annotated[str, typer.Argument(help="Built-in name (dspark/smollm2_135m) or YAML file.")],
    out: Annotated[Path, typer.Option("--out", help="Directory of the cache; one that was begun is completed.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value ...")] = None,
    device: Device = None,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Write the target features of a recipe's rows to disk, for many epochs, runs or ranks."""
    loaded = load_checked(recipe, overrides or [])
    check_recipe_data(loaded)

    def tell(size: Any) -> None:
        if not quiet:
            typer.echo(f"{out}: {size}", err=True)

    result = call(
        "training.cache_features:cache_features", loaded, out, device=device_of(device), on_size=tell, quiet=quiet
    )
    if not quiet and str(json_path) != "-":
        typer.echo(f"{result['shards']} shards in {out}; train from it: {' '.join(result['overrides'])}")
    emit(result, json_path)
