"""What a preflight found: one line for each fact and engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from modelopt_spec.consoles import stderr_console

__all__ = ["Fact", "Report", "Verdict"]

Verdict = Literal["same", "differs", "fails", "harmless", "unknown"]
"""same: all that is known agrees. differs: it does not. fails: the engine will not load or serve it. harmless: it
differs where it makes no difference. unknown: nothing to compare with."""

_STYLE = {"same": "green", "differs": "bold red", "fails": "bold red", "harmless": "yellow", "unknown": "dim"}


@dataclass(frozen=True)
class Fact:
    """One fact, as one engine (or the files alone, engine ``""``) has it."""

    name: str
    engine: str
    trained: Any
    written: Any
    does: Any
    verdict: Verdict
    note: str = ""

    @property
    def bad(self) -> bool:
        """Whether training and serving disagree here."""
        return self.verdict in ("differs", "fails")


@dataclass(frozen=True)
class Report:
    """Everything that was checked in one directory."""

    directory: Path
    layout: str
    engines: tuple[str, ...]
    facts: tuple[Fact, ...]
    not_served: dict[str, str]
    """Engines that nobody asked for and that do not serve the directory, with the reason."""
    skipped: tuple[str, ...] = ()
    """Checks that could not run, and why."""
    warnings: tuple[str, ...] = ()
    """What may be meant so, and lowers acceptance if it is not."""

    @property
    def ok(self) -> bool:
        """Whether training and serving agree on everything that was checked."""
        return not any(fact.bad for fact in self.facts)

    @property
    def exit_status(self) -> int:
        """0, or 1 on any disagreement."""
        return 0 if self.ok else 1

    @property
    def disagreements(self) -> tuple[str, ...]:
        """Names of the facts on which training and serving disagree, each once."""
        return tuple(dict.fromkeys(fact.name for fact in self.facts if fact.bad))

    def summary(self) -> str:
        """One line: ``ok: 31 facts agree``, or how many disagree and their names; what could not be compared, too."""
        unknown = sum(fact.verdict == "unknown" for fact in self.facts)
        rest = f", {unknown} not known" if unknown else ""
        if self.warnings:
            rest += f", {len(self.warnings)} warning{'s' if len(self.warnings) > 1 else ''}"
        if self.ok:
            return f"ok: {len(self.facts) - unknown} facts agree{rest}"
        names = self.disagreements
        count = f"{len(names)} facts disagree" if len(names) > 1 else "1 fact disagrees"
        return f"{count}: {', '.join(names)}{rest}"

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for ``--json``."""
        return {
            "directory": str(self.directory),
            "layout": self.layout,
            "engines": list(self.engines),
            "ok": self.ok,
            "disagreements": list(self.disagreements),
            "facts": [asdict(fact) for fact in self.facts],
            "not_served": dict(self.not_served),
            "skipped": list(self.skipped),
            "warnings": list(self.warnings),
        }

    def show(self, console: Console | None = None, *, everything: bool = True) -> None:
        """Print one line for each fact; engines that do the same share a line."""
        console = console or stderr_console()
        table = Table(
            "fact",
            "trained",
            "written",
            "engine will do",
            "verdict",
            title=f"{self.directory} ({self.layout})",
            title_justify="left",
            show_edge=False,
        )
        groups = _groups(self.facts)
        for group in groups:
            first = group[0]
            if not (everything or first.bad):
                continue
            alone = sum(other[0].name == first.name for other in groups) == 1
            engines = "" if alone else " ".join(fact.engine for fact in group if fact.engine)
            does = "" if first.does is None and not first.engine else f"{_text(first.does)} [dim]{engines}[/]"
            verdict = f"[{_STYLE[first.verdict]}]{first.verdict}[/]" + (f": {first.note}" if first.note else "")
            table.add_row(first.name, _text(first.trained), _text(first.written), does, verdict)
        console.print(table)
        for engine, reason in self.not_served.items():
            console.print(f"{engine} does not serve it: {reason}", style="dim")
        for line in self.skipped:
            console.print(f"not checked: {line}", style="yellow")
        for line in self.warnings:
            console.print(f"warning: {line}", style="bold yellow", highlight=False, markup=False, soft_wrap=True)
        console.print(self.summary(), style="bold green" if self.ok else "bold red", highlight=False, markup=False)


def _groups(facts: tuple[Fact, ...]) -> list[list[Fact]]:
    """Facts that differ in their engine only, together."""
    groups: dict[str, list[Fact]] = {}
    for fact in facts:
        key = repr((fact.name, fact.trained, fact.written, fact.does, fact.verdict, fact.note))
        groups.setdefault(key, []).append(fact)
    return list(groups.values())


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
