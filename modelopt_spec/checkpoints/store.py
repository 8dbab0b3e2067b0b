"""Our own checkpoint of a drafter: `drafter.json` (config, target, provenance) and `model.safetensors` (its weights).

Weights carry the names of the drafter's state dict; nothing of the target is stored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from modelopt_spec.arguments import check_path
from modelopt_spec.checkpoints.atomic import DRAFTER_FILES, atomic_directory, check_free
from modelopt_spec.checkpoints.card import check_kind, check_target, short, target_identity, warn_other_target
from modelopt_spec.config import DrafterConfig
from modelopt_spec.conversion import MODES, convert, undone_on_error
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.errors import CheckpointError, ConfigError, SpecError
from modelopt_spec.versions import versions

__all__ = [
    "DESCRIPTION",
    "WEIGHTS",
    "fingerprint",
    "fingerprint_of",
    "read_description",
    "restore",
    "save",
    "write_drafter",
]

DESCRIPTION, WEIGHTS = "drafter.json", "model.safetensors"
KIND, VERSION = "modelopt_spec.drafter", 1
RESERVED = ("kind", "version", "config", "target", "target_identity", "fingerprint", "sha256", "versions")


def fingerprint(drafter: nn.Module) -> str:
    """sha256 over the names, types, shapes and bytes of a drafter's state dict."""
    return fingerprint_of(drafter.state_dict())


def fingerprint_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 over the names, types, shapes and bytes of tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name}|{data.dtype}|{tuple(data.shape)}|".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    return digest.hexdigest()


def _drafter_of(model: nn.Module) -> Drafter:
    drafter = getattr(model, "drafter", None)
    if not isinstance(drafter, Drafter):
        raise CheckpointError(f"this {type(model).__name__} has no drafter: call modelopt_spec.convert first")
    return drafter


def write_drafter(drafter: Drafter, directory: Path, *, target: str = "", extra: dict[str, Any] | None = None) -> None:
    """Write both files into an existing directory."""
    if any(hasattr(module, "weight_quantizer") for module in drafter.modules()):
        raise CheckpointError("this drafter is quantised, and a checkpoint holds whole weights: export it instead")
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    description = {
        "kind": KIND,
        "version": VERSION,
        "config": drafter.config.model_dump(),
        "target": target,
        "fingerprint": fingerprint(drafter),
        "sha256": hashlib.sha256((directory / WEIGHTS).read_bytes()).hexdigest(),
        "versions": versions(),
        **(extra or {}),
    }
    (directory / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")


def save(model: nn.Module, path: str | Path, *, overwrite: bool = False, extra: dict[str, Any] | None = None) -> Path:
    """Save a model's drafter as a checkpoint directory, atomically.

    Args:
        model: a converted model. path: the directory to write; one that is not empty is refused without ``overwrite``.
        extra: more entries for ``drafter.json``, such as the recipe; plain JSON values.

    Returns:
        The directory.

    Raises:
        CheckpointError: the model has no drafter, or the directory is not free.
        ConfigError: arguments of another kind, or entries that would replace the checkpoint's own.
    """
    drafter = _drafter_of(model)
    path = check_path("path", path, "the directory to write")
    _check_extra(extra)
    name = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    check_free(path, overwrite=overwrite, marks=DRAFTER_FILES)
    with atomic_directory(path, overwrite=overwrite) as directory:
        identity = {"target_identity": target_identity(model, name)}
        write_drafter(drafter, directory, target=name, extra={**(extra or {}), **identity})
    return path


def _check_extra(extra: Any) -> None:
    """Refuse entries that would make a checkpoint that cannot be written or read."""
    if extra is None:
        return
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise ConfigError(f"extra is {short(extra)}: it must be a dict of names and plain JSON values")
    reserved = [name for name in RESERVED if name in extra]
    if reserved:
        raise ConfigError(f"extra has {', '.join(map(repr, reserved))}, which save writes itself: name it otherwise")
    for name, value in extra.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"extra[{name!r}] is no JSON value ({error}): give plain values") from None
    try:
        _check_entries(extra, Path("extra"))
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def read_description(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint's ``drafter.json``, checked for kind and version."""
    file = Path(path) / DESCRIPTION
    inner = Path(path) / "drafter"
    if not file.is_file() and (inner / DESCRIPTION).is_file():
        raise CheckpointError(f"{path} is a run, not a checkpoint: its drafter is {inner}")
    if not file.is_file():
        raise CheckpointError(
            f"{path} holds no {DESCRIPTION}, so it is not a checkpoint of this package. A published or exported draft "
            "is read by load_drafter (`mtsp import`)"
        )
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}): restore it from a backup") from None
    if not isinstance(description, dict):
        raise CheckpointError(f"{file} holds a {type(description).__name__}, not an object: restore it from a backup")
    if description.get("kind") != KIND or description.get("version") != VERSION:
        raise CheckpointError(
            f"{file} is of kind {description.get('kind')!r}, version {description.get('version')!r}; this version of "
            f"modelopt-spec reads {KIND!r}, version {VERSION}"
        )
    try:
        _check_description(description, file)
    except CheckpointError as error:
        raise CheckpointError(f"{error}: restore it from a backup") from None
    return description


def _check_description(description: dict[str, Any], file: Path) -> None:
    """Refuse a description whose entries are not what :func:`write_drafter` writes."""
    for name in ("sha256", "fingerprint"):
        check_kind(file, name, description.get(name), str)
    check_kind(file, "config", description.get("config"), dict)
    _check_entries(description, file)
    algorithm = description["config"].get("algorithm")
    if algorithm not in tuple(MODES):
        raise CheckpointError(f"{file}: config.algorithm is {short(algorithm)}, not one of {', '.join(MODES)}")
    try:
        config = config_of(description)
    except (SpecError, TypeError) as error:
        raise CheckpointError(f"{file}: config: {' '.join(str(error).split())}") from None
    for name in ("vocab_size", "target_hidden_size", "num_target_layers", "target_layer_ids", "block_size"):
        if getattr(config, name) is None:
            raise CheckpointError(f"{file}: config.{name} is missing or null")
    for name in ("num_layers", "hidden_size", "num_attention_heads", "intermediate_size"):
        if getattr(config.backbone, name) is None:
            raise CheckpointError(f"{file}: config.backbone.{name} is missing or null")


def _check_entries(entries: Mapping[str, Any], file: Path) -> None:
    """Refuse entries of a description that are of another kind than their readers expect; all may be missing."""
    check_kind(file, "target", entries.get("target"), str, type(None))
    for name in ("target_identity", "recipe"):
        check_kind(file, name, entries.get(name), dict, type(None))
    check_target(entries.get("target_identity") or {}, file, "target_identity")
    recipe = entries.get("recipe") or {}
    for name in ("model", "data"):
        check_kind(file, f"recipe.{name}", recipe.get(name), dict, type(None))


def config_of(description: dict[str, Any]) -> DrafterConfig:
    """The drafter config of a description."""
    values = description["config"]
    return MODES[values["algorithm"]](**values)


def read_weights(path: str | Path, description: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, with their checksum verified."""
    file = Path(path) / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{path} holds no {WEIGHTS}: the checkpoint is incomplete")
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != description["sha256"]:
        raise CheckpointError(
            f"{file} has sha256 {found}, but {DESCRIPTION} says {description['sha256']}: it is damaged"
        )
    try:
        return load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a safetensors file ({error}): restore it from a backup") from None


def restore(model: nn.Module, path: str | Path, *, quiet: bool = True) -> nn.Module:
    """Bring a saved drafter back onto its target, in place.

    A model without a drafter is converted with the checkpoint's config; one that has a drafter must have the same.

    Raises:
        CheckpointError: incomplete, damaged, or of a drafter that does not fit this model.
        ConfigError: arguments of another kind.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}: call restore(model, path) with the target first")
    path = check_path("path", path, "the directory of a saved drafter")
    description = read_description(path)
    config = config_of(description)
    weights = read_weights(path, description)
    with undone_on_error(model):
        if getattr(model, "drafter", None) is None:
            convert(model, (config.algorithm, config.model_dump()), quiet=quiet)
        drafter = _drafter_of(model)
        if drafter.config != config:
            differing = [
                name for name in type(config).model_fields if getattr(config, name) != getattr(drafter.config, name)
            ]
            raise CheckpointError(f"{path} is of another drafter than this model's: {', '.join(differing)} differ")
        _check_weights(Path(path) / WEIGHTS, weights, drafter)
        dtypes = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
        if len(dtypes) == 1:
            drafter.to(dtypes.pop())
        drafter.load_state_dict(weights)
        warn_other_target(path, description.get("target_identity") or {}, model)
    return model


def _check_weights(file: Path, weights: Mapping[str, torch.Tensor], drafter: Drafter) -> None:
    """Refuse weights whose names or shapes are not the drafter's."""
    ours = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    differing = [
        f"{name} is {_shape(theirs, name)}, the config of {DESCRIPTION} makes it {_shape(ours, name)}"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    if differing:
        more = f" ({len(differing) - 3} more)" if len(differing) > 3 else ""
        raise CheckpointError(
            f"{file} is not of the drafter that {DESCRIPTION} describes: {'; '.join(differing[:3])}{more}. "
            "Restore both files from one checkpoint"
        )


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "absent"
