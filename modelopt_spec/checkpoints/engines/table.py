"""The support table: for each kind of drafter, which engines serve it, in which layouts, and why not the others.

Computed from the engines' own rules, so that the command line, the documentation and export never say different things.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from modelopt_spec.checkpoints.engines.base import Engine, Serving
from modelopt_spec.checkpoints.layouts import LAYOUTS
from modelopt_spec.config import BackboneConfig, DrafterConfig
from modelopt_spec.consoles import stdout_console
from modelopt_spec.conversion import MODES

__all__ = ["KINDS", "example", "markdown", "print_support_table", "support_table"]


def _stages(window_rule: str) -> dict[str, Any]:
    """Settings of a drafter with DeepSeek-V4 stages."""
    backbone: dict[str, Any] = {
        "type": "moe_mhc",
        "window_rule": window_rule,
        "sliding_window": 9,
        "num_layers": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "hyper_connection": {"streams": 4, "sinkhorn_iterations": 20, "eps": 1e-6},
        "latent_attention": {"q_lora_rank": 12, "qk_rope_head_dim": 4, "o_groups": 2, "o_lora_rank": 6},
    }
    experts = {"num_experts": 4, "experts_per_token": 2, "intermediate_size": 32, "swiglu_limit": 10.0}
    routing = {"scoring": "sqrtsoftplus", "normalize_weights": True, "routed_scaling_factor": 1.0}
    return {"head": {"type": "vanilla", "rank": 6}, "backbone": {**backbone, "moe": {**experts, **routing}}}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "DFlash, bonus anchor (z-lab)": ("dflash", {"layout": "bonus_anchor"}),
    "DFlash, anchor first (markov_rank 0)": ("dflash", {}),
    "DFlash, anchor first, written with a head of zeros": (
        "dspark",
        {"head": {"type": "vanilla", "rank": 16}, "confidence": {"enabled": False}},
    ),
    "DSpark vanilla": ("dspark", {"head": {"type": "vanilla", "rank": 6}}),
    "DSpark vanilla, bonus anchor": ("dspark", {"head": {"type": "vanilla", "rank": 6}, "layout": "bonus_anchor"}),
    "DSpark gated": ("dspark", {"head": {"type": "gated", "rank": 6}}),
    "DSpark rnn": ("dspark", {"head": {"type": "rnn", "rank": 6}}),
    "Domino": ("domino", {"head": {"rank": 6, "gru_hidden_dim": 10}}),
    "DSpark vanilla, reduced vocabulary": ("dspark", {"head": {"type": "vanilla", "rank": 6}, "draft_vocab_size": 40}),
    "DSpark vanilla, tap -1": ("dspark", {"head": {"type": "vanilla", "rank": 6}, "target_layer_ids": (-1, 1, 3)}),
    "DSpark vanilla, window and causal blocks": (
        "dspark",
        {
            "head": {"type": "vanilla", "rank": 6},
            "backbone": {"sliding_window": 9, "window_rule": "query", "causal": True},
        },
    ),
    "DSpark vanilla, attention sinks": (
        "dspark",
        {"head": {"type": "vanilla", "rank": 6}, "backbone": {"attention_sink": True}},
    ),
    "DSpark vanilla, Gemma-4 layers": (
        "dspark",
        {"head": {"type": "vanilla", "rank": 6}, "backbone": {"layer_style": "gemma4", "key_is_value": True}},
    ),
    "DSpark vanilla, llama3 rope": (
        "dspark",
        {
            "head": {"type": "vanilla", "rank": 6},
            "backbone": {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        },
    ),
    "DSpark, DeepSeek-V4 stages": ("dspark", _stages("block")),
    "DSpark, DeepSeek-V4 stages, window rule query": ("dspark", _stages("query")),
}
"""Kinds of drafters that the table has a row for: mode and settings."""

_SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 256,
}


def example(kind: str) -> DrafterConfig:
    """A small resolved drafter of a kind, for a target of width 32, 97 ids and 6 layers."""
    mode, settings = KINDS[kind]
    backbone = BackboneConfig(**{**_SHAPE, **settings.get("backbone", {})})
    taps = settings.get("target_layer_ids", (1, 2, 3))
    fields = {
        "block_size": 5,
        "mask_token_id": 96,
        "vocab_size": 97,
        "target_hidden_size": 32,
        "num_target_layers": 6,
        **settings,
        "target_layer_ids": taps,
        "num_taps": len(taps),
        "backbone": backbone,
    }
    return MODES[mode](**fields)


def support_table() -> dict[str, Any]:
    """Engines with their versions and evidence, and one row for each kind of drafter.

    Returns:
        ``engines``: name, title, version, evidence. ``rows``: the kind, the layouts that hold it, for each engine the
        layouts in which it is served or the reason why not.
    """
    from modelopt_spec.checkpoints.engines import ENGINES

    rows = []
    for kind in KINDS:
        config = example(kind)
        held = [layout.name for layout in LAYOUTS.values() if layout.refuses(config) is None]
        rows.append(
            {"kind": kind, "layouts": held, "engines": {name: _cell(e, config, held) for name, e in ENGINES.items()}}
        )
    engines = [
        {"name": e.name, "title": e.title, "version": e.version, "evidence": e.evidence} for e in ENGINES.values()
    ]
    return {"engines": engines, "rows": rows}


def _cell(engine: Engine, config: DrafterConfig, held: list[str]) -> dict[str, Any]:
    """Layouts in which an engine serves a drafter, or its reason in the layout that it would read."""
    dtype = torch.bfloat16 if config.head.type == "gru" else torch.float32
    verdicts = {layout: engine.refuses(Serving(config, layout, dtype)) for layout in held}
    served = [layout for layout, reason in verdicts.items() if reason is None]
    reasons = [verdicts[layout] for layout in engine.layouts if layout in verdicts]
    return {
        "served": served,
        "reason": None if served else next(iter(reasons or verdicts.values()), "no layout holds it"),
    }


def print_support_table(table: dict[str, Any], console: Console | None = None) -> None:
    """The table on a terminal, reasons below it."""
    console = console or stdout_console()
    titles = [f"{e['title']} {e['version']}\n[dim]{e['evidence']}[/]" for e in table["engines"]]
    rendered = Table("drafter", *titles, title="what each engine serves", title_justify="left", show_lines=True)
    reasons: dict[str, int] = {}
    for row in table["rows"]:
        rendered.add_row(row["kind"], *(_text(cell, reasons) for cell in row["engines"].values()))
    console.print(rendered)
    for reason, number in reasons.items():
        console.print(f"{number}  {reason}", highlight=False)


def markdown(table: dict[str, Any], proved: Collection[tuple[str, str, str]] = ()) -> str:
    """The table for the documentation, reasons as a numbered list.

    Args:
        table: of :func:`support_table`.
        proved: (kind, layout, engine) that a test served; their layouts are set in bold.
    """
    reasons: dict[str, int] = {}
    head = ["drafter", *(f"{e['title']} {e['version']}" for e in table["engines"])]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in table["rows"]:
        cells = [
            _text(cell, reasons, {layout for kind, layout, e in proved if (kind, e) == (row["kind"], engine)})
            for engine, cell in row["engines"].items()
        ]
        lines.append("| " + " | ".join([row["kind"], *cells]) + " |")
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items())]
    return "\n".join(lines) + "\n"


def _text(cell: dict[str, Any], reasons: dict[str, int], proved: Collection[str] = ()) -> str:
    """``layouts`` or ``no (n)``; new reasons get the next number."""
    if cell["served"]:
        return ", ".join(f"**{layout}**" if layout in proved else layout for layout in cell["served"])
    number = reasons.setdefault(cell["reason"], len(reasons) + 1)
    return f"no ({number})"
