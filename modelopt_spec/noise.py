"""Messages of libraries that a user of this package can do nothing about: exactly these are left out, none else."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["MESSAGES", "filtered", "own_warnings_as"]

MESSAGES = (
    # megatron-core, which ModelOpt imports where it is installed
    r"Transformer Engine and Apex are not installed\. Falling back",
    r"Apex is not installed\. Falling back to Torch Norm",
    # ModelOpt, about saving quantised Megatron models
    r"GPTModel\.sharded_state_dict is not the version ModelOpt patches",
    # torch, about float32 norms under bfloat16 autocast: they are meant to be so
    r"Mismatch dtype between input and weight: .* Cannot dispatch to fused implementation",
)
"""Beginnings of the warnings, as regular expressions."""

LOGGED = {
    "transformers.generation.configuration_utils": "generation flags are not valid and may be ignored: ['min_p']",
    "transformers.generation.utils": "Both `min_new_tokens` (=0) and `min_length`(=0) seem to have been set",
}
"""Parts of what is logged, by logger: about fields that a neutral generation config holds at values of no effect."""


class _Without(logging.Filter):
    """Lets everything through but one message."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self.message = message

    def filter(self, record: logging.LogRecord) -> bool:
        return self.message not in record.getMessage()


@contextlib.contextmanager
def filtered(*, everything: bool = False) -> Iterator[None]:
    """Leave :data:`MESSAGES` and :data:`LOGGED` out while the block runs; with ``everything`` they are shown too."""
    if everything:
        yield
        return
    with contextlib.ExitStack() as stack:
        for name, message in LOGGED.items():
            logger, without = logging.getLogger(name), _Without(message)
            logger.addFilter(without)
            stack.callback(logger.removeFilter, without)
        stack.enter_context(warnings.catch_warnings())
        for message in MESSAGES:
            warnings.filterwarnings("ignore", message=message)
        yield


@contextlib.contextmanager
def own_warnings_as(show: Callable[[str], None]) -> Iterator[None]:
    """Hand the texts of this package's own warnings to ``show`` instead of printing where in the code they arose."""
    package = str(Path(__file__).parent)
    with warnings.catch_warnings():
        original = warnings.showwarning

        def showwarning(
            message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
        ) -> None:
            if category is UserWarning and filename.startswith(package):
                show(str(message))
            else:
                original(message, category, filename, lineno, file, line)

        warnings.showwarning = showwarning
        yield
