"""``drafter_card.json``: where an exported draft comes from and what training used, beside the files that engines read.

The card is what the preflight holds the other files against. Kind ``modelopt_spec.drafter_card``, version 1.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_spec.checkpoints.safe_read import read_json
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import DrafterConfig
from modelopt_spec.conversion import MODES
from modelopt_spec.disk import sha256_of
from modelopt_spec.errors import CheckpointError
from modelopt_spec.targets.base import open_target
from modelopt_spec.versions import versions

__all__ = [
    "CARD",
    "build_card",
    "embedding_sample",
    "read_card",
    "target_identity",
    "trained_config",
    "warn_other_target",
]

CARD = "drafter_card.json"
KIND, VERSION = "modelopt_spec.drafter_card", 1
TRAINING_REPORT = "report.json"
_SAMPLED_ROWS = 16


def target_identity(model: nn.Module | None, name: str = "") -> dict[str, Any]:
    """Name and shape of a target: what a draft was trained against."""
    if model is None:
        return {"name": name}
    config = getattr(model, "config", None)
    shape = asdict(open_target(model).shape)
    shape["special_token_ids"] = list(shape["special_token_ids"])
    return {
        "name": str(getattr(config, "name_or_path", "") or name),
        "class": type(model).__name__,
        "shape": shape,
        "embedding": embedding_sample(model),
        "facts": TargetFacts.of(model).to_dict(),
    }


def embedding_sample(model: nn.Module) -> str | None:
    """A checksum of some rows of the input embedding, in bfloat16: tells models of the same shape apart.

    None where this process does not hold the whole embedding, or in float16, which rounds small weights away.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, Tensor) or type(weight.data) is not Tensor or weight.is_meta:
        return None
    if not weight.numel() or weight.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        return None
    rows = torch.linspace(0, weight.shape[0] - 1, _SAMPLED_ROWS, dtype=torch.float64).long().to(weight.device)
    sample = weight.detach()[rows].to(torch.bfloat16).cpu().contiguous()
    return hashlib.sha256(sample.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def warn_other_target(path: str | Path, identity: dict[str, Any], model: nn.Module) -> None:
    """Warn where a model is not the target that a drafter was trained for; ``identity`` is what was recorded of it."""
    name, trained, embedding = identity.get("name") or "unnamed", identity.get("class"), identity.get("embedding")
    if trained is not None and trained != type(model).__name__:
        warnings.warn(
            f"{path} was trained for a {trained} ({name}), and this is a {type(model).__name__}: "
            "of another target almost nothing is accepted",
            stacklevel=3,
        )
    elif embedding is not None and embedding_sample(model) not in (None, embedding):
        warnings.warn(
            f"{path} was trained for another {trained} ({name}), whose embedding is not this one's: "
            "a finetuned target accepts less, another one almost nothing",
            stacklevel=3,
        )


def build_card(
    config: DrafterConfig,
    *,
    layout: str,
    engines: dict[str, Any],
    dtype: str,
    target: dict[str, Any],
    fingerprint: str,
    source: str = "",
    provenance: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The card's content; checksums of the files and the export's own comparison are added when they are known."""
    card: dict[str, Any] = {
        "kind": KIND,
        "version": VERSION,
        "versions": versions(),
        "layout": layout,
        "engines": engines,
        "dtype": dtype,
        "trained": config.model_dump(),
        "target": target,
        "fingerprint": fingerprint,
        "source": source,
    }
    return {**card, **(provenance or {})}


def provenance_of(checkpoint: Path) -> dict[str, Any]:
    """Recipe, data and training report of a checkpoint directory, as far as it and its run directory tell."""
    found: dict[str, Any] = {}
    for name in ("recipe", "data"):
        value = read_json(checkpoint / "drafter.json").get(name)
        if value is not None:
            found[name] = value
    for place in (checkpoint, checkpoint.parent):
        report = place / TRAINING_REPORT
        if report.is_file():
            content = read_json(report)
            found["training_report"] = {
                "sha256": sha256_of(report),
                "steps": content.get("steps"),
                "seed": content.get("seed"),
            }
            break
    return found


def read_card(directory: Path) -> dict[str, Any] | None:
    """The card of an exported directory; None if it has none."""
    file = directory / CARD
    if not file.is_file():
        return None
    card = read_json(file)
    if card.get("kind") != KIND or card.get("version") != VERSION:
        raise CheckpointError(
            f"{file} is of kind {card.get('kind')!r}, version {card.get('version')!r}; known: {KIND}, 1"
        )
    return card


def trained_config(card: dict[str, Any]) -> DrafterConfig:
    """What training used."""
    values = card.get("trained")
    if not isinstance(values, dict) or values.get("algorithm") not in MODES:
        raise CheckpointError(f"{CARD} has no usable 'trained' entry: export again")
    return MODES[values["algorithm"]](**values)


def to_json(card: dict[str, Any]) -> str:
    """The card as text."""
    return json.dumps(card, indent=2) + "\n"
