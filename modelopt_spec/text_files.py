"""Text files that users name, told by their name where they are no text; and JSON that every reader takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelopt_spec.errors import DataError, SpecError

__all__ = ["finite", "read_json_object", "read_text"]


def read_text(path: Path, what: str, error: type[SpecError] = DataError) -> str:
    """The text of a file in UTF-8.

    Args:
        path: the file.
        what: what it should be, for the message: ``a YAML file``.
        error: what to raise.

    Raises:
        SpecError: its bytes are no UTF-8, as in binary files. OSError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as cause:
        raise error(
            f"{path} is not text in UTF-8 (byte {cause.start} is {cause.object[cause.start]:#04x}): name {what}"
        ) from None


def read_json_object(path: Path, what: str, error: type[SpecError] = DataError) -> dict[str, Any]:
    """The object in a JSON file; arguments as those of :func:`read_text`.

    Raises:
        SpecError: not text, not JSON, or no object. OSError: it cannot be read.
    """
    try:
        data = json.loads(read_text(path, what, error))
    except (json.JSONDecodeError, RecursionError) as cause:
        raise error(f"{path} is not JSON ({cause}): name {what}") from None
    if not isinstance(data, dict):
        raise error(f"{path} holds a {type(data).__name__}, not an object: name {what}")
    return data


def finite(value: Any) -> Any:
    """The value with None for every number that JSON has no word for: NaN and the infinities, however deep.

    Mappings come back as dicts and lists and tuples as lists, which is what ``json.dumps`` makes of them anyway.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
