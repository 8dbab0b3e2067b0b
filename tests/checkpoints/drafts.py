"""Tiny converted models with random weights, one for each kind of drafter."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from modelopt_spec.checkpoints.layouts import Draft
from modelopt_spec.conversion import convert
from tests.tiny import tiny

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vanilla": ("dspark", {"head": {"type": "vanilla", "rank": 6}}),
    "vanilla_no_confidence": ("dspark", {"head": {"rank": 6}, "confidence": {"enabled": False}}),
    "vanilla_bonus": ("dspark", {"head": {"rank": 6}, "layout": "bonus_anchor"}),
    "gated": ("dspark", {"head": {"type": "gated", "rank": 6}, "confidence": {"with_markov": False}}),
    "rnn": ("dspark", {"head": {"type": "rnn", "rank": 6}}),
    "dflash": ("dflash", {}),
    "dflash_bonus": ("dflash", {"layout": "bonus_anchor"}),
    "domino": ("domino", {"head": {"rank": 6, "gru_hidden_dim": 10}}),
    "domino_bonus": ("domino", {"head": {"rank": 6, "gru_hidden_dim": 10}, "layout": "bonus_anchor"}),
    "reduced": ("dspark", {"head": {"rank": 6}, "draft_vocab_size": 40}),
    "reduced_dflash": ("dflash", {"layout": "bonus_anchor", "draft_vocab_size": 40}),
    "window": (
        "dspark",
        {"head": {"rank": 6}, "backbone": {"sliding_window": 9, "window_rule": "query", "causal": True}},
    ),
    "sink": (
        "dflash",
        {
            "layout": "bonus_anchor",
            "backbone": {"attention_sink": True, "sliding_window": 9, "window_rule": "query", "attention_bias": True},
        },
    ),
    "yarn": (
        "dspark",
        {
            "head": {"rank": 6},
            "backbone": {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        },
    ),
    "llama3": (
        "dspark",
        {
            "head": {"rank": 6},
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
    "linear": (
        "dspark",
        {
            "head": {"rank": 6},
            "backbone": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
        },
    ),
}


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Random weights that leave no part of a drafter without effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + (1.0 if "norm" in name else 0.0))
        table = getattr(module, "d2t", None)
        if table is not None:
            vocab = module.config.vocab_size
            kept = torch.randperm(vocab, generator=generator)[: len(table)].sort().values
            table.copy_(kept - torch.arange(len(table)))


def converted(case: str = "vanilla", *, seed: int = 0, target: str = "llama", **changes: Any) -> nn.Module:
    """A tiny target with a random drafter of a case."""
    mode, config = CASES[case]
    model = tiny(target, seed=seed)
    convert(model, (mode, {"mask_token_id": 96, "block_size": 5, **config, **changes}), quiet=True)
    randomise(model.drafter, seed)
    return model


@functools.cache
def cached_draft(case: str = "vanilla") -> Draft:
    """The drafter of a case as data; made once, not to be changed."""
    return draft_of(converted(case))


def draft_of(model: nn.Module) -> Draft:
    """The drafter of a model as data."""
    return Draft(model.drafter.config, {name: t.detach().clone() for name, t in model.drafter.state_dict().items()})
