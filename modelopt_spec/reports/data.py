"""Tables and figures of training data, from what :func:`modelopt_spec.data.inspect_rows` counted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich.table import Table

__all__ = ["data_figure", "data_table"]

_COLOUR = "#1f6fb4"


def data_figure(inspection: Mapping[str, Any], path: str | Path) -> Path:
    """Histograms of row length, supervised tokens of a row and their share; dashed: median."""
    figure, grid = plt.subplots(1, 3, figsize=(10.5, 3.0), layout="constrained")
    panels = (
        ("length", "tokens of a row"),
        ("supervised_tokens_per_sample", "supervised tokens of a row"),
        ("supervised_share", "supervised share of a row"),
    )
    for axes, (key, label) in zip(grid, panels, strict=True):
        _panel(axes, inspection[key], label)
    grid[0].set_ylabel("rows")
    looping = inspection["looping_share"]
    tokens, taught = inspection["tokens"], inspection["supervised_tokens"]
    title = f"{inspection['samples']:,} rows, {tokens:,} tokens, {taught:,} supervised"
    figure.suptitle(title + ("" if looping is None else f", {looping:.1%} of conversations loop"), fontsize=10)
    destination = Path(path)
    destination.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(destination, dpi=150)
    plt.close(figure)
    return destination


def _panel(axes: Axes, summary: Mapping[str, Any], label: str) -> None:
    edges, counts = summary["histogram"]["edges"], summary["histogram"]["counts"]
    axes.stairs(counts, edges, fill=True, color=_COLOUR, alpha=0.8)
    if "p50" in summary:
        axes.axvline(summary["p50"], color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel(label, fontsize=9)
    axes.set_ylim(bottom=0)


def data_table(inspection: Mapping[str, Any]) -> Table:
    """The same numbers, and what became of the rows that were read, for a terminal."""
    table = Table(title="training data", show_header=False)
    table.add_row("rows", f"{inspection['samples']:,}")
    if inspection["conversations"] != inspection["samples"]:
        table.add_row("conversations in them", f"{inspection['conversations']:,}")
    share = inspection["supervised_tokens"] / max(1, inspection["tokens"])
    table.add_row("tokens", f"{inspection['tokens']:,} ({share:.1%} supervised)")
    for key, label in (("length", "length"), ("supervised_tokens_per_sample", "supervised tokens")):
        summary = inspection[key]
        if "p50" in summary:
            numbers = " / ".join(f"{summary[name]:,.0f}" for name in ("p5", "p50", "p95", "max"))
            table.add_row(f"{label}, p5 / p50 / p95 / max", numbers)
    if inspection["looping_share"] is not None:
        table.add_row("looping conversations", f"{inspection['looping_share']:.1%}")
    report = inspection["report"] or {}
    if report:
        table.add_row("conversations read / kept", f"{report['rows_read']:,} / {report['rows_kept']:,}")
        for reason, count in sorted(report["skipped"].items(), key=lambda item: -item[1]):
            example = report["examples"].get(reason, "")
            table.add_row(f"  left out: {reason}", f"{count:,}" + (f"  ({example})" if example else ""))
        if report["truncated"]:
            lost = f"{report['truncated']:,} rows lost {report['lost_supervised']:,} supervised tokens"
            table.add_row("cut to max_length", lost)
        table.add_row("fingerprint", report["fingerprint"][:16])
    return table
