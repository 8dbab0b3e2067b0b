"""An append-only JSONL file of finished rows that survives kills: nothing is lost, nothing is written twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from modelopt_spec.errors import DataError
from modelopt_spec.text_files import read_json_object

__all__ = ["Ledger", "check_begun"]


def _description(path: Path) -> Path:
    return path.with_name(path.name + ".meta.json")


def check_begun(path: str | Path) -> Path:
    """A file that a ledger may go on with: one that is new or empty, or that has its description beside it.

    Raises:
        DataError: it holds other data, or is no file.
    """
    place = Path(path).expanduser()
    if place.exists() and not place.is_file():
        raise DataError(f"{str(place)!r} is no ordinary file: name the .jsonl file that answers go to")
    if place.is_file() and place.stat().st_size and not _description(place).is_file():
        raise DataError(
            f"{str(place)!r} is no file of answers that this command began (there is no {_description(place).name} "
            "beside it), and nothing is appended to other data: name another file, or put the description back"
        )
    return place


class Ledger:
    """Rows with an ``id``, one a line, and a description of the run in ``<name>.meta.json`` beside them.

    A run that was killed leaves at most one torn line at the end; opening the ledger again removes it. Only one
    process may hold a ledger.

    Args:
        path: the ``.jsonl`` file; made if missing.
        settings: what decides the content of rows. Going on with other settings is refused.

    Raises:
        DataError: other settings, a damaged line in the middle, or another process that holds the ledger.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]) -> None:
        self.path = check_begun(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.settings = json.loads(json.dumps(settings))
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            self.ids = self._recover()
            self._check_settings()
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def meta_path(self) -> Path:
        """Where the description of the run stands."""
        return _description(self.path)

    def append(self, row: dict[str, Any]) -> None:
        """Write one row; it counts as done once this returns."""
        if row["id"] in self.ids:
            raise DataError(f"{str(self.path)!r} holds row {row['id']!r} already")
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except OSError as error:
            raise DataError(f"cannot write to {str(self.path)!r} ({error}): free some space and run again") from None
        self.ids.add(row["id"])

    def describe(self, **values: Any) -> None:
        """Write the description: the settings and what else is known about the run."""
        text = json.dumps({"kind": "mtsp.regenerated", "version": 1, "settings": self.settings, **values}, indent=1)
        temporary = self.meta_path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.meta_path)

    def close(self) -> None:
        """Flush to disk and let go of the file."""
        os.fsync(self._fd)
        os.close(self._fd)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # no advisory locks on this platform
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"another process is writing to {str(self.path)!r}") from None

    def _recover(self) -> set[str]:
        ids: set[str] = set()
        good = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break
                try:
                    ids.add(json.loads(line)["id"])
                except (ValueError, KeyError, TypeError) as error:
                    raise DataError(
                        f"line {number + 1} of {str(self.path)!r} is no answer of this command ({error}): the file is "
                        "damaged or holds other data. Name another file, or restore this one"
                    ) from None
                good += len(line)
        if good < self.path.stat().st_size:
            os.ftruncate(self._fd, good)
        return ids

    def _settings_before(self) -> dict[str, Any]:
        """What the description says that the file was begun with."""
        found = read_json_object(self.meta_path, "another output file, or restore this one").get("settings")
        if not isinstance(found, dict):
            raise DataError(f"{str(self.meta_path)!r} has no settings: it is damaged. Name another output file")
        return found

    def _check_settings(self) -> None:
        if self.meta_path.is_file():
            before = self._settings_before()
            changed = [k for k in {**before, **self.settings} if before.get(k) != self.settings.get(k)]
            if changed and self.ids:
                name = changed[0]
                raise DataError(
                    f"{str(self.path)!r} was begun with {name} {before.get(name)!r}, now it is "
                    f"{self.settings.get(name)!r}: use the same settings to go on, or another output file"
                )
        self.describe()
