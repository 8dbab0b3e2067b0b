"""Figures and tables of calibration, step costs and simulated serving, from the scheduling room's JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from modelopt_spec.scheduling.cost import cost_from_dict

__all__ = [
    "calibration_table",
    "comparison_table",
    "cost_figure",
    "draw_reliability",
    "ece_figure",
    "load_figure",
    "print_calibration",
    "print_profile",
    "print_simulation",
    "reliability_figure",
    "simulation_table",
    "throughput_figure",
]

_COLOURS = {"before": "#9a9a9a", "shared": "#d98c2b", "after": "#1f6fb4"}
_LABELS = {"before": "raw", "shared": "one temperature", "after": "one temperature a slot"}
_UNITS = {"concurrency": "concurrent requests", "rate": "requests/s", "batch": "rows of a batch"}
_MARKERS = "osD^vPX*"


def reliability_figure(report: Mapping[str, Any], path: str | Path, part: str = "held_out") -> Path:
    """Predicted survival against the observed rate, a panel a slot, raw and calibrated; area of a dot: its rounds."""
    judged = report[part] or report["fit"]
    slots = judged["slots"]
    columns = min(len(slots), 4)
    rows = math.ceil(len(slots) / columns)
    figure, grid = plt.subplots(rows, columns, figsize=(2.6 * columns, 2.7 * rows), squeeze=False, layout="constrained")
    for axes, slot in zip(grid.flat, slots):
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
        for name in ("before", "after"):
            bins = slot["reliability"][name]
            share = np.array([b["count"] for b in bins]) / judged["rounds"]
            x, y = [b["predicted"] for b in bins], [b["observed"] for b in bins]
            axes.plot(x, y, color=_COLOURS[name], linewidth=1.0, label=_LABELS[name])
            axes.scatter(x, y, s=6 + 120 * share, color=_COLOURS[name], alpha=0.8)
        error = slot["ece"]
        axes.set_title(f"slot {slot['slot']}: ECE {error['before']:.3f} to {error['after']:.3f}", fontsize=9)
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    for axes in grid.flat[len(slots) :]:
        axes.set_axis_off()
    grid[0, 0].legend(fontsize=7, loc="upper left")
    figure.supxlabel("predicted survival", fontsize=9)
    figure.supylabel("accepted", fontsize=9)
    return _save(figure, path)


def ece_figure(report: Mapping[str, Any], path: str | Path, part: str = "held_out") -> Path:
    """Bars of the ECE of survival per slot: raw, with a shared temperature, with one a slot; dashes: noise floor."""
    judged = report[part] or report["fit"]
    slots = judged["slots"]
    figure, axes = plt.subplots(figsize=(1.6 + 0.8 * len(slots), 3.2), layout="constrained")
    x = np.arange(len(slots))
    for offset, name in enumerate(("before", "shared", "after")):
        values = np.array([slot["ece"][name] for slot in slots])
        errors = None
        if slots[0]["ece_interval"] is not None:
            bounds = np.array([slot["ece_interval"][name] for slot in slots])
            errors = np.clip(np.stack([values - bounds[:, 0], bounds[:, 1] - values]), 0.0, None)
        axes.bar(
            x + 0.27 * (offset - 1),
            values,
            0.26,
            yerr=errors,
            color=_COLOURS[name],
            label=f"{_LABELS[name]} (mean {judged['mean_ece'][name]:.3f})",
            error_kw={"linewidth": 0.8, "capsize": 2},
        )
    axes.hlines(
        [slot["noise_floor"] for slot in slots], x - 0.42, x + 0.42, color="black", linestyle="--", linewidth=0.8
    )
    axes.set(xlabel="slot", ylabel="ECE of survival", xticks=x)
    axes.margins(y=0.3)
    axes.legend(fontsize=8)
    return _save(figure, path)


def throughput_figure(
    simulation: Mapping[str, Any], path: str | Path, measured: Mapping[str, Any] | None = None
) -> Path:
    """Throughput of the engine against tokens a second of a user, one curve a policy, loads written at the points."""
    figure, axes = plt.subplots(figsize=(6.2, 4.2), layout="constrained")
    for index, curve in enumerate(simulation["policies"]):
        points = curve["points"]
        x, y = [p["user_rate"] for p in points], [p["throughput"] for p in points]
        marker = _MARKERS[index % len(_MARKERS)]
        (line,) = axes.plot(x, y, marker=marker, markersize=4, linewidth=1.2, label=curve["name"])
        if measured is not None:
            _measured_points(axes, measured, curve, line.get_color())
    axes.set_yscale("log")
    longest = max(simulation["policies"], key=lambda curve: len(curve["points"]))
    for point in longest["points"]:
        axes.annotate(
            f"{point['load']:g}",
            (point["user_rate"], point["throughput"]),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=7,
        )
    unit = _UNITS[simulation["load"]]
    axes.set(xlabel="tokens/s of a user", ylabel="tokens/s of the engine", title=f"numbers: {unit}")
    axes.title.set_fontsize(9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return _save(figure, path)


def _measured_points(axes: Axes, measured: Mapping[str, Any], curve: Mapping[str, Any], colour: Any) -> None:
    rates = {float(p["load"]): p for p in curve["points"]}
    mine = [p for p in measured["points"] if p["policy"] == curve["name"] and float(p["load"]) in rates]
    if mine:
        x = [p.get("user_rate", rates[float(p["load"])]["user_rate"]) for p in mine]
        axes.scatter(
            x, [p["throughput"] for p in mine], marker="x", color=colour, s=36, label=f"{curve['name']}, measured"
        )


def load_figure(simulation: Mapping[str, Any], path: str | Path, measured: Mapping[str, Any] | None = None) -> Path:
    """Over the load: throughput (left; crosses: measured) and draft tokens verified a request and step (right)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
    for index, curve in enumerate(simulation["policies"]):
        loads = [p["load"] for p in curve["points"]]
        style: dict[str, Any] = {"marker": _MARKERS[index % len(_MARKERS)], "markersize": 4, "linewidth": 1.2}
        (line,) = left.plot(loads, [p["throughput"] for p in curve["points"]], label=curve["name"], **style)
        right.plot(loads, [p["verified_tokens"] for p in curve["points"]], **style)
        if measured is not None:
            mine = [p for p in measured["points"] if p["policy"] == curve["name"]]
            left.scatter([p["load"] for p in mine], [p["throughput"] for p in mine], marker="x", color=line.get_color())
    unit = _UNITS[simulation["load"]]
    left.set(xlabel=unit, ylabel="tokens/s of the engine", xscale="log", yscale="log")
    right.set(xlabel=unit, ylabel="draft tokens verified a step", xscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    return _save(figure, path)


def cost_figure(profile: Mapping[str, Any], path: str | Path, context: int | None = None) -> Path:
    """Measured step times (dots) and the fitted table (lines) over batch tokens, one colour a request count."""
    cells = profile["measurements"]["cells"]
    context = cells[0]["context"] if context is None else context
    cost = cost_from_dict(profile["cost"])
    figure, axes = plt.subplots(figsize=(5.6, 3.8), layout="constrained")
    for requests in sorted({cell["requests"] for cell in cells}):
        mine = [cell for cell in cells if cell["requests"] == requests and cell["context"] == context]
        if not mine:
            continue
        tokens = np.arange(min(c["tokens"] for c in mine), max(c["tokens"] for c in mine) + 1)
        (line,) = axes.plot(tokens, 1e3 * cost.step_seconds(requests, tokens, context), linewidth=1.0)
        axes.scatter(
            [c["tokens"] for c in mine],
            [1e3 * c["seconds"] for c in mine],
            s=14,
            color=line.get_color(),
            label=f"{requests} requests",
        )
    axes.set(xlabel="batch tokens", ylabel="step time, ms", title=f"{profile['hardware']}, context {context}")
    axes.title.set_fontsize(9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return _save(figure, path)


def draw_reliability(report: Mapping[str, Any], path: str | Path) -> None:
    """The reliability diagram, and the bars of the ECE beside it (same name with ``_ece`` before its ending)."""
    path = Path(path)
    reliability_figure(report, path)
    ece_figure(report, path.with_name(f"{path.stem}_ece{path.suffix}"))


def print_calibration(report: Mapping[str, Any], console: Console) -> None:
    """Table of :func:`calibration_table`, and one line that sums it up."""
    judged = report["held_out"] or report["fit"]
    _print(calibration_table(report), console)
    mean, where = judged["mean_ece"], "held-out" if report["held_out"] else "fitted"
    console.print(
        f"mean ECE of survival {mean['before']:.4f} to {mean['after']:.4f} on {judged['rounds']} {where} rounds of "
        f"{judged['prompts']} prompts; one shared temperature {report['shared_temperature']:.3f}: {mean['shared']:.4f}"
    )
    crossed = report.get("cross_validation")
    if crossed:
        mean, bounds = crossed["mean_ece"], crossed["mean_ece_interval"]
        spans = {name: f" ({b[0]:.4f} to {b[1]:.4f})" for name, b in (bounds or {}).items()}
        console.print(
            f"cross-validated over {crossed['folds']} folds, {crossed['rounds']} rounds of {crossed['prompts']} "
            f"prompts: {mean['before']:.4f}{spans.get('before', '')} to {mean['after']:.4f}{spans.get('after', '')}"
        )
    if "scheduler_file" in report:
        console.print(f"written: {report['scheduler_file']}")


def print_profile(report: Mapping[str, Any], console: Console) -> None:
    """Measured and fitted step times."""
    cost = cost_from_dict(report["cost"])
    rows = [
        [
            c["context"],
            c["requests"],
            c["tokens"],
            f"{1e3 * c['seconds']:.2f}",
            f"{1e3 * float(cost.step_seconds(c['requests'], c['tokens'], c['context'])):.2f}",
            f"{1e3 * c['draft_seconds']:.2f}",
            f"{100 * spread:.1f}%",
        ]
        for c, spread in zip(report["measurements"]["cells"], report["measurements"]["spread"])
    ]
    head = ["context", "requests", "batch tokens", "step, ms", "fitted, ms", "of it drafting, ms", "spread"]
    _print(_markdown(head, rows), console)
    worst = max(q["worst"] for q in report["quality"])
    console.print(f"{report['hardware']}: the fit is off by at most {100 * worst:.1f}%")
    if "scheduler_file" in report:
        console.print(f"written: {report['scheduler_file']}")


def print_simulation(report: Mapping[str, Any], console: Console) -> None:
    """Table of :func:`simulation_table`, and of the comparison with measured throughput where there is one."""
    _print(simulation_table(report), console)
    if report["engine"]["extrapolated"]:
        console.print(f"step times beyond {report['engine']['measured_tokens']} batch tokens are extrapolated")
    if "comparison" in report:
        _print(comparison_table(report["comparison"]), console)


def _print(markdown: str, console: Console) -> None:
    """A markdown table as a rich one."""
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    table = Table(*head, show_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def calibration_table(report: Mapping[str, Any], part: str = "held_out") -> str:
    """Markdown: temperature, ECE, AUC and Brier score of each slot, raw and calibrated."""
    judged = report[part] or report["fit"]
    rows = [
        [
            slot["slot"],
            f"{slot['survival']:.3f}",
            f"{temperature:.3f}",
            *(f"{slot['ece'][name]:.4f}" for name in ("before", "after", "shared")),
            *(_number(slot["auc"][name]) for name in ("before", "after")),
            *(f"{slot['brier'][name]:.4f}" for name in ("before", "after")),
        ]
        for slot, temperature in zip(judged["slots"], report["temperatures"])
    ]
    mean = judged["mean_ece"]
    rows.append(
        ["mean", "", "", f"{mean['before']:.4f}", f"{mean['after']:.4f}", f"{mean['shared']:.4f}", "", "", "", ""]
    )
    head = ["slot", "accepted", "T", "ECE raw", "ECE", "ECE shared T", "AUC raw", "AUC", "Brier raw", "Brier"]
    return _markdown(head, rows)


def simulation_table(simulation: Mapping[str, Any]) -> str:
    """Markdown: one row a policy and load."""
    rows = [
        [
            curve["name"],
            f"{p['load']:g}",
            f"{p['throughput']:.1f}",
            f"{p['user_rate']:.2f}",
            f"{p['accepted_length']:.2f}",
            f"{p['verified_tokens']:.2f}",
            f"{1e3 * p['step_seconds']:.2f}",
        ]
        for curve in simulation["policies"]
        for p in curve["points"]
    ]
    head = ["policy", "load", "tokens/s", "tokens/s/user", "tokens a step", "draft tokens verified", "step, ms"]
    return _markdown(head, rows)


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of simulated against measured throughput (``compare_measured``)."""
    body = [
        [
            r["policy"],
            f"{r['load']:g}",
            f"{r['measured']:.1f}",
            f"{r['simulated']:.1f}",
            f"{100 * r['relative_error']:+.1f}%",
        ]
        for r in rows
    ]
    return _markdown(["policy", "load", "measured tokens/s", "simulated tokens/s", "error"], body)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [" | ".join(map(str, row)) for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def _save(figure: Figure, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
