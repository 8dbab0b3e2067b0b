"""Quantised weights as ModelOpt stores them beside a ``quantization_config``: names, shapes and their float values.

==========  ==========================  ==========================================================
quant_algo  ``weight`` [out, in]        scales
==========  ==========================  ==========================================================
FP8         float8_e4m3                 ``weight_scale`` [] float32, ``input_scale`` [] float32
NVFP4       uint8 [out, in / 2]         ``weight_scale`` [out, in / 16] float8_e4m3,
                                        ``weight_scale_2`` [] and ``input_scale`` [] float32
W8A16       int8                        ``weight_scale`` [out] float32
==========  ==========================  ==========================================================

The float value is ``weight * weight_scale (* weight_scale_2)``; NVFP4 packs two E2M1 codes a byte, low nibble first.
``input_scale`` is what an engine divides activations by before it rounds them to the same format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_spec.checkpoints.safe_read import TensorEntry, read_tensors
from modelopt_spec.errors import CheckpointError

__all__ = [
    "ALGORITHMS",
    "GROUP",
    "QUANT_FILE",
    "Packed",
    "algorithm_of",
    "dequantise",
    "e2m1_values",
    "is_packed",
    "logical_entries",
    "quantisation_of",
    "quantization_config",
    "read_float",
]

QUANT_FILE = "hf_quant_config.json"

GROUP = 16
"""Neighbours that share one scale in NVFP4."""
SCALES: dict[str, tuple[str, ...]] = {
    "FP8": ("weight_scale", "input_scale"),
    "NVFP4": ("weight_scale", "weight_scale_2", "input_scale"),
    "W8A16": ("weight_scale",),
}
ALGORITHMS = tuple(SCALES)
"""``quant_algo`` values that are read and written."""
_STORED = {"FP8": "F8_E4M3", "NVFP4": "U8", "W8A16": "I8"}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Packed:
    """The quantised part of a draft."""

    algorithm: str
    """``quant_algo``."""
    layers: Mapping[str, Mapping[str, Tensor]]
    """Our module name -> ``weight`` and its scales, as they are stored."""
    ignore: tuple[str, ...] = ()
    """Modules that stay as they are, with ModelOpt's wildcards."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """What quantising did to the drafter: accepted length before and after, for the card."""


def e2m1_values(codes: Tensor) -> Tensor:
    """4-bit codes -> the floats that they stand for."""
    return torch.tensor([*_E2M1, *(-value for value in _E2M1)])[codes.long()]


def dequantise(algorithm: str, parts: Mapping[str, Tensor]) -> Tensor:
    """``weight`` and its scales -> [out, in] float32."""
    weight, scale = parts["weight"], parts["weight_scale"].float()
    if algorithm == "FP8":
        return weight.float() * scale
    if algorithm == "W8A16":
        return weight.float() * scale.reshape(-1, 1)
    codes = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(1)
    steps = scale * parts["weight_scale_2"].float()
    return e2m1_values(codes) * steps.repeat_interleave(GROUP, dim=1)


def algorithm_of(config: Mapping[str, Any]) -> str | None:
    """The ModelOpt format of a directory's ``config.json``; None without one, or with another tool's.

    Raises:
        CheckpointError: a ModelOpt format that is not read.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or not str(quantization.get("quant_method", "")).startswith("modelopt"):
        return None
    inner = quantization.get("quantization")
    algorithm = str((inner if isinstance(inner, dict) else quantization).get("quant_algo"))
    if algorithm not in SCALES:
        raise CheckpointError(
            f"quantization_config.quant_algo is {algorithm!r}: {', '.join(ALGORITHMS)} are read; use the draft before "
            "it was quantised"
        )
    return algorithm


def quantization_config(packed: Packed) -> tuple[dict[str, Any], dict[str, Any]]:
    """``quantization_config`` of ``config.json`` and the content of ``hf_quant_config.json``, as ModelOpt does."""
    from modelopt import __version__
    from modelopt.torch.export import convert_hf_quant_config_format

    inner: dict[str, Any] = {"quant_algo": packed.algorithm, "kv_cache_quant_algo": None}
    if packed.algorithm == "NVFP4":
        inner["group_size"] = GROUP
    whole = {
        "producer": {"name": "modelopt", "version": __version__},
        "quantization": {**inner, "exclude_modules": list(packed.ignore)},
    }
    return convert_hf_quant_config_format(whole), whole


def quantisation_of(quantization: Any) -> dict[str, Any]:
    """What a ``quantization_config`` or a ``hf_quant_config.json`` says: format and ignored modules; {} without one."""
    if not isinstance(quantization, dict):
        return {}
    inner = quantization.get("quantization")
    keys = inner if isinstance(inner, dict) else quantization
    ignored = keys.get("ignore", keys.get("exclude_modules"))
    method = quantization.get("quant_method", (quantization.get("producer") or {}).get("name"))
    return {"quant_method": method, "quant_algo": keys.get("quant_algo"), "ignore": sorted(ignored or ())}


def logical_entries(config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries as if nothing was quantised: scales left out, packed weights with the shape that they stand for.

    Raises:
        CheckpointError: a format that is not read, or a quantised weight whose scales are missing or misshapen.
    """
    algorithm = algorithm_of(config)
    if algorithm is None:
        return dict(entries)
    held = {name: _check(algorithm, name, entry, entries) for name, entry in entries.items() if is_packed(name, entry)}
    scales = {f"{name.removesuffix('weight')}{suffix}" for name in held for suffix in SCALES[algorithm]}
    return {name: held.get(name, entry) for name, entry in entries.items() if name not in scales}


def read_float(directory: Path, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors by name, quantised weights as float32."""
    from modelopt_spec.checkpoints.safe_read import tensor_entries

    wanted = list(names)
    algorithm = algorithm_of(config)
    if algorithm is None:
        return read_tensors(directory, wanted)
    entries = tensor_entries(directory)
    packed = [name for name in wanted if is_packed(name, entries[name])]
    extra = [f"{name.removesuffix('weight')}{suffix}" for name in packed for suffix in SCALES[algorithm]]
    tensors = read_tensors(directory, [*wanted, *extra])
    for name in packed:
        stem = name.removesuffix("weight")
        parts = {suffix: tensors[f"{stem}{suffix}"] for suffix in SCALES[algorithm]}
        tensors[name] = dequantise(algorithm, {"weight": tensors[name], **parts})
    return {name: tensors[name] for name in wanted}


def is_packed(name: str, entry: TensorEntry) -> bool:
    """Whether a tensor holds quantised values."""
    return name.endswith(".weight") and entry.dtype in _STORED.values()


def _check(algorithm: str, name: str, entry: TensorEntry, entries: Mapping[str, TensorEntry]) -> TensorEntry:
    """The entry of a quantised weight with its logical shape."""
    if entry.dtype != _STORED[algorithm] or len(entry.shape) != 2:
        raise CheckpointError(
            f"tensor {name!r} is {entry.dtype} {list(entry.shape)}, but quant_algo {algorithm} stores "
            f"{_STORED[algorithm]} matrices"
        )
    rows, columns = entry.shape
    shape = (rows, 2 * columns) if algorithm == "NVFP4" else (rows, columns)
    matrix = {"FP8": ((), (1,)), "W8A16": ((rows,), (rows, 1)), "NVFP4": ((rows, shape[1] // GROUP),)}[algorithm]
    for suffix in SCALES[algorithm]:
        scale = entries.get(f"{name.removesuffix('weight')}{suffix}")
        if scale is None:
            raise CheckpointError(f"tensor {name!r} is quantised ({algorithm}) and needs its {suffix} beside it")
        allowed = matrix if suffix == "weight_scale" else ((), (1,))
        if tuple(scale.shape) not in allowed:
            raise CheckpointError(
                f"tensor {scale.name!r} has shape {list(scale.shape)}, quant_algo {algorithm} needs {list(allowed[0])}"
            )
    return replace(entry, shape=shape)
