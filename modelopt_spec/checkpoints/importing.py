"""Reading a published or exported draft directory: its layout, what each key became, and a drafter on its target."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_spec.checkpoints.account import Account, Entry, KeyReader
from modelopt_spec.checkpoints.card import read_card, trained_config, warn_other_target
from modelopt_spec.checkpoints.layouts import Draft, Layout, get_layout, recognise
from modelopt_spec.checkpoints.layouts.base import SHARED
from modelopt_spec.checkpoints.packing import algorithm_of, is_packed, logical_entries, read_float
from modelopt_spec.checkpoints.safe_read import pickles, read_json, read_tensors, tensor_entries
from modelopt_spec.checkpoints.store import save
from modelopt_spec.config import BackboneConfig, DrafterConfig, HeadConfig, MoEConfig
from modelopt_spec.conversion import convert, undone_on_error
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.errors import CheckpointError, ConfigError, nearest
from modelopt_spec.targets.base import open_target

__all__ = ["Imported", "canonical", "import_checkpoint", "load_drafter", "read_draft"]

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
    overrides: Mapping[str, Any] | None = None,
) -> Imported:
    """Read a draft directory of any known layout.

    Args:
        directory: ``config.json`` and safetensors files.
        layout: the layout's name; recognised by content if None.
        allow_contradictions: where two keys disagree, take the one that the layout names first.
        ignore_unknown: drop tensors that belong to no part of the drafter, and files that would change it.
        overrides: dotted config fields that are known better than the files say them, such as
            ``{"backbone.rms_norm_eps": 1e-5}``.

    Raises:
        CheckpointError: unknown layout, damaged or unsafe files, missing or unknown tensors, keys that disagree.
    """
    root = Path(directory)
    if (root / "drafter.json").is_file() and not (root / "config.json").is_file():
        raise CheckpointError(f"{root} is a checkpoint of this package: use restore, or export it")
    config = read_json(root / "config.json")
    entries = logical_entries(config, tensor_entries(root))
    chosen = get_layout(layout) if layout else recognise(config, entries)
    keys = KeyReader(config, str(root / "config.json"), allow_contradictions=allow_contradictions)
    drafter_config = override(chosen.read_config(keys, entries), overrides or {})
    drafter_config = complete_from_card(drafter_config, root)
    overruled = [*keys.overruled, *(f"{name} was given as {value!r}" for name, value in (overrides or {}).items())]
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
    tensors = read_float(root, config, pairs.values())
    modelopt = algorithm_of(config) is not None
    quantised = [ours for ours, name in pairs.items() if modelopt and is_packed(name, entries[name])]
    draft = Draft(drafter_config, _in_one_type({ours: tensors[name] for ours, name in pairs.items()}, quantised))
    account = Account(chosen.name, keys.entries(), tensor_account, files, overruled)
    return Imported(chosen.after_read(draft), chosen, account, config)


def _in_one_type(tensors: dict[str, Tensor], quantised: Sequence[str]) -> dict[str, Tensor]:
    """Quantised weights came back as float32: give them the type of the norms, which never are."""
    if not quantised:
        return tensors
    dtype = tensors["norm.weight"].dtype
    return {name: tensor.to(dtype) if name in quantised else tensor for name, tensor in tensors.items()}


def load_drafter(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    layout: str | None = None,
    allow_contradictions: bool = False,
    ignore_unknown: bool = False,
    overrides: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> nn.Module:
    """Attach the drafter of a published or exported directory to its target, in place, ready to train or to serve.

    Args:
        path: the directory.
        model: the target that the draft was trained for.
        layout: as for :func:`read_draft`.
        allow_contradictions: as for :func:`read_draft`.
        ignore_unknown: as for :func:`read_draft`.
        overrides: as for :func:`read_draft`.
        quiet: do not print what became of each key and tensor.

    Returns:
        The same model; ``model.drafter`` holds the weights in the type in which they were stored.

    Raises:
        CheckpointError: see :func:`read_draft`, and a draft of another target (width, vocabulary, layers) or with an
            embedding or output projection of its own.
        ConfigError: the model has a drafter already, or arguments of another kind.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(model, nn.Module):
        swapped = isinstance(path, nn.Module) and isinstance(model, str | os.PathLike)
        raise ConfigError(
            f"load_drafter was given a {type(path).__name__} as path and a {type(model).__name__} as model: "
            + ("they are swapped, " if swapped else "")
            + "call load_drafter(path, model) with the draft's directory and the target"
        )
    imported = read_draft(
        path,
        layout=layout,
        allow_contradictions=allow_contradictions,
        ignore_unknown=ignore_unknown,
        overrides=overrides,
    )
    draft = fit_to_target(imported.draft, model)
    if not ignore_unknown:
        check_shared(Path(path), imported.draft.config, model)
    with undone_on_error(model):
        convert(model, (draft.config.algorithm, draft.config.model_dump()), quiet=True)
        drafter = model.drafter
        assert isinstance(drafter, Drafter)
        drafter.to(draft.dtype)
        drafter.load_state_dict(dict(draft.tensors))
        warn_other_target(Path(path), (read_card(Path(path)) or {}).get("target") or {}, model)
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


def import_checkpoint(
    src: str | os.PathLike[str],
    target: nn.Module,
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Account:
    """Turn a published draft directory into a checkpoint of this package, which trains on, evaluates and exports.

    Args:
        src: the published directory.
        target: the model that it was trained for; gets the drafter attached.
        out: the checkpoint directory to write.
        overwrite: replace a directory that is not empty.
        quiet: do not print what became of each key and tensor.
        options: as for :func:`read_draft`.

    Returns:
        What became of each key and tensor.
    """
    imported = read_draft(src, **options)
    load_drafter(src, target, quiet=True, **options)
    save(target, Path(out), overwrite=overwrite, extra={"imported_from": imported.account.to_dict()})
    if not quiet:
        imported.account.show()
    return imported.account


def canonical(config: DrafterConfig) -> DrafterConfig:
    """A config without what no published layout can say: two drafters that differ only there read the same files."""
    backbone, head = config.backbone, config.head
    backbone = backbone.replace(window_rule=BackboneConfig().window_rule)
    if backbone.moe is not None:
        how = ("balancing", "bias_update_rate", "balance_weight")
        backbone = backbone.replace(moe=backbone.moe.replace(**{name: getattr(MoEConfig(), name) for name in how}))
    if head.type == "none":
        head = HeadConfig()
    elif head.type == "gru":
        head = head.replace(gru_hidden_dim=head.gru_hidden_dim or 2 * head.rank)
    else:
        head = HeadConfig(type=head.type, rank=head.rank)
    confidence = config.confidence
    if not confidence.enabled:
        confidence = confidence.replace(with_markov=True)
    values = {name: getattr(config, name) for name in DrafterConfig.model_fields}
    values |= {"backbone": backbone, "head": head, "confidence": confidence, "mask_token": None}
    values["algorithm"] = "domino" if head.type == "gru" else "dflash" if head.type == "none" else "dspark"
    values["num_taps"] = len(config.target_layer_ids or ())
    return DrafterConfig(**values)


def complete_from_card(config: DrafterConfig, directory: Path) -> DrafterConfig:
    """What no key can say (window rule, mask token's text) from the directory's card, if that agrees otherwise."""
    card = read_card(directory)
    if card is None:
        return config
    trained = trained_config(card)
    return trained if canonical(trained) == canonical(config) else config


def override(config: DrafterConfig, changes: Mapping[str, Any]) -> DrafterConfig:
    """A config with dotted fields replaced."""
    for path, value in changes.items():
        section, _, field = path.rpartition(".")
        holder = getattr(config, section, None) if section else config
        if holder is None or field not in type(holder).model_fields:
            known = [*DrafterConfig.model_fields, *(f"backbone.{name}" for name in BackboneConfig.model_fields)]
            raise ConfigError(f"override {path!r} names no field of a drafter config.{nearest(path, known)}")
        changed = holder.replace(**{field: value})
        config = config.replace(**{section: changed}) if section else changed
    return config


def check_shared(directory: Path, config: DrafterConfig, model: nn.Module) -> None:
    """Refuse a draft whose own embedding or full output projection is not its target's.

    Raises:
        CheckpointError: the rows differ by more than their storage type explains.
    """
    present = set(tensor_entries(directory)) & set(SHARED)
    if config.draft_vocab_size is not None:
        present -= {"lm_head.weight"}
    getters = {"embed_tokens.weight": "get_input_embeddings", "lm_head.weight": "get_output_embeddings"}
    for name in sorted(present):
        getter: Any = getattr(model, getters[name], None)
        weight = getattr(getter(), "weight", None) if getter is not None else None
        if weight is None or not weight.is_floating_point():
            continue
        ours, theirs = weight.detach().cpu().float(), read_tensors(directory, [name])[name].float()
        if theirs.shape != ours.shape or not torch.allclose(
            theirs, ours, rtol=0.008, atol=1e-6 * float(ours.abs().max())
        ):
            raise CheckpointError(
                f"{directory} carries its own {name}, which differs from the target's, which this package uses. "
                "Pass ignore_unknown to accept that (acceptance will differ)"
            )
