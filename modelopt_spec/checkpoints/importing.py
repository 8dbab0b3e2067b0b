"""Reading a published or exported draft directory: its layout, what each key became, and a drafter on its target."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from modelopt_spec.checkpoints.account import Account, Entry, KeyReader
from modelopt_spec.checkpoints.layouts import Draft, Layout, get_layout, recognise
from modelopt_spec.checkpoints.safe_read import pickles, read_json, read_tensors, tensor_entries
from modelopt_spec.conversion import convert
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.errors import CheckpointError
from modelopt_spec.targets.base import open_target

__all__ = ["Imported", "load_drafter", "read_draft"]

MASK_EMBEDDING = "mask_embedding.pt"


@dataclass(frozen=True)
class Imported:
    """A draft directory, read."""

    draft: Draft
    layout: Layout
    account: Account
    config: dict[str, Any]
    """The directory's ``config.json``."""


def read_draft(
    directory: str | os.PathLike[str],
    *,
    layout: str | None = None,
    allow_contradictions: bool = False,
    ignore_unknown: bool = False,
) -> Imported:
    """Read a draft directory of any known layout.

    Args:
        directory: ``config.json`` and safetensors files.
        layout: the layout's name; recognised by content if None.
        allow_contradictions: where two keys disagree, take the one that the layout names first.
        ignore_unknown: drop tensors that belong to no part of the drafter.

    Raises:
        CheckpointError: unknown layout, damaged or unsafe files, missing or unknown tensors, keys that disagree.
    """
    root = Path(directory)
    if (root / "drafter.json").is_file() and not (root / "config.json").is_file():
        raise CheckpointError(f"{root} is a checkpoint of this package: use restore, or export it")
    config = read_json(root / "config.json")
    entries = tensor_entries(root)
    chosen = get_layout(layout) if layout else recognise(config, entries)
    keys = KeyReader(config, str(root / "config.json"), allow_contradictions=allow_contradictions)
    drafter_config = chosen.read_config(keys, entries)
    overruled = list(keys.overruled)
    pairs, tensor_account = chosen.match(drafter_config, entries, ignore_unknown=ignore_unknown, overruled=overruled)
    files = [Entry(name, "ignored", "a pickle, never read") for name in pickles(root)]
    if (root / MASK_EMBEDDING).exists():
        message = (
            f"{root} has a {MASK_EMBEDDING}: engines that read it embed mask slots with it, this package with the "
            "row of mask_token_id"
        )
        if not ignore_unknown:
            raise CheckpointError(f"{message}. Pass ignore_unknown to import without it (acceptance will differ)")
        overruled.append(message)
    tensors = read_tensors(root, pairs.values())
    draft = Draft(drafter_config, {ours: tensors[name] for ours, name in pairs.items()})
    account = Account(chosen.name, keys.entries(), tensor_account, files, overruled)
    return Imported(chosen.after_read(draft), chosen, account, config)


def load_drafter(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    layout: str | None = None,
    allow_contradictions: bool = False,
    ignore_unknown: bool = False,
    quiet: bool = False,
) -> nn.Module:
    """Attach the drafter of a published or exported directory to its target, in place, ready to train or to serve.

    Returns:
        The same model; ``model.drafter`` holds the weights in the type in which they were stored.

    Raises:
        CheckpointError: see :func:`read_draft`, and a draft of another target (width, vocabulary, layers).
        ConfigError: the model has a drafter already.
    """
    imported = read_draft(path, layout=layout, allow_contradictions=allow_contradictions, ignore_unknown=ignore_unknown)
    draft = fit_to_target(imported.draft, model)
    convert(model, (draft.config.algorithm, draft.config.model_dump()), quiet=True)
    drafter = model.drafter
    assert isinstance(drafter, Drafter)
    drafter.to(draft.dtype)
    drafter.load_state_dict(dict(draft.tensors))
    if not quiet:
        imported.account.show()
    return model


def fit_to_target(draft: Draft, model: nn.Module) -> Draft:
    """Check a draft against a target and fill what its files did not say.

    Raises:
        CheckpointError: it was made for a target of another width, vocabulary or depth.
    """
    shape = open_target(model).shape
    config = draft.config
    facts = {
        "hidden size": (config.target_hidden_size, shape.hidden_size),
        "vocabulary": (config.vocab_size, shape.vocab_size),
        "number of layers": (config.num_target_layers, shape.num_layers),
    }
    for what, (theirs, ours) in facts.items():
        if theirs is not None and theirs != ours:
            raise CheckpointError(
                f"this draft was made for a target with {what} {theirs}, but {type(model).__name__} has {ours}: "
                "load it onto the target it was trained for"
            )
    return replace(draft, config=config.replace(num_target_layers=shape.num_layers))
