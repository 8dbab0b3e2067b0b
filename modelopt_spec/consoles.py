"""Where tables are printed: a terminal sets their width, and what is piped or kept in a file gets all of it."""

from __future__ import annotations

import sys

from rich.console import Console

__all__ = ["PIPE_WIDTH", "stderr_console", "stdout_console"]

PIPE_WIDTH = 200
"""Columns of a table that nobody looks at: enough that no cell is cut."""


def stderr_console() -> Console:
    """A console on standard error."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else PIPE_WIDTH)


def stdout_console() -> Console:
    """A console on standard output."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
