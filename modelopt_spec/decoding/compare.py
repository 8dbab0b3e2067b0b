"""Two drafters on the same prompts, prompt by prompt, with a paired bootstrap interval.

The comparison (JSON)::

    {"kind": "mtsp.comparison", "version": 1, "a": EVALUATION, "b": EVALUATION, "names": [str, str],
     "differences": [{"temperature": float, "pooled": DIFFERENCE, "files": {name: DIFFERENCE}}], "warnings": [str]}

    DIFFERENCE = {"prompts": int, "tau_a": float, "tau_b": float, "difference": tau_b - tau_a,
                  "interval": [low, high] | null, "better": "a" | "b" | null}

``better`` names one only where the interval leaves 0 out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from modelopt_spec.decoding.evaluate import EVALUATION_KIND, evaluate
from modelopt_spec.decoding.statistics import PromptCounts, paired_interval
from modelopt_spec.errors import DataError

__all__ = ["COMPARISON_KIND", "compare_checkpoints", "compare_reports"]

COMPARISON_KIND = "mtsp.comparison"

_SAME = ("model", "max_new_tokens", "top_k", "top_p", "dtype", "seed")


def compare_checkpoints(
    a: nn.Module,
    b: nn.Module,
    tokenizer: Any,
    prompts: str | Path | Sequence[str | Path],
    *,
    names: tuple[str, str] = ("a", "b"),
    baseline: bool = False,
    control: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Evaluate two models with drafters and compare them.

    Args:
        a: a model with the first drafter.
        b: the same target with the second.
        tokenizer: the target's.
        prompts: JSONL files.
        names: of the two, for tables and figures.
        baseline: see :func:`~modelopt_spec.decoding.evaluate.evaluate`.
        control: see the same.
        options: further arguments of it, the same for both.

    Returns:
        The comparison of the module's docstring.
    """
    reports = [evaluate(m, tokenizer, prompts, baseline=baseline, control=control, **options) for m in (a, b)]
    return compare_reports(reports[0], reports[1], names=names, seed=options.get("seed", 0))


def compare_reports(
    a: Mapping[str, Any], b: Mapping[str, Any], *, names: tuple[str, str] = ("a", "b"), seed: int = 0
) -> dict[str, Any]:
    """Compare two evaluation reports of the same prompts.

    Raises:
        DataError: not evaluations, or of other prompts or temperatures.
    """
    for name, report in zip(names, (a, b), strict=True):
        if report.get("kind") != EVALUATION_KIND:
            raise DataError(f"{name} is of kind {report.get('kind')!r}, not an evaluation ({EVALUATION_KIND!r})")
    if a["prompts"]["fingerprint"] != b["prompts"]["fingerprint"]:
        raise DataError("the two evaluations used other prompts (their fingerprints differ): evaluate both on the same")
    warnings = [f"{key} differs: {a[key]} and {b[key]}" for key in _SAME if a.get(key) != b.get(key)]
    if a["num_draft_tokens"] != b["num_draft_tokens"]:
        warnings.append(
            f"num_draft_tokens differs: {a['num_draft_tokens']} and {b['num_draft_tokens']}; longer blocks accept more "
            "and costs more"
        )
    others = {result["temperature"]: result for result in b["results"]}
    shared = [result for result in a["results"] if result["temperature"] in others]
    if not shared:
        raise DataError("the two evaluations share no temperature")
    return {
        "kind": COMPARISON_KIND,
        "version": 1,
        "names": list(names),
        "a": dict(a),
        "b": dict(b),
        "differences": [_differences(result, others[result["temperature"]], seed) for result in shared],
        "warnings": warnings,
    }


def _counts(result: Mapping[str, Any], file: str | None = None) -> PromptCounts:
    return {
        row["prompt"]: (row["rounds"], row["committed"])
        for row in result["per_prompt"]
        if file is None or row["file"] == file
    }


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], seed: int) -> dict[str, Any]:
    return {
        "temperature": a["temperature"],
        "pooled": _difference(_counts(a), _counts(b), seed),
        "files": {name: _difference(_counts(a, name), _counts(b, name), seed) for name in a["files"]},
    }


def _difference(a: PromptCounts, b: PromptCounts, seed: int) -> dict[str, Any]:
    prompts = a.keys() & b.keys()
    taus = [sum(c[p][1] for p in prompts) / sum(c[p][0] for p in prompts) if prompts else None for c in (a, b)]
    bounds = paired_interval(a, b, seed=seed)
    better = None
    if bounds is not None and (bounds[0] > 0 or bounds[1] < 0):
        better = "b" if bounds[0] > 0 else "a"
    return {
        "prompts": len(prompts),
        "tau_a": taus[0],
        "tau_b": taus[1],
        "difference": None if taus[0] is None or taus[1] is None else taus[1] - taus[0],
        "interval": bounds,
        "better": better,
    }
