"""`quantize`: quantise a drafter on real blocks, measure what it costs, and export it.

The report (``mtsp quantize --json``; its first two parts go into the card)::

    {"before": {"tau": float, "tau_interval": [low, high] | null, "rounds": int}, "after": {...},
     "calibration": {"format": str, "prompts": int, "same_prompts": bool, "max_new_tokens": int},
     "bytes": {"before": int, "after": int}, "export": what mtsp export reports}
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelopt_spec.checkpoints.atomic import DRAFTER_FILES, check_free
from modelopt_spec.checkpoints.export import export
from modelopt_spec.checkpoints.quantise import EXCLUDED, check_exclude, quantise
from modelopt_spec.consoles import stderr_console
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.errors import CheckpointError

__all__ = ["quantize"]


def quantize(
    model: nn.Module,
    tokenizer: Any,
    out: str | os.PathLike[str],
    *,
    format: str,
    prompts: str | Path | Sequence[str | Path],
    calibration: str | Path | Sequence[str | Path] | None = None,
    engines: Sequence[str] | None = None,
    layout: str | None = None,
    dtype: str | torch.dtype | None = "bfloat16",
    exclude: Sequence[str] = EXCLUDED,
    limit: int | None = None,
    max_new_tokens: int = 128,
    overwrite: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Quantise a model's drafter and export it with its ``quantization_config``.

    Activations are calibrated on the blocks that the drafter itself drafts while it answers the calibration prompts;
    the accepted length is measured greedily before and after, activations rounded as engines round them.

    Args:
        model: a target with its drafter; the drafter is quantised in place and stays so.
        tokenizer: the target's.
        out: the directory to write. It appears complete or not at all.
        format: ``fp8``, ``nvfp4`` or ``int8`` (weights only).
        prompts: JSONL files to measure the accepted length on.
        calibration: JSONL files to calibrate on; None takes ``prompts``, and the report says so.
        engines: as for :func:`modelopt_spec.export`.
        layout: as for :func:`modelopt_spec.export`.
        dtype: type of what is not quantised.
        exclude: modules that stay as they are.
        limit: prompts of each file.
        max_new_tokens: of each answer.
        overwrite: replace a directory that is not empty.
        quiet: print nothing.

    Returns:
        The report of the module's docstring.

    Raises:
        ConfigError: an unknown format, or nothing to quantise.
        UnsupportedError: an engine that was named does not load such a draft.
        CheckpointError: no drafter, or ``out`` is not free.
    """
    from modelopt_spec.decoding.evaluate import evaluate

    drafter = getattr(model, "drafter", None)
    if not isinstance(drafter, Drafter):
        raise CheckpointError(f"this {type(model).__name__} has no drafter: call modelopt_spec.convert first")
    check_exclude(drafter, exclude)
    check_free(out, overwrite=overwrite, marks=DRAFTER_FILES, export=True)
    settings: dict[str, Any] = {"limit": limit, "max_new_tokens": max_new_tokens, "probabilities": False}

    def answer(files: Any) -> dict[str, Any]:
        return evaluate(model, tokenizer, files, baseline=False, control=False, quiet=True, **settings)

    before = answer(prompts)
    seen: dict[str, Any] = {}
    chosen = calibration if calibration is not None else prompts
    layers = quantise(drafter, format, lambda: seen.update(answer(chosen)), exclude=exclude)
    report: dict[str, Any] = {
        "before": _accepted(before),
        "after": _accepted(answer(prompts)),
        "calibration": {
            "format": format,
            "prompts": seen["results"][0]["pooled"]["prompts"],
            "same_prompts": seen["prompts"]["fingerprint"] == before["prompts"]["fingerprint"],
            "max_new_tokens": max_new_tokens,
        },
    }
    written = export(
        model,
        out,
        engines=engines,
        layout=layout,
        dtype=dtype,
        overwrite=overwrite,
        quantization_report=report,
        quiet=quiet,
    )
    after = sum(path.stat().st_size for path in Path(out).glob("*.safetensors"))
    whole = 4 if dtype in ("float32", "fp32", torch.float32) else 2
    report |= {"bytes": {"before": whole * written.parameters, "after": after}, "export": written.to_dict()}
    if not quiet:
        _show(report, format, len(layers))
    return report


def _accepted(evaluation: dict[str, Any]) -> dict[str, Any]:
    pooled = evaluation["results"][0]["pooled"]
    return {name: pooled[name] for name in ("tau", "tau_interval", "rounds")}


def _tau(part: dict[str, Any]) -> str:
    return "-" if part["tau"] is None else f"{part['tau']:.3f}"


def _show(report: dict[str, Any], format: str, layers: int) -> None:
    before, after, size = report["before"], report["after"], report["bytes"]
    console = stderr_console()
    console.print(
        f"{format}, {layers} layers: accepted length {_tau(before)} before, {_tau(after)} after "
        f"({before['rounds']} and {after['rounds']} rounds); {size['before'] / 1e6:.1f} MB became "
        f"{size['after'] / 1e6:.1f} MB",
        highlight=False,
    )
    if report["calibration"]["same_prompts"]:
        console.print("calibrated on the prompts that were measured: name others with calibration", style="yellow")
