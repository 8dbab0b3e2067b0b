"""What `inspect` shows: marked rows, histograms that add up, a figure and a table."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from modelopt_spec.data import DataConfig, load_rows
from modelopt_spec.data.inspection import SEGMENT_STYLE, SUPERVISED_STYLE, inspect_rows, marked_row
from modelopt_spec.reports.data import data_figure, data_table
from tests.data import tiny


@pytest.fixture
def source(tmp_path) -> str:
    rows = [tiny.chat(f"Question {i}?", f"Answer number {i}." + " Really." * (i % 5)) for i in range(20)]
    rows.append(tiny.chat("Again?", "and again and again it goes on " * 5))
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("pack", [False, True])
def test_statistics_add_up(source: str, pack: bool) -> None:
    dataset, report = load_rows(source, tiny.make_tokenizer(), DataConfig(pack=pack, max_length=200))
    found = inspect_rows(dataset, report)
    assert found["conversations"] == 21
    assert (found["samples"], found["tokens"]) == (len(dataset), report.tokens)
    assert found["supervised_tokens"] == report.supervised_tokens
    for key in ("length", "supervised_tokens_per_sample", "supervised_share"):
        assert sum(found[key]["histogram"]["counts"]) == len(dataset)
        assert found[key]["p5"] <= found[key]["p50"] <= found[key]["p95"] <= found[key]["max"]
    assert found["length"]["max"] == report.longest
    assert found["looping_share"] == pytest.approx(1 / 21)
    assert json.loads(json.dumps(found)) == found


def test_supervised_text_is_marked(source: str) -> None:
    tokenizer = tiny.make_tokenizer()
    dataset, _ = load_rows(source, tokenizer, DataConfig(shuffle=False))
    text = marked_row(dataset[3], tokenizer)
    assert text.plain == tokenizer.decode(dataset[3]["input_ids"])
    green = [text.plain[span.start : span.end] for span in text.spans if span.style == SUPERVISED_STYLE]
    assert green == ["Answer number 3. Really. Really. Really.<|im_end|>"]
    rest = len(dataset[3]["input_ids"]) - 5
    assert marked_row(dataset[3], tokenizer, max_tokens=5).plain.endswith(f"{rest} more tokens")
    packed, _ = load_rows(source, tokenizer, DataConfig(pack=True, max_length=200))
    row = max(packed, key=lambda row: row["segment_ids"].max())
    rules = [span for span in marked_row(row, tokenizer).spans if span.style == SEGMENT_STYLE]
    assert len(rules) == row["segment_ids"].max()


def test_figure_and_table(source: str, tmp_path) -> None:
    dataset, report = load_rows(source, tiny.make_tokenizer(), DataConfig(skip_looping=True))
    found = inspect_rows(dataset, report)
    assert data_figure(found, tmp_path / "x" / "data.png").stat().st_size > 5000
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(data_table(found))
    shown = console.export_text()
    assert "left out: looping" in shown
    assert report.fingerprint[:16] in shown
    assert data_figure(inspect_rows(dataset.select([])), tmp_path / "empty.png").exists()
