"""Checks of the files that results go to, before any work is done for them. Nothing heavy is imported.

A result replaces an earlier result of the same kind, as a repeated command should. It never replaces a file that the
command reads, a file of another kind (a recipe, weights), or a file that a run or a drafter is made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from modelopt_spec.errors import ConfigError

__all__ = ["FIGURES", "check_outputs"]

FIGURES = (".svg", ".png", ".pdf", ".eps", ".jpg", ".jpeg", ".webp", ".tif", ".tiff")
"""Endings of figures, which say how they are drawn."""

_RESULTS = (".json", ".jsonl", ".html", ".htm", *FIGURES)
_PARTS = ("config.json", "drafter.json", "drafter_card.json", "generation_config.json", "trainer_state.json")
_RUN = ("drafter", "drafter.json")


def check_outputs(
    outputs: Mapping[str, Path | str | None], inputs: Iterable[Path | str | None] = (), *, stdout: bool = True
) -> None:
    """Files that a command or function writes, by option or argument.

    Args:
        outputs: option or argument -> file, None where there is none. A name with ``figure`` in it is a figure.
        inputs: files that are read.
        stdout: ``-`` stands for standard output.

    Raises:
        ConfigError: one is read, or named twice; it is no ordinary file, or in a place that is none; it is of another
            kind, or a part of a run or a drafter; a figure of an unknown kind.
    """
    read = {Path(name).resolve() for name in inputs if name is not None and Path(name).exists()}
    written: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is None or (stdout and str(path) == "-"):
            continue
        if not isinstance(path, str | Path):
            raise ConfigError(f"{option} is {path!r}: it must be the path of a file to write")
        place = Path(path).resolve()
        if place in read:
            raise ConfigError(f"{option} {path} is a file that this command reads: name another one")
        if place in written:
            raise ConfigError(f"{option} and {written[place]} both name {path}: one would replace the other")
        written[place] = option
        _check_place(option, Path(path))


def _check_place(option: str, path: Path) -> None:
    if "figure" in option and path.suffix.lower() not in FIGURES:
        raise ConfigError(f"{option} {path} names no kind of figure: end it in one of {', '.join(FIGURES)}")
    above = next((parent for parent in path.absolute().parents if parent.exists()), None)
    if above is not None and not above.is_dir():
        raise ConfigError(f"{option} {path} is below {above}, which is a file: name a place in a directory")
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"{option} {path} is no ordinary file: name one, or - with --json for standard output")
    if path.stat().st_size and path.suffix.lower() not in _RESULTS:
        raise ConfigError(f"{option} {path} is there already and is not named like a result: name another file")
    if path.name in _PARTS or (path.name == "report.json" and any((path.parent / name).exists() for name in _RUN)):
        raise ConfigError(f"{option} {path} is a part of the run or drafter in {path.parent}: name another file")
