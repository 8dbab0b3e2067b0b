"""Put a comparison of dense and MoE-mHC recipes and the step benchmark into docs/results/moe.md and beside it.

python -m benchmarks.moe_results runs/moe/comparison.json runs/bench/moe_step.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from modelopt_spec.reports.comparison import draw_comparison

PAGE = Path(__file__).parents[1] / "docs" / "results" / "moe.md"
UNTRAINED = "training.max_steps=1"


def name_of(entry: dict[str, Any]) -> str:
    """The recipe, and whether it was left untrained."""
    untrained = UNTRAINED in entry["overrides"]
    return f"{entry['recipe']}, untrained" if untrained else str(entry["recipe"])


def tau_on_rows(entry: dict[str, Any], last: int = 10) -> float | None:
    """Mean over seeds of the accepted length on training rows, over the last logs of a run."""
    curves = [[point["tau"] for point in run["training"]["curve"]][-last:] for run in entry["runs"]]
    values = [value for curve in curves for value in curve]
    return sum(values) / len(values) if values else None


def table(comparison: dict[str, Any]) -> str:
    """One row an entry, Markdown."""
    lines = [
        "| recipe | tau, real rounds | 95% interval | against dense, paired | tau on training rows, last 100 steps |"
    ]
    lines.append("|---|---|---|---|---|")
    for entry in comparison["entries"]:
        summary, rows = entry["summary"], tau_on_rows(entry)
        span = summary["interval"]
        interval = "-" if span is None else f"{span[0]:.3f} to {span[1]:.3f}"
        difference = "-" if summary["difference"] is None else f"{summary['difference']:+.3f}"
        bounds = summary["difference_interval"]
        difference += f" ({bounds[0]:+.3f} to {bounds[1]:+.3f})" if bounds is not None else ""
        taught = "-" if rows is None or UNTRAINED in entry["overrides"] else f"{rows:.3f}"
        lines.append(f"| {name_of(entry)} | {summary['tau']:.3f} | {interval} | {difference} | {taught} |")
    return "\n".join(lines) + "\n"


def step_table(results: list[dict[str, Any]]) -> str:
    """One row a kind of backbone and number of anchors, Markdown."""
    lines = ["| backbone | N | GFLOP a step | CPU seconds | step over its floor | backbone alone over its floor |"]
    lines.append("|---|---|---|---|---|---|")
    for row in results:
        lines.append(
            f"| {row['kind']} | {row['sizes']['anchors']} | {row['gflop']['step']:.0f} | {row['seconds']['step']:.2f} "
            f"| {row['over_floor']['step']:.2f} | {row['over_floor']['backbone']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def put(text: str, mark: str, content: str) -> str:
    """A page with what stands between two marks replaced."""
    begin, end = f"<!-- {mark}: begin -->\n", f"<!-- {mark}: end -->\n"
    before, rest = text.split(begin)
    return f"{before}{begin}{content}{end}{rest.split(end)[1]}"


def without_places(comparison: dict[str, Any]) -> dict[str, Any]:
    """A copy that does not say where on this machine the runs were."""
    copy: dict[str, Any] = json.loads(json.dumps(comparison))
    copy["overrides"] = [part for part in copy["overrides"] if not part.startswith("training.cache_dir=")]
    for entry in copy["entries"]:
        for run in entry["runs"]:
            run["directory"] = Path(run["directory"]).parent.name + "/" + Path(run["directory"]).name
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("comparison", type=Path)
    parser.add_argument("steps", type=Path, nargs="?")
    options = parser.parse_args()
    text, beside = PAGE.read_text(), PAGE.parent / "moe"
    beside.mkdir(exist_ok=True)
    comparison = without_places(json.loads(options.comparison.read_text()))
    (beside / "comparison.json").write_text(json.dumps(comparison, indent=1) + "\n")
    drawn = {**comparison, "entries": [e for e in comparison["entries"] if UNTRAINED not in e["overrides"]]}
    draw_comparison(drawn, beside / "comparison.png")
    figure = "\n![Training curves and acceptance of each slot](moe/comparison.png)\n"
    text = put(text, "comparison", table(comparison) + figure)
    if options.steps is not None:
        steps = json.loads(options.steps.read_text())
        (beside / "moe_step.json").write_text(json.dumps(steps, indent=1) + "\n")
        text = put(text, "steps", step_table(steps["results"]))
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
