"""Where results may go: never onto what is read, what is of another kind, or what a run is made of."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from modelopt_spec import noise
from modelopt_spec.errors import ConfigError
from modelopt_spec.outputs import check_outputs


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "drafter").mkdir(parents=True)
    for name in (
        "run/report.json",
        "run/drafter/drafter.json",
        "prompts.jsonl",
        "mine.yaml",
        "old.json",
        "report.json",
    ):
        (tmp_path / name).write_text("{}")
    return tmp_path


REFUSED = {
    "read": ({"out": "prompts.jsonl"}, "is a file that this command reads"),
    "twice": ({"out": "a.json", "rounds_out": "./a.json"}, "out and rounds_out both|rounds_out and out both"),
    "directory": ({"out": "run"}, "no ordinary file"),
    "below a file": ({"--json": "mine.yaml/x.json"}, "below .*mine.yaml, which is a file"),
    "recipe": ({"--json": "mine.yaml"}, "not named like a result"),
    "report of a run": ({"--rounds": "run/report.json"}, "part of the run or drafter in run"),
    "description of a drafter": ({"--json": "run/drafter/drafter.json"}, "part of the run or drafter"),
    "figure": ({"--figure": "a.xyz"}, "names no kind of figure"),
    "no path": ({"out": 3}, "out is 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_places_that_are_refused(case: str, place: Path) -> None:
    outputs, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        check_outputs(outputs, ["prompts.jsonl"])  # type: ignore[arg-type]


def test_places_that_are_taken(place: Path) -> None:
    (place / "empty.txt").touch()
    check_outputs({"--json": Path("-"), "--figure": "new/place/a.svg", "--out": "old.json", "--rounds": None})
    check_outputs({"--json": "report.json", "--out": "empty.txt"}, [None, "missing.jsonl"])


def test_own_warnings_are_one_line_and_others_stay() -> None:
    shown: list[str] = []
    with warnings.catch_warnings(record=True) as others, noise.own_warnings_as(shown.append):
        warnings.simplefilter("always")
        warnings.warn_explicit("of ours", UserWarning, noise.__file__, 1)
        warnings.warn_explicit("of somebody else", UserWarning, "/elsewhere/x.py", 1)
    assert shown == ["of ours"]
    assert [str(other.message) for other in others] == ["of somebody else"]
