"""Whether a directory's quantised weights are declared as they are stored, in both files that engines look into."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from modelopt_spec.checkpoints.engines import get_engine
from modelopt_spec.checkpoints.engines.base import Directory
from modelopt_spec.checkpoints.packing import QUANT_FILE, quantisation_of
from modelopt_spec.checkpoints.preflight.report import Fact
from modelopt_spec.checkpoints.safe_read import read_json

__all__ = ["quantisation_facts"]


def quantisation_facts(
    root: Path, directory: Directory, card: dict[str, Any] | None, problem: str | None, engines: Iterable[str]
) -> list[Fact]:
    """One fact for each engine, none where nothing is quantised.

    Args:
        root: the draft directory.
        directory: its ``config.json`` and tensors.
        card: what the export recorded.
        problem: why the quantised weights cannot be read.
        engines: names of the engines that are checked.
    """
    exported = quantisation_of((card or {}).get("quantization"))
    said = quantisation_of(directory.config.get("quantization_config"))
    if not (exported or problem or str(said.get("quant_method")).startswith("modelopt")):
        return []
    beside = quantisation_of(read_json(root / QUANT_FILE)) if (root / QUANT_FILE).is_file() else {}
    note = problem or ""
    if not note and card is not None and said != exported:
        note = "config.json declares another quantisation than was exported"
    if not note and beside and {**beside, "quant_method": said.get("quant_method")} != said:
        note = f"{QUANT_FILE} and config.json's quantization_config contradict each other"
    if not note and exported and not beside:
        note = f"{QUANT_FILE} is missing, which TensorRT-LLM reads"
    mine, theirs = exported.get("quant_algo"), said.get("quant_algo")
    if note:
        return [Fact("quantisation", "", mine, theirs, None, "differs", note)]
    facts = []
    for name in engines:
        known = theirs in get_engine(name).quantisations
        why = "" if known else f"it is not known to load a draft quantised as {theirs}"
        facts.append(Fact("quantisation", name, mine, theirs, theirs, "same" if known else "fails", why))
    return facts or [Fact("quantisation", "", mine, theirs, None, "same" if card is not None else "unknown")]
