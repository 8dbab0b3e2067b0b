"""The command of `mtsp` that writes a DeepSeek-V4 draft into a copy of its target's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modelopt_spec.cli import Json, Quiet, call, emit
from modelopt_spec.cli_checks import check_place, checkpoint_directory

__all__ = ["export_beside"]


def export_beside(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint of `mtsp train` with DeepSeek-V4 stages.")],
    target: Annotated[Path, typer.Argument(help="The target's checkpoint directory; it is read only.")],
    out: Annotated[Path, typer.Argument(help="Directory to write; it appears complete or not at all.")],
    dtype: Annotated[str | None, typer.Option("--dtype", help="Type of the draft's weights.")] = None,
    experts: Annotated[str, typer.Option("--experts", help="float, or mxfp4 (llama.cpp's converter).")] = "float",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a directory that is not empty.")] = False,
    quiet: Quiet = False,
    json_path: Json = None,
) -> None:
    """Write a DeepSeek-V4 draft beside its target's files.

    Engines look for such drafts in the target's own directory.
    """
    checkpoint = checkpoint_directory(checkpoint)
    check_place(out, overwrite=overwrite)
    report = call(
        "checkpoints.beside_target:export_beside_target",
        checkpoint,
        target,
        out,
        dtype=dtype,
        experts=experts,
        overwrite=overwrite,
        quiet=quiet,
    )
    emit(report.to_dict(), json_path)


export_beside.__name__ = "export-beside"
