"""Figures and table of a comparison of recipes: training curves, acceptance per slot, cost of each head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

__all__ = ["COLUMNS", "comparison_rows", "draw_comparison"]

COLUMNS = (
    "",
    "tau",
    "95% interval",
    "by seed",
    "against the baseline",
    "head, us a token",
    "multiply-adds",
    "floats of state",
)
"""Of :func:`comparison_rows`."""


def _short(entry: dict[str, Any]) -> str:
    recipe = entry["recipe"].split("/")[0]
    head = [part.split("=")[1] for part in entry["overrides"] if part.startswith("drafter.head.type=")]
    return f"{recipe} ({head[0]})" if head else recipe


def _labels(comparison: dict[str, Any]) -> list[str]:
    """A short name of each entry, or the name it was given where short names are the same."""
    short = [_short(entry) for entry in comparison["entries"]]
    pairs = zip(short, comparison["entries"], strict=True)
    return [name if short.count(name) == 1 else entry["name"] for name, entry in pairs]


def comparison_rows(comparison: dict[str, Any]) -> list[list[Any]]:
    """One row an entry, see :data:`COLUMNS`; tau and interval are of all seeds together."""
    rows = []
    for label, entry in zip(_labels(comparison), comparison["entries"], strict=True):
        summary, cost = entry["summary"], entry["head_cost"]
        taus = [run["evaluation"]["pooled"]["tau"] for run in entry["runs"]]
        rows.append(
            [
                label,
                float(summary["tau"]),
                _span(summary["interval"]),
                " ".join(f"{tau:.3f}" for tau in taus),
                _difference(summary),
                float(cost["microseconds"]),
                cost["multiply_adds"],
                cost["state_floats"],
            ]
        )
    return rows


def _span(bounds: Sequence[float] | None) -> str:
    return "-" if bounds is None else f"{bounds[0]:.3f} to {bounds[1]:.3f}"


def _difference(summary: dict[str, Any]) -> str:
    if summary["difference"] is None:
        return "baseline"
    bounds = summary["difference_interval"]
    text = f"{summary['difference']:+.3f}"
    return text if bounds is None else f"{text} ({bounds[0]:+.3f} to {bounds[1]:+.3f})"


def _running_median(values: Sequence[float]) -> list[float]:
    """Median of each log and its two neighbours on either side: one row of repeated text moves a log far."""
    return [float(np.median(values[max(0, place - 2) : place + 3])) for place in range(len(values))]


def draw_comparison(comparison: dict[str, Any], path: str | Path) -> Path:
    """Draw training curves (mean over seeds, seeds as thin lines) and conditional acceptance per slot (rounds of all
    seeds) into one PNG.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    labels = _labels(comparison)
    for index, entry in enumerate(comparison["entries"]):
        colour = f"C{index}"
        curves = [run["training"]["curve"] for run in entry["runs"]]
        steps = [point["step"] for point in curves[0]]
        values = np.array([[point["tau"] for point in curve[: len(steps)]] for curve in curves])
        for line in values:
            left.plot(steps, line, color=colour, alpha=0.25, linewidth=0.8)
        left.plot(steps, values.mean(0), color=colour, label=labels[index])
        shares = [np.nan if share is None else share for share in entry["summary"]["conditional_acceptance"]]
        right.plot(range(len(shares)), shares, marker="o", color=colour, label=labels[index])
    left.set(xlabel="optimizer step", ylabel="accepted length on training rows, running median")
    right.set(xlabel="slot", ylabel="conditional acceptance, real rounds", ylim=(0, 1))
    left.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return Path(path)
