"""Checkpoints of a run: written beside their place, sealed with checksums and renamed into it when complete.

So a directory ``checkpoint-N`` is whole whenever the process died, and one that was damaged later is noticed and passed
over on resume.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelopt_spec.disk import sha256_of, sync_path, usual_modes
from modelopt_spec.errors import CheckpointError

__all__ = [
    "DRAFTER",
    "REPORT",
    "RUN",
    "SEAL",
    "check_free",
    "check_position",
    "check_writable",
    "checkpoint_dir",
    "clear_staging",
    "is_intact",
    "locked",
    "newest_intact",
    "prune",
    "publish",
    "read_run",
    "seal",
    "staging_dir",
    "step_of",
]

SEAL, RUN = "sealed.json", "run.json"
REPORT, DRAFTER = "report.json", "drafter"
"""What a finished run adds to its directory."""
RESUMABLE = ("trainer_state.json", "optimizer.pt", "scheduler.pt")
_NAME = re.compile(r"checkpoint-(\d+)$")
_STAGING = ".saving"


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Place of the checkpoint after ``step`` optimizer steps."""
    return run_dir / f"checkpoint-{step}"


# ---- writing ---------------------------------------------------------------------------------------------------------


def check_writable(run_dir: Path) -> None:
    """Create the directory of a run and write to it, before anything expensive begins.

    Raises:
        CheckpointError: it cannot be made or written to.
    """
    probe = run_dir / f".writable.{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"0")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"training.output_dir {str(run_dir)!r} cannot be written to ({error.strerror or error}): choose another one"
        ) from None


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep a second process out of a run's directory. The lock is the process's own and dies with it.

    Raises:
        CheckpointError: another process trains into the directory.
    """
    directory = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        raise CheckpointError(
            f"another process trains into {run_dir}: wait for it, or set another training.output_dir"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            os.close(directory)
            raise
    try:
        yield
    finally:
        os.close(directory)


def check_free(run_dir: Path, *, resume: bool = False, export: str | Path | None = None) -> None:
    """Refuse a directory that a run must not write to; nothing is created or written.

    Args:
        run_dir: of the run.
        resume: the run goes on from what is there.
        export: where the run will export to.

    Raises:
        CheckpointError: a file is in the way, nothing can be written there, another run is there, or something at the
            places of the result (``drafter``, the export) that is no drafter and would be replaced.
    """
    standing = next(part for part in (run_dir.absolute(), *run_dir.absolute().parents) if part.exists())
    if not standing.is_dir():
        raise CheckpointError(
            f"training.output_dir {str(run_dir)!r} cannot be written to ({standing} is a file): choose another one"
        )
    if not os.access(standing, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"training.output_dir {str(run_dir)!r} cannot be written to ({standing} is read-only): choose another one"
        )
    if not resume and (run_dir / REPORT).exists():
        raise CheckpointError(
            f"{run_dir} holds a finished run: pass resume (--resume), or set another training.output_dir"
        )
    if not resume and any(run_dir.glob("checkpoint-*")):
        raise CheckpointError(
            f"{run_dir} holds checkpoints of an earlier run: pass resume (--resume) to go on from the newest, "
            "set another training.output_dir, or remove them"
        )
    _refuse_foreign(run_dir / DRAFTER, "drafter.json", "training.output_dir")
    if export is not None:
        _refuse_foreign(Path(export), "drafter_card.json", "export.output_dir")


def _refuse_foreign(place: Path, mark: str, setting: str) -> None:
    """Refuse to replace a directory that no run or export has made."""
    if place.is_file() or (place.is_dir() and any(place.iterdir()) and not (place / mark).is_file()):
        raise CheckpointError(
            f"{place} holds something else, which the run's result would replace (there is no {mark}): choose another "
            f"{setting}, or move it away"
        )


def staging_dir(run_dir: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return run_dir / _STAGING


def clear_staging(run_dir: Path) -> None:
    """Remove what a process that died while saving has left."""
    shutil.rmtree(staging_dir(run_dir), ignore_errors=True)


def publish(run_dir: Path, step: int) -> Path:
    """Seal the staged checkpoint and rename it into its place; a damaged one that stands there gives way."""
    final = checkpoint_dir(run_dir, step)
    staged = staging_dir(run_dir) / final.name
    seal(staged)
    if final.exists():
        shutil.rmtree(final)
    os.rename(staged, final)
    sync_path(run_dir)
    clear_staging(run_dir)
    return final


def seal(directory: Path) -> None:
    """Flush every file of a complete checkpoint to disk and record its sha256; the record appears at once or not."""
    files = {}
    usual_modes(directory)
    for file in sorted(directory.rglob("*")):
        if file.is_file() and file.name != SEAL:
            files[str(file.relative_to(directory))] = sha256_of(file)
            sync_path(file)
    temporary = directory / f".{SEAL}.{os.getpid()}"
    temporary.write_text(json.dumps(files, indent=1))
    sync_path(temporary)
    temporary.replace(directory / SEAL)
    sync_path(directory)


def prune(run_dir: Path, keep: int | None, protect: str | None = None) -> None:
    """Remove what is older than the ``keep`` newest sealed checkpoints, and unsealed ones older than the newest.

    Args:
        run_dir: directory of the run.
        keep: how many to keep; None or 0 for all.
        protect: a checkpoint that stays in any case (the best one).
    """
    everything = _all(run_dir)
    sealed = [path for path in everything if (path / SEAL).exists()]
    if not sealed:
        return
    torn = [path for path in everything[everything.index(sealed[0]) :] if path not in sealed]
    for path in torn + (sealed[keep:] if keep else []):
        if protect is None or path.resolve() != Path(protect).resolve():
            shutil.rmtree(path, ignore_errors=True)


# ---- reading ---------------------------------------------------------------------------------------------------------


def is_intact(directory: Path) -> bool:
    """Whether a checkpoint is sealed and every file is as it was then."""
    try:
        files = json.loads((directory / SEAL).read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return all((directory / name).is_file() and sha256_of(directory / name) == sealed for name, sealed in files.items())


def step_of(directory: Path) -> int:
    """The step of a ``checkpoint-N``."""
    found = _NAME.search(directory.name)
    if found is None:
        raise CheckpointError(f"{directory} is not a run's checkpoint: its name is not checkpoint-STEP")
    return int(found[1])


def newest_intact(run_dir: Path) -> Path | None:
    """The checkpoint to resume from: the newest that is intact; None when a run has none at all.

    Raises:
        CheckpointError: there are checkpoints, but each is damaged; or the newest cannot be resumed from.
    """
    candidates = _all(run_dir)
    for path in candidates:
        if is_intact(path):
            missing = [name for name in RESUMABLE if not (path / name).is_file()]
            if missing:
                raise CheckpointError(
                    f"{path} holds a drafter but no {', '.join(missing)} (training.save_only_model?): start another "
                    "run from it with drafter.init_from"
                )
            return path
    if any((path / SEAL).exists() for path in candidates):
        names = ", ".join(path.name for path in candidates)
        raise CheckpointError(
            f"every checkpoint of {run_dir} is damaged ({names}): restore one from a backup, or start in another "
            "output_dir"
        )
    return None


def read_run(directory: str | Path) -> dict[str, Any]:
    """What the run that wrote a checkpoint was like (``run.json``): rows a step, data, rows without supervision."""
    file = Path(directory) / RUN
    return json.loads(file.read_text()) if file.is_file() else {}


def check_position(saved: dict[str, Any], now: dict[str, Any], path: str) -> None:
    """Refuse a position in the data that means something else in this run.

    Args:
        saved: of :func:`read_run`.
        now: the same entries of the run that resumes.
        path: of the checkpoint.

    Raises:
        CheckpointError: other rows a step, other data or another order.
    """
    if saved.get("rows_per_step", now["rows_per_step"]) != now["rows_per_step"]:
        raise CheckpointError(
            f"{path} was written with {saved['rows_per_step']} rows a step ({saved['ranks']} ranks), this run has "
            f"{now['rows_per_step']} ({now['ranks']} ranks): choose per_device_train_batch_size and "
            "gradient_accumulation_steps so that batch x accumulation x ranks is the same, or set "
            "training.ignore_data_skip=true to start the data anew"
        )
    differing = [name for name in ("rows", "data", "data_seed", "order") if saved.get(name, now[name]) != now[name]]
    if differing:
        values = ", ".join(f"{name}: {saved[name]}, now {now[name]}" for name in differing)
        raise CheckpointError(
            f"{path} was written with other data ({values}): its position means nothing here. Use the same data "
            "section, or set training.ignore_data_skip=true to start the data anew"
        )


def _all(run_dir: Path) -> list[Path]:
    """Checkpoints of a run, newest first."""
    found = [(int(m.group(1)), p) for p in run_dir.glob("checkpoint-*") if (m := _NAME.search(p.name)) and p.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]
