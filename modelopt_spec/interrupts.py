"""Whether Ctrl-C was pressed. What a half-finished import makes of it may look like any other error."""

from __future__ import annotations

import os
import signal
from types import FrameType

__all__ = ["STATUS", "install", "pressed", "tell"]

STATUS = 130
"""Exit status after Ctrl-C, as shells have it."""

_pressed = False


def install() -> None:
    """Note Ctrl-C from now on; the first raises KeyboardInterrupt, a second one ends the process at once.

    A process that ignores SIGINT (``nohup``, a shell's background job) goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _note)


def pressed() -> bool:
    """Whether it was pressed."""
    return _pressed


def tell(hint: str = "") -> None:
    """The closing line on standard error; with what to do next, where there is something."""
    os.write(2, f"interrupted{f': {hint}' if hint else ''}\n".encode())


def _note(number: int, frame: FrameType | None) -> None:
    global _pressed
    if _pressed:
        tell()
        os._exit(STATUS)
    _pressed = True
    raise KeyboardInterrupt
