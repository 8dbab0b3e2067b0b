"""Tables and figures of evaluations and of comparisons of two drafters, from the decoding room's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from modelopt_spec.consoles import stdout_console

__all__ = ["draw_evaluation", "evaluation_table", "print_evaluation"]

_COLOURS = ("#1f6fb4", "#d98c2b", "#3a8f5c", "#a8456b", "#6a5aa8", "#7a7a7a")


def print_evaluation(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Tables of an evaluation, or of a comparison, and its warnings."""
    console = console or stdout_console()
    if report["kind"] == "mtsp.comparison":
        for item in report["differences"]:
            console.print(_difference_table(report, item))
        reports = [(f"{name}: ", report[key]) for name, key in zip(report["names"], "ab", strict=True)]
    else:
        reports = [("", report)]
    for prefix, one in reports:
        for result in one["results"]:
            console.print(evaluation_table(one, result, prefix))
        _print_checks(one, console)
    for text in report["warnings"]:
        console.print(f"[yellow]warning:[/] {text}", highlight=False)


def evaluation_table(report: Mapping[str, Any], result: Mapping[str, Any], prefix: str = "") -> Table:
    """One temperature: a row for each prompt file and one for all rounds together."""
    count = report["num_draft_tokens"]
    title = f"{prefix}temperature {result['temperature']:g}, {count} draft tokens, {report['dtype']}"
    table = Table(title=title, title_justify="left", show_edge=False)
    for name in ("prompts", "answers", "rounds", "tau", "95%", *(f"slot {k}" for k in range(count)), "looping"):
        table.add_column(name, justify="left" if name == "prompts" else "right")
    rows = (
        [*result["files"].items(), ("all", result["pooled"])] if len(result["files"]) > 1 else result["files"].items()
    )
    for name, values in rows:
        bounds = values["tau_interval"]
        table.add_row(
            name,
            str(values["answers"]),
            str(values["rounds"]),
            _number(values["tau"], ".3f"),
            "" if bounds is None else f"{bounds[0]:.2f}-{bounds[1]:.2f}",
            *(_number(share, ".0%") for share in values["conditional_acceptance"]),
            f"{values['looping_share']:.0%}",
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _print_checks(report: Mapping[str, Any], console: Console) -> None:
    control, baseline = report["control"], report["baseline"]
    if control is not None and control["falls"] is None:
        console.print(f"control: no round to compare ({control['prompts']} prompts)", highlight=False)
    elif control is not None:
        verdict = "falls" if control["falls"] else "[bold red]does not fall[/]"
        console.print(
            f"control: tau {control['tau_same_prompts']:.3f} {verdict} to {control['tau']:.3f} with shuffled features "
            f"({control['prompts']} prompts)",
            highlight=False,
        )
    if baseline is not None:
        equal = baseline["equal_outputs"]
        console.print(
            f"speed: {baseline['speculative_tokens_per_second']:.1f} tokens/s, plain decoding "
            f"{baseline['tokens_per_second']:.1f}: {baseline['speedup']:.2f}x ({baseline['prompts']} prompts"
            + ("" if equal is None else f", {equal:.0%} of outputs equal")
            + ")",
            highlight=False,
        )


def _difference_table(report: Mapping[str, Any], item: Mapping[str, Any]) -> Table:
    a, b = report["names"]
    title = f"{b} against {a}, temperature {item['temperature']:g}"
    table = Table("prompts", "shared", f"tau {a}", f"tau {b}", "difference", "95%", "better", title=title)
    table.title_justify, table.show_edge = "left", False
    for name, values in [*item["files"].items(), ("all", item["pooled"])]:
        bounds = values["interval"]
        table.add_row(
            name,
            str(values["prompts"]),
            _number(values["tau_a"], ".3f"),
            _number(values["tau_b"], ".3f"),
            _number(values["difference"], "+.3f"),
            "" if bounds is None else f"{bounds[0]:+.3f} {bounds[1]:+.3f}",
            {"a": a, "b": b, None: "not decided"}[values["better"]],
        )
    return table


# ---- figures --------------------------------------------------------------------------------------------------------


def draw_evaluation(report: Mapping[str, Any], path: str | Path) -> Path:
    """Figure of an evaluation, or of a comparison: acceptance by slot, committed tokens a round, and what remains."""
    if report["kind"] == "mtsp.comparison":
        figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
        series = {
            f"{name}, T {result['temperature']:g}": result["pooled"]
            for name, key in zip(report["names"], "ab", strict=True)
            for result in report[key]["results"]
        }
        _draw_slots(axes[0], series)
        _draw_committed(axes[1], series)
        _draw_differences(axes[2], report)
    else:
        by_probability = any("by_draft_probability" in result["pooled"] for result in report["results"])
        panels = 3 if by_probability else 2
        figure, axes = plt.subplots(1, panels, figsize=(4.4 * panels, 3.8), layout="constrained")
        series = {
            f"{name}, T {result['temperature']:g}": values
            for result in report["results"]
            for name, values in result["files"].items()
        }
        _draw_slots(axes[0], series)
        _draw_committed(axes[1], {f"T {r['temperature']:g}": r["pooled"] for r in report["results"]})
        if by_probability:
            _draw_by_probability(axes[2], report)
    return _save(figure, path)


def _draw_slots(axes: Axes, series: Mapping[str, Mapping[str, Any]]) -> None:
    for index, (name, values) in enumerate(series.items()):
        points = [(k, share) for k, share in enumerate(values["conditional_acceptance"]) if share is not None]
        axes.plot(
            [k for k, _ in points],
            [share for _, share in points],
            marker="o",
            markersize=4,
            color=_COLOURS[index % len(_COLOURS)],
            linestyle="-" if index < len(_COLOURS) else "--",
            label=f"{name} (tau {_number(values['tau'], '.2f')})",
        )
    axes.set(xlabel="draft token", ylabel="accepted, given all before it", ylim=(0, 1), title="acceptance by slot")
    axes.legend(fontsize=8)


def _draw_committed(axes: Axes, series: Mapping[str, Mapping[str, Any]]) -> None:
    width = 0.8 / max(1, len(series))
    for index, (name, values) in enumerate(series.items()):
        counts, total = values["committed_histogram"], max(1, values["rounds"])
        places = [k + 1 + (index - (len(series) - 1) / 2) * width for k in range(len(counts))]
        axes.bar(places, [c / total for c in counts], width, color=_COLOURS[index % len(_COLOURS)], label=name)
    axes.set(xlabel="tokens committed, bonus included", ylabel="share of rounds", title="rounds")
    axes.legend(fontsize=8)


def _draw_by_probability(axes: Axes, report: Mapping[str, Any]) -> None:
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
    for index, result in enumerate(report["results"]):
        bins = [b for b in result["pooled"].get("by_draft_probability", ()) if b["count"]]
        colour = _COLOURS[index % len(_COLOURS)]
        x, y = [b["draft_probability"] for b in bins], [b["accepted"] for b in bins]
        total = max(1, sum(b["count"] for b in bins))
        axes.plot(x, y, color=colour, linewidth=1, label=f"T {result['temperature']:g}")
        axes.scatter(x, y, s=[8 + 200 * b["count"] / total for b in bins], color=colour, alpha=0.8)
    axes.set(xlabel="draft's probability of its token", ylabel="accepted", title="acceptance by probability")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.legend(fontsize=8)


def _draw_differences(axes: Axes, report: Mapping[str, Any]) -> None:
    labels, centres, errors = [], [], []
    for item in report["differences"]:
        for name, values in [*item["files"].items(), ("all", item["pooled"])]:
            if values["difference"] is None:
                continue
            low, high = values["interval"] or (values["difference"], values["difference"])
            labels.append(f"{name}, T {item['temperature']:g}")
            centres.append(values["difference"])
            errors.append((max(0.0, values["difference"] - low), max(0.0, high - values["difference"])))
    places = range(len(labels))
    axes.axvline(0, color="black", linewidth=0.8, linestyle=":")
    axes.errorbar(
        centres, places, xerr=list(zip(*errors, strict=True)), fmt="o", color=_COLOURS[0], capsize=3, markersize=5
    )
    axes.set_yticks(list(places), labels, fontsize=8)
    axes.invert_yaxis()
    a, b = report["names"]
    axes.set(xlabel=f"tau of {b} less tau of {a}", title="paired difference, 95% interval")


def _save(figure: Figure, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
