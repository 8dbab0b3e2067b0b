"""What the engine tests proved, as JSON, and the table that the documentation shows.

A test asks for the ``proof`` fixture and says what it serves and what it compared; the session's end merges all proofs
into the file that ``MTSP_ENGINE_PROOFS`` names, by test, so that the parts may run one after the other::

    {"kind": "mtsp.engine_proofs", "version": 1, "proofs": [
      {"test": str, "engine": str, "engine_version": str, "drafter": str (a row of the support table), "layout": str,
       "block_layout": "anchor_first" | "bonus_anchor", "head": str, "draft": str, "target": str,
       "compared": [{"what": str, "count": int, "worst": float | null}],
       "result": "passed" | "failed", "date": str, "seconds": float, "command": str}]}

``python -m tests.engines.proofs`` writes the table into docs/results/engines.md anew.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KIND, VERSION = "mtsp.engine_proofs", 1
ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "results" / "engine_proofs.json"
PAGE = ROOT / "docs" / "results" / "engines.md"
BEGIN, END = "<!-- proofs: begin -->\n", "<!-- proofs: end -->\n"
RULES_ONLY = ("sglang", "tensorrt_llm")
"""Engines that need a GPU: their files are checked against their parsers' rules."""


@dataclass
class Proof:
    """One test's claim, filled in by the test."""

    test: str
    engine: str = ""
    engine_version: str = ""
    drafter: str = ""
    """Row of the support table."""
    layout: str = ""
    block_layout: str = ""
    head: str = ""
    draft: str = ""
    target: str = ""
    compared: list[dict[str, Any]] = field(default_factory=list)

    def serves(self, engine: str, engine_version: str, **subject: str) -> None:
        """Say what is served, and by what."""
        self.engine, self.engine_version = engine, engine_version
        for name, value in subject.items():
            setattr(self, name, value)

    def found(self, what: str, count: int, worst: float | None = None) -> None:
        """Say what was compared: how many of them, and the worst difference where they are no ids."""
        if count < 1:
            raise AssertionError(f"nothing was compared: {what}")
        self.compared.append({"what": what, "count": count, "worst": worst})

    def entry(self, result: str, seconds: float, date: str, command: str) -> dict[str, Any]:
        """The JSON form."""
        run = {"result": result, "date": date, "seconds": round(seconds, 1), "command": command}
        return {**vars(self), **run}


def read(path: Path = FILE) -> list[dict[str, Any]]:
    """Proofs of a file; none where there is no file."""
    if not path.is_file():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    if (content["kind"], content["version"]) != (KIND, VERSION):
        found = f"kind {content['kind']!r}, version {content['version']}"
        raise ValueError(f"{path} is of {found}: expected {KIND!r}, version {VERSION}")
    return content["proofs"]


def merge(entries: list[dict[str, Any]], path: Path) -> None:
    """Put the entries of a session into a file, in place of older ones of the same tests."""
    known = {entry["test"]: entry for entry in read(path)}
    known |= {entry["test"]: entry for entry in entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"kind": KIND, "version": VERSION, "proofs": [known[test] for test in sorted(known)]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def table(entries: list[dict[str, Any]]) -> str:
    """Each kind of drafter and layout with each engine: served in a test, refused and why, or rules only."""
    from modelopt_spec.checkpoints.engines import support_table

    rules = support_table()
    served: dict[tuple[str, str, str], list[str]] = {}
    for entry in entries:
        if entry["result"] == "passed":
            key = (entry["drafter"], entry["layout"], entry["engine"])
            served.setdefault(key, []).append(entry["test"])
    reasons: dict[str, int] = {}
    head = ["drafter", "layout", *(engine["title"] for engine in rules["engines"])]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rules["rows"]:
        for layout in row["layouts"]:
            cells = [
                _cell(served.get((row["kind"], layout, name), []), cell, layout, name, reasons)
                for name, cell in row["engines"].items()
            ]
            lines.append("| " + " | ".join([row["kind"], layout, *cells]) + " |")
    extra = sorted({key for key in served if key[0] not in {row["kind"] for row in rules["rows"]}})
    for kind, layout, engine in extra:
        cells = ["served" if name == engine else "-" for name in (e["name"] for e in rules["engines"])]
        lines.append("| " + " | ".join([kind, layout, *cells]) + " |")
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items())]
    return "\n".join(lines) + "\n"


def _cell(tests: list[str], rule: dict[str, Any], layout: str, engine: str, reasons: dict[str, int]) -> str:
    """``served`` where a test did it, ``no (n)`` where the rules refuse every layout, ``-`` where only this one."""
    if tests:
        return "**served**"
    if layout in rule["served"]:
        return "file rules" if engine in RULES_ONLY else "by the rules"
    if rule["served"]:
        return "-"
    return f"no ({reasons.setdefault(rule['reason'], len(reasons) + 1)})"


def details(entries: list[dict[str, Any]]) -> str:
    """One line for each draft that an engine served: what all tests of it compared."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        engine = f"{entry['engine']} ({entry['engine_version']})"
        groups.setdefault((engine, entry["drafter"], entry["layout"], entry["draft"]), []).append(entry)
    lines = ["| engine | drafter | layout | draft | compared | result |", "|---|---|---|---|---|---|"]
    for key, group in groups.items():
        compared = [_compared(item) for entry in group for item in entry["compared"]]
        result = "passed" if all(entry["result"] == "passed" for entry in group) else "failed"
        lines.append("| " + " | ".join([*key, "; ".join(dict.fromkeys(compared)), result]) + " |")
    return "\n".join(lines) + "\n"


def _compared(item: dict[str, Any]) -> str:
    worst = "" if item["worst"] is None else f" (within {item['worst']:.1e})"
    return f"{item['count']} {item['what']}{worst}"


def page(text: str, entries: list[dict[str, Any]]) -> str:
    """A page with the part between its markers written anew."""
    part = BEGIN + "\n" + table(entries) + "\n" + details(entries) + "\n" + END
    if not re.search(re.escape(BEGIN) + r".*" + re.escape(END), text, re.DOTALL):
        raise ValueError(f"the page has no part between {BEGIN.strip()} and {END.strip()}")
    before, rest = text.split(BEGIN, 1)
    return before + part + rest.split(END, 1)[1]


def main() -> None:
    """Write the documentation's table anew."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")


if __name__ == "__main__":
    main()
