"""Jobs of test_megatron_checkpoint.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jobs_train import ANCHORS, MODES, SEED, TOTAL, batches_of, both_sides
from megatron.core import parallel_state
from megatron_tiny import VOCAB, gpt_model, hf_config, hf_model, initialize

import modelopt_spec.conversion as mtsp
from modelopt_spec.errors import SpecError
from modelopt_spec.targets.megatron import drafter_config
from modelopt_spec.targets.megatron_checkpoint import load_checkpoint, save_checkpoint
from modelopt_spec.targets.megatron_vocab import whole_state_dict
from modelopt_spec.targets.megatron_weights import gather_hf_weights
from modelopt_spec.training import megatron as training


def save(directory: str, mode: str, target: bool, family: str = "qwen3", **layout: Any) -> dict[str, Any]:
    """Convert, save; the drafter and the target as one rank alone would hold them."""
    model, _, _ = both_sides(family, mode, layout)
    save_checkpoint(model, directory, target=target, common={"step": 3})
    return _whole(model, hf_config(family, **layout.get("config", {})))


def load(directory: str, target: bool, family: str = "qwen3", **layout: Any) -> dict[str, Any]:
    """Load into a fresh model of another layout that was never converted."""
    tp, pp, ep = (layout.get(name, 1) for name in ("tp", "pp", "ep"))
    initialize(tp, pp, ep)
    config = hf_config(family, **layout.get("config", {}))
    source = None if target else hf_model(config)
    model = gpt_model(source, config, sp=layout.get("sp", False))
    common = load_checkpoint(model, directory, target=target)
    adapter = getattr(getattr(model, "drafter", None), "target", None)
    embedded = None
    if adapter is not None:
        embedded = adapter.embed(torch.arange(VOCAB))
    return {
        **_whole(model, config),
        "common": common,
        "config": drafter_config(model).model_dump(mode="json"),
        "embedded": embedded,
        "trainable": [name for name, p in model.named_parameters() if p.requires_grad],
    }


def _whole(model: Any, config: Any) -> dict[str, Any]:
    drafter = getattr(model, "drafter", None)
    return {
        "drafter": None if drafter is None else whole_state_dict(drafter),
        "target": gather_hf_weights(model, config),
    }


def resume(directory: str, resumed: dict[str, Any], **layout: Any) -> dict[str, Any]:
    """Two steps, save with the optimizer, a third; against a third step after loading (at another layout)."""
    mode, microbatches = "vanilla", 2

    def prepared(where: dict[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        model, _, loss = both_sides("qwen3", mode, where)
        step = training.MegatronForwardStep(model, loss, ANCHORS, seed=SEED, total_steps=TOTAL)
        wrapped = training.wrap_for_training(model, step)
        optimizer, scheduler = training.make_optimizer(wrapped, lr=1e-3, total_steps=TOTAL, adam_eps=1e-4)
        return model, step, wrapped, optimizer, scheduler

    model, step, wrapped, optimizer, scheduler = prepared(layout)
    rank = parallel_state.get_data_parallel_rank()
    for number in range(2):
        training.train_step(step, wrapped, optimizer, batches_of(rank, number, microbatches), scheduler)
    save_checkpoint(
        model, directory, optimizer=optimizer, common={"step": step.step, "scheduler": scheduler.state_dict()}
    )
    training.train_step(step, wrapped, optimizer, batches_of(rank, 2, microbatches), scheduler)
    expected = _whole(model, hf_config("qwen3"))["drafter"]

    parallel_state.destroy_model_parallel()
    model, step, wrapped, optimizer, scheduler = prepared(resumed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    common = load_checkpoint(model, directory, optimizer=optimizer)
    scheduler.load_state_dict(common["scheduler"])
    step.step = common["step"]
    rank = parallel_state.get_data_parallel_rank()
    training.train_step(step, wrapped, optimizer, batches_of(rank, 2, microbatches), scheduler)
    got = _whole(model, hf_config("qwen3"))["drafter"]
    return {"expected": expected, "got": got}


def refusals(directory: str) -> dict[str, str]:
    """Messages for directories that cannot be loaded."""
    initialize()
    model = gpt_model(None, hf_config("qwen3"))
    messages = {}

    def message(name: str, path: Path) -> None:
        try:
            load_checkpoint(model, path)
        except SpecError as error:
            messages[name] = str(error)

    message("missing", Path(directory) / "nothing")
    unconverted = Path(directory) / "unconverted"
    unconverted.mkdir()
    save_checkpoint(model, unconverted)
    message("unconverted", unconverted)
    (name, settings), _ = MODES["vanilla"]
    mtsp.convert(model, (name, {**settings, "mask_token_id": 96}), quiet=True)
    return messages
