"""Forecasts of accepted length from the beginning of real runs, beside what those runs (and longer ones) then reached.

    python -m benchmarks.forecast runs/*/report.json --json docs/results/forecast.json --figure forecast.svg

Each run's curve is cut at the given shares of its steps and `forecast` is asked for the end. With ``--longer`` the
whole curve of each run is also asked for the end of another, longer run. What was reached is the mean of the last tenth
of the longer curve with its standard error: single logs are noisy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from modelopt_spec.errors import DataError
from modelopt_spec.training.forecast import curve_of, forecast


def reached(report: dict[str, Any]) -> tuple[float, float, float]:
    """Tokens at the end, mean of the last tenth of the curve (eight logs at least) and its standard error."""
    tokens, tau, _ = curve_of(report)
    last = tau[-max(8, len(tau) // 10) :]
    return float(tokens[-1]), float(last.mean()), float(last.std(ddof=1) / len(last) ** 0.5)


def cut(report: dict[str, Any], share: float) -> dict[str, Any]:
    """A report as it was after a share of the steps."""
    return {**report, "curves": [entry for entry in report["curves"] if entry["step"] <= share * report["steps"]]}


def compare(name: str, seen: str, short: dict[str, Any], long: dict[str, Any], level: float) -> dict[str, Any]:
    """One forecast and its outcome."""
    tokens, mean, error = reached(long)
    found = forecast(short, [tokens], level=level)
    point = found["at"][0]
    distance = max(point["low"] - mean, mean - point["high"], 0.0)
    return {
        "run": name,
        "seen": seen,
        "seen_tokens": found["tokens"],
        "at_tokens": tokens,
        "tau": point["tau"],
        "low": point["low"],
        "high": point["high"],
        "reached": mean,
        "reached_error": error,
        "verdict": "inside" if not distance else "within its error" if distance <= error else "missed",
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Intervals and outcomes, one line each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.4 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(reversed(rows)):
        axes.plot([row["low"], row["high"]], [place, place], color="tab:blue", linewidth=5, alpha=0.4)
        axes.plot(row["tau"], place, "|", color="tab:blue", markersize=12)
        axes.errorbar(row["reached"], place, xerr=row["reached_error"], fmt="o", color="tab:orange", markersize=5)
    axes.set_yticks(range(len(rows)), [f"{row['run']}, {row['seen']}" for row in reversed(rows)])
    axes.set_xlabel("accepted length at the end: forecast (bar), reached (dot)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+", help="report.json of complete runs")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--longer", type=Path, help="report.json of a longer run of the same recipe")
    parser.add_argument("--level", type=float, default=0.8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    curves: dict[str, Any] = {}
    longer = json.loads(args.longer.read_text()) if args.longer else None
    for path in args.reports:
        report = json.loads(path.read_text())
        head = report["recipe"]["drafter"].get("head", {}).get("type") or report["recipe"]["drafter"]["mode"]
        name = f"{head}, {report['steps']} steps, seed {report['seed']}"
        tokens, tau, metric = curve_of(report)
        curves[name] = {"metric": metric, "tokens": tokens.round().tolist(), "tau": tau.round(4).tolist()}
        pairs = [(f"first {share:.0%}", cut(report, share), report) for share in args.shares]
        if longer is not None and longer["steps"] > report["steps"] and _same(report, longer):
            pairs.append((f"all, for {longer['steps']} steps", report, longer))
        for seen, short, long in pairs:
            try:
                rows.append(compare(name, seen, short, long, args.level))
            except DataError as error:
                print(f"{name}, {seen}: {error}")
    for row in rows:
        print(
            f"{row['run']:32} {row['seen']:20} {row['tau']:.2f} ({row['low']:.2f} to {row['high']:.2f})   reached "
            f"{row['reached']:.2f} +- {row['reached_error']:.2f}   {row['verdict']}"
        )
    inside = np.mean([row["verdict"] == "inside" for row in rows])
    near = np.mean([row["verdict"] != "missed" for row in rows])
    print(f"{len(rows)} forecasts: {inside:.0%} inside of their {args.level:.0%} interval, {near:.0%} with the error")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"level": args.level, "forecasts": rows, "curves": curves}) + "\n")
    if args.figure:
        draw(rows, args.figure)


def _same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(first["recipe"][name] == second["recipe"][name] for name in ("drafter", "loss"))


if __name__ == "__main__":
    main()
