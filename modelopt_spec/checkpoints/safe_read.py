"""Reading checkpoints that somebody else wrote: safetensors and JSON only, every size and name checked first.

Nothing in a directory is ever executed or unpickled. A file that is damaged, oversized or points outside of its
directory gives a :class:`~modelopt_spec.errors.CheckpointError` that names it.
"""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from modelopt_spec.errors import CheckpointError

__all__ = [
    "INDEX_FILE",
    "MAX_HEADER_BYTES",
    "MAX_JSON_BYTES",
    "WEIGHTS_FILE",
    "TensorEntry",
    "pickles",
    "read_header",
    "read_json",
    "read_plain_state",
    "read_tensors",
    "tensor_entries",
    "torch_dtype",
]

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MAX_JSON_BYTES = 64 << 20
MAX_HEADER_BYTES = 100 << 20
"""The safetensors library's own limit."""
_MAX_INDEX_SHARDS = 10_000
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

_ITEM_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "I16": 16,
    "U16": 16,
    "I32": 32,
    "U32": 32,
    "I64": 64,
    "U64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor is and what it holds, known without reading it."""

    name: str
    dtype: str
    """As in the safetensors header, for example ``BF16``."""
    shape: tuple[int, ...]
    file: Path


# ---- JSON ------------------------------------------------------------------------------------------------------------


def read_json(path: Path, *, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: no such file, larger than ``limit`` bytes, not UTF-8 JSON, not an object, or a repeated key.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    size = path.stat().st_size
    if size > limit:
        raise CheckpointError(f"{path} has {size} bytes, more than the {limit} that a file of its kind may have")
    return _parse(path.read_bytes(), str(path))


def _parse(data: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise CheckpointError(f"{where}: the key {key!r} stands there twice")
            seen[key] = value
        return seen

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds {type(value).__name__}, not a JSON object")
    return value


# ---- safetensors -----------------------------------------------------------------------------------------------------


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Names, types and shapes of one safetensors file, with the layout of its bytes checked.

    Raises:
        CheckpointError: not a safetensors file, truncated, an oversized header, repeated names, overlapping tensors,
            or a tensor whose bytes do not match its shape.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or prefix[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
            raise CheckpointError(f"{path} is not a safetensors file (a renamed pickle or zip is not read)")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path}: its header claims {length} bytes, more than {MAX_HEADER_BYTES}: damaged, or of another format"
            )
        if 8 + length > size:
            raise CheckpointError(
                f"{path} is truncated: a header of {length} bytes in a file of {size}: download it again"
            )
        raw = _parse(file.read(length), f"{path} (header)")
    raw.pop("__metadata__", None)
    entries, spans = {}, []
    for name, entry in raw.items():
        entries[name], span = _check_entry(path, name, entry)
        spans.append((*span, name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise CheckpointError(f"{path}: the bytes of tensor {name!r} start at {start} instead of {end}: damaged")
        end = stop
    if 8 + length + end != size:
        raise CheckpointError(
            f"{path} is truncated or damaged: its tensors need {8 + length + end} bytes, it has {size}"
        )
    return entries


def _check_entry(path: Path, name: str, entry: Any) -> tuple[TensorEntry, tuple[int, int]]:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: the header entry of tensor {name!r} is malformed")
    bits = _ITEM_BITS.get(dtype)
    if bits is None:
        raise CheckpointError(f"{path}: tensor {name!r} has the unknown type {dtype!r}. Known: {', '.join(_ITEM_BITS)}")
    if math.prod(shape) * bits // 8 != stop - start:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {list(shape)} and type {dtype} does not fit its {stop - start} bytes"
        )
    return TensorEntry(name, dtype, shape, path), (start, stop)


def read_plain_state(path: Path, *, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A small torch file that holds plain containers and tensors only; anything else in it is refused, not executed.

    Raises:
        CheckpointError: no such file, larger than ``limit`` bytes, or with objects that would have to be executed.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    if path.stat().st_size > limit:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, more than the {limit} that its kind may have")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise CheckpointError(f"{path} is refused: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds {type(state).__name__}, not a dict")
    return state


def pickles(directory: Path) -> list[str]:
    """Names of files in a directory that would have to be unpickled; they are never read."""
    return sorted(path.name for path in directory.iterdir() if path.suffix.lower() in _PICKLE_SUFFIXES)


def _weight_files(directory: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The weight files of a directory, and the index's map of names to files if there is one."""
    index = directory / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index} has no 'weight_map' of tensor names to file names")
        names = sorted(set(weight_map.values()))
        if len(names) > _MAX_INDEX_SHARDS:
            raise CheckpointError(f"{index} names {len(names)} shards, more than {_MAX_INDEX_SHARDS}")
        for name in names:
            if not _is_plain_name(name) or not name.endswith(".safetensors"):
                raise CheckpointError(
                    f"{index} names the file {name!r}: shards must be .safetensors files of the same directory"
                )
        if (directory / WEIGHTS_FILE).is_file() and WEIGHTS_FILE not in names:
            raise CheckpointError(f"{directory} has both {WEIGHTS_FILE} and {INDEX_FILE}: delete the one that is stale")
        return [directory / name for name in names], weight_map
    single = directory / WEIGHTS_FILE
    if single.is_file():
        return [single], None
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found, None
    if found:
        raise CheckpointError(
            f"{directory} has {len(found)} safetensors files and neither {WEIGHTS_FILE} nor {INDEX_FILE}: "
            "write the index, or keep one file"
        )
    unsafe = pickles(directory)
    if unsafe:
        raise CheckpointError(
            f"{directory} has no safetensors file; {', '.join(unsafe[:4])} are pickles, which can run code when they "
            "are read and are refused: convert them to safetensors where you trust them"
        )
    raise CheckpointError(f"{directory} has no {WEIGHTS_FILE} (or {INDEX_FILE} with its shards)")


def _is_plain_name(name: str) -> bool:
    return (
        bool(name) and name not in (".", "..") and "\0" not in name and not set(name) & {"/", "\\"} and ":" not in name
    )


def tensor_entries(directory: str | os.PathLike[str]) -> dict[str, TensorEntry]:
    """Every tensor of a checkpoint directory, from one file or from an index and its shards.

    Raises:
        CheckpointError: no weights, only pickles, an index that leaves the directory, or a tensor in no shard or two.
    """
    root = Path(directory)
    if not root.is_dir():
        raise CheckpointError(f"{root} is not a directory")
    files, weight_map = _weight_files(root)
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                raise CheckpointError(f"tensor {name!r} stands in both {entries[name].file.name} and {file.name}")
            entries[name] = entry
    if weight_map is not None:
        for name, file_name in weight_map.items():
            if name not in entries or entries[name].file.name != file_name:
                raise CheckpointError(f"{root / INDEX_FILE} says that {name!r} is in {file_name}, but it is not")
        unlisted = sorted(set(entries) - set(weight_map))
        if unlisted:
            raise CheckpointError(f"{root / INDEX_FILE} does not list {', '.join(unlisted[:4])}, which its shards hold")
    return entries


def read_tensors(directory: str | os.PathLike[str], names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a checkpoint directory by name, on the CPU and as stored; all of them without ``names``."""
    entries = tensor_entries(directory)
    wanted = list(entries) if names is None else list(names)
    missing = sorted(set(wanted) - set(entries))
    if missing:
        raise CheckpointError(f"{directory} lacks the tensors {', '.join(missing[:6])}")
    tensors: dict[str, Tensor] = {}
    for file in {entries[name].file for name in wanted}:
        try:
            with safe_open(file, framework="pt", device="cpu") as reader:
                for name in wanted:
                    if entries[name].file == file:
                        tensors[name] = reader.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
    return {name: tensors[name] for name in wanted}


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a safetensors type name of a float tensor."""
    types = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    if name not in types:
        raise CheckpointError(f"{name} is not a float type that a drafter can have: {', '.join(types)}")
    return types[name]
