"""A plan as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from modelopt_spec.consoles import stdout_console

__all__ = ["print_plan"]


def _si(value: float, unit: str = "") -> str:
    for factor, name in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.2f} {name}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def _duration(hours: float) -> str:
    for unit, size in (("days", 24.0), ("h", 1.0), ("min", 1 / 60)):
        if hours >= 2 * size:
            return f"{hours / size:.1f} {unit}"
    return f"{3600 * hours:.1f} s"


def _time(time: dict[str, Any]) -> str:
    """Hours, and everything that they rest on."""
    tera = time["peak_tflops"]
    peak = f"{tera:.3g} TFLOP/s" if 1 <= tera < 1000 else _si(tera * 1e12, "FLOP/s")
    source = "measured here" if time["peak_from"] == "measured here" else "data sheet"
    text = f"{_duration(time['hours'])} on {time['gpus']} x {time['gpu']} at {time['efficiency']:.0%} of {peak}"
    text += f" ({source}; the share is assumed)"
    if time["here"]:
        return f"{text}; --gpu plans for another"
    return text if time["asked"] else f"{text}; no GPU is here, so this one is assumed: --gpu"


def print_plan(found: dict[str, Any], console: Console | None = None) -> None:
    """Show a plan as tables."""
    out = console or stdout_console()
    data, steps, time, flops = found["data"], found["steps"], found["time"], found["flops"]
    out.print(f"plan: {found['recipe'] or found['mode']}", style="italic", highlight=False)
    table = Table(show_edge=False, show_header=False)
    table.add_row("target", f"{found['target']['name']}, {_si(found['target']['parameters'])} parameters")
    parts = ", ".join(f"{name} {_si(count)}" for name, count in found["drafter"]["by_part"].items())
    table.add_row("drafter", f"{_si(found['drafter']['parameters'])} parameters ({parts})")
    kind = " (assumed)" if data["assumed"] else ""
    counts = f"{data['rows']:,} rows, {data['tokens']:,} tokens, mean length {data['mean_length']:.0f}{kind}"
    table.add_row("data", counts)
    table.add_row("steps", f"{steps['total']:,} of {steps['rows_per_step']} rows, {steps['epochs']:.1f} epochs")
    table.add_row("tokens", _si(steps["tokens"]))
    shares = ", ".join(f"{name} {value / flops['step']:.0%}" for name, value in flops["by_part"].items() if value)
    table.add_row("a step", f"{_si(flops['step'], 'FLOP')} ({shares})")
    table.add_row("the run", _si(flops["run"], "FLOP"))
    table.add_row("time", _time(time))
    table.add_row(
        "features", f"{_si(found['cache']['bytes'], 'B')} on disk, {_si(found['cache']['memory_bytes'], 'B')} in memory"
    )
    out.print(table)
    rank = found["memory"]["rank"]
    verdict = "fits in" if time["fits"] else "does NOT fit in"
    fit = f"memory of a rank: {_si(rank['total'], 'B')}, {verdict} {time['memory_gb']:.0f} GB"
    out.print(fit, style="italic", highlight=False)
    table = Table(show_edge=False, show_header=False)
    for name, value in rank.items():
        table.add_row(name, _si(value, "B"))
    if found["memory"]["host"]["features"]:
        table.add_row("features in host memory", _si(found["memory"]["host"]["features"], "B"))
    out.print(table)
    if "forecast" in found:
        guess = found["forecast"]
        for point in guess["at"]:
            out.print(
                f"forecast: tau {point['tau']:.2f} ({guess['level']:.0%} interval {point['low']:.2f} to "
                f"{point['high']:.2f}) after {_si(point['tokens'])} tokens, from {guess['points']} points of "
                f"{guess['metric']}",
                highlight=False,
            )
        for caveat in guess["caveats"]:
            out.print(f"  note: {caveat}", highlight=False)
