"""Small drafters of each kind that engines serve, fitted to one answer and exported in each layout.

Weights are random at a size at which backbone, taps and head all decide proposals, and then fitted to the answer of one
prompt: there the target accepts drafts, elsewhere the proposals are arbitrary and must be equal all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelopt_spec.checkpoints.export import export
from modelopt_spec.config import LossConfig
from modelopt_spec.conversion import convert
from modelopt_spec.training.blocks import make_blocks
from modelopt_spec.training.module import block_settings
from tests.checkpoints.drafts import randomise
from tests.moe.blocks import loss_of

BLOCK_SIZE = 7
REDUCED = 8192
SHAPE: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "mask_token_id": 4,
    "target_layer_ids": (9, 28),
    "backbone": {"num_layers": 2},
}
VANILLA: dict[str, Any] = {"head": {"type": "vanilla", "rank": 16}}
ZERO_HEAD = "DFlash, anchor first, written with a head of zeros"
RANK_ZERO = "DFlash, anchor first (markov_rank 0)"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "DFlash, bonus anchor (z-lab)": ("dflash", {"layout": "bonus_anchor"}),
    RANK_ZERO: ("dflash", {}),
    ZERO_HEAD: ("dflash", {}),
    "DSpark vanilla": ("dspark", VANILLA),
    "DSpark vanilla, bonus anchor": ("dspark", {**VANILLA, "layout": "bonus_anchor"}),
    "DSpark vanilla, reduced vocabulary": ("dspark", {**VANILLA, "draft_vocab_size": REDUCED}),
}
"""Rows of the support table."""
HEADLESS: dict[str, Any] = {"steps": 60, "lr": 2e-3}
"""Without a Markov head an answer takes longer to learn."""


def target_model(directory: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def spread(drafter: nn.Module) -> None:
    """Random weights of a size at which the backbone, the taps and the head all decide proposals."""
    randomise(drafter)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim == 2 and "markov_w1" not in name:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif "markov_w1" in name:
                parameter.normal_()


def reduce_vocabulary(drafter: nn.Module, whole: nn.Module, wanted: Sequence[int]) -> None:
    """Give a drafter of a reduced vocabulary the weights of one of the whole vocabulary, and a table of kept ids.

    Kept are the wanted ids and every sixth other one.
    """
    wanted = sorted(set(wanted))
    others = [token for token in range(0, drafter.config.vocab_size, 6) if token not in wanted]
    ids = torch.tensor(sorted(wanted + others[: REDUCED - len(wanted)]))
    given = whole.state_dict()
    state = {name: given[name] for name in drafter.state_dict() if name in given}
    state["markov_head.markov_w2.weight"] = state["markov_head.markov_w2.weight"][ids]
    state["lm_head.weight"] = whole.target.output_weight()[ids]
    state["d2t"] = ids - torch.arange(REDUCED)
    drafter.load_state_dict(state)


def fit(model: Any, prompt: Sequence[int], answer: Sequence[int], steps: int = 30, lr: float = 1e-2) -> None:
    """Teach the drafter one answer: cross entropy of every block in it."""
    drafter = model.drafter.train()
    ids = torch.tensor([[*prompt, *answer]])
    anchors = torch.arange(len(prompt), ids.shape[1] - 1).unsqueeze(0)
    settings = block_settings(drafter, LossConfig(), anchors.shape[1])
    everywhere = torch.ones_like(ids).bool()
    blocks = make_blocks(ids, everywhere, anchors, torch.ones_like(anchors).bool(), settings)
    features = drafter.target.features(ids, drafter.config.target_layer_ids)
    weights = {"ce": 1.0, "confidence": 0.1 if drafter.confidence_head is not None else 0.0}
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(drafter, features, blocks, **weights).backward()
        optimizer.step()
    drafter.eval()


def fitted(
    directory: Path, kind: str, prompt: Sequence[int], answer: Sequence[int], whole: nn.Module | None = None
) -> nn.Module:
    """The target with a drafter of a kind; one of a reduced vocabulary gets the weights of ``whole``, a drafter."""
    mode, settings = KINDS[kind]
    torch.manual_seed(0)
    model = target_model(directory)
    convert(model, (mode, {**SHAPE, **settings}), quiet=True)
    if whole is not None:
        reduce_vocabulary(model.drafter, whole, answer)
        model.drafter.eval()
    else:
        spread(model.drafter)
        fit(model, prompt, answer, **(HEADLESS if mode == "dflash" else {}))
    return model


def export_case(model: nn.Module, kind: str, layout: str, out: Path) -> Path:
    """Write a layout; a head of zeros is what export adds when no layout is named."""
    if kind == ZERO_HEAD:
        report = export(model, out, engines=["vllm"], quiet=True)
        assert report.layout == layout
    else:
        export(model, out, layout=layout, quiet=True)
    return out


def drafts_and_method(kind: str) -> tuple[int, str]:
    """Draft tokens of a block, and the method under which vLLM serves it."""
    mode, settings = KINDS[kind]
    bonus = settings.get("layout") == "bonus_anchor"
    return BLOCK_SIZE - bonus, "dflash" if bonus and mode == "dflash" else "dspark"
