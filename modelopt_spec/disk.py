"""What every writer and reader of files needs of the disk: bytes that are really there, and their checksum."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

__all__ = ["sha256_of", "sync_path", "usual_modes"]


def sha256_of(path: Path) -> str:
    """Checksum of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_path(path: Path) -> None:
    """Flush a file or directory to disk, where its file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def usual_modes(root: Path) -> None:
    """Give a directory and all in it the modes that the umask grants; temporary ones are their owner's alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    for folder, _, files in os.walk(root):
        Path(folder).chmod(0o777 & ~mask)
        for name in files:
            Path(folder, name).chmod(0o666 & ~mask)
