"""Dispatch of a golden case to what checks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

DATA = Path(__file__).parent / "data"

TOLERANCES = {"float32": 1e-5, "float64": 1e-10}
"""Largest allowed difference: relative to the tensor's largest entry where that exceeds 1, absolute below."""


class Row(NamedTuple):
    """One compared tensor."""

    name: str
    difference: float
    tolerance: float
    ok: bool


def compare(name: str, got: Tensor, want: Tensor, dtype: str) -> Row:
    """Largest difference of two tensors, in units of the larger of 1 and the tensor's size."""
    if tuple(got.shape) != tuple(want.shape):
        return Row(f"{name} (shape {tuple(got.shape)}, golden {tuple(want.shape)})", float("inf"), 0.0, False)
    if not got.numel():
        return Row(name, 0.0, TOLERANCES[dtype], True)
    scale = max(1.0, float(want.double().abs().max()))
    difference = float((got.double() - want.double()).abs().max()) / scale
    return Row(name, difference, TOLERANCES[dtype], difference <= TOLERANCES[dtype])


def load_case(file: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of a case; scheduler cases have no tensors."""
    case = json.loads(Path(file).read_text())
    tensors = Path(file).with_suffix(".safetensors")
    return case, load_file(tensors) if tensors.is_file() else {}


def check_file(file: str | Path, dtype: str | None = None) -> list[Row]:
    """All comparisons of one case file, in both precisions unless one is named."""
    case, tensors = load_case(file)
    kind = case["kind"]
    dtypes = [dtype] if dtype else ["float32", "float64"]
    if kind in ("scheduler", "sts"):
        from tests.golden.scheduling_cases import check_golden

        return [Row(row.name, row.difference, 1e-12, row.ok) for row in check_golden(case)]
    if kind == "training":
        from tests.golden.training_cases import check_training_case

        return [row for name in dtypes for row in check_training_case(case, tensors, name)]
    if kind == "decode":
        from tests.golden.decode_cases import check_decode_case

        return [Row(*row) for name in dtypes for row in check_decode_case(case, tensors, name)]
    if kind == "module":
        from tests.golden.module_cases import check_module_case

        return [Row(*row) for name in dtypes for row in check_module_case(case, tensors, name)]
    raise SystemExit(f"{file}: cases of kind {kind!r} are not known")


def torch_dtype(name: str) -> torch.dtype:
    """float32 or float64."""
    return {"float32": torch.float32, "float64": torch.float64}[name]
