"""Ctrl-C ends the process, soon and with one line.

What a half-finished import makes of a KeyboardInterrupt may look like any other error, or be swallowed; and a process
that ends may wait for a thread that does not. So the press is noted, and a thread of this module ends the process when
it has not ended by itself.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

__all__ = ["GRACE_SECONDS", "STATUS", "install", "pressed", "tell"]

STATUS = 130
"""Exit status after Ctrl-C, as shells have it."""

GRACE_SECONDS = 5.0
"""For cleaning up after Ctrl-C; then the process ends whatever it is doing."""

_press = threading.Event()
_told = threading.Event()


def install() -> None:
    """Note Ctrl-C from now on; the first raises KeyboardInterrupt, a second one ends the process at once.

    A process that ignores SIGINT (``nohup``, a shell's background job) goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, _note):
        return
    threading.Thread(target=_end, name="mtsp-interrupt", daemon=True).start()
    signal.signal(signal.SIGINT, _note)


def pressed() -> bool:
    """Whether it was pressed."""
    return _press.is_set()


def tell(hint: str = "") -> None:
    """The closing line on standard error, once; with what to do next, where there is something."""
    if not _told.is_set():
        _told.set()
        os.write(2, f"interrupted{f': {hint}' if hint else ''}\n".encode())


def _note(number: int, frame: FrameType | None) -> None:
    if _press.is_set():
        tell()
        os._exit(STATUS)
    _press.set()
    raise KeyboardInterrupt


def _end() -> None:
    _press.wait()
    threading.Event().wait(GRACE_SECONDS)
    tell()
    os._exit(STATUS)
