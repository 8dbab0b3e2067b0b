"""`mtsp report`: one page, complete, that asks for nothing from anywhere."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from modelopt_spec.decoding.rounds import RoundRecord
from modelopt_spec.decoding.statistics import round_statistics
from modelopt_spec.errors import CheckpointError
from modelopt_spec.reports.page import write_report
from modelopt_spec.reports.run import collect
from modelopt_spec.reports.training import running_mean, series
from modelopt_spec.scheduling.calibrate import calibrate_rounds
from modelopt_spec.scheduling.calibration import CalibrationOptions
from modelopt_spec.scheduling.sweep import simulate_loads
from tests.scheduling.synthetic import memory_bound_cost, round_table

VOID = {"meta", "img", "br", "hr", "input", "link"}


class Page(HTMLParser):
    """Tags in order, with a check that they nest, and every attribute that could load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: list[str] = []
        self.images: list[tuple[str, str]] = []
        self.loads: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        if tag == "section":
            self.sections.append(values["id"] or "")
        if tag == "img":
            self.images.append((values["alt"] or "", values["src"] or ""))
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "poster")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def training_report() -> dict[str, Any]:
    curves = [
        {
            "step": step,
            "loss": 5.0 - step / 100,
            "ce": 4.0 - step / 100,
            "tau": 1.0 + step / 200,
            "grad_norm": 0.5,
            "learning_rate": 1e-3,
            "acceptance/0": step / 300,
            "acceptance/1": step / 400,
        }
        for step in range(10, 110, 10)
    ]
    data = {"samples": 12, "tokens": 3400, "supervised_tokens": 560, "fingerprint": "f" * 64}
    return {
        "kind": "modelopt_spec.training_report",
        "version": 1,
        "versions": {"modelopt_spec": "0.1.0", "torch": "2.13.0"},
        "recipe": {
            "metadata": {"name": "dspark/tiny & <co>", "description": "a test"},
            "model": {"name_or_path": "path/to/<target>"},
        },
        "seed": 3,
        "data": {"train": data, "validation": None},
        "steps": 100,
        "stopped_by": "max_minutes",
        "seconds": 125.0,
        "rows_without_supervision": 0,
        "rows_per_step": 4,
        "trainable_parameters": 14_037_249,
        "device": "cpu",
        "world_size": 1,
        "curves": [*curves, {"train_loss": 4.0, "step": 100}],
    }


def evaluation() -> dict[str, Any]:
    records = [
        RoundRecord(p, r, 3, (1, 2), 2, (p + r) % 3, (p + r) % 3 + 1, 0.0, 3) for p in range(4) for r in range(6)
    ]
    stats = {
        **round_statistics(records, 2),
        "prompts": 4,
        "answers": 4,
        "new_tokens": 40,
        "looping_share": 0.0,
        "tau_interval": [1.8, 2.2],
        "stopped": {"eos": 4},
        "tokens_per_second": 10.0,
        "seconds": {},
    }
    return {
        "kind": "mtsp.evaluation",
        "version": 1,
        "model": "m",
        "dtype": "float32",
        "device": "cpu",
        "versions": {"modelopt_spec": "0.1.0"},
        "seed": 0,
        "num_draft_tokens": 2,
        "prompts": {"files": [{"name": "held", "sha256": "a" * 64}]},
        "results": [{"temperature": 0.0, "pooled": stats, "files": {"held": stats}, "per_prompt": []}],
        "control": {"tau": 2.1, "tau_same_prompts": 2.0, "falls": False},
        "baseline": {
            "prompts": 4,
            "tokens_per_second": 8.0,
            "speculative_tokens_per_second": 12.0,
            "speedup": 1.5,
            "equal_outputs": 1.0,
        },
        "warnings": ["every <token> was accepted"],
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory with a result of every kind that a report shows."""
    root = tmp_path_factory.mktemp("run")
    table = round_table(prompts=40, rounds=20)
    cost = memory_bound_cost()
    card = {"kind": "modelopt_spec.drafter_card", "version": 1, "layout": "deepspec", "dtype": "float32", "engines": {}}
    files = {
        "report.json": training_report(),
        "evaluation.json": evaluation(),
        "calibration.json": calibrate_rounds(round_table(), options=CalibrationOptions(bootstrap=4)),
        "simulation.json": simulate_loads(table, cost, loads=[1, 4], policies=["none", "fixed"]),
        "export/drafter_card.json": card,
        "other.json": {"kind": "something else"},
        "list.json": [1, 2],
    }
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    (root / "cut.json").write_text('{"kind": "mtsp.evaluation", ')
    return root


@pytest.fixture(scope="module")
def page(run: Path) -> tuple[dict[str, Any], str]:
    result = write_report(run)
    return result, Path(result["file"]).read_text(encoding="utf-8")


def test_shows_every_part(page: tuple[dict[str, Any], str]) -> None:
    result, text = page
    parsed = Page(text)
    assert parsed.sections == ["training", "evaluation", "calibration", "serving", "export", "provenance"]
    assert result["sections"] == parsed.sections
    named = {alternative for alternative, _ in parsed.images}
    assert {"training curves", "acceptance by slot", "reliability of each slot"} <= named
    assert "throughput against speed of a user" in named


def test_opens_without_a_network(page: tuple[dict[str, Any], str]) -> None:
    _, text = page
    parsed = Page(text)
    assert parsed.loads
    assert all(value.startswith("data:image/svg+xml;base64,") for value in parsed.loads)
    assert not parsed.tags & {"script", "link", "iframe", "object", "embed", "video", "audio"}
    assert not re.search(r"url\(|@import", text)
    for _, source in parsed.images:
        svg = base64.b64decode(source.split(",", 1)[1]).decode()
        assert svg.lstrip().startswith("<?xml")
        assert "<svg" in svg
        assert not re.search(r"href=\"(?!#)", svg), "a figure loads something"


def test_text_is_escaped(page: tuple[dict[str, Any], str]) -> None:
    _, text = page
    assert "dspark/tiny &amp; &lt;co&gt;" in text
    assert "<target>" not in text
    assert "every &lt;token&gt; was accepted" in text


def test_numbers_are_those_of_the_files(page: tuple[dict[str, Any], str]) -> None:
    _, text = page
    pooled = evaluation()["results"][0]["pooled"]
    assert f"<b>{pooled['tau']:.3f}</b>" in text
    assert "95% 1.80 to 2.20" in text
    assert "<b>14M</b>" in text
    assert "100</b><span>optimizer steps in 2 min" in text
    assert "<b>1.50×</b>" in text
    assert "stopped by max_minutes" in text
    assert "It does not fall." in text
    taus = series(training_report()["curves"], "tau")[1][-8:]
    assert f"<b>{sum(taus) / 8:.3f}</b>" in text


def test_names_its_sources_and_what_it_could_not_read(page: tuple[dict[str, Any], str], run: Path) -> None:
    result, text = page
    shown = {Path(source["path"]).name for source in result["sources"]}
    assert shown == {"report.json", "evaluation.json", "calibration.json", "simulation.json", "drafter_card.json"}
    assert all(source["sha256"] in text for source in result["sources"])
    assert "cut.json cannot be read and is left out" in text
    assert "something else" not in text


def test_results_from_elsewhere(run: Path, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "report.json").write_text(json.dumps(training_report()))
    alone = write_report(tmp_path / "alone", tmp_path / "one.html")
    both = write_report(tmp_path / "alone", tmp_path / "two.html", more=[run / "evaluation.json"])
    assert alone["sections"] == ["training", "provenance"]
    assert both["sections"] == ["training", "evaluation", "provenance"]
    assert not (tmp_path / "alone" / "report.html").exists()


def test_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        collect(tmp_path / "no")
    with pytest.raises(CheckpointError, match="holds no result of this package"):
        collect(tmp_path)
    (tmp_path / "report.json").write_text(json.dumps(training_report()))
    with pytest.raises(CheckpointError, match="is not a file"):
        collect(tmp_path, [tmp_path / "missing.json"])


def test_files_of_another_version_are_named_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(training_report()))
    (tmp_path / "comparison.json").write_text(
        json.dumps({"kind": "mtsp.recipe_comparison", "entries": [{"label": "x"}]})
    )
    result = write_report(tmp_path)
    assert [Path(source["path"]).name for source in result["sources"]] == ["report.json"]
    assert "comparison.json cannot be read and is left out: not what mtsp.recipe_comparison holds (KeyError" in (
        Path(result["file"]).read_text()
    )
    (tmp_path / "report.json").unlink()
    with pytest.raises(CheckpointError, match=r"comparison\.json: not what mtsp\.recipe_comparison holds"):
        write_report(tmp_path)


def test_running_mean() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert running_mean([1.0, 3.0], 1) == [1.0, 3.0]
