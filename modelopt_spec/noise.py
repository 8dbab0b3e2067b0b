"""Messages of libraries that a user of this package can do nothing about: exactly these are left out, none else."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

__all__ = ["MESSAGES", "filtered"]

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

_GENERATION = "transformers.generation.configuration_utils"
_MIN_P = "generation flags are not valid and may be ignored: ['min_p']"
"""Logged for a greedy answer of a target whose generation config names a min_p."""


class _NotMinP(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return _MIN_P not in record.getMessage()


@contextlib.contextmanager
def filtered(*, everything: bool = False) -> Iterator[None]:
    """Leave :data:`MESSAGES` out while the block runs; with ``everything`` they are shown as well."""
    if everything:
        yield
        return
    logger, min_p = logging.getLogger(_GENERATION), _NotMinP()
    logger.addFilter(min_p)
    try:
        with warnings.catch_warnings():
            for message in MESSAGES:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        logger.removeFilter(min_p)
