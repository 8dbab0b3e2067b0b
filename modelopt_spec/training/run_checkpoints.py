"""Checkpoints of a run: sealed with checksums when complete, so that a torn or damaged one is never resumed from."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from modelopt_spec.errors import CheckpointError

__all__ = ["SEAL", "is_intact", "newest_intact", "prune", "seal"]

SEAL = "sealed.json"
_NAME = re.compile(r"checkpoint-(\d+)$")


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def seal(directory: Path) -> None:
    """Record the sha256 of every file of a complete checkpoint; the record itself appears at once or not at all."""
    files = {str(f.relative_to(directory)): _digest(f) for f in sorted(directory.rglob("*")) if f.is_file()}
    files.pop(SEAL, None)
    temporary = directory / f".{SEAL}.{os.getpid()}"
    with temporary.open("w") as stream:
        json.dump(files, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(directory / SEAL)


def is_intact(directory: Path) -> bool:
    """Whether a checkpoint is sealed and every file is as it was then."""
    try:
        files = json.loads((directory / SEAL).read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return all((directory / name).is_file() and _digest(directory / name) == digest for name, digest in files.items())


def _all(run_dir: Path) -> list[Path]:
    """Checkpoints of a run, newest first."""
    found = [(int(m.group(1)), p) for p in run_dir.glob("checkpoint-*") if (m := _NAME.search(p.name)) and p.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def newest_intact(run_dir: Path) -> Path | None:
    """The checkpoint to resume from: the newest that is intact; None when a run has none at all.

    Raises:
        CheckpointError: there are checkpoints, but each is damaged.
    """
    candidates = _all(run_dir)
    for path in candidates:
        if is_intact(path):
            return path
    if any((path / SEAL).exists() for path in candidates):
        names = ", ".join(path.name for path in candidates)
        raise CheckpointError(
            f"every checkpoint of {run_dir} is damaged ({names}): restore one from a backup, or start in another "
            "output_dir"
        )
    return None


def prune(run_dir: Path, keep: int | None) -> None:
    """Remove what is older than the ``keep`` newest sealed checkpoints, and torn ones older than the newest."""
    sealed = [path for path in _all(run_dir) if (path / SEAL).exists()]
    if not sealed:
        return
    newest = _all(run_dir).index(sealed[0])
    torn = [path for path in _all(run_dir)[newest:] if path not in sealed]
    for path in torn + (sealed[keep:] if keep else []):
        shutil.rmtree(path)
