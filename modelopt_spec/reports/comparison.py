"""Figures and table of a comparison of recipes: training curves, acceptance per slot, cost of each head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

__all__ = ["comparison_rows", "draw_comparison"]


def _short(entry: dict[str, Any]) -> str:
    recipe = entry["recipe"].split("/")[0]
    head = [part.split("=")[1] for part in entry["overrides"] if part.startswith("drafter.head.type=")]
    return f"{recipe} ({head[0]})" if head else recipe


def comparison_rows(comparison: dict[str, Any]) -> list[list[Any]]:
    """One row an entry: name, tau of each seed, pooled tau with its intervals, head cost."""
    rows = []
    for entry in comparison["entries"]:
        pooled = [run["evaluation"]["pooled"] for run in entry["runs"]]
        taus = [stats["tau"] for stats in pooled]
        spans = [stats.get("tau_interval") for stats in pooled]
        intervals = "; ".join(f"{a:.3f}-{b:.3f}" for a, b in (span for span in spans if span))
        cost = entry["head_cost"]
        rows.append(
            [
                _short(entry),
                float(np.mean(taus)),
                " ".join(f"{tau:.3f}" for tau in taus),
                intervals,
                float(cost["microseconds"]),
                cost["multiply_adds"],
                cost["state_floats"],
            ]
        )
    return rows


def draw_comparison(comparison: dict[str, Any], path: str | Path) -> Path:
    """Draw training curves (mean over seeds, seeds as thin lines) and conditional acceptance per slot into one PNG."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for index, entry in enumerate(comparison["entries"]):
        colour = f"C{index}"
        curves = [run["training"]["curve"] for run in entry["runs"]]
        steps = [point["step"] for point in curves[0]]
        values = np.array([[point["tau"] for point in curve[: len(steps)]] for curve in curves])
        for line in values:
            left.plot(steps, line, color=colour, alpha=0.25, linewidth=0.8)
        left.plot(steps, values.mean(0), color=colour, label=_short(entry))
        shares = [run["evaluation"]["pooled"]["conditional_acceptance"] for run in entry["runs"]]
        width = min(len(share) for share in shares)
        mean = [np.mean([s[k] for s in shares if s[k] is not None] or [np.nan]) for k in range(width)]
        right.plot(range(width), mean, marker="o", color=colour, label=_short(entry))
    left.set(xlabel="optimizer step", ylabel="accepted length on training rows")
    right.set(xlabel="slot", ylabel="conditional acceptance, real rounds", ylim=(0, 1))
    left.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return Path(path)
