"""Progress on standard error: a bar on a terminal, else a plain line now and then; nothing when asked to be quiet."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["LINE_SECONDS", "ProgressLines", "heartbeat", "progress"]

LINE_SECONDS, MOST_SECONDS = 12.0, 300.0
"""Between two lines where nobody watches a bar: at first, and at most in long runs."""

_last_line = 0.0
"""When a line was last printed, in seconds of the monotonic clock."""


@contextlib.contextmanager
def progress(description: str, total: int | None, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A bar (or lines) for a loop; the yielded function advances it: ``advance(n=1, note="")``."""
    if quiet:
        yield lambda n=1, note="": None
        return
    if not sys.stderr.isatty():
        lines = ProgressLines(description, total)
        yield lines.advance
        lines.close()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(description, total=total, note="")

        def advance(n: float = 1, note: str = "") -> None:
            bar.update(task, advance=n, note=note)

        yield advance


class ProgressLines:
    """Lines such as ``train: 120/800 (15%), 1:23 passed, about 7:50 left, loss 3.210``.

    Nothing is printed before :data:`LINE_SECONDS` have passed, so short loops leave no trace in a log; after eight
    minutes the lines grow rarer.

    Args:
        description: what is going on. total: steps in all; None where that is not known.
        clock: seconds; a test's own.
    """

    def __init__(self, description: str, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.description, self.total, self.clock = description, total, clock
        self.done, self.note = 0.0, ""
        self.started = self.told = clock()
        self.told_at = 0.0

    def advance(self, n: float = 1, note: str = "") -> None:
        """Count ``n`` steps and print a line where one is due."""
        self.done += n
        self.note = note or self.note
        now = self.clock()
        if now - self.told >= max(LINE_SECONDS, min((now - self.started) / 40, MOST_SECONDS)):
            self._print()

    def close(self) -> None:
        """Print where it ended, if anything was printed before."""
        if self.told > self.started and self.done != self.told_at:
            self._print()

    def _print(self) -> None:
        self.told, self.told_at = self.clock(), self.done
        passed = self.told - self.started
        parts = [f"{self.done:,.0f}"]
        if self.total:
            parts = [f"{self.done:,.0f}/{self.total:,} ({self.done / self.total:.0%})"]
        parts.append(f"{_clock(passed)} passed")
        if self.total and 0 < self.done < self.total:
            parts.append(f"about {_clock(passed / self.done * (self.total - self.done))} left")
        if self.note:
            parts.append(self.note)
        _say(f"{self.description}: {', '.join(parts)}")


@contextlib.contextmanager
def heartbeat(name: str, *, quiet: bool = False, every: float = LINE_SECONDS + 3) -> Iterator[None]:
    """While a command runs without a terminal: a line whenever ``every`` seconds have passed in silence."""
    if quiet or sys.stderr.isatty():
        yield
        return
    started, ended = time.monotonic(), threading.Event()

    def beat() -> None:
        while not ended.wait(max(0.01, every - (time.monotonic() - max(started, _last_line)))):
            if time.monotonic() - max(started, _last_line) >= every:
                _say(f"{name}: at work, {_clock(time.monotonic() - started)} passed")

    thread = threading.Thread(target=beat, name="mtsp-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _say(line: str) -> None:
    global _last_line
    _last_line = time.monotonic()
    print(line, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    """``1:23`` or ``2:05:10``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
