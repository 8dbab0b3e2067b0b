"""DeepSeek-V4's layout of a DSpark draft: ``mtp.{i}.*`` tensors and ``dspark_*`` keys, in or beside the target's files.

Written in the draft's own float type with hyper-connections and routers in float32. Read from bf16 or float32, from FP8
with block scales, and with MXFP4 experts; everything quantised is turned back exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modelopt_spec.checkpoints.account import Entry, KeyReader
from modelopt_spec.checkpoints.block_scales import (
    FP8_BLOCK,
    MXFP4_GROUP,
    dequantize_fp8,
    dequantize_mxfp4,
    quantize_mxfp4,
)
from modelopt_spec.checkpoints.layouts.base import NO_TARGET, Draft, Layout, expected_shapes
from modelopt_spec.checkpoints.layouts.deepseek_v4_keys import read_keys, why_not, write_keys
from modelopt_spec.checkpoints.layouts.deepseek_v4_names import expert_files, file_names, kept_float32
from modelopt_spec.checkpoints.safe_read import TensorEntry
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import DrafterConfig
from modelopt_spec.errors import CheckpointError

__all__ = ["DeepseekV4Layout", "pack_experts", "round_experts"]

_FP8, _PACKED, _SCALE = ("F8_E4M3",), ("I8", "U8"), ("F8_E8M0", "U8", "F32")
_ALIASES = {"markov_head.markov_w1.weight": "markov_head.embed.weight"}
_ALIASES |= {"markov_head.markov_w2.weight": "markov_head.head.weight"}


class DeepseekV4Layout(Layout):
    """Stages ``mtp.0`` to ``mtp.{L-1}``."""

    name = "deepseek_v4"
    title = "DeepSeek-V4 (mtp.* beside the target)"

    def recognises(self, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> bool:
        """By the tensor that only a DSpark draft of this architecture has."""
        return "mtp.0.main_proj.weight" in entries

    def refuses(self, config: DrafterConfig) -> str | None:
        """Stages of DeepSeek-V4 with a vanilla head, one tap a stage."""
        return why_not(config)

    def write_config(self, config: DrafterConfig, *, target: TargetFacts = NO_TARGET) -> dict[str, Any]:
        """The keys of a directory of its own; beside a target's files only the draft's own keys are added."""
        return write_keys(config)

    def read_config(self, keys: KeyReader, entries: Mapping[str, TensorEntry]) -> DrafterConfig:
        """Shape from the target's keys, the draft from the ``dspark_*`` ones."""
        return read_keys(keys, entries)

    def own_type(self, name: str) -> bool:
        """Draft tensors only, without the float32 ones."""
        return name.startswith("mtp.") and not kept_float32(name) and not name.endswith(".scale")

    def write_tensors(self, draft: Draft) -> dict[str, Tensor]:
        """Single experts, the rest renamed."""
        stages, experts = _sizes(draft.config)
        names, written = file_names(stages), {}
        for ours, tensor in draft.tensors.items():
            if ours in names:
                written[names[ours]] = tensor.detach().contiguous()
        for ours, expert, half, file in expert_files(stages, experts):
            stack = draft.tensors[ours][expert].detach()
            part = stack if ours.endswith("down_proj") else stack.chunk(2)[half]
            written[file] = part.contiguous().clone()
        return written

    def match(
        self,
        config: DrafterConfig,
        entries: Mapping[str, TensorEntry],
        *,
        ignore_unknown: bool = False,
        overruled: list[str] | None = None,
    ) -> tuple[dict[str, str], list[Entry]]:
        """Every ``mtp.*`` tensor of the file under its own name, scales included; :meth:`after_read` assembles them."""
        wanted = _wanted(config)
        pairs: dict[str, str] = {}
        account: list[Entry] = []
        missing = []
        for file, (ours, shape) in wanted.items():
            stored = _stored_name(file, entries)
            if stored is None:
                missing.append(file)
                continue
            scale = _check_storage(entries, stored, shape)
            pairs[file] = stored
            account.append(Entry(stored, "renamed", ours, list(entries[stored].shape)))
            if scale is not None:
                pairs[f"{file.removesuffix('.weight')}.scale"] = scale
                account.append(Entry(scale, "renamed", f"scale of {ours}", list(entries[scale].shape)))
        if missing:
            raise CheckpointError(
                f"layout {self.name!r}: the file lacks {len(missing)} tensors that its config asks for: "
                f"{', '.join(missing[:8])}"
            )
        used = set(pairs.values())
        unknown = []
        for name, entry in entries.items():
            if name in used:
                continue
            reason = _why_there(name)
            account.append(Entry(name, "ignored", reason or "not a tensor of this drafter", list(entry.shape)))
            if reason is None:
                unknown.append(name)
        if unknown:
            message = (
                f"layout {self.name!r}: {len(unknown)} tensors belong to no part of the drafter that the config "
                f"describes: {', '.join(unknown[:8])}."
            )
            if not ignore_unknown:
                raise CheckpointError(f"{message} Pass ignore_unknown to drop them")
            if overruled is not None:
                overruled.append(message)
        return pairs, account

    def after_read(self, draft: Draft) -> Draft:
        """Dequantised, renamed and stacked, the backbone's weights first."""
        files = dict(draft.tensors)
        floats = {name: _as_float(name, files) for name in files if not name.endswith(".scale")}
        stages, experts = _sizes(draft.config)
        names = file_names(stages)
        tensors = {ours: floats[file] for ours, file in names.items() if file in floats}
        stacks: dict[str, list[list[Tensor]]] = {}
        for ours, expert, _, file in expert_files(stages, experts):
            rows = stacks.setdefault(ours, [])
            if expert == len(rows):
                rows.append([])
            rows[expert].append(floats[file])
        for ours, parts in stacks.items():
            tensors[ours] = torch.stack([torch.cat(halves) for halves in parts])
        main = tensors["main_proj.weight"].dtype
        settled = {
            ours: tensor if kept_float32(names.get(ours, "")) else tensor.to(main) for ours, tensor in tensors.items()
        }
        order = expected_shapes(draft.config)
        return Draft(draft.config, {ours: settled[ours] for ours in order})


def round_experts(draft: Draft) -> Draft:
    """A draft whose routed experts hold values that MXFP4 can: what is served once :func:`pack_experts` packed them."""
    tensors = dict(draft.tensors)
    for name, stack in draft.tensors.items():
        if ".mlp.experts." in name:
            rounded = [dequantize_mxfp4(*quantize_mxfp4(expert)) for expert in stack]
            tensors[name] = torch.stack(rounded).to(stack.dtype)
    return Draft(draft.config, tensors)


def pack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The file's tensors with routed experts as MXFP4: packed weights and their scales."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".ffn.experts." in name:
            packed[name], packed[f"{name.removesuffix('.weight')}.scale"] = quantize_mxfp4(tensor)
        else:
            packed[name] = tensor
    return packed


def _sizes(config: DrafterConfig) -> tuple[int, int]:
    """Stages and routed experts."""
    moe = config.backbone.moe
    return config.backbone.num_layers or 0, (moe.num_experts if moe else None) or 0


def _wanted(config: DrafterConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """File name -> our name and the shape, of every tensor that a config's drafter has."""
    shapes = expected_shapes(config)
    stages, experts = _sizes(config)
    wanted = {file: (ours, shapes[ours]) for ours, file in file_names(stages).items() if ours in shapes}
    for ours, _, _, file in expert_files(stages, experts):
        _, rows, columns = shapes[ours]
        wanted[file] = (ours, (rows if ours.endswith("down_proj") else rows // 2, columns))
    return wanted


def _stored_name(file: str, entries: Mapping[str, TensorEntry]) -> str | None:
    """Where a tensor stands: under its name, or an older one of the Markov matrices."""
    if file in entries:
        return file
    stage, _, rest = file.partition("mtp.")[2].partition(".")
    alias = f"mtp.{stage}.{_ALIASES.get(rest, rest)}"
    return alias if alias in entries else None


def _check_storage(entries: Mapping[str, TensorEntry], name: str, shape: tuple[int, ...]) -> str | None:
    """The name of the scales of a quantised tensor, None for a plain one; an error where shapes do not fit."""
    entry = entries[name]
    stored, scale_shape = shape, None
    if entry.dtype in _FP8:
        scale_shape = tuple(-(-size // FP8_BLOCK) for size in shape)
    elif entry.dtype in _PACKED:
        stored, scale_shape = (shape[0], shape[1] // 2), (shape[0], shape[1] // MXFP4_GROUP)
    if tuple(entry.shape) != stored:
        raise CheckpointError(
            f"tensor {name!r} has shape {list(entry.shape)} as {entry.dtype}, but its config asks for {list(stored)}"
        )
    if scale_shape is None:
        return None
    scale = f"{name.removesuffix('.weight')}.scale"
    if scale not in entries or entries[scale].dtype not in _SCALE:
        raise CheckpointError(f"tensor {name!r} is {entry.dtype} and needs {scale!r} beside it")
    if tuple(entries[scale].shape) != scale_shape:
        raise CheckpointError(f"{scale!r} has shape {list(entries[scale].shape)}, not {list(scale_shape)}")
    return scale


def _as_float(name: str, files: Mapping[str, Tensor]) -> Tensor:
    tensor = files[name]
    if tensor.dtype == torch.float8_e4m3fn:
        return dequantize_fp8(tensor, files[f"{name.removesuffix('.weight')}.scale"])
    if tensor.dtype in (torch.int8, torch.uint8):
        return dequantize_mxfp4(tensor, files[f"{name.removesuffix('.weight')}.scale"])
    return tensor


def _why_there(name: str) -> str | None:
    """Why a tensor that is not the draft's may stand in the directory."""
    if not name.startswith("mtp."):
        return "the target's"
    return "routes image tokens; the draft reads text" if name.endswith(".ffn.gate.bias_vl") else None
