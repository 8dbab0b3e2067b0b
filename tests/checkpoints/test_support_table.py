"""The support table says what really happens: every cell is exported, or refused, here; the docs hold the result."""

import io
import json
import os
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from modelopt_spec.checkpoints.engines import ENGINES, ExportPlan, plan_export, print_support_table, support_table
from modelopt_spec.checkpoints.engines.table import KINDS, example, markdown
from modelopt_spec.checkpoints.export import write_draft
from modelopt_spec.checkpoints.layouts import LAYOUTS, Draft, expected_shapes
from modelopt_spec.checkpoints.preflight import check
from modelopt_spec.errors import UnsupportedError

DOCS = Path(__file__).parents[2] / "docs" / "engines.md"
PROOFS = DOCS.parent / "results" / "engine_proofs.json"
BEGIN, END = "<!-- support table: begin -->\n", "<!-- support table: end -->\n"
CELLS = [(kind, engine) for kind in KINDS for engine in ENGINES]


def random_draft(kind: str) -> Draft:
    config = example(kind)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.zeros(shape, dtype=torch.long)
        if name == "d2t"
        else torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)
        for name, shape in expected_shapes(config).items()
    }
    dtype = torch.bfloat16 if config.head.type == "gru" else torch.float32
    rows = {name: torch.zeros(97, 32, dtype=dtype) for name in ("embed_tokens.weight", "lm_head.weight")}
    shared = rows if config.backbone.layer_style == "gemma4" else {}
    return Draft(config, {n: t if n == "d2t" else t.to(dtype) for n, t in tensors.items()}, shared=shared)


@pytest.mark.parametrize(("kind", "engine"), CELLS)
def test_cell(tmp_path, kind, engine):
    row = next(row for row in support_table()["rows"] if row["kind"] == kind)
    cell = row["engines"][engine]
    draft = random_draft(kind)
    for layout in cell["served"]:
        plan = plan_export(draft.config, [engine], layout=layout, dtype=draft.dtype)
        assert plan.engines == (engine,)
        assert "DIR" in plan.launch("TARGET", "DIR")[engine]
        (tmp_path / layout).mkdir()
        write_draft(draft, plan, tmp_path / layout)
        report = check(tmp_path / layout, None, [engine], trained=draft.config, dynamic=False)
        assert report.disagreements == (), layout
    for layout in set(row["layouts"]) - set(cell["served"]):
        with pytest.raises(UnsupportedError):
            plan_export(draft.config, [engine], layout=layout, dtype=draft.dtype)
    if not cell["served"]:
        with pytest.raises(UnsupportedError, match=r"cannot export for") as caught:
            plan_export(draft.config, [engine], dtype=draft.dtype)
        assert cell["reason"] in str(caught.value)


def test_every_written_layout_is_in_the_table():
    named = {layout for row in support_table()["rows"] for layout in row["layouts"]}
    config = example("DSpark vanilla")
    only_read = {name for name, layout in LAYOUTS.items() if "only read" in (layout.refuses(config) or "")}
    assert only_read == {"modelopt_training"}
    assert named >= {"deepspec", "zlab", "domino", "speculators", "specforge", "modelopt", "nemotron"}


def proofs():
    """(kind, layout, engine) that the tests of tests/engines served, as their last run recorded it."""
    if not PROOFS.is_file():
        return set()
    entries = json.loads(PROOFS.read_text())["proofs"]
    return {(e["drafter"], e["layout"], e["engine"]) for e in entries if e["result"] == "passed"}


def test_documentation_holds_the_table():
    """Set MTSP_UPDATE_DOCS=1 to write it; what is bold there must have been served."""
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    if os.environ.get("MTSP_UPDATE_DOCS") == "1":
        DOCS.write_text(f"{before}{BEGIN}{markdown(support_table(), proofs())}{END}{after}")
    written = DOCS.read_text().split(BEGIN)[1].split(END)[0]
    stale = "docs/engines.md is out of date: run this test with MTSP_UPDATE_DOCS=1"
    assert written.replace("**", "") == markdown(support_table()), stale
    names = [engine["name"] for engine in support_table()["engines"]]
    for line in written.splitlines():
        kind, *cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        for engine, cell in zip(names, cells):
            for layout in re.findall(r"\*\*(\w+)\*\*", cell):
                assert (kind, layout, engine) in proofs(), stale


def test_served_layouts_are_bold():
    table = support_table()
    text = markdown(table, {("DSpark vanilla", "deepspec", "vllm")})
    row = next(line for line in text.splitlines() if line.startswith("| DSpark vanilla |"))
    assert row.count("**deepspec**") == 1
    assert text.replace("**", "") == markdown(table)


def test_prints():
    out = io.StringIO()
    print_support_table(support_table(), Console(file=out, width=200))
    assert "Domino" in out.getvalue()


def test_engines_that_share_one_directory():
    config = example("DFlash, bonus anchor (z-lab)")
    plan = plan_export(config, ["vllm", "llama_cpp", "sglang", "tensorrt-llm"])
    assert plan.layout.name == "zlab"
    assert plan.engines == ("vllm", "llama.cpp", "sglang", "tensorrt_llm")


def test_two_engines_that_cannot_share_a_directory(monkeypatch):
    """SGLang reads a headless bonus-anchor draft as z-lab's only; the other engine is made to read DeepSpec's only."""
    engine = ENGINES["llama.cpp"]
    rules = engine.refuses
    monkeypatch.setattr(engine, "refuses", lambda s: rules(s) or (None if s.layout == "deepspec" else "another layout"))
    with pytest.raises(UnsupportedError, match=r"sglang and llama.cpp cannot share one directory.*Export twice"):
        plan_export(example("DFlash, bonus anchor (z-lab)"), ["sglang", "llama.cpp"])


def test_plan_is_independent_of_the_layouts_order():
    config = example("DSpark vanilla")
    assert plan_export(config).layout.name == "deepspec"
    assert plan_export(config, ["tensorrt_llm", "vllm"]).layout.name in ("deepspec", "speculators")
    assert isinstance(plan_export(config), ExportPlan)
