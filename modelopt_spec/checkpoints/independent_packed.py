"""ModelOpt's quantised weights, read a second time and plainly, for the independent reader alone.

Number by number on purpose where the package's own reader works with tables and packed words: E2M1 codes are computed
from their sign, exponent and mantissa bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelopt_spec.errors import UnsupportedError

__all__ = ["unpacked"]


def _e2m1(code: Tensor) -> Tensor:
    """One sign bit, two exponent bits (bias 1), one mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, (code & 1).double()
    size = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent.double() - 1))
    return size * (1 - 2 * sign.double())


def unpacked(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a directory with every quantised weight as floats and without scales; others as they are."""
    quantization = config.get("quantization_config") or {}
    if not str(quantization.get("quant_method", "")).startswith("modelopt"):
        return tensors
    algorithm = quantization.get("quant_algo")
    result = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if part in ("weight_scale", "weight_scale_2", "input_scale"):
            continue
        scale = tensors.get(f"{stem}.weight_scale") if part == "weight" else None
        if scale is None:
            result[name] = tensor
        elif algorithm == "FP8":
            result[name] = (tensor.double() * scale.double()).float()
        elif algorithm == "W8A16":
            result[name] = (tensor.double() * scale.double().reshape(-1, 1)).float()
        elif algorithm == "NVFP4":
            rows, bytes_each = tensor.shape
            values = torch.empty(rows, 2 * bytes_each, dtype=torch.float64)
            values[:, 0::2], values[:, 1::2] = _e2m1(tensor & 15), _e2m1(tensor >> 4)
            size = values.shape[1] // scale.shape[1]
            whole = tensors[f"{stem}.weight_scale_2"].double()
            result[name] = (values.view(rows, -1, size) * (scale.double() * whole).unsqueeze(-1)).flatten(1).float()
        else:
            raise UnsupportedError(f"quant_algo {algorithm!r} has no independent check; use FP8, NVFP4 or W8A16")
    return result
