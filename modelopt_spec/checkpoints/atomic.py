"""Directories that appear complete or not at all.

A directory is written beside its final place and renamed into it once every byte is on disk. Whatever kills the process
in between leaves the final place as it was: absent, or holding the complete older version.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from modelopt_spec.disk import sync_path, usual_modes
from modelopt_spec.errors import CheckpointError

__all__ = ["DRAFTER_FILES", "atomic_directory", "check_free"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


DRAFTER_FILES = ("drafter.json", "drafter_card.json")
"""A checkpoint holds the first, what this package exported the second."""


def check_free(
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    marks: Sequence[str] = (),
    keep: Sequence[str | os.PathLike[str]] = (),
    export: bool = False,
) -> Path:
    """The absolute form of a path that a directory may be written to.

    Args:
        path: the directory.
        overwrite: whether it may hold something, which is replaced.
        marks: files of which what is replaced must hold one; none for anything.
        keep: paths that are read and must not be replaced.
        export: an export is to be written, which replaces no checkpoint.

    Raises:
        CheckpointError: the path or a parent is a file, the path is a directory that is not empty (without
            ``overwrite``), one that holds none of ``marks``, a checkpoint that an export would replace, or one that
            must never be replaced as a whole (the home or working directory, one of ``keep``, or a parent of these).
    """
    final = Path(path).expanduser().absolute()
    if final.is_symlink():
        final = final.resolve()
    if final.exists() and not final.is_dir():
        raise CheckpointError(f"{final} is a file: name a directory to write to")
    standing = next((parent for parent in final.parents if parent.exists()), final)
    if not standing.is_dir():
        raise CheckpointError(f"{final} cannot be written, as {standing} is a file: name another directory")
    if final.is_dir() and any(final.iterdir()):
        if not overwrite:
            raise CheckpointError(
                f"{final} exists and is not empty: name another directory, or pass overwrite (--overwrite)"
            )
        for kept in (Path.cwd(), Path.home(), *(Path(name).expanduser().resolve() for name in keep)):
            if kept.is_relative_to(final.resolve()):
                raise CheckpointError(f"{final} holds {kept}, which overwriting would delete: name another directory")
        if export and (final / DRAFTER_FILES[0]).is_file():
            raise CheckpointError(
                f"{final} is a checkpoint of mtsp train or save, which an export does not replace: name another "
                "directory"
            )
        if marks and not any((final / mark).is_file() for mark in marks):
            raise CheckpointError(
                f"{final} holds something else than a drafter of this package (there is no "
                f"{' and no '.join(marks)}), which overwriting would delete: name another directory, or remove it"
            )
    return final


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory to fill; when the block ends without an error it takes the place of ``path``.

    On an error, or when the process dies, ``path`` stays untouched. With ``overwrite`` an older directory survives
    until the new one is complete, and the two are then exchanged in one step where the file system can do that.

    Raises:
        CheckpointError: ``path`` cannot be written to, see :func:`check_free`. Raised before anything is created.
    """
    final = check_free(path, overwrite=overwrite)
    final.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}.partial-", dir=final.parent))
    try:
        yield work
        usual_modes(work)
        _sync_tree(work)
        check_free(final, overwrite=overwrite)
        _put(work, final)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    sync_path(final.parent)


def _put(work: Path, final: Path) -> None:
    """Rename ``work`` to ``final``; what was there before ends up deleted."""
    if not final.exists():
        os.rename(work, final)
        return
    if not any(final.iterdir()):
        os.replace(work, final)
        return
    if _exchange(work, final):
        shutil.rmtree(work)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{final.name}.old-", dir=final.parent))
    os.replace(final, old)
    try:
        os.rename(work, final)
    except BaseException:
        os.rename(old, final)
        raise
    shutil.rmtree(old)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one step (Linux ``renameat2``); False where the system or file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    failed = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _sync_tree(root: Path) -> None:
    """Flush every file and directory below ``root`` to disk."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            sync_path(Path(folder, name))
        sync_path(Path(folder))
