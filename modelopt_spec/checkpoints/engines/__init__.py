"""Engines: what each serves and refuses, and the plan of a directory that several of them load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from modelopt_spec.checkpoints.engines.base import Engine, Serving
from modelopt_spec.checkpoints.engines.stages import ENGINE_CLASSES
from modelopt_spec.checkpoints.engines.table import print_support_table, support_table
from modelopt_spec.checkpoints.layouts import LAYOUTS, Layout, default_layout, get_layout
from modelopt_spec.checkpoints.layouts.base import NO_TARGET
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import DrafterConfig
from modelopt_spec.errors import UnsupportedError, nearest

__all__ = [
    "ENGINES",
    "Engine",
    "ExportPlan",
    "Serving",
    "get_engine",
    "plan_export",
    "print_support_table",
    "support_table",
]

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (cls() for cls in ENGINE_CLASSES)}
"""All engines by name."""

_ALIASES = {"llama_cpp": "llama.cpp", "llamacpp": "llama.cpp", "llama-cpp": "llama.cpp"}
_ALIASES |= {"trtllm": "tensorrt_llm", "tensorrt-llm": "tensorrt_llm"}


def get_engine(name: str) -> Engine:
    """An engine by name; ``llama_cpp`` and ``tensorrt-llm`` are understood too."""
    key = _ALIASES.get(name.lower(), name.lower())
    if key not in ENGINES:
        raise UnsupportedError(f"engine {name!r} is unknown.{nearest(key, ENGINES)} Known: {', '.join(ENGINES)}")
    return ENGINES[key]


@dataclass(frozen=True)
class ExportPlan:
    """One directory: its layout, and which engines load it."""

    config: DrafterConfig
    layout: Layout
    engines: tuple[str, ...]
    refused: dict[str, str]
    """Engine -> reason and the nearest thing that works."""
    notes: tuple[str, ...] = ()
    quantization: str | None = None
    """``quant_algo`` of a quantised draft."""

    def launch(self, target: str, draft: str) -> dict[str, str]:
        """Command line of every engine that loads the directory."""
        return {
            name: ENGINES[name].launch(self.config, self.layout.name, target, draft, self.quantization)
            for name in self.engines
        }


def plan_export(
    config: DrafterConfig,
    engines: Sequence[str] | None = None,
    *,
    layout: str | None = None,
    dtype: torch.dtype = torch.float32,
    target: TargetFacts = NO_TARGET,
    quantization: str | None = None,
) -> ExportPlan:
    """Choose the layout that all named engines read; with none named, the usual one for this kind of drafter.

    Raises:
        UnsupportedError: an engine serves this drafter in no layout, two engines share none, or the layout cannot
            hold it.
    """
    named = None if engines is None else [get_engine(name) for name in engines]
    considered = list(ENGINES.values()) if named is None else named
    candidates = _candidates(config, layout)
    verdicts = {
        candidate.name: {
            engine.name: engine.refuses(Serving(config, candidate.name, dtype, target, quantization))
            for engine in considered
        }
        for candidate in candidates
    }

    def served(candidate: Layout) -> list[str]:
        return [name for name, reason in verdicts[candidate.name].items() if reason is None]

    best = max(candidates, key=lambda candidate: len(served(candidate)))
    if named is None and served(candidates[0]):
        best = candidates[0]
    if named is not None and len(served(best)) < len(named):
        raise UnsupportedError(_why_not(named, candidates, verdicts))
    refused = {name: reason for name, reason in verdicts[best.name].items() if reason is not None}
    notes = [note for name in served(best) for note in ENGINES[name].notes(Serving(config, best.name, dtype, target))]
    return ExportPlan(config, best, tuple(served(best)), refused, tuple(notes), quantization)


def _candidates(config: DrafterConfig, layout: str | None) -> list[Layout]:
    """Layouts that can hold a drafter, the usual one first."""
    if layout is not None:
        chosen = get_layout(layout)
        chosen.check(config)
        return [chosen]
    usual = default_layout(config)
    usual.check(config)
    others = [other for other in LAYOUTS.values() if other is not usual and other.refuses(config) is None]
    return [usual, *others]


def _why_not(named: list[Engine], candidates: list[Layout], verdicts: dict[str, dict[str, str | None]]) -> str:
    """Why the named engines cannot share a directory."""
    homes = {e.name: [c.name for c in candidates if verdicts[c.name][e.name] is None] for e in named}
    homeless = [name for name, layouts in homes.items() if not layouts]
    if homeless:
        reasons = [f"{name}: {verdicts[candidates[0].name][name]}" for name in homeless]
        return "cannot export for " + "; ".join(reasons)
    for first in named:
        for second in named:
            if not set(homes[first.name]) & set(homes[second.name]):
                return (
                    f"{first.name} and {second.name} cannot share one directory: {first.name} reads this drafter in "
                    f"layout {' or '.join(homes[first.name])}, {second.name} in layout "
                    f"{' or '.join(homes[second.name])}. Export twice"
                )
    return f"no single layout suits all of {', '.join(homes)}: {homes}. Export in several directories"
