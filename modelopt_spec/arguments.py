"""Checks of single arguments, each with the name that its caller wrote: whole numbers, numbers, seeds, lists.

Settings in sections are checked by their configs; this is for arguments of functions and options of commands.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from modelopt_spec.errors import ConfigError

__all__ = [
    "MAX_RANKS",
    "MAX_ROWS",
    "MAX_SEED",
    "check_path",
    "check_paths",
    "check_seed",
    "check_temperatures",
    "comma_separated",
    "number",
    "whole_number",
]

MAX_RANKS, MAX_ROWS = 2**20, 10**12
"""The most ranks and rows that a plan is made for: beyond any machine, and small enough for exact arithmetic."""

MAX_SEED = 2**32 - 1
"""The largest seed that numpy's global generator takes, which transformers seeds too."""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _range(at_least: float, at_most: float | None) -> str:
    return f"of at least {at_least:,}" if at_most is None else f"from {at_least:,} to {at_most:,}"


def whole_number(name: str, value: Any, at_least: int, at_most: int | None = None, note: str = "") -> int:
    """The value as an int; 4.0 counts as 4, but text, true and 1.5 do not count.

    Args:
        name: what the caller knows the value by.
        value: what was given.
        at_least: the smallest one that is right.
        at_most: the largest one; None: no limit.
        note: what follows the range in the message, for example ``"; 0 is off"``.

    Raises:
        ConfigError: it is none, or out of range.
    """
    plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    whole = isinstance(plain, numbers.Integral) or (isinstance(plain, float) and plain.is_integer())
    if isinstance(plain, bool) or not whole or plain < at_least or (at_most is not None and plain > at_most):
        raise ConfigError(f"{name} is {_shown(value)}: it must be a whole number {_range(at_least, at_most)}{note}")
    return int(plain)


def number(
    name: str,
    value: Any,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    *,
    above: bool = False,
    wanted: str = "",
) -> float:
    """The value as a float; text, true, NaN and infinities do not count.

    Args:
        name: what the caller knows the value by.
        value: what was given.
        at_least: the smallest one that is right, or with ``above`` the largest one that is too small.
        at_most: the largest one.
        above: leave ``at_least`` itself out.
        wanted: what it must be, for the message.

    Raises:
        ConfigError: it is none, or out of range.
    """
    plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    real = isinstance(plain, numbers.Real) and not isinstance(plain, bool) and math.isfinite(plain)
    if not real or not at_least <= plain <= at_most or (above and plain == at_least):
        raise ConfigError(f"{name} is {_shown(value)}: it must be {wanted or 'a number'}")
    return float(plain)


def check_seed(name: str, value: Any) -> int:
    """A seed of random numbers.

    Raises:
        ConfigError: not a whole number from 0 to :data:`MAX_SEED`.
    """
    return whole_number(name, value, 0, MAX_SEED)


def check_path(name: str, value: Any, what: str) -> Path:
    """One path.

    Raises:
        ConfigError: something else, for example None or a model.
    """
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name} is {_shown(value)}: it must be {what}")
    return Path(value)


def check_paths(name: str, value: Any, what: str) -> list[str | Path]:
    """One path or several, as a list.

    Raises:
        ConfigError: neither, for example None or a model.
    """
    listed = [value] if isinstance(value, str | Path) else value
    if not isinstance(listed, Sequence) or not all(isinstance(item, str | Path) for item in listed):
        raise ConfigError(f"{name} is {_shown(value)}: it must be {what}, or a list of them")
    return list(listed)


def check_temperatures(values: Sequence[float]) -> None:
    """Sampling temperatures of ``--temperature``.

    Raises:
        ConfigError: one is neither 0 nor a positive number.
    """
    for value in values:
        number("--temperature", value, 0, wanted="0 (greedy) or a positive number")


def comma_separated(text: str, option: str, kind: Callable[[str], Any] = int) -> list[Any]:
    """The numbers of an option such as ``--loads 1,2,4``.

    Raises:
        ConfigError: one is no number of this kind.
    """
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}: give numbers, comma separated, for example 1,2,4") from error
