"""Progress bars on standard error; silent when asked or when nobody looks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["progress"]


@contextlib.contextmanager
def progress(description: str, total: int | None, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A bar for a loop; the yielded function advances it: ``advance(n=1, note="")``."""
    if quiet or not sys.stderr.isatty():
        yield lambda n=1, note="": None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(description, total=total, note="")

        def advance(n: float = 1, note: str = "") -> None:
            bar.update(task, advance=n, note=note)

        yield advance
