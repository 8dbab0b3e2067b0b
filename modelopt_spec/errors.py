"""Errors of this package: each names the field, the value that was given and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["CheckpointError", "ConfigError", "DataError", "SpecError", "UnsupportedError", "nearest"]


class SpecError(ValueError):
    """A mistake that the user can fix; the command line prints it without a traceback."""


class ConfigError(SpecError):
    """A setting that is unknown, out of range or contradicts another one."""


class DataError(SpecError):
    """Training or evaluation data that cannot be used as asked."""


class CheckpointError(SpecError):
    """A checkpoint directory that is incomplete, damaged or of another model."""


class UnsupportedError(SpecError):
    """Something valid that the named engine, target or mode does not serve."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest known name, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""
