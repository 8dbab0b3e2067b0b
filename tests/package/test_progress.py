"""Progress where nobody watches: a line now and then, none for short loops, none when quiet."""

from __future__ import annotations

import io
import sys
import time

import pytest

from modelopt_spec.progress import LINE_SECONDS, ProgressLines, heartbeat, progress


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lines_are_spaced_and_say_how_far_and_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = ProgressLines("train", 800, clock)
    for step in range(1, 801):
        clock.now += 0.5
        lines.advance(note=f"loss {step}")
    lines.close()
    out, err = capsys.readouterr()
    told = err.splitlines()
    assert out == ""
    assert told[0] == "train: 24/800 (3%), 0:12 passed, about 6:28 left, loss 24"
    assert told[-1] == "train: 800/800 (100%), 6:40 passed, loss 800"
    assert len(told) == 400 // LINE_SECONDS + 1


def test_a_short_loop_and_an_unknown_end(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    short = ProgressLines("read", 10, clock)
    for _ in range(10):
        clock.now += 1
        short.advance()
    short.close()
    assert capsys.readouterr().err == ""
    endless = ProgressLines("read", None, clock)
    clock.now += 3700
    endless.advance(12_345)
    assert capsys.readouterr().err == "read: 12,345, 1:01:40 passed\n"


@pytest.mark.parametrize(("quiet", "lines"), [(False, 2), (True, 0)])
def test_quiet_says_nothing(quiet: bool, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr("modelopt_spec.progress.LINE_SECONDS", 0.0)
    with progress("evaluate", 2, quiet=quiet) as advance:
        advance()
        advance()
    assert err.getvalue().count("evaluate: ") == lines


@pytest.mark.parametrize("quiet", [False, True])
def test_a_silent_command_shows_that_it_lives(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with heartbeat("mtsp profile", quiet=quiet, every=0.05):
        end = time.monotonic() + 20
        while (err := capsys.readouterr().err) == "" and time.monotonic() < end and not quiet:
            time.sleep(0.01)
    assert err == ("" if quiet else "mtsp profile: at work, 0:00 passed\n")
    time.sleep(0.15)
    assert capsys.readouterr().err == "", "it ends with the command"
