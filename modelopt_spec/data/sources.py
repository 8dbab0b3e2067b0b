"""Raw rows from files, directories and `datasets` names, one at a time and in a fixed order."""

from __future__ import annotations

import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from modelopt_spec.data.config import SourceConfig
from modelopt_spec.data.messages import RowError
from modelopt_spec.errors import DataError, nearest
from modelopt_spec.targets.hub import offline_if_unreachable

__all__ = ["RawRow", "place", "read_prompts", "read_rows", "source_bytes", "source_files"]

BUILTIN = "builtin://"
"""Data that ships with the package: ``builtin://demo/train.jsonl``, whatever the working directory is."""

LINES = (".jsonl", ".jsonl.gz", ".ndjson")
_SUFFIXES = (*LINES, ".json", ".parquet")


@dataclass(frozen=True)
class RawRow:
    """One row as it was read, or why it could not be read."""

    source: str
    """Path or name of the source it came from."""
    index: int
    """Row number in that source, from 0; of JSON lines the line's, blank lines counted."""
    value: Mapping[str, Any] | RowError

    @property
    def place(self) -> str:
        """Where a reader finds it: ``file:line``, lines from 1, in JSON lines; else ``file, row n``, rows from 0."""
        return place(self.source, self.index)


def place(source: str, index: int) -> str:
    """Words for row ``index`` of a source, as :attr:`RawRow.place` has them."""
    return f"{source}:{index + 1}" if source.endswith(LINES) else f"{source}, row {index}"


def source_files(source: SourceConfig) -> list[Path]:
    """Files of a source in name order; empty when it names a `datasets` set (a hub name or a saved directory)."""
    if source.path.startswith("builtin:/"):
        return [_builtin_file(re.sub("^builtin:/+", BUILTIN, source.path))]
    path = Path(source.path).expanduser()
    if path.is_file():
        if not path.name.endswith(_SUFFIXES):
            raise DataError(f"data source {source.path!r}: unknown file type; known: {', '.join(_SUFFIXES)}")
        return [path]
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            return []
        found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(_SUFFIXES))
        if not found:
            raise DataError(f"data source {source.path!r}: no {', '.join(_SUFFIXES)} file in this directory")
        return found
    if any(mark in source.path for mark in "*?["):
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
        if not found:
            raise DataError(f"data source {source.path!r}: no file matches this pattern")
        return found
    if source.path.endswith(_SUFFIXES) or source.path.startswith((".", "/", "~")):
        raise DataError(f"data source {source.path!r}: no such file (relative paths start at {Path.cwd()})")
    return []


def _builtin_file(name: str) -> Path:
    """File of a ``builtin://demo/NAME`` source."""
    root = Path(str(files("modelopt_spec") / "demo_data"))
    known = {f"{BUILTIN}demo/{file.name}": file for file in sorted(root.glob("*.jsonl"))}
    if name not in known:
        raise DataError(
            f"data source {name!r} does not ship with this package.{nearest(name, known)} It has {', '.join(known)}"
        )
    return known[name]


def source_bytes(source: SourceConfig) -> int | None:
    """Size on disk of a source's files, or None where it is not made of files."""
    found = source_files(source)
    return sum(file.stat().st_size for file in found) if found else None


def read_rows(source: SourceConfig) -> Iterator[RawRow]:
    """All rows of a source, in file and row order, with flat memory (``.json`` files are read whole).

    A line that is not JSON comes as a :class:`RowError`, not as an exception.
    """
    found = source_files(source)
    for file in found:
        if file.name.endswith(".parquet"):
            rows: Iterator[tuple[int, Mapping[str, Any] | RowError]] = enumerate(_read_parquet(file))
        elif file.name.endswith(".json"):
            rows = enumerate(_read_json(file))
        else:
            rows = _read_jsonl(file)
        for index, value in rows:
            yield RawRow(str(file), index, _rename(value, source.columns))
    if not found:
        for index, value in enumerate(_read_datasets(source)):
            yield RawRow(source.path, index, _rename(value, source.columns))


def _read_jsonl(file: Path) -> Iterator[tuple[int, Mapping[str, Any] | RowError]]:
    """Rows and the numbers of their lines, from 0; blank lines are no rows but count."""
    opener = gzip.open if file.name.endswith(".gz") else open
    try:
        with opener(file, "rb") as lines:
            for index, line in enumerate(lines):
                if not line.strip():
                    continue
                try:
                    yield index, json.loads(line)
                except json.JSONDecodeError as error:
                    yield index, RowError("not_json", f"{error.msg} at column {error.colno}")
                except (UnicodeDecodeError, RecursionError) as error:
                    yield index, RowError("not_json", str(error))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"data source {str(file)!r} is damaged or no gzip file ({error}): copy it again") from None


def _read_json(file: Path) -> Iterator[Mapping[str, Any] | RowError]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"data source {str(file)!r} is not JSON ({error}); JSON lines are named .jsonl") from None
    if isinstance(value, Mapping):
        value = next(
            (value[key] for key in ("data", "rows", "conversations") if isinstance(value.get(key), list)), None
        )
    if not isinstance(value, list):
        raise DataError(f"data source {str(file)!r}: a .json file holds a list of rows (or an object with `data`)")
    yield from value


def _read_parquet(file: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    yield _without_nulls(row)
    except pyarrow.ArrowException as error:
        raise DataError(f"data source {str(file)!r} is no parquet file that can be read ({error})") from None


def _read_datasets(source: SourceConfig) -> Iterator[Mapping[str, Any]]:
    import datasets

    path = Path(source.path).expanduser()
    if path.is_dir():
        loaded = datasets.load_from_disk(str(path))
        if isinstance(loaded, datasets.DatasetDict):
            if source.split not in loaded:
                raise DataError(f"data source {source.path!r} has no split {source.split!r}: {', '.join(loaded)}")
            loaded = loaded[source.split]
    else:
        from huggingface_hub import constants

        offline_if_unreachable(source.path)
        datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE or constants.HF_HUB_OFFLINE
        try:
            loaded = datasets.load_dataset(source.path, source.name, split=source.split, streaming=True)
        except Exception as error:
            raise DataError(
                f"data source {source.path!r} is no file here, and `datasets` cannot load it "
                f"(name {source.name!r}, split {source.split!r}): {str(error).splitlines()[0]}"
            ) from error
    for row in loaded:
        yield _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    """Drop the null keys that columnar formats add to every row when one row has them."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _rename(value: Mapping[str, Any] | RowError, columns: Mapping[str, str]) -> Mapping[str, Any] | RowError:
    if not columns or not isinstance(value, Mapping):
        return value
    return {**value, **{name: value[column] for name, column in columns.items() if column in value}}


def read_prompts(path: str, limit: int | None = None) -> list[tuple[str, ...]]:
    """User turns of a prompt file: rows of ``turns``, ``prompt``, or ``messages`` (their user messages), in order.

    Raises:
        DataError: a row has no prompt; the message names its number.
    """
    prompts: list[tuple[str, ...]] = []
    for row in read_rows(SourceConfig(path=path)):
        if limit is not None and len(prompts) >= limit:
            break
        turns = _turns(row.value) if isinstance(row.value, Mapping) else []
        if not turns:
            raise DataError(f"prompt file {row.place}: no turns, prompt or user messages in it")
        prompts.append(tuple(turns))
    if not prompts:
        raise DataError(f"prompt file {path!r} is empty")
    return prompts


def _turns(row: Mapping[str, Any]) -> Sequence[str]:
    if isinstance(row.get("turns"), list) and all(isinstance(turn, str) for turn in row["turns"]):
        return row["turns"]
    if isinstance(row.get("prompt"), str):
        return [row["prompt"]]
    messages = row.get("messages") or row.get("conversations")
    if not isinstance(messages, list):
        return []
    users = [m for m in messages if isinstance(m, Mapping) and (m.get("role") or m.get("from")) in ("user", "human")]
    return [str(m.get("content") or m.get("value") or "") for m in users]
