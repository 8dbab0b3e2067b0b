"""The two quantised number formats of DeepSeek-V4 checkpoints, both ways.

* FP8: ``F8_E4M3`` weights [out, in] with one scale for each 128 x 128 block (``F8_E8M0`` powers of two, or ``F32``).
* MXFP4: two 4-bit floats (E2M1) a byte, low nibble first, [out, in / 2], with one ``F8_E8M0`` scale for 32 neighbours
  (OCP Microscaling Formats, version 1.0).

Reading is exact: both formats are a few significant bits times a power of two. Values that bfloat16 can hold come back
as bfloat16, others as float32.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from modelopt_spec.errors import CheckpointError

__all__ = [
    "FP8_BLOCK",
    "MXFP4_GROUP",
    "dequantize_fp8",
    "dequantize_mxfp4",
    "power_of_two",
    "quantize_fp8",
    "quantize_mxfp4",
]

FP8_BLOCK = 128
MXFP4_GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E4M3_MAX = 448.0
_E2M1_MAX = 6.0


def power_of_two(scale: Tensor) -> Tensor:
    """E8M0 scales as float32: 2^(byte - 127). Also takes the raw bytes, and float scales as they are.

    Raises:
        CheckpointError: a scale is NaN (byte 255).
    """
    if scale.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return scale.float()
    exponent = scale.view(torch.uint8).to(torch.int32)
    if bool((exponent == 255).any()):
        raise CheckpointError("a block scale is NaN (byte 255): the file is damaged")
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - 127).float()


def _settle(exact: Tensor) -> Tensor:
    """The values as bfloat16 where that changes none of them."""
    half = exact.to(torch.bfloat16)
    return half if torch.equal(half.float(), exact) else exact


def _blocks(scale: Tensor, shape: torch.Size) -> Tensor:
    """[ceil(out/128), ceil(in/128)] -> [out, in]."""
    rows = scale.repeat_interleave(FP8_BLOCK, 0)[: shape[0]]
    return rows.repeat_interleave(FP8_BLOCK, 1)[:, : shape[1]]


def dequantize_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """[out, in] float8 with [ceil(out/128), ceil(in/128)] scales -> [out, in]."""
    wanted = tuple(-(-size // FP8_BLOCK) for size in weight.shape)
    if tuple(scale.shape) != wanted:
        raise CheckpointError(f"FP8 weight {list(weight.shape)} needs scales {list(wanted)}, got {list(scale.shape)}")
    return _settle(weight.float() * _blocks(power_of_two(scale), weight.shape))


def dequantize_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """[out, in/2] bytes with [out, in/32] scales -> [out, in]."""
    wanted = (packed.shape[0], 2 * packed.shape[1] // MXFP4_GROUP)
    if tuple(scale.shape) != wanted:
        raise CheckpointError(f"MXFP4 weight {list(packed.shape)} needs scales {list(wanted)}, got {list(scale.shape)}")
    codes = packed.view(torch.uint8)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    return _settle(table[nibbles] * power_of_two(scale).repeat_interleave(MXFP4_GROUP, 1))


def _e8m0(largest: Tensor, most: float) -> Tensor:
    """The smallest power of two, as its byte, that brings ``largest`` below ``most``."""
    mantissa, exponent = torch.frexp(largest.clamp(min=2.0**-100) / most)
    return (exponent - (mantissa == 0.5).int() + 127).clamp(0, 254).to(torch.uint8)


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> float8_e4m3fn [out, in] and E8M0 scales [ceil(out/128), ceil(in/128)]."""
    rows, columns = (-(-size // FP8_BLOCK) for size in weight.shape)
    padded = weight.new_zeros(rows * FP8_BLOCK, columns * FP8_BLOCK, dtype=torch.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    largest = padded.view(rows, FP8_BLOCK, columns, FP8_BLOCK).abs().amax(dim=(1, 3))
    scale = _e8m0(largest, _E4M3_MAX)
    values = weight.float() / _blocks(power_of_two(scale), weight.shape)
    return values.to(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> packed int8 [out, in/2] and E8M0 scales [out, in/32]; ``in`` must be a multiple of 32."""
    if weight.shape[1] % MXFP4_GROUP:
        raise CheckpointError(f"MXFP4 packs groups of {MXFP4_GROUP}, but the weight is {list(weight.shape)}")
    groups = weight.float().unflatten(1, (-1, MXFP4_GROUP))
    scale = _e8m0(groups.abs().amax(-1), _E2M1_MAX)
    values = groups / power_of_two(scale).unsqueeze(-1)
    middles = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(_E2M1)])
    sizes = torch.bucketize(values.abs().contiguous(), middles).to(torch.uint8)
    codes = sizes + 8 * ((values < 0) & (sizes > 0)).to(torch.uint8)
    low, high = codes.flatten(1)[:, 0::2], codes.flatten(1)[:, 1::2]
    return (low | (high << 4)).view(torch.int8), scale.view(torch.float8_e8m0fnu)
