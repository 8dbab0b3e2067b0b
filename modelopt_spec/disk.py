"""What every writer and reader of files needs of the disk: bytes that are really there, and their checksum."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

__all__ = ["sha256_of", "sync_path"]


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
