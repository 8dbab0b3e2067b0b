"""Fields of transformers' TrainingArguments, read from its source: importing the class would import torch.

A recipe with a misspelt key is refused in a second instead of eight.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from modelopt_spec.errors import ConfigError, SpecError

__all__ = ["check_values", "trainer_fields"]

_NUMBERS: dict[str, tuple[Any, str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (bool, "true or false"),
}


@functools.cache
def trainer_fields() -> dict[str, str]:
    """Names and annotations, as the installed version spells them: ``{"max_steps": "int", ...}``.

    Raises:
        SpecError: transformers is not installed.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise SpecError("transformers is not installed: pip install 'transformers>=5.14'")
    source = Path(spec.origin).with_name("training_args.py")
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments":
            parts = [
                part for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            ]
            return {part.target.id: ast.unparse(part.annotation) for part in parts}  # type: ignore[union-attr]
    raise SpecError(f"{source} has no class TrainingArguments: this version of transformers is not supported")


def check_values(section: dict[str, Any]) -> dict[str, Any]:
    """A recipe's training section with the numbers and switches of TrainingArguments as such (YAML reads 1e-4 as text).

    Raises:
        ConfigError: a value of another kind, which transformers would only trip over when the target is loaded.
    """
    kinds = trainer_fields()
    checked = dict(section)
    for key, value in section.items():
        kind, _, optional = kinds.get(key, "").partition(" | ")
        if kind not in _NUMBERS or (optional == "None" and value is None):
            continue
        wanted, words = _NUMBERS[kind]
        if isinstance(value, bool) and wanted is not bool:
            raise ConfigError(f"training.{key} is {value}: it must be {words}")
        try:
            checked[key] = TypeAdapter(wanted).validate_python(value)
        except ValidationError:
            raise ConfigError(f"training.{key} is {value!r}: it must be {words}") from None
    return checked
