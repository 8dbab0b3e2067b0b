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
from collections.abc import Iterator
from pathlib import Path

from modelopt_spec.disk import sync_path
from modelopt_spec.errors import CheckpointError

__all__ = ["atomic_directory", "check_free"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_free(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """The absolute form of a path that a directory may be written to.

    Raises:
        CheckpointError: the path is a file, a directory that is not empty (without ``overwrite``), or one that must
            never be replaced as a whole (the home or working directory, or a parent of it).
    """
    final = Path(path).expanduser().absolute()
    if final.is_symlink():
        final = final.resolve()
    if final.exists() and not final.is_dir():
        raise CheckpointError(f"{final} is a file: name a directory to write to")
    if final.is_dir() and any(final.iterdir()):
        if not overwrite:
            raise CheckpointError(
                f"{final} exists and is not empty: name another directory, or pass overwrite (--overwrite)"
            )
        for kept in (Path.cwd(), Path.home()):
            if kept.is_relative_to(final):
                raise CheckpointError(f"{final} holds {kept}, which overwriting would delete: name another directory")
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
        work.chmod(0o777 & ~_umask())
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


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync_tree(root: Path) -> None:
    """Flush every file and directory below ``root`` to disk."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            sync_path(Path(folder, name))
        sync_path(Path(folder))
