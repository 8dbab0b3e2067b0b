"""Figures of a training report: loss terms, accepted length, acceptance of each slot, gradient norm and rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from modelopt_spec.training.curves import TERMS

__all__ = ["draw_training", "running_mean", "series"]

_COLOURS = ("#1f6fb4", "#d98c2b", "#3a8f5c", "#a8456b", "#6a5aa8", "#7a7a7a")


def series(curves: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one logged quantity."""
    points = [(entry["step"], entry[name]) for entry in curves if name in entry and "step" in entry]
    return [step for step, _ in points], [value for _, value in points]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and the ``width - 1`` before it (fewer at the start)."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def draw_training(report: Mapping[str, Any], path: str | Path) -> Path:
    """Draw the curves of a training report into one file; quantities that were not logged are left out.

    Accepted length and acceptance are running means over an eighth of the logs, beside the thin raw line of tau.
    """
    curves = report["curves"]
    figure, grid = plt.subplots(2, 2, figsize=(10.4, 6.2), layout="constrained", sharex=True)
    _draw(grid[0, 0], curves, ["loss", *TERMS], "loss and its terms", log=True)
    _draw(grid[0, 1], curves, ["tau", "tau_probability", "eval_tau"], "accepted length, bonus included", smooth=True)
    _draw_slots(grid[1, 0], curves)
    _draw(grid[1, 1], curves, ["grad_norm"], "gradient norm", log=True)
    rate = grid[1, 1].twinx()
    steps, values = series(curves, "learning_rate")
    rate.plot(steps, values, color=_COLOURS[5], linewidth=1.0, linestyle="--")
    rate.set_ylabel("learning rate (dashed)", fontsize=9)
    for axes in grid[1]:
        axes.set_xlabel("optimizer step", fontsize=9)
    path = Path(path)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _draw(
    axes: Axes,
    curves: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    title: str,
    *,
    log: bool = False,
    smooth: bool = False,
) -> None:
    colours = iter(_COLOURS * 2)
    for name in names:
        steps, values = series(curves, name)
        if steps and any(values):
            colour, width = next(colours), max(1, len(values) // 8)
            if smooth and width > 1:
                axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.35)
                values = running_mean(values, width)
            axes.plot(steps, values, color=colour, linewidth=1.4, label=name.replace("_", " "))
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    if log and axes.lines:
        axes.set_yscale("log")
    if len(axes.lines) > 1:
        axes.legend(fontsize=8)


def _draw_slots(axes: Axes, curves: Sequence[Mapping[str, Any]]) -> None:
    """Acceptance of each slot given that the slots before were right, early slots dark."""
    names = sorted(
        {key for entry in curves for key in entry if key.startswith("acceptance/")}, key=lambda n: int(n.split("/")[1])
    )
    shades = matplotlib.colormaps["viridis"]
    for index, name in enumerate(names):
        steps, values = series(curves, name)
        slot = name.split("/")[1]
        values = running_mean(values, max(1, len(values) // 8))
        axes.plot(steps, values, color=shades(index / max(1, len(names))), linewidth=1.3, label=f"slot {slot}")
    axes.set_title("acceptance on training rows, given all slots before", fontsize=10)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.25)
    if names:
        axes.legend(fontsize=7, ncols=2)
