"""Ending a run between two steps, with its state saved: on SIGTERM, or when its time is over."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback

__all__ = ["Interrupt"]


class Interrupt(TrainerCallback):
    """Watches for SIGTERM while it is entered, and for the deadline; all ranks stop after the same step.

    Args:
        max_minutes: time from now after which the run ends; None for no limit.

    ``reason`` is None, ``"SIGTERM"`` or ``"max_minutes"`` afterwards.
    """

    _REASONS = (None, "max_minutes", "SIGTERM")

    def __init__(self, max_minutes: float | None = None) -> None:
        self.deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self.reason: str | None = None
        self._signalled = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a save and the end of the run once any rank was told to stop."""
        late = self.deadline is not None and time.monotonic() >= self.deadline
        code = 2 if self._signalled else int(late)
        if args.world_size > 1:
            shared = torch.tensor(code, device=args.device)
            distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
            code = int(shared)
        if code:
            self.reason = self._REASONS[code]
            control.should_training_stop = control.should_save = True
