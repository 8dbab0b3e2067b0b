"""What became of every key and tensor of a foreign checkpoint: used, renamed, filled by default, or ignored.

:class:`KeyReader` is how a layout reads a config: each look-up names all the places where a value may stand, notes
which one gave it and refuses two places that disagree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from modelopt_spec.consoles import stderr_console
from modelopt_spec.errors import CheckpointError

__all__ = ["Account", "Entry", "KeyReader"]

_MISSING = object()


@dataclass(frozen=True)
class Entry:
    """One key or tensor of a checkpoint."""

    name: str
    """Dotted path of the key, or the tensor's name, as it stands in the file."""
    fate: str
    """``used``, ``renamed``, ``default`` (absent; the layout's default was taken) or ``ignored``."""
    ours: str = ""
    """Field or tensor of this package that it became; why it was ignored."""
    value: Any = None


@dataclass
class Account:
    """Everything that a checkpoint held, key by key and tensor by tensor."""

    layout: str
    keys: list[Entry] = field(default_factory=list)
    tensors: list[Entry] = field(default_factory=list)
    files: list[Entry] = field(default_factory=list)
    overruled: list[str] = field(default_factory=list)
    """Contradictions and surprises that were accepted because the caller said so."""

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for a JSON report."""

        def rows(entries: list[Entry]) -> list[dict[str, Any]]:
            return [{"name": e.name, "fate": e.fate, "as": e.ours, "value": e.value} for e in entries]

        return {
            "layout": self.layout,
            "keys": rows(self.keys),
            "tensors": rows(self.tensors),
            "files": rows(self.files),
            "overruled": list(self.overruled),
        }

    def show(self, *, console: Console | None = None, every_tensor: bool = False) -> None:
        """Print the account; tensors that kept their name are only counted unless ``every_tensor``."""
        console = console or stderr_console()
        table = Table(title=f"layout: {self.layout}", title_justify="left", show_edge=False)
        for column in ("what", "name", "fate", "as"):
            table.add_column(column)
        for kind, entries in (("key", self.keys), ("tensor", self.tensors), ("file", self.files)):
            for entry in entries:
                if kind != "tensor" or every_tensor or entry.fate != "used":
                    table.add_row(kind, entry.name, entry.fate, entry.ours)
        console.print(table)
        same = sum(entry.fate == "used" for entry in self.tensors)
        console.print(f"{same} of {len(self.tensors)} tensors kept their name")
        for note in self.overruled:
            console.print(f"[yellow]accepted:[/] {note}")


class KeyReader:
    """Reads a nested config and remembers what happened to each key."""

    def __init__(self, config: dict[str, Any], where: str, *, allow_contradictions: bool = False) -> None:
        self.config = config
        self.where = where
        self.allow_contradictions = allow_contradictions
        self.overruled: list[str] = []
        self.contradictions: dict[str, str] = {}
        """Our field -> how the places that say it disagree."""
        self.last = ""
        """The field that was looked up last: what a mistake that is noticed next is about."""
        self._entries: dict[str, Entry] = {}

    def peek(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path, without noting that it was read."""
        node: Any = self.config
        for part in path.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    def get(self, ours: str, *paths: str, default: Any = _MISSING, convert: Any = None) -> Any:
        """The value of our field ``ours`` from the first of several places; the others must agree with it.

        Raises:
            CheckpointError: it stands nowhere and has no default, two places disagree, or it cannot be converted.
        """
        self.last = ours
        found = [(path, value) for path in paths if (value := self.peek(path, _MISSING)) not in (_MISSING, None)]
        if not found:
            for path in paths:
                if self.peek(path, _MISSING) is None:
                    self._entries[path] = Entry(path, "used", ours, None)
            if default is _MISSING:
                raise CheckpointError(
                    f"{self.where} lacks {' (or '.join(paths)}{')' * (len(paths) - 1)}: needed for {ours}"
                )
            self._entries.setdefault(paths[0], Entry(paths[0], "default", ours, default))
            return default
        first_path, first = found[0]
        value = self._converted(first_path, first, convert)
        for path, other in found[1:]:
            if self._converted(path, other, convert) != value:
                message = (
                    f"{self.where} contradicts itself: {first_path} is {first!r} but {path} is {other!r}. "
                    f"Correct the file, or accept {first_path} with allow_contradictions"
                )
                self.contradict(ours, message)
        for path, given in found:
            same = path.rsplit(".", 1)[-1] == ours.rsplit(".", 1)[-1]
            self._entries[path] = Entry(path, "used" if same else "renamed", ours, given)
        return value

    def contradict(self, ours: str, message: str) -> None:
        """Note that the places which say our field ``ours`` disagree; an error unless that is allowed."""
        self.last = ours
        if not self.allow_contradictions:
            raise CheckpointError(message)
        self.contradictions[ours] = message
        self.overruled.append(message)

    def _converted(self, path: str, value: Any, convert: Any) -> Any:
        if convert is None:
            return value
        if convert in (int, float) and isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {path} is {value!r}, not a number")
        if convert is bool and not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {path} is {value!r}, not true or false")
        if convert is int and isinstance(value, float) and not value.is_integer():
            raise CheckpointError(f"{self.where}: {path} is {value!r}, not a whole number")
        try:
            return convert(value)
        except (TypeError, ValueError):
            raise CheckpointError(f"{self.where}: {path} is {value!r}, which is not usable there") from None

    def ignore(self, why: str, *paths: str) -> None:
        """Note keys that are understood but have no meaning for a drafter."""
        for path in paths:
            value = self.peek(path, _MISSING)
            if value is not _MISSING and path not in self._entries:
                self._entries[path] = Entry(path, "ignored", why, value)

    def entries(self) -> list[Entry]:
        """All keys of the config in order, and the defaults that were taken; what nobody read is ``ignored``."""
        rows = [
            self._entries.get(path, Entry(path, "ignored", "not a key of this layout", value))
            for path, value in self._leaves()
        ]
        listed = {row.name for row in rows}
        return rows + [entry for path, entry in self._entries.items() if path not in listed and entry.fate == "default"]

    def _leaves(self) -> Iterable[tuple[str, Any]]:
        def walk(node: dict[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
            for key, value in node.items():
                path = f"{prefix}{key}"
                if isinstance(value, dict) and value and path not in self._entries:
                    yield from walk(value, f"{path}.")
                else:
                    yield path, value

        return walk(self.config, "")
