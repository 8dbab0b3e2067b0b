"""A DeepSeek-V4 draft inside of its target's checkpoint: the form in which engines look for it.

Engines read the draft's ``mtp.*`` tensors and ``dspark_*`` keys from the target's own directory. This writes a
directory that has both: the target's weight files are linked (hard links where the file system allows, symbolic ones
elsewhere), the draft stands in shards of its own, index and ``config.json`` are merged. No file of the target is opened
for writing. A shard of the target that holds ``mtp.*`` tensors of an older draft is written anew without them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from modelopt_spec.checkpoints.atomic import DRAFTER_FILES, atomic_directory, check_free
from modelopt_spec.checkpoints.card import CARD, build_card
from modelopt_spec.checkpoints.compare import Comparison
from modelopt_spec.checkpoints.engines import ENGINES, deepseek_v4
from modelopt_spec.checkpoints.engines.base import Directory, Serving
from modelopt_spec.checkpoints.export import cast_draft, draft_of, prove
from modelopt_spec.checkpoints.files import MAX_SHARD_BYTES, parse_dtype, write_json
from modelopt_spec.checkpoints.layouts import get_layout
from modelopt_spec.checkpoints.layouts.base import Draft
from modelopt_spec.checkpoints.layouts.deepseek_v4 import pack_experts, round_experts
from modelopt_spec.checkpoints.layouts.deepseek_v4_keys import draft_keys, shape_keys
from modelopt_spec.checkpoints.safe_read import INDEX_FILE, TensorEntry, read_json, tensor_entries
from modelopt_spec.checkpoints.store import fingerprint_of
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import DrafterConfig
from modelopt_spec.consoles import stderr_console
from modelopt_spec.errors import CheckpointError, UnsupportedError

__all__ = ["BesideReport", "export_beside_target"]

_PREFIX = "mtp."
_QUANTISED = "quantization_config"


@dataclass(frozen=True)
class BesideReport:
    """What :func:`export_beside_target` wrote."""

    path: Path
    linked: tuple[str, ...]
    """The target's files, linked."""
    rewritten: tuple[str, ...]
    """The target's shards that were copied without an older draft's tensors."""
    shards: tuple[str, ...]
    """The draft's own files."""
    parameters: int
    comparisons: tuple[Comparison, ...]
    engines: tuple[str, ...]
    """Engines that load the directory."""
    refused: dict[str, str]
    """Engines that do not, with the reason."""
    launch: dict[str, str]
    """How to start each engine with it."""
    notes: tuple[str, ...] = ()

    @property
    def worst_difference(self) -> float:
        """Largest relative difference between the drafter and the independent reading of the files."""
        return max(c.worst for c in self.comparisons)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for ``--json``."""
        fields = ("linked", "rewritten", "shards", "engines", "notes")
        return {
            "path": str(self.path),
            **{name: list(getattr(self, name)) for name in fields},
            "refused": dict(self.refused),
            "parameters": self.parameters,
            "worst_difference": self.worst_difference,
            "launch": dict(self.launch),
        }

    def show(self, console: Console | None = None) -> None:
        """Print what was written."""
        console = console or stderr_console()
        console.print(
            f"target and draft in {self.path}: {self.parameters:,} draft parameters in {len(self.shards)} file(s)"
        )
        console.print(f"{len(self.linked)} of the target's files linked, {len(self.rewritten)} rewritten without mtp.*")
        console.print(f"proven: block logits read back from the files differ by {self.worst_difference:.1e} at most")
        for name, reason in self.refused.items():
            console.print(f"{name}: [yellow]no:[/] {reason}", highlight=False)
        for note in self.notes:
            console.print(f"[yellow]note:[/] {note}", highlight=False)
        for name, line in self.launch.items():
            console.print(f"[bold]{name}[/]\n{line}", highlight=False, soft_wrap=True)


def export_beside_target(
    model_or_checkpoint: nn.Module | str | os.PathLike[str],
    target_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    experts: Literal["float", "mxfp4"] = "float",
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    quiet: bool = False,
) -> BesideReport:
    """Write a directory with a target's checkpoint and a drafter of DeepSeek-V4 stages beside it.

    Args:
        model_or_checkpoint: a model with such a drafter, or a checkpoint directory of one.
        target_dir: the target's checkpoint: ``config.json`` and safetensors files under DeepSeek's own names. It is
            read only.
        out: the directory to write, another one than ``target_dir``. It appears complete or not at all.
        dtype: type of the draft's weights (bfloat16 for engines); None keeps theirs.
        experts: ``mxfp4`` rounds the routed experts to 4-bit floats, the only form that llama.cpp's converter takes.
        overwrite: replace a directory that is not empty.
        max_shard_bytes: size of the draft's files.
        quiet: do not print the report.

    Raises:
        UnsupportedError: a drafter that this layout cannot hold, or experts in another form.
        CheckpointError: the target's keys contradict the drafter, ``out`` is not free or is the target itself, or what
            was written does not reproduce the drafter.
    """
    if experts not in ("float", "mxfp4"):
        raise UnsupportedError(f"experts is {experts!r}: it must be float or mxfp4")
    source = Path(target_dir).resolve()
    if source.is_relative_to(Path(out).expanduser().resolve()):
        raise CheckpointError(f"{out} is the target's own directory, which stays as it is: name another one")
    final = check_free(out, overwrite=overwrite, marks=DRAFTER_FILES, export=True)
    draft, target, provenance, origin = draft_of(model_or_checkpoint)
    wanted = parse_dtype(dtype)
    draft = draft if wanted is None else cast_draft(draft, wanted)
    layout = get_layout("deepseek_v4")
    layout.check(draft.config)
    draft = round_experts(draft) if experts == "mxfp4" else draft
    keys, entries = read_json(source / "config.json"), tensor_entries(source)
    check_same_shape(draft.config, keys)
    with atomic_directory(final, overwrite) as directory:
        linked, rewritten = _bring_target(source, directory, entries)
        tensors = layout.write_tensors(draft)
        tensors = pack_experts(tensors) if experts == "mxfp4" else tensors
        shards = _write_shards(tensors, directory, max_shard_bytes)
        _write_index(directory, entries, shards)
        write_json(directory / "config.json", merged_keys(keys, draft.config))
        comparisons = prove(draft, directory)
        loaded, refused = _engines(draft, directory, experts, TargetFacts.from_card(target))
        card = build_card(
            draft.config,
            layout=layout.name,
            engines={"load": list(loaded), "refused": refused},
            dtype=str(draft.dtype).removeprefix("torch."),
            target=target,
            fingerprint=fingerprint_of(draft.tensors),
            source=origin,
            provenance=provenance,
        )
        write_json(directory / CARD, card)
        _refuse_contradictions(directory)
    report = BesideReport(
        path=final,
        linked=linked,
        rewritten=rewritten,
        shards=tuple(shards),
        parameters=sum(t.numel() for t in draft.tensors.values() if t.is_floating_point()),
        comparisons=comparisons,
        engines=loaded,
        refused=refused,
        launch={name: deepseek_v4.launch(name, draft.config, str(final), str(final)) for name in loaded},
        notes=_notes(keys, entries, draft, loaded),
    )
    if not quiet:
        report.show()
    return report


def check_same_shape(config: DrafterConfig, keys: Mapping[str, Any]) -> None:
    """Refuse a drafter whose stages are of another shape than the target's layers: engines read one set of keys.

    Raises:
        CheckpointError: names the key and both values.
    """
    rope = keys.get("rope_parameters")
    main = rope.get("main") if isinstance(rope, dict) else None
    theirs = {**keys}
    if theirs.get("rope_theta") is None and isinstance(main, dict):
        theirs["rope_theta"] = main.get("rope_theta")
    if theirs.get("qk_rope_head_dim") is None and theirs.get("partial_rotary_factor") and theirs.get("head_dim"):
        theirs["qk_rope_head_dim"] = round(theirs["head_dim"] * theirs["partial_rotary_factor"])
    if keys.get("num_hidden_layers") != config.num_target_layers:
        raise CheckpointError(
            f"the draft was made for a target of {config.num_target_layers} layers, this one has "
            f"{keys.get('num_hidden_layers')}: name the target it was trained for"
        )
    for key, ours in shape_keys(config).items():
        given = theirs.get(key)
        if given is not None and given != ours:
            raise CheckpointError(
                f"{key} is {ours} in the draft and {given} in the target's config.json, and engines read one value for "
                "both: leave that field of the backbone unset when you train, so that it follows the target"
            )


def merged_keys(keys: Mapping[str, Any], config: DrafterConfig) -> dict[str, Any]:
    """The target's keys with the draft's added; its stages follow the target's layers, uncompressed."""
    merged = {**keys, **draft_keys(config)}
    layers, stages = config.num_target_layers or 0, config.backbone.num_layers or 0
    ratios = keys.get("compress_ratios")
    if isinstance(ratios, list):
        merged["compress_ratios"] = [*ratios[:layers], *[0] * stages]
    return merged


def _bring_target(
    source: Path, directory: Path, entries: Mapping[str, TensorEntry]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Link every file of the target but its index and config; copy shards with ``mtp.*`` without those tensors."""
    weights = {entry.file.name for entry in entries.values()}
    mixed = {entry.file.name for name, entry in entries.items() if name.startswith(_PREFIX)}
    linked, rewritten = [], []
    for file in sorted(source.iterdir()):
        if not file.is_file() or file.name in ("config.json", INDEX_FILE, CARD):
            continue
        if file.suffix == ".safetensors" and file.name not in weights:
            raise CheckpointError(f"{file} belongs to no index of {source}: engines would read it too; remove it first")
        if file.name in mixed:
            kept = _without_draft(file)
            if kept:
                save_file(kept, directory / file.name, metadata={"format": "pt"})
            rewritten.append(file.name)
        else:
            _link(file, directory / file.name, large=file.name in weights)
            linked.append(file.name)
    return tuple(linked), tuple(rewritten)


def _without_draft(file: Path) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as reader:
        names = [name for name in reader.keys() if not name.startswith(_PREFIX)]  # noqa: SIM118
        return {name: reader.get_tensor(name) for name in names}


def _link(file: Path, place: Path, *, large: bool) -> None:
    """A hard link, else a symbolic one; small files are copied."""
    if not large:
        shutil.copy2(file, place)
        return
    try:
        os.link(file, place)
    except OSError:
        place.symlink_to(file)


def _write_shards(tensors: Mapping[str, Tensor], directory: Path, limit: int) -> dict[str, list[str]]:
    """The draft's files and the names of their tensors."""
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        needed = tensor.numel() * tensor.element_size()
        if groups[-1] and size + needed > limit:
            groups.append({})
            size = 0
        groups[-1][name] = tensor.detach().cpu().contiguous()
        size += needed
    files = {}
    for index, group in enumerate(groups):
        name = f"model-mtp-{index + 1:05d}-of-{len(groups):05d}.safetensors"
        save_file(group, directory / name, metadata={"format": "pt"})
        files[name] = list(group)
    return files


def _write_index(directory: Path, entries: Mapping[str, TensorEntry], shards: Mapping[str, list[str]]) -> None:
    """One index over the target's files and the draft's."""
    weight_map = {name: entry.file.name for name, entry in entries.items() if not name.startswith(_PREFIX)}
    weight_map |= {tensor: file for file, names in shards.items() for tensor in names}
    total = sum((directory / name).stat().st_size for name in set(weight_map.values()))
    write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _engines(
    draft: Draft, directory: Path, experts: str, target: TargetFacts
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Engines that load what was written, and why the others do not: their rules, then their reading of the files."""
    packed = deepseek_v4.PACKED_EXPERTS if experts == "mxfp4" else None
    serving = Serving(draft.config, deepseek_v4.LAYOUT, draft.dtype, target, packed)
    files = Directory(read_json(directory / "config.json"), tensor_entries(directory))
    loaded, refused = [], {}
    for name, engine in ENGINES.items():
        reason = engine.refuses(serving)
        failures = engine.reads(files, target).fails if reason is None else {}
        if reason is None and not failures:
            loaded.append(name)
        else:
            refused[name] = reason or "; ".join(failures.values())
    return tuple(loaded), refused


def _refuse_contradictions(directory: Path) -> None:
    """Let no directory appear whose keys, tensors and engines disagree with training."""
    from modelopt_spec.checkpoints.preflight import check

    report = check(directory, dynamic=False)
    if not report.ok:
        reasons = "; ".join(f"{fact.name}: {fact.note}" for fact in report.facts if fact.bad)
        raise CheckpointError(f"the preflight of what was written fails, nothing was kept. {reasons}")


def _notes(
    keys: Mapping[str, Any], entries: Mapping[str, TensorEntry], draft: Draft, engines: tuple[str, ...]
) -> tuple[str, ...]:
    serving = Serving(draft.config, deepseek_v4.LAYOUT, draft.dtype)
    notes = [note for name in engines for note in deepseek_v4.notes(name, serving)]
    if keys.get(_QUANTISED) is not None:
        notes.append(
            f"the target has a {_QUANTISED}, under which engines build the draft too, but the draft is written as "
            f"{str(draft.dtype).removeprefix('torch.')}: serve it beside an unquantised copy of the target"
        )
    if any(name.startswith("model.layers.") for name in entries):
        notes.append("the target's tensors have other names than DeepSeek's (model.layers.*): engines may not load it")
    return tuple(notes)
