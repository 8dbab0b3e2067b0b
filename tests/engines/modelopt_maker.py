"""A DSpark draft that nvidia-modelopt 0.47 makes itself: its convert, its exporter, its own generation."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.engines.exported import BLOCK_SIZE, SHAPE, spread, target_model


def write_modelopt_draft(target_dir: Path, out: Path) -> Any:
    """Convert the target with nvidia-modelopt, give the draft random weights, and export it; returns the model."""
    import modelopt.torch.speculative as speculative

    torch.manual_seed(0)
    model: Any = target_model(target_dir)
    shape = model.config
    architecture = {
        "num_hidden_layers": SHAPE["backbone"]["num_layers"],
        "head_dim": shape.head_dim,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "intermediate_size": shape.intermediate_size,
        "target_layer_ids": list(SHAPE["target_layer_ids"]),
        "projector_type": "dspark",
        "markov_rank": 16,
        "markov_head_type": "vanilla",
        "use_confidence_head": True,
    }
    config = {
        "dflash_block_size": BLOCK_SIZE,
        "dflash_mask_token_id": SHAPE["mask_token_id"],
        "dflash_use_torch_compile": False,
        "dflash_architecture_config": architecture,
    }
    speculative.convert(model, [("dflash", config)])
    spread(model.dflash_module)
    with contextlib.redirect_stdout(io.StringIO()):
        model.get_exporter().export(out)
    return model.eval()


def modelopt_block(model: Any, context: Sequence[int], num_draft_tokens: int) -> tuple[int, list[int]]:
    """The anchor behind the context (the target's greedy token) and the block that nvidia-modelopt drafts from it."""
    anchor, drafted = model.pseudo_speculative_generate(torch.tensor([list(context)]), steps=num_draft_tokens)
    return int(anchor), drafted[0].tolist()
