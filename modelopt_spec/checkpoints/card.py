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
from modelopt_spec.errors import CheckpointError, SpecError
from modelopt_spec.targets.base import open_target
from modelopt_spec.versions import versions

__all__ = [
    "CARD",
    "build_card",
    "check_kind",
    "check_target",
    "embedding_sample",
    "read_card",
    "short",
    "target_identity",
    "trained_config",
    "warn_other_target",
]

CARD = "drafter_card.json"
KIND, VERSION = "modelopt_spec.drafter_card", 1
WITHOUT = "export again, or delete that file: the draft loads without it, but nothing then tells what training used"
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
    """The card of an exported directory; None if it has none.

    Raises:
        CheckpointError: it is damaged, or of another kind or version.
    """
    file = directory / CARD
    if not file.is_file():
        return None
    try:
        card = read_json(file)
        if card.get("kind") == KIND and card.get("version") == VERSION:
            _check_card(card, file)
    except CheckpointError as error:
        raise CheckpointError(f"{error}: {WITHOUT}") from None
    if card.get("kind") != KIND or card.get("version") != VERSION:
        raise CheckpointError(
            f"{file} is of kind {card.get('kind')!r}, version {card.get('version')!r}; known: {KIND}, 1"
        )
    return card


def _check_card(card: dict[str, Any], file: Path) -> None:
    """Refuse a card whose entries are not what :func:`build_card` writes."""
    for name in ("layout", "dtype", "fingerprint"):
        check_kind(file, name, card.get(name), str)
    for name in ("target", "engines"):
        check_kind(file, name, card.get(name), dict)
    for name in ("recipe", "quantization"):
        check_kind(file, name, card.get(name), dict, type(None))
    loaded = card["engines"].get("load")
    if not isinstance(loaded, list) or not all(isinstance(name, str) for name in loaded):
        raise CheckpointError(f"{file}: engines.load is {short(loaded)}, not a list of names")
    check_kind(file, "recipe.data", (card.get("recipe") or {}).get("data"), dict, type(None))
    check_target(card["target"], file, "target")
    values = card.get("trained")
    if not isinstance(values, dict) or values.get("algorithm") not in tuple(MODES):
        raise CheckpointError(f"{file}: trained is {short(values)}, not a drafter's config")
    try:
        trained_config(card)
    except (SpecError, TypeError) as error:
        raise CheckpointError(f"{file}: trained: {' '.join(str(error).split())}") from None


def check_target(target: dict[str, Any], file: Path, where: str) -> None:
    """Refuse what a card or a description records of its target where it is not what :func:`target_identity` gives.

    Raises:
        CheckpointError: names the file and the field.
    """
    for name in ("name", "class", "embedding"):
        check_kind(file, f"{where}.{name}", target.get(name), str, type(None))
    facts = target.get("facts")
    check_kind(file, f"{where}.facts", facts, dict, type(None))
    known = TargetFacts().to_dict()
    for name, value in (facts or {}).items():
        if name not in known:
            raise CheckpointError(f"{file}: {where}.facts has no field {name!r}: known are {', '.join(known)}")
        kinds = (int, float, type(None)) if name == "logit_softcapping" else (int, float)
        check_kind(file, f"{where}.facts.{name}", value, *kinds)


_KINDS = {dict: "an object", str: "a text", int: "a number", float: "a number", type(None): "null"}


def check_kind(file: Path, name: str, value: Any, *kinds: type) -> None:
    """Refuse a value of a JSON file that is of none of the kinds.

    Raises:
        CheckpointError: names the file, the field and the value.
    """
    if not isinstance(value, kinds) or isinstance(value, bool):
        wanted = " or ".join(dict.fromkeys(_KINDS[kind] for kind in kinds))
        raise CheckpointError(f"{file}: {name} is {short(value)}, not {wanted}")


def short(value: Any) -> str:
    """A JSON value as a message shows it."""
    text = "missing or null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def trained_config(card: dict[str, Any]) -> DrafterConfig:
    """What training used."""
    values = card["trained"]
    return MODES[values["algorithm"]](**values)


def to_json(card: dict[str, Any]) -> str:
    """The card as text."""
    return json.dumps(card, indent=2) + "\n"
