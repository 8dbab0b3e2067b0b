"""A drafter's linear layers in FP8, NVFP4 or INT8 (weights only), by ModelOpt's ``mtq``.

By default the inputs of the block and of the heads stay as they are: engines read the rows of the fused qkv weight to
project the context's keys and values for all layers at once, check the shape of ``fc`` as a plain matrix, and add the
heads' projections to logits of full precision. What is left is the output projection of the attention and the MLP.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_spec.checkpoints.packing import GROUP, Packed, dequantise, e2m1_values
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.errors import ConfigError, UnsupportedError, nearest

__all__ = [
    "EXCLUDED",
    "FORMATS",
    "Format",
    "check_exclude",
    "float_weights",
    "is_quantised",
    "nvfp4_rounded",
    "pack",
    "quantise",
]


@dataclass(frozen=True)
class Format:
    """One quantisation."""

    algorithm: str
    """``quant_algo`` of the written files."""
    config: str
    """Name of ModelOpt's configuration."""
    group: int = 1
    """The input width of a layer must be a multiple of it."""


FORMATS = {
    "fp8": Format("FP8", "FP8_DEFAULT_CFG"),
    "nvfp4": Format("NVFP4", "NVFP4_DEFAULT_CFG", GROUP),
    "int8": Format("W8A16", "INT8_WEIGHT_ONLY_CFG"),
}
"""By the name on the command line. FP8 and NVFP4 quantise activations too, int8 weights only."""

EXCLUDED = (
    "embed_tokens",
    "lm_head",
    "fc",
    "q_proj",
    "k_proj",
    "v_proj",
    "markov_head",
    "domino_head",
    "confidence_head",
)
"""Modules, with all that is inside them, that are not quantised unless told otherwise."""

_BACKEND = "modelopt_spec_nvfp4"
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that engines put into one matrix: they share one scale."""


def quantise(
    drafter: Drafter, name: str, calibrate: Callable[[], None], *, exclude: Sequence[str] = EXCLUDED
) -> list[str]:
    """Put ModelOpt's quantizers into a drafter, in place, calibrated on what ``calibrate`` runs through it.

    Args:
        drafter: a dense drafter, bound to its target.
        name: one of :data:`FORMATS`.
        calibrate: drafts real blocks with this drafter.
        exclude: module names that stay as they are.

    Returns:
        The quantised modules. From here on the drafter computes with rounded values; training it on is quantisation
        aware training.

    Raises:
        ConfigError: an unknown format, a drafter that is quantised already, or nothing left to quantise.
        UnsupportedError: no dense backbone, or a layer whose width the format cannot hold.
    """
    import modelopt.torch.quantization as mtq

    if name not in FORMATS:
        raise ConfigError(f"quantisation {name!r} is unknown.{nearest(name, FORMATS)} Known: {', '.join(FORMATS)}")
    if drafter.config.backbone.type != "dense":
        raise UnsupportedError(
            f"a {drafter.config.backbone.type} drafter lives in its target's files: quantise those with the target"
        )
    if is_quantised(drafter):
        raise ConfigError("this drafter is quantised already: restore its checkpoint first")
    chosen = FORMATS[name]
    check_exclude(drafter, exclude)
    config = _configuration(chosen, exclude)
    wanted = [n for n, m in drafter.named_modules() if isinstance(m, nn.Linear) and not _excluded(n, exclude)]
    if not wanted:
        raise ConfigError(f"exclude {list(exclude)} leaves no linear layer to quantise")
    for layer in wanted:
        module: Any = drafter.get_submodule(layer)
        width = module.in_features
        if width % chosen.group:
            raise UnsupportedError(
                f"{layer} has {width} inputs, and {name} packs groups of {chosen.group}: exclude it, or use fp8"
            )
    was_training = drafter.training
    drafter.eval()
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        mtq.quantize(drafter, config, forward_loop=lambda _: calibrate())
        _share_scales(drafter, wanted)
    drafter.train(was_training)
    uncalibrated = [n for n in wanted if not _has_amax(drafter.get_submodule(n))]
    if uncalibrated:
        raise ConfigError(f"calibration ran nothing through {', '.join(uncalibrated[:4])}: draft at least one block")
    return wanted


def is_quantised(module: nn.Module) -> bool:
    """Whether ModelOpt's quantizers are in a module."""
    return any(hasattr(part, "weight_quantizer") for part in module.modules())


@torch.no_grad()
def pack(drafter: Drafter) -> Packed:
    """The quantised layers of a drafter as they are stored."""
    from modelopt.torch.export import quant_utils

    layers: dict[str, dict[str, Tensor]] = {}
    algorithm = ""
    for name, module in drafter.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if quantizer is None or not quantizer.is_enabled:
            continue
        kind = quant_utils.get_quantization_format(module)
        algorithm = {"fp8": "FP8", "nvfp4": "NVFP4", "int8_wo": "W8A16"}.get(str(kind), "")
        if not algorithm:
            raise UnsupportedError(f"{name} is quantised as {kind!r}: fp8, nvfp4 and int8_wo are written")
        scale = quant_utils.get_weight_scaling_factor(module)
        if algorithm == "W8A16":
            scale = scale.reshape(-1)  # a layer of one output has a scale without dimensions
        second = quant_utils.get_weight_scaling_factor_2(module)
        block = quant_utils.get_weight_block_size(module)
        weight = quant_utils.to_quantized_weight(module.weight.detach(), scale, kind, second, block)
        parts = {"weight": weight, "weight_scale": scale if algorithm != "FP8" else scale.float().reshape(())}
        if algorithm == "NVFP4":
            parts["weight_scale_2"] = second.float().reshape(())
        activation = quant_utils.get_activation_scaling_factor(module)
        if algorithm != "W8A16":
            parts["input_scale"] = activation.float().reshape(())
        layers[name] = {part: tensor.detach().cpu().contiguous() for part, tensor in parts.items()}
    modules = [n for n, m in drafter.named_modules() if isinstance(m, nn.Linear | nn.Embedding)]
    return Packed(algorithm, layers, ignored_names(modules, list(layers)))


def float_weights(packed: Packed) -> dict[str, Tensor]:
    """Our weight name -> [out, in] float32 that a reader of the files computes with."""
    return {f"{name}.weight": dequantise(packed.algorithm, parts) for name, parts in packed.layers.items()}


def ignored_names(modules: Sequence[str], quantised: Sequence[str]) -> tuple[str, ...]:
    """``ignore`` entries: the target's modules, and what stays as it is, each layer's part as one wildcard.

    A fused qkv matrix is named as well, because engines ask for it by that name, and the heads whether there are any or
    not, because export may add one of zeros.
    """
    listed = ["embed_tokens", "lm_head"]
    listed += [h for h in ("markov_head", "confidence_head") if not any(n.startswith(f"{h}.") for n in quantised)]
    names = sorted(set(modules) - set(quantised))
    for name in names:
        first, *rest = name.split(".")
        listed.append(f"*.{'.'.join(rest[1:])}" if first == "layers" else first)
        if first == "domino_head":
            listed += ["prefix_gru", rest[0]]
    if any(name.endswith("q_proj") for name in names):
        listed.append("*.self_attn.qkv_proj")
    return tuple(dict.fromkeys(listed))


# ---- ModelOpt's configuration ---------------------------------------------------------------------------------------


def check_exclude(drafter: Drafter, exclude: Sequence[str]) -> None:
    """Every name stands for a module of this drafter, or is one of the heads and tables that others have.

    Raises:
        ConfigError: one matches nothing; the nearest module is suggested.
    """
    if isinstance(exclude, str) or not all(isinstance(name, str) for name in exclude):
        raise ConfigError(f"exclude is {exclude!r}: it must be a list of module names, such as {EXCLUDED[:3]}")
    parts = {part for name, _ in drafter.named_modules() for part in name.split(".") if not part.isdigit()} - {""}
    for name in exclude:
        if name not in parts and name not in EXCLUDED:
            raise ConfigError(
                f"exclude names {name!r}, which is no module of this drafter.{nearest(name, parts)} Its modules: "
                f"{', '.join(sorted(parts))}"
            )


def _excluded(name: str, exclude: Sequence[str]) -> bool:
    return any(part in exclude for part in name.split("."))


def _configuration(chosen: Format, exclude: Sequence[str]) -> dict[str, Any]:
    """ModelOpt's own configuration, our exclusions after it; NVFP4 rounds by :func:`nvfp4_rounded` off a GPU."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    config: dict[str, Any] = copy.deepcopy(getattr(mtq, chosen.config))
    for name in exclude:
        for pattern in (f"{name}.*", f"*.{name}.*"):
            config["quant_cfg"].append({"quantizer_name": pattern, "enable": False})
    if chosen.algorithm == "NVFP4" and not torch.cuda.is_available():
        if not tensor_quantizer.is_registered_quant_backend(_BACKEND):
            tensor_quantizer.register_quant_backend(_BACKEND, lambda values, q: nvfp4_rounded(values, q.amax))
        for rule in config["quant_cfg"]:
            if "cfg" in rule:
                rule["cfg"]["backend"] = _BACKEND
    return config


def _share_scales(drafter: Drafter, wanted: Sequence[str]) -> None:
    """Give layers that engines fuse the larger of their scales; per-channel scales stay."""
    from modelopt.torch.export import quant_utils

    parents = dict.fromkeys(name.rsplit(".", 1)[0] for name in wanted if "." in name)
    for parent in parents:
        for group in _FUSED:
            members = [f"{parent}.{part}" for part in group if f"{parent}.{part}" in wanted]
            modules: list[Any] = [drafter.get_submodule(name) for name in members]
            if len(modules) == len(group) and modules[0].weight_quantizer.amax.numel() == 1:
                quant_utils.preprocess_linear_fusion(modules)


def _has_amax(module: nn.Module) -> bool:
    quantizer: Any = module.input_quantizer
    return not quantizer.is_enabled or quantizer.amax is not None


def nvfp4_rounded(values: Tensor, amax: Tensor) -> Tensor:
    """[..., n] rounded to NVFP4 and back: E2M1 in groups of 16 along the last dimension, E4M3 scales of the groups.

    The plain form of what ModelOpt's CUDA kernel does (its ``NVFP4QTensor``): scales of zero become 1, smaller ones
    than 2^-9 are raised to it, halves round to the even code.
    """
    groups = values.float().unflatten(-1, (-1, GROUP))
    whole = amax.float() / (_E2M1_MAX * _E4M3_MAX)
    scale = groups.abs().amax(-1, keepdim=True) / (_E2M1_MAX * whole)
    scale = torch.where(scale == 0, 1.0, scale).clamp(2.0**-9, _E4M3_MAX).to(torch.float8_e4m3fn).float()
    steps = groups / (scale * whole)
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.bucketize(steps.abs().contiguous(), middles)
    codes = codes + torch.isin(steps.abs(), middles[1::2]).long()
    rounded = e2m1_values(codes) * steps.sign() * scale * whole
    return rounded.flatten(-2).to(values.dtype)
