"""Mistakes in nested settings, told by the key that the user wrote: ``drafter.head.rank``, not a class of ours.

A section that is built inside another raises its own :class:`SettingError`; the outer one puts its key in front.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pydantic import ValidationError

from modelopt_spec.errors import ConfigError

__all__ = ["Problem", "SettingError", "problems_of"]

_LEADING_NAME = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*(?= )")
_SHOWN = 80
_WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid tuple": "a list",
    "a valid list": "a list",
}


@dataclass(frozen=True)
class Problem:
    """One mistake."""

    where: tuple[str, ...]
    """Keys from the outermost section inwards."""
    text: str
    """What follows the key: ``is 1: it must be ...``, or with ``sentence`` a whole sentence about that section."""
    sentence: bool = False

    def tell(self, noun: str) -> str:
        """The mistake in words; ``noun`` is what the outermost settings are called."""
        key = ".".join(self.where)
        if not self.sentence:
            owner = f" of {noun}" if len(self.where) == 1 and not self.text.startswith("has no") else ""
            return f"{key}{owner} {self.text}" if key else f"{noun} {self.text}"
        named = _LEADING_NAME.match(self.text)
        parts = named[0].split(".") if named else [""]
        if parts[0] in self.where:
            before = self.where[: self.where.index(parts[0])]
            return ".".join([*before, self.text])
        if not key:
            return self.text
        return f"{key}.{self.text}" if len(parts) > 1 or "_" in parts[0] else f"{key}: {self.text}"


class SettingError(ConfigError):
    """Mistakes in settings, each with its place."""

    def __init__(self, noun: str, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problem.tell(noun) for problem in self.problems))

    def under(self, noun: str, *keys: str) -> SettingError:
        """The same mistakes, seen from settings that hold these under ``keys``."""
        return SettingError(noun, (replace(problem, where=(*keys, *problem.where)) for problem in self.problems))


def problems_of(error: ValidationError) -> list[Problem]:
    """The mistakes that pydantic found, with those that nested sections told in place."""
    found: list[Problem] = []
    for item in error.errors(include_url=False):
        where = tuple(str(part) for part in item["loc"])
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, SettingError):
            found += cause.under("", *where).problems
        elif item["type"] == "value_error":
            found.append(Problem(where, item["msg"].removeprefix("Value error, "), sentence=True))
        elif item["type"] == "missing":
            found.append(Problem(where, "is missing"))
        else:
            given = repr(item["input"])
            given = given if len(given) <= _SHOWN else given[: _SHOWN - 3] + "..."
            found.append(Problem(where, f"is {given}: it must be {_wanted(item['type'], item['msg'])}"))
    return found


def _wanted(kind: str, message: str) -> str:
    """What pydantic wants, without its own words for it."""
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "a mapping of settings"
    words = message.removeprefix("Input should be ").split(", unable to")[0]
    return _WORDS.get(words, words)
