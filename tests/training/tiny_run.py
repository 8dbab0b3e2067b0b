"""A target directory, a data file and a recipe that train in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import PrinterCallback, TrainingArguments

import modelopt_spec as mtsp
from modelopt_spec.config import LossConfig
from modelopt_spec.training.module import DraftTrainingModule
from modelopt_spec.training.recipe import LOSS_DEFAULTS, Recipe
from modelopt_spec.training.trainer import Collator, DraftTrainer, IndexedRows
from tests.data.tiny import CHATML, chat, make_tokenizer
from tests.tiny import tiny

HEADS: dict[str, dict[str, Any]] = {
    "dspark": {"head": {"type": "vanilla", "rank": 8}},
    "dflash": {},
    "domino": {"head": {"rank": 8, "gru_hidden_dim": 8}},
}
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "some", "more", "words"]


def make_target(directory: Path) -> Path:
    """A tiny Llama with a tokenizer of its vocabulary."""
    tokenizer = make_tokenizer(CHATML)
    model = tiny("llama", vocab_size=len(tokenizer), num_hidden_layers=4)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def write_chats(path: Path, count: int, seed: int = 0) -> Path:
    """Conversations of different lengths."""
    generator = np.random.default_rng(seed)
    with path.open("w") as file:
        for i in range(count):
            answer = " ".join(generator.choice(WORDS, size=int(generator.integers(4, 30))))
            file.write(json.dumps(chat(f"Question number {i}?", answer)) + "\n")
    return path


def recipe_values(target: Path, data: Path, output_dir: Path, mode: str = "dspark", **training: Any) -> dict[str, Any]:
    """A recipe as a dict; ``training`` is laid over its training section."""
    loss = {"dspark": {}, "dflash": {"ce": 1.0}, "domino": {}}[mode]
    return {
        "model": {"name_or_path": str(target), "dtype": "float32"},
        "data": {"train": str(data), "max_length": 256},
        "drafter": {
            "mode": mode,
            "block_size": 4,
            "target_layer_ids": [0, 2],
            "mask_token": "auto",
            "backbone": {"num_layers": 1},
            **HEADS[mode],
        },
        "loss": {"decay": 3.0, **loss},
        "training": {
            "output_dir": str(output_dir),
            "num_anchors": 8,
            "learning_rate": 1e-2,
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "logging_steps": 1,
            "save_steps": 2,
            "seed": 3,
            **training,
        },
    }


def make_recipe(target: Path, data: Path, output_dir: Path, mode: str = "dspark", **training: Any) -> Recipe:
    """The recipe of :func:`recipe_values`."""
    return Recipe(**recipe_values(target, data, output_dir, mode, **training))


def write_recipe(path: Path, values: dict[str, Any]) -> Path:
    """A recipe file."""
    path.write_text(yaml.safe_dump(values))
    return path


def losses(report: dict[str, Any]) -> list[float]:
    """The logged losses of a run."""
    return [entry["loss"] for entry in report["curves"] if "loss" in entry]


def state_of(drafter: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of a drafter's weights."""
    return {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}


def random_rows(count: int, *, seed: int = 0, longest: int = 40, vocab: int = 97) -> list[dict[str, Any]]:
    """Token rows of different lengths, each with one supervised stretch."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(generator.integers(8, longest))
        mask = np.zeros(length, dtype=bool)
        mask[int(generator.integers(1, length - 4)) :] = True
        rows.append({"input_ids": generator.integers(3, vocab - 1, size=length).astype(np.int32), "loss_mask": mask})
    return rows


def make_trainer(
    rows: Any,
    output_dir: Path,
    *,
    mode: str = "dspark",
    loss: dict[str, Any] | None = None,
    num_anchors: int = 6,
    dtype: torch.dtype = torch.float64,
    source: Any = None,
    evaluate: Any = None,
    layers: int = 1,
    **arguments: Any,
) -> DraftTrainer:
    """A trainer over token rows and a tiny random target of its own; the same seed gives the same drafter."""
    model = tiny(dtype=dtype)
    config = {"target_layer_ids": (1, 3), "block_size": 4, "mask_token_id": 96, "backbone": {"num_layers": layers}}
    torch.manual_seed(1)
    mtsp.convert(model, (mode, {**config, **HEADS[mode]}), quiet=True)
    model.drafter.to(dtype)
    values = {**LOSS_DEFAULTS[mode], "decay": 3.0, **(loss or {})}
    module = DraftTrainingModule(model, LossConfig(**values), num_anchors, source(model) if source else None)
    settings = {
        "output_dir": str(output_dir),
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "max_grad_norm": 0.0,
        "dataloader_pin_memory": False,
        **arguments,
    }
    trainer = DraftTrainer(
        module,
        TrainingArguments(**settings),
        train_dataset=IndexedRows(rows),
        eval_dataset=None if evaluate is None else IndexedRows(evaluate),
        data_collator=Collator(0),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def curve(trainer: DraftTrainer, name: str = "loss") -> list[float]:
    """One value of every log that has it."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]
