"""Known messages of libraries are left out, by their words; everything else is heard."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from modelopt_spec import noise

KNOWN = (
    "Transformer Engine and Apex are not installed. Falling back to Torch optimizers.",
    "Transformer Engine and Apex are not installed. Falling back to local implementations of multi_tensor_applier",
    "Apex is not installed. Falling back to Torch Norm",
    "Mismatch dtype between input and weight: input dtype = c10::BFloat16, weight dtype = float, Cannot dispatch to "
    "fused implementation. (Triggered internally at layer_norm.cpp:346.)",
)


@pytest.mark.parametrize("message", KNOWN)
def test_known_messages_are_left_out(message: str) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with noise.filtered():
            warnings.warn(message, UserWarning, stacklevel=1)
        assert heard == []
        warnings.warn(message, UserWarning, stacklevel=1)
        with noise.filtered(everything=True):
            warnings.warn(message, UserWarning, stacklevel=1)
        assert len(heard) == 2


def test_other_messages_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers.generation.configuration_utils")
    logger.addHandler(caplog.handler)
    try:
        with warnings.catch_warnings(record=True) as heard, noise.filtered():
            warnings.warn("Apex is installed in a version that is not supported", UserWarning, stacklevel=1)
            logger.warning("The following generation flags are not valid and may be ignored: ['min_p'].")
            logger.warning("The following generation flags are not valid and may be ignored: ['top_k', 'min_p'].")
        assert len(heard) == 1
        assert {record.getMessage().split(": ")[1] for record in caplog.records} == {"['top_k', 'min_p']."}
    finally:
        logger.removeHandler(caplog.handler)


def test_importing_what_converts_is_silent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import warnings; before = list(warnings.filters); import modelopt_spec.conversion"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


def test_loggers_are_as_before_afterwards() -> None:
    loggers = [logging.getLogger(name) for name in noise.LOGGED]
    before = [list(logger.filters) for logger in loggers]
    with noise.filtered():
        assert all(len(logger.filters) == len(old) + 1 for logger, old in zip(loggers, before, strict=True))
    assert [logger.filters for logger in loggers] == before
