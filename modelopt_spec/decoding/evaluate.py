"""Measure a drafter by real rounds on prompts that it was not trained on.

The report (JSON; ``mtsp evaluate`` writes it, the figures and comparisons read it)::

    {"kind": "mtsp.evaluation", "version": 1, "model": str, "dtype": str, "device": str, "versions": {...}, "seed": int,
     "drafter": {"fingerprint", "algorithm", "head", "layout", "block_size"},
     "num_draft_tokens": m, "max_new_tokens": int, "batch_size": int, "top_k": int, "top_p": float,
     "scheduler": str | null,
     "prompts": {"fingerprint": str, "files": [{"name", "path", "sha256", "prompts", "first"}]},
     "results": [{"temperature": float, "pooled": STATS, "files": {name: STATS},
                  "per_prompt": [{"prompt": int, "file": str, "rounds": int, "committed": int, "looping": bool}]}],
     "control": {"tau", "tau_same_prompts", "difference_interval", "falls": bool | null} | null,
     "baseline": {"prompts", "tokens_per_second", "speculative_tokens_per_second", "speedup", "equal_outputs"} | null,
     "warnings": [str]}

    STATS = what statistics.round_statistics returns, and {"prompts", "answers", "new_tokens", "looping_share",
             "tau_interval": [low, high] | null, "stopped": {reason: answers}, "tokens_per_second", "seconds": {...}}

Numbers that were not measured are null: tau where no round was needed (answers of one token), and ``falls`` with it.

``per_prompt`` counts are what two reports are compared by. Prompts are numbered over all files; ``first`` is a file's
first number. A prompt of several turns is answered turn by turn, its later turns after the target's own answers.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelopt_spec import noise
from modelopt_spec.arguments import check_seed, number, whole_number
from modelopt_spec.checkpoints.store import fingerprint
from modelopt_spec.data.chat import ChatRenderer
from modelopt_spec.data.config import DataConfig
from modelopt_spec.data.looping import looping
from modelopt_spec.decoding.control import run_baseline, run_control
from modelopt_spec.decoding.draft import check_num_draft_tokens
from modelopt_spec.decoding.measure import (
    Answer,
    Measured,
    MeasureSettings,
    check_tokenizer,
    end_tokens,
    measure,
    numbered,
)
from modelopt_spec.decoding.prompts import PromptFile, read_prompt_files
from modelopt_spec.decoding.rounds import rounds_header, write_rounds
from modelopt_spec.decoding.sampling import Sampling
from modelopt_spec.decoding.statistics import count_prompts, interval, round_statistics
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.errors import ConfigError
from modelopt_spec.outputs import check_outputs
from modelopt_spec.scheduling.api import open_policy
from modelopt_spec.text_files import finite
from modelopt_spec.versions import versions

__all__ = ["EVALUATION_KIND", "evaluate"]

EVALUATION_KIND = "mtsp.evaluation"


@noise.filtered()
def evaluate(
    model: nn.Module,
    tokenizer: Any,
    prompts: str | Path | Sequence[str | Path],
    *,
    num_draft_tokens: int | None = None,
    max_new_tokens: int = 256,
    temperatures: Sequence[float] = (0.0,),
    top_k: int = 0,
    top_p: float = 1.0,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 1,
    scheduler: Any = None,
    baseline: bool = True,
    control: bool = True,
    probabilities: bool = True,
    data_config: DataConfig | None = None,
    rounds_out: str | Path | None = None,
    out: str | Path | None = None,
    figure: str | Path | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """Answer prompts with the drafter's help and report what its rounds accepted.

    Args:
        model: a model with a drafter.
        tokenizer: the target's.
        prompts: JSONL files, see :mod:`modelopt_spec.decoding.prompts`.
        num_draft_tokens: draft tokens a round; default all of the trained block.
        max_new_tokens: limit of each answer.
        temperatures: each is measured over all prompts; 0 is greedy.
        top_k: of the sampled temperatures; 0 keeps all tokens.
        top_p: of the sampled temperatures.
        limit: prompts of each file.
        seed: of the sampling, the control and the intervals.
        batch_size: prompts decoded together; acceptance does not depend on it, speed does.
        scheduler: a length policy, or the path of a ``scheduler.json`` of this drafter, tokenizer and machine.
        baseline: also decode some prompts with ``model.generate``: tokens a second, and whether the tokens are equal.
        control: also measure with shuffled target features, which must lower tau.
        probabilities: record acceptance probabilities (not counted in the speed).
        data_config: chat template settings; default the tokenizer's own template.
        rounds_out: write all rounds here (several temperatures: one file each, ``name.t0.7.jsonl``).
        out: write the report here as JSON.
        figure: draw it here.
        quiet: no progress bar.

    Returns:
        The report of the module's docstring.

    Raises:
        DataError: prompts that cannot be used. ConfigError: settings out of range.
    """
    drafter = getattr(model, "drafter", None)
    if not isinstance(drafter, Drafter):
        raise ConfigError(f"this {type(model).__name__} has no drafter: convert it or restore a checkpoint first")
    check_tokenizer(tokenizer)
    files = read_prompt_files(prompts, limit)
    read = [prompts] if isinstance(prompts, str | Path) else prompts
    check_outputs({"rounds_out": rounds_out, "out": out, "figure": figure}, read, stdout=False)
    if not isinstance(temperatures, Sequence) or isinstance(temperatures, str):
        raise ConfigError(f"temperatures is {temperatures!r}: it must be a list, for example (0.0, 0.7); 0 is greedy")
    if not temperatures:
        raise ConfigError("temperatures is empty: name at least one (0 is greedy)")
    for temperature in temperatures:
        number("temperatures", temperature, 0, wanted="0 (greedy) or a positive number")
    whole_number("batch_size", batch_size, 1)
    whole_number("max_new_tokens", max_new_tokens, 1)
    check_seed("seed", seed)
    whole_number("top_k", top_k, 0, note="; 0 keeps all")
    number("top_p", top_p, 0, 1, above=True, wanted="a number above 0 and at most 1")
    count = check_num_draft_tokens(drafter, num_draft_tokens)
    policy = open_policy(scheduler, model, tokenizer, gamma=count)
    renderer = ChatRenderer(tokenizer, data_config)
    ends = end_tokens(model, tokenizer)
    base = MeasureSettings(count, max_new_tokens, Sampling(), seed, batch_size, policy, ends, probabilities)
    report = _identity(model, drafter, files, base)
    report |= {"top_k": top_k, "top_p": top_p, "scheduler": _describe(scheduler)}
    for temperature in temperatures:
        sampling = Sampling() if temperature == 0 else Sampling(temperature, top_k, top_p)
        settings = replace(base, sampling=sampling)
        title = f"temperature {temperature:g}"
        measured = measure(model, renderer, numbered(files), settings, title=title, quiet=quiet)
        report["results"].append(_result(files, measured, settings))
        if rounds_out is not None:
            path = Path(rounds_out)
            if len(temperatures) > 1:
                path = path.with_name(f"{path.stem}.t{temperature:g}{path.suffix}")
            write_rounds(path, _header(report, temperature), measured.rounds)
        if temperature == temperatures[0]:
            if control:
                report["control"] = run_control(model, renderer, files, settings, measured, report["warnings"])
            if baseline:
                report["baseline"] = run_baseline(model, renderer, files, settings, report["warnings"])
    _warn(report)
    _save(report, out, figure)
    return report


# ---- the report -----------------------------------------------------------------------------------------------------


def _result(files: Sequence[PromptFile], measured: Measured, settings: MeasureSettings) -> dict[str, Any]:
    names = [file.name for file in files for _ in file.dialogues]
    looped = {a.prompt for a in measured.answers if looping(a.text)}
    pooled = _statistics(measured.answers, settings)
    seconds = {name: round(value, 4) for name, value in measured.seconds.items()}
    spent = sum(value for name, value in measured.seconds.items() if name != "records")
    pooled |= {"seconds": seconds, "tokens_per_second": pooled["new_tokens"] / spent if spent else None}
    counts = count_prompts(measured.rounds)
    return {
        "temperature": settings.sampling.temperature,
        "pooled": pooled,
        "files": {
            file.name: _statistics([a for a in measured.answers if names[a.prompt] == file.name], settings)
            for file in files
        },
        "per_prompt": [
            {"prompt": n, "file": names[n], "rounds": rounds, "committed": tokens, "looping": n in looped}
            for n, (rounds, tokens) in counts.items()
        ],
    }


def _statistics(answers: Sequence[Answer], settings: MeasureSettings) -> dict[str, Any]:
    rounds = [record for answer in answers for record in answer.rounds]
    return {
        "prompts": len({answer.prompt for answer in answers}),
        "answers": len(answers),
        "new_tokens": sum(len(answer.tokens) for answer in answers),
        "looping_share": sum(looping(answer.text) for answer in answers) / len(answers),
        "stopped": dict(Counter(answer.stopped for answer in answers)),
        "tau_interval": interval(count_prompts(rounds), seed=settings.seed),
        **round_statistics(rounds, settings.num_draft_tokens),
    }


def _identity(
    model: nn.Module, drafter: Drafter, files: Sequence[PromptFile], settings: MeasureSettings
) -> dict[str, Any]:
    """The report before anything is measured."""
    config: Any = getattr(model, "config", None)
    listed, first = [], 0
    for file in files:
        size = len(file.dialogues)
        listed.append({"name": file.name, "path": file.path, "sha256": file.sha256, "prompts": size, "first": first})
        first += size
    parameter = next(model.parameters())
    return {
        "kind": EVALUATION_KIND,
        "version": 1,
        "model": str(getattr(config, "name_or_path", "") or ""),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "seed": settings.seed,
        "drafter": {
            "fingerprint": fingerprint(drafter),
            "dtype": str(drafter.dtype).removeprefix("torch."),
            "algorithm": drafter.config.algorithm,
            "head": drafter.config.head.type,
            "layout": str(drafter.config.layout),
            "block_size": drafter.config.block_size,
        },
        "num_draft_tokens": settings.num_draft_tokens,
        "max_new_tokens": settings.max_new_tokens,
        "batch_size": settings.batch_size,
        "prompts": {
            "fingerprint": hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest(),
            "files": listed,
        },
        "results": [],
        "control": None,
        "baseline": None,
        "warnings": [],
    }


def _header(report: dict[str, Any], temperature: float) -> dict[str, Any]:
    """First line of a round file."""
    return rounds_header(
        report["num_draft_tokens"],
        model=report["model"],
        drafter_fingerprint=report["drafter"]["fingerprint"],
        dtype=report["dtype"],
        temperature=temperature,
        top_k=report["top_k"],
        top_p=report["top_p"],
        seed=report["seed"],
        max_new_tokens=report["max_new_tokens"],
        scheduler=report["scheduler"],
        versions=report["versions"],
        prompts=report["prompts"],
    )


def _describe(scheduler: Any) -> str | None:
    return None if scheduler is None else str(scheduler) if isinstance(scheduler, str | Path) else repr(scheduler)


# ---- warnings -------------------------------------------------------------------------------------------------------


def _warn(report: dict[str, Any]) -> None:
    """What makes a number suspicious."""
    for result in report["results"]:
        pooled, temperature = result["pooled"], result["temperature"]
        if not pooled["rounds"]:
            report["warnings"].append(
                f"temperature {temperature:g}: no round was needed for {pooled['new_tokens']} tokens in "
                f"{pooled['answers']} answers, so there is no accepted length: raise max_new_tokens "
                f"({report['max_new_tokens']}) or ask for longer answers"
            )
        if pooled["verified_tokens"] and not pooled["accepted_tokens"]:
            report["warnings"].append(
                f"temperature {temperature:g}: no draft token was accepted in {pooled['rounds']} rounds: an untrained "
                "drafter, a wrong tap or mask token, or a broken head"
            )
        if pooled["verified_tokens"] and pooled["accepted_tokens"] == pooled["verified_tokens"]:
            report["warnings"].append(
                f"temperature {temperature:g}: every one of {pooled['verified_tokens']} draft tokens was accepted: "
                "check the prompts"
            )
        if pooled["looping_share"] > 0.2:
            report["warnings"].append(
                f"temperature {temperature:g}: {pooled['looping_share']:.0%} of the answers repeat themselves, which "
                "flatters the accepted length"
            )


def _save(report: dict[str, Any], out: str | Path | None, figure: str | Path | None) -> None:
    if out is not None:
        path = Path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(finite(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)
    if figure is not None:
        from modelopt_spec.reports.evaluation import draw_evaluation

        draw_evaluation(report, figure)
