"""Train recipes on the same data, seeds and steps, evaluate each on the same prompts, and put them side by side.

Every run and every evaluation leaves a file; a comparison that was stopped goes on with what is missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from modelopt_spec.checkpoints.opening import open_checkpoint
from modelopt_spec.decoding.evaluate import evaluate
from modelopt_spec.decoding.prompts import read_prompt_files
from modelopt_spec.decoding.statistics import PromptCounts, interval, paired_interval
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.text_files import finite
from modelopt_spec.training.recipe import load_recipe
from modelopt_spec.training.train import DRAFTER, REPORT, train

__all__ = ["COMPARISON_KIND", "compare_recipes", "head_cost", "summarise"]

COMPARISON_KIND = "mtsp.recipe_comparison"


def compare_recipes(
    entries: Sequence[str],
    out: str | Path,
    prompts: Sequence[str | Path],
    *,
    seeds: Sequence[int] = (0, 1),
    overrides: Sequence[str] = (),
    limit: int | None = None,
    max_new_tokens: int = 128,
    quiet: bool = True,
) -> dict[str, Any]:
    """Compare recipes.

    Args:
        entries: ``recipe`` or ``recipe:key=value,key=value``; the overrides after the colon are that entry's own.
        out: directory of the runs (``ENTRY/seed-N``), of ``comparison.json`` and of the figures.
        prompts: held-out prompt files, see :func:`modelopt_spec.evaluate`.
        seeds: each entry is trained once with each.
        overrides: recipe overrides of all entries.
        limit: prompts of each file. max_new_tokens: tokens of each answer. quiet: no progress.

    Returns:
        Also in ``comparison.json``: ``kind`` "mtsp.recipe_comparison", ``seeds``, ``prompts``, ``baseline`` and
        ``entries``, each with ``name``, ``recipe``, ``overrides``, ``head``, ``head_cost``, ``runs`` (``seed``,
        ``training``, ``evaluation``, ``directory``) and ``summary`` (see :func:`summarise`).
    """
    directory = Path(out)
    result: dict[str, Any] = {
        "kind": COMPARISON_KIND,
        "version": 1,
        "seeds": list(seeds),
        "overrides": list(overrides),
        "prompts": [str(path) for path in prompts],
        "entries": [],
    }
    for entry in entries:
        recipe, _, own = entry.partition(":")
        own_overrides = [part for part in own.split(",") if part]
        name = entry.replace("/", "_").replace(":", "-").replace(",", "-").replace("=", "-")
        runs = []
        for seed in seeds:
            run = directory / name / f"seed-{seed}"
            settings = [*overrides, *own_overrides, f"training.seed={seed}", f"training.output_dir={run}"]
            if not quiet:
                Console(stderr=True).print(f"{entry}, seed {seed}: {run}", highlight=False, soft_wrap=True)
            runs.append(_run(recipe, settings, run, prompts, seed, limit, max_new_tokens, quiet))
        model: Any = open_checkpoint(directory / name / f"seed-{seeds[0]}")[0]
        cost = head_cost(model.drafter)
        head = model.drafter.config.head.type
        made = {"name": entry, "recipe": recipe, "overrides": own_overrides, "head": head, "head_cost": cost}
        result["entries"].append({**made, "runs": runs})
        summarise(result)
        (directory / "comparison.json").write_text(json.dumps(finite(result), indent=1, allow_nan=False) + "\n")
    return result


def summarise(comparison: dict[str, Any]) -> None:
    """Pool each entry's rounds over seeds and set it against the baseline; fills ``baseline`` and ``summary`` in place.

    The baseline is the first entry without a correction head, else the first entry. ``summary`` holds ``tau`` and its
    ``interval``, ``conditional_acceptance`` by slot over all seeds, and ``difference`` to the baseline's tau with its
    ``difference_interval`` (95%, bootstrap over prompts, paired; a prompt's seeds are drawn together).
    """
    entries = comparison["entries"]
    baseline = next((entry for entry in entries if entry["head"] == "none"), entries[0])
    comparison["baseline"] = baseline["name"]
    reference = _prompt_counts(baseline)
    for entry in entries:
        counts = _prompt_counts(entry)
        bounds = None if entry is baseline else paired_interval(reference, counts)
        entry["summary"] = {
            "tau": _tau(counts),
            "interval": interval(counts),
            "conditional_acceptance": _acceptance_by_slot(entry),
            "difference": None if entry is baseline else _tau(counts) - _tau(reference),
            "difference_interval": bounds,
        }


def _prompt_counts(entry: dict[str, Any]) -> PromptCounts:
    """Rounds and committed tokens of each prompt, all seeds together."""
    totals: PromptCounts = {}
    for run in entry["runs"]:
        for row in run["evaluation"]["per_prompt"]:
            rounds, committed = totals.get(row["prompt"], (0, 0))
            totals[row["prompt"]] = (rounds + row["rounds"], committed + row["committed"])
    return totals


def _tau(counts: PromptCounts) -> float:
    rounds = sum(count for count, _ in counts.values())
    if not rounds:
        raise DataError("no prompt needed a round, so there is nothing to compare: raise max_new_tokens")
    return sum(committed for _, committed in counts.values()) / rounds


def _acceptance_by_slot(entry: dict[str, Any]) -> list[float | None]:
    pooled = [run["evaluation"]["pooled"] for run in entry["runs"]]
    shares: list[float | None] = []
    for slot in range(min(len(stats["conditional_rounds"]) for stats in pooled)):
        reached = sum(stats["conditional_rounds"][slot] for stats in pooled)
        stood = sum((s["conditional_acceptance"][slot] or 0.0) * s["conditional_rounds"][slot] for s in pooled)
        shares.append(stood / reached if reached else None)
    return shares


def _same_settings(made: Path, asked: dict[str, Any], found: dict[str, Any]) -> None:
    """Refuse a result that was made with other settings than those asked for; where it was written does not count."""
    now, then = _flat(json.loads(json.dumps(asked))), _flat(found)
    shared = (now.keys() & then.keys()) - {"training.output_dir", "export.output_dir"}
    other = [f"{key} {then[key]!r}, not {now[key]!r}" for key in sorted(shared) if now[key] != then[key]]
    if other:
        raise ConfigError(
            f"{made} was made with {'; '.join(other[:3])}: name another directory for this comparison, or remove it"
        )


def _flat(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Nested mappings as ``{"training.max_steps": 5}``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        full = f"{path}.{key}" if path else str(key)
        flat.update(_flat(value, full) if isinstance(value, dict) else {full: value})
    return flat


def _run(
    recipe: str,
    settings: list[str],
    run: Path,
    prompts: Sequence[str | Path],
    seed: int,
    limit: int | None,
    max_new_tokens: int,
    quiet: bool,
) -> dict[str, Any]:
    """One training and its evaluation, each only if its file is not there yet.

    Raises:
        ConfigError: what is there was made with other settings.
    """
    if not (run / REPORT).is_file():
        train(recipe, settings, resume=run.is_dir(), quiet=quiet)
    report = json.loads((run / REPORT).read_text())
    _same_settings(run, load_recipe(recipe, settings).model_dump(), report["recipe"])
    evaluation_file = run / "evaluation.json"
    if evaluation_file.is_file():
        made, files = json.loads(evaluation_file.read_text()), read_prompt_files(prompts, limit)
        now = [f"{len(file.dialogues)} ({file.sha256[:8]})" for file in files]
        then = [f"{file['prompts']} ({file['sha256'][:8]})" for file in made["prompts"]["files"]]
        asked = {"max_new_tokens": max_new_tokens, "prompts": now}
        _same_settings(evaluation_file, asked, {"max_new_tokens": made["max_new_tokens"], "prompts": then})
    else:
        model, tokenizer = open_checkpoint(run / DRAFTER)
        evaluation = evaluate(
            model,
            tokenizer,
            prompts,
            limit=limit,
            max_new_tokens=max_new_tokens,
            baseline=False,
            control=False,
            seed=0,
            quiet=quiet,
        )
        evaluation_file.write_text(json.dumps(finite(evaluation), indent=1, allow_nan=False) + "\n")
    curve = [
        {key: entry[key] for key in ("step", "loss", "tau", "tau_probability") if key in entry}
        for entry in report["curves"]
        if "tau" in entry
    ]
    training = {"steps": report["steps"], "seconds": report["seconds"], "curve": curve}
    return {
        "seed": seed,
        "directory": str(run),
        "training": training,
        "evaluation": json.loads(evaluation_file.read_text())["results"][0],
        "versions": report["versions"],
    }


@torch.no_grad()
def head_cost(drafter: Drafter, repeats: int = 50) -> dict[str, Any]:
    """What the correction head adds to one drafted token: microseconds (median), multiply-adds and floats of state.

    The vocabulary projection ``W_out u`` is in it; the backbone and ``lm_head`` are not.
    """
    head = drafter.head
    if head is None:
        return {"microseconds": 0.0, "multiply_adds": 0, "state_floats": 0, "parameters": 0}
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}: it must be at least 1")
    width = drafter.config.backbone.hidden_size or 0
    hidden = torch.randn(1, width, dtype=drafter.dtype, device=drafter.device)
    previous = torch.zeros(1, dtype=torch.long, device=drafter.device)
    state = head.initial_state(hidden)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        latent, _ = head.step(previous, hidden, state, head.first_slot + 1)
        head.out(latent)
        times.append(time.perf_counter() - started)
    matrices = [p for name, p in head.named_parameters() if p.ndim == 2 and "markov_w1" not in name]
    return {
        "microseconds": 1e6 * sorted(times)[len(times) // 2],
        "multiply_adds": sum(p.numel() for p in matrices),
        "state_floats": 0 if state is None else state.numel(),
        "parameters": sum(p.numel() for p in head.parameters()),
    }
