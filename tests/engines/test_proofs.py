"""The record of what engines served, and that the documentation shows what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines import proofs


def entry(test: str, **changes: object) -> dict[str, object]:
    claim = proofs.Proof(test)
    claim.serves("vllm", "0.32.0", drafter="DSpark vanilla", layout="deepspec", draft="trained")
    claim.found("blocks", 12)
    claim.found("confidences", 84, 2e-7)
    return {**claim.entry("passed", 1.25, "2026-11-29T00:00:00+00:00", "pytest -m engines"), **changes}


def test_a_later_session_replaces_its_own_tests_only(tmp_path: Path) -> None:
    file = tmp_path / "results" / "proofs.json"
    proofs.merge([entry("a"), entry("b")], file)
    proofs.merge([entry("b", result="failed")], file)
    assert [(one["test"], one["result"]) for one in proofs.read(file)] == [("a", "passed"), ("b", "failed")]
    file.write_text(json.dumps({"kind": "other", "version": 1, "proofs": []}))
    with pytest.raises(ValueError, match="kind 'other'"):
        proofs.read(file)


def test_a_proof_compares_something() -> None:
    with pytest.raises(AssertionError, match="nothing was compared"):
        proofs.Proof("a").found("blocks", 0)


def test_table_tells_served_refused_and_rules_apart() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in proofs.table([entry("a")]).splitlines()]
    head = rows[0]
    vanilla = next(dict(zip(head, row)) for row in rows if row[:2] == ["DSpark vanilla", "deepspec"])
    assert (vanilla["vLLM"], vanilla["SGLang"], vanilla["llama.cpp"]) == ("**served**", "file rules", "by the rules")
    domino = next(dict(zip(head, row)) for row in rows if row[:2] == ["Domino", "domino"])
    assert domino["vLLM"].startswith("no (") and domino["SGLang"] == "file rules"
    failed = proofs.table([entry("a", result="failed")])
    assert "**served**" not in failed
    assert "84 confidences (within 2.0e-07)" in proofs.details([entry("a")])


def test_the_page_shows_the_recorded_proofs() -> None:
    text, entries = proofs.PAGE.read_text(encoding="utf-8"), proofs.read()
    assert proofs.details(entries) in text, "run python -m tests.engines.proofs"
    assert proofs.page(text, entries).count("**served**") == text.count("**served**")
    assert entries and all(entry["result"] == "passed" for entry in entries)
