"""One HTML page of a run that opens without a network: figures inside, no script, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import yaml

from modelopt_spec.errors import CheckpointError
from modelopt_spec.reports import comparison, evaluation, html, scheduling, training
from modelopt_spec.reports.run import Found, RunFiles, collect
from modelopt_spec.versions import versions

__all__ = ["render", "write_report"]

STYLE = """
:root { color-scheme: light; --line: #d9dee5; --soft: #5b6672; --accent: #1f6fb4; }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
       color: #1d2329; background: #f4f6f8; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 26px; margin: 8px 0 2px; }
h2 { font-size: 19px; margin: 0 0 10px; }
h3 { font-size: 15px; margin: 18px 0 6px; }
p.sub { margin: 0 0 18px; color: var(--soft); overflow-wrap: anywhere; }
section { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 18px 20px; margin: 16px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tile { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 24px; line-height: 1.2; } .tile span { color: var(--soft); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; }
th { font-weight: 600; color: var(--soft); }
img { max-width: 100%; height: auto; display: block; margin: 10px auto; }
pre { background: #f4f6f8; padding: 12px; border-radius: 6px; overflow-x: auto; font-size: 12.5px; }
code { font-size: 13px; overflow-wrap: anywhere; }
.warn { border-left: 4px solid #c8811a; background: #fdf6ea; padding: 8px 12px; margin: 10px 0; }
.bad { border-left-color: #b3372f; background: #fbecea; }
details summary { cursor: pointer; color: var(--accent); margin-top: 10px; }
footer { color: var(--soft); font-size: 13px; }
@media print { body { background: #fff; } section, .tile { break-inside: avoid; } }
""".strip()


LAST_LOGS = 8


def write_report(
    directory: str | Path, out: str | Path | None = None, *, more: Sequence[str | Path] = ()
) -> dict[str, Any]:
    """Write the page of a run.

    Args:
        directory: the run. out: file to write; default ``report.html`` in the run. more: further result files.

    Returns:
        ``file``, ``sections`` (names, in order) and ``sources`` (path and sha256 of each file that is shown).

    Raises:
        CheckpointError: nothing of this package is in the directory.
    """
    run = _understood(collect(directory, more))
    destination = Path(out) if out is not None else run.directory / "report.html"
    text, sections = _page(run)
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(destination)
    sources = [{"path": str(found.path), "sha256": found.sha256} for found in run.files]
    return {"kind": "mtsp.report", "file": str(destination), "sections": sections, "sources": sources}


def render(run: RunFiles) -> str:
    """The page's text."""
    return _page(run)[0]


def _understood(run: RunFiles) -> RunFiles:
    """The run without files that say what they are and hold something else: of another version, or edited by hand."""
    files, strange = [], list(run.unreadable)
    for found in run.files:
        try:
            _page(replace(run, files=(found,)))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            strange.append((found.path, f"not what {found.content['kind']} holds ({type(error).__name__}: {error})"))
        else:
            files.append(found)
    if not files:
        raise CheckpointError("; ".join(f"{path}: {reason}" for path, reason in strange))
    return replace(run, files=tuple(files), unreadable=tuple(strange))


def _page(run: RunFiles) -> tuple[str, list[str]]:
    """The page and the ids of its sections."""
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "mtsp"}):
        parts = [(name, part) for name, make in SECTIONS.items() for part in [make(run)] if part]
    body = "\n".join(f'<section id="{name}">\n{part}\n</section>' for name, part in parts)
    title, subtitle = _title(run)
    damaged = "".join(
        html.note(f"{path} cannot be read and is left out: {reason}", bad=True) for path, reason in run.unreadable
    )
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="modelopt-spec {escape(versions()["modelopt_spec"])}">
<title>{escape(title)}</title>
<style>
{STYLE}
</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="sub">{escape(subtitle)}</p>
{_tiles(run)}
{damaged}{body}
<footer>Made by <code>mtsp report</code> from the files listed under Provenance; nothing was measured again.</footer>
</main>
</body>
</html>
"""
    return page, [name for name, _ in parts]


def _title(run: RunFiles) -> tuple[str, str]:
    found = run.of("training") or run.of("card") or run.files
    recipe = found[0].content.get("recipe") or {}
    name = (recipe.get("metadata") or {}).get("name") or run.directory.name
    target = (recipe.get("model") or {}).get("name_or_path") or found[0].content.get("model") or ""
    described = (recipe.get("metadata") or {}).get("description") or ""
    return f"{name}", " · ".join(
        part for part in (described, f"target {target}" if target else "", str(run.directory)) if part
    )


# ---- tiles ----------------------------------------------------------------------------------------------------------


def _tiles(run: RunFiles) -> str:
    """The numbers that somebody looks for first."""
    tiles: list[tuple[str, str]] = []
    for found in run.of("evaluation")[:1]:
        result = found.content["results"][0]
        pooled, bounds = result["pooled"], result["pooled"]["tau_interval"]
        span = f", 95% {bounds[0]:.2f} to {bounds[1]:.2f}" if bounds else ""
        if pooled["tau"] is not None:
            where = f"accepted length, held-out prompts, temperature {result['temperature']:g}{span}"
            tiles.append((f"{pooled['tau']:.3f}", where))
        baseline = found.content["baseline"]
        if baseline is not None:
            tiles.append((f"{baseline['speedup']:.2f}×", "this package's decoding against plain generate"))
    for found in run.of("training")[:1]:
        report = found.content
        taus = training.series(report["curves"], "tau")[1][-LAST_LOGS:]
        if taus:
            where = f"accepted length on training rows, mean of the last {len(taus)} logs"
            tiles.append((f"{sum(taus) / len(taus):.3f}", where))
        tiles.append((f"{report['steps']:,}", f"optimizer steps in {html.duration(report['seconds'])}"))
        tiles.append((html.count(report["trainable_parameters"]), "trainable parameters"))
    for found in run.of("calibration")[:1]:
        judged = found.content["held_out"] or found.content["fit"]
        mean = judged["mean_ece"]
        tiles.append((f"{mean['after']:.3f}", f"calibration error of survival, {mean['before']:.3f} before"))
    inner = "".join(f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in tiles)
    return f'<div class="tiles">{inner}</div>' if tiles else ""


# ---- sections -------------------------------------------------------------------------------------------------------


def _training(run: RunFiles) -> str:
    parts = []
    for found in run.of("training"):
        report = found.content
        parts.append(_heading("Training", found, run))
        if report.get("stopped_by"):
            parts.append(html.note(f"stopped by {report['stopped_by']} after step {report['steps']}"))
        if report["curves"]:
            parts.append(html.figure("training curves", training.draw_training, report))
        without = report.get("rows_without_supervision")
        data = report["data"]["train"]
        parts.append(
            html.table(
                ["rows", "tokens", "supervised", "rows without a taught slot", "rows a step", "device", "ranks"],
                [
                    [
                        f"{data['samples']:,}",
                        f"{data['tokens']:,}",
                        f"{data['supervised_tokens']:,}",
                        html.text(without),
                        html.text(report.get("rows_per_step")),
                        report["device"],
                        report["world_size"],
                    ]
                ],
            )
        )
    return "\n".join(parts)


def _evaluation(run: RunFiles) -> str:
    parts = []
    for found in run.of("evaluation"):
        report = found.content
        parts.append(_heading("Acceptance in real rounds", found, run))
        for result in report["results"]:
            parts.append(f"<h3>temperature {result['temperature']:g}, {report['num_draft_tokens']} draft tokens</h3>")
            parts.append(_acceptance(report, result))
        parts.append(html.figure("acceptance by slot", evaluation.draw_evaluation, report))
        control, baseline = report["control"], report["baseline"]
        if control is not None and control["falls"] is not None:
            text = (
                f"Control: with shuffled target features tau is {control['tau']:.3f}, with the right ones "
                f"{control['tau_same_prompts']:.3f} on the same prompts."
            )
            parts.append(f"<p>{text}</p>" if control["falls"] else html.note(text + " It does not fall.", bad=True))
        if baseline is not None:
            parts.append(
                f"<p>Speed: {baseline['speculative_tokens_per_second']:.1f} tokens/s against "
                f"{baseline['tokens_per_second']:.1f} of plain generate on {baseline['prompts']} prompts.</p>"
            )
        parts.extend(html.note(str(text)) for text in report["warnings"])
    return "\n".join(parts)


def _acceptance(report: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    count = report["num_draft_tokens"]
    head = ["prompts", "answers", "rounds", "tau", "95%", *(f"slot {k}" for k in range(count)), "looping"]
    rows = []
    for name, values in [*result["files"].items(), ("all", result["pooled"])]:
        bounds = values["tau_interval"]
        rows.append(
            [
                name,
                values["answers"],
                values["rounds"],
                "-" if values["tau"] is None else f"{values['tau']:.3f}",
                "" if bounds is None else f"{bounds[0]:.2f} to {bounds[1]:.2f}",
                *("-" if share is None else f"{share:.0%}" for share in values["conditional_acceptance"]),
                f"{values['looping_share']:.0%}",
            ]
        )
    return html.table(head, rows if len(result["files"]) > 1 else rows[:1])


def _calibration(run: RunFiles) -> str:
    parts = []
    for found in run.of("calibration"):
        parts.append(_heading("Reliability of the confidence head", found, run))
        parts.append(html.figure("reliability of each slot", scheduling.reliability_figure, found.content))
        parts.append(html.figure("calibration error of each slot", scheduling.ece_figure, found.content))
        parts.append(html.markdown(scheduling.calibration_table(found.content)))
    return "\n".join(parts)


def _serving(run: RunFiles) -> str:
    parts = []
    for found in run.of("profile"):
        parts.append(_heading("Step times of this machine", found, run))
        parts.append(html.figure("step time over batch tokens", scheduling.cost_figure, found.content))
    for found in run.of("simulation"):
        parts.append(_heading("Throughput", found, run))
        parts.append(html.figure("throughput against speed of a user", scheduling.throughput_figure, found.content))
        parts.append(html.markdown(scheduling.simulation_table(found.content)))
    return "\n".join(parts)


def _comparison(run: RunFiles) -> str:
    parts = []
    for found in run.of("comparison"):
        parts.append(_heading("Comparison of two checkpoints", found, run))
        parts.append(html.figure("paired differences", evaluation.draw_evaluation, found.content))
    for found in run.of("recipes"):
        parts.append(_heading("Comparison of recipes", found, run))
        parts.append(html.figure("curves and acceptance of each entry", comparison.draw_comparison, found.content))
        rows = comparison.comparison_rows(found.content)
        cells = [[f"{c:.3f}" if isinstance(c, float) else c for c in row] for row in rows]
        parts.append(html.table(list(comparison.COLUMNS), cells))
    return "\n".join(parts)


def _export(run: RunFiles) -> str:
    parts = []
    for found in run.of("card"):
        card = found.content
        parts.append(_heading("Exported draft", found, run))
        engines = card.get("engines") or {}
        rows = [
            [name, value if isinstance(value, str) else yaml.safe_dump(value).strip()]
            for name, value in engines.items()
        ]
        parts.append(
            html.table(["what", "value"], [["layout", card.get("layout")], ["type", card.get("dtype")], *rows])
        )
    return "\n".join(parts)


def _provenance(run: RunFiles) -> str:
    parts = ["<h2>Provenance</h2>"]
    for found in run.of("training")[:1]:
        report = found.content
        rows = [[name, value] for name, value in report["versions"].items()]
        rows += [["seed", report["seed"]], ["data fingerprint", report["data"]["train"]["fingerprint"]]]
        parts.append(html.table(["of the training", "value"], rows))
        recipe = yaml.safe_dump(report["recipe"], sort_keys=False)
        parts.append(f"<details><summary>Recipe, complete</summary><pre>{escape(recipe)}</pre></details>")
    for found in run.of("evaluation"):
        report = found.content
        rows = [[name, value] for name, value in report["versions"].items()]
        rows += [["device", report["device"]], ["dtype", report["dtype"]], ["seed", report["seed"]]]
        rows += [[f"prompts {item['name']}", item["sha256"]] for item in report["prompts"]["files"]]
        table = html.table(["of the evaluation", "value"], rows)
        parts.append(f"<details><summary>Evaluation {escape(_relative(found, run))}</summary>{table}</details>")
    parts.append("<h3>Files</h3>")
    parts.append(
        html.table(["file", "kind", "sha256"], [[_relative(f, run), f.content["kind"], f.sha256] for f in run.files])
    )
    return "\n".join(parts)


SECTIONS: dict[str, Callable[[RunFiles], str]] = {
    "training": _training,
    "evaluation": _evaluation,
    "calibration": _calibration,
    "serving": _serving,
    "comparison": _comparison,
    "export": _export,
    "provenance": _provenance,
}
"""Sections in the order of the page; one that has nothing to show is left out."""


# ---- pieces ---------------------------------------------------------------------------------------------------------


def _heading(text: str, found: Found, run: RunFiles) -> str:
    return f'<h2>{escape(text)}</h2>\n<p class="sub"><code>{escape(_relative(found, run))}</code></p>'


def _relative(found: Found, run: RunFiles) -> str:
    inside = found.path.is_relative_to(run.directory)
    return str(found.path.relative_to(run.directory) if inside else found.path)
