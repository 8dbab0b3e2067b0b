"""`mtsp data inspect` and `prepare` on rows that cannot be used: told, counted and kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from modelopt_spec import cli, cli_data, cli_run
from tests.data import tiny

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call a command on the tiny tokenizer: exit status, standard output, standard error."""
    real = cli_data.call
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        cli_data, "call", lambda name, *a, **k: tiny.make_tokenizer() if "tokenizer" in name else real(name, *a, **k)
    )
    Path("target").mkdir()

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        cli.console.file = None  # type: ignore[assignment]
        status = cli_run.run(cli.application(), ["data", *arguments, "--target", "./target"], debug=False)
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """Six good rows and six bad ones, of two kinds."""
    lines = [json.dumps(tiny.chat(f"Question {i}?", "An answer that is long enough.")) for i in range(6)]
    lines += ['{"messages": 5}'] * 2 + ["{not json"] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return "rows.jsonl"


def test_inspect_shows_what_training_would_refuse(run: Run, rows: str) -> None:
    status, out, err = run("inspect", rows, "--rejects", "bad.jsonl", "--rows", "0", "--json", "found.json")
    assert status == 0, err
    report = json.loads(Path("found.json").read_text())["report"]
    assert report["skipped"] == {"unknown_shape": 2, "not_json": 4}
    assert (report["rows_read"], report["rows_kept"]) == (12, 6)
    assert "rows left out" in out
    for reason, count, line in (("not_json", 4, 9), ("unknown_shape", 2, 7)):
        shown = next(text for text in out.splitlines() if text.strip().startswith(reason))
        assert f" {count} " in shown
        assert f"rows.jsonl:{line}: " in shown
    assert "6 of 12 rows cannot be used: training stops there" in out
    rejects = [json.loads(text) for text in Path("bad.jsonl").read_text().splitlines()]
    assert sorted(entry["line"] for entry in rejects) == [7, 8, 9, 10, 11, 12]


def test_prepare_names_the_file_that_it_leaves(run: Run, rows: str) -> None:
    status, _, err = run("prepare", rows, "--out", "prepared")
    assert status == 2
    line = next(text for text in err.splitlines() if text.startswith("error: "))
    assert line.endswith("all of them: prepared.rejects.jsonl")
    assert len(Path("prepared.rejects.jsonl").read_text().splitlines()) == 6
    assert not Path("prepared").exists()
