"""A drafter, its optimizer and its target when they are spread over ranks (DDP, FSDP2).

Checkpoints hold whole tensors by name, so they read the same however many ranks wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import TrainingArguments

from modelopt_spec.config import LossConfig
from modelopt_spec.drafter.drafter import Drafter, build_drafter
from modelopt_spec.errors import ConfigError, UnsupportedError
from modelopt_spec.targets.hf import find_decoder

__all__ = [
    "load_drafter",
    "load_optimizer_state",
    "needs_unused_search",
    "number",
    "prepare_arguments",
    "shard_target",
    "whole_drafter",
    "whole_optimizer_state",
]


def needs_unused_search(drafter: Drafter, loss: LossConfig) -> bool:
    """Whether a step can leave a parameter of the drafter without gradient, which DDP must then look for."""
    config = drafter.config
    known_head = config.head.type in ("none", "vanilla", "gated", "rnn", "gru")
    idle_confidence = config.confidence.enabled and not loss.confidence
    return idle_confidence or not known_head or config.backbone.mlp != "dense"


def prepare_arguments(args: TrainingArguments, drafter: Drafter, loss: LossConfig) -> None:
    """Settings of DDP and FSDP2 that follow from what is trained, where the user left them open.

    Under FSDP2 parameters are gathered and gradients reduced in float32; autocast chooses the type of the arithmetic,
    as it does without FSDP.
    """
    if args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = needs_unused_search(drafter, loss)
    plugin = args.fsdp_plugin_args
    if plugin is not None:
        if plugin.get("fsdp_version") != 2:
            raise ConfigError(f"training.fsdp_config.version is {plugin.get('fsdp_version')}: only FSDP2 is supported")
        plugin.setdefault("mixed_precision_policy", MixedPrecisionPolicy())


def shard_target(model: nn.Module, device: torch.device) -> None:
    """Spread a target's layers over all ranks with FSDP2, one layer at a time, and put the rest on ``device``.

    Embeddings, final norm and output projection stay whole on every rank. Call it before the drafter is attached.
    """
    decoder: Any = find_decoder(model)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    whole = {parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)}
    for tensor in (*whole, *model.buffers()):
        tensor.data = tensor.data.to(device)
    fully_shard(decoder, mesh=mesh, ignored_params=whole)


def number(value: Any) -> float:
    """A scalar, whatever kind of tensor it is in."""
    return float(_whole(value)) if isinstance(value, Tensor) else float(value)


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor; every rank must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(tensor: Tensor, model: Tensor) -> Tensor:
    """A whole tensor, spread as another one is."""
    if not isinstance(model, DTensor):
        return tensor
    return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements)


def whole_drafter(drafter: Drafter) -> Drafter:
    """The drafter itself, or a copy on the CPU with all of its weights where it is sharded; call it on every rank."""
    state = drafter.state_dict()
    if not any(isinstance(tensor, DTensor) for tensor in state.values()):
        return drafter
    weights = {name: _whole(tensor).cpu() for name, tensor in state.items()}
    copy = build_drafter(drafter.config)
    copy.to(next(iter(weights.values())).dtype)
    copy.load_state_dict(weights)
    copy.bind(drafter.target)
    return copy


def load_drafter(drafter: Drafter, weights: Mapping[str, Tensor]) -> None:
    """Load whole weights into a drafter that may be sharded."""
    own = drafter.state_dict()
    drafter.load_state_dict({name: _like(w, own[name]) if name in own else w for name, w in weights.items()})


# ---- optimizer -------------------------------------------------------------------------------------------------------


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside of accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def _names(drafter: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the optimizer's parameters, in its own numbering."""
    known = {id(parameter): name for name, parameter in drafter.named_parameters()}
    return [known[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def whole_optimizer_state(drafter: nn.Module, optimizer: Any) -> dict[str, Any]:
    """An optimizer's state by parameter name, whole and on the CPU; call it on every rank.

    Returns:
        ``state``: {name: {key: value}}; ``groups``: settings of each parameter group with the names of its parameters.
    """
    plain = _plain(optimizer)
    names, raw = _names(drafter, plain), plain.state_dict()
    state = {
        names[index]: {key: _whole(v).cpu() if isinstance(v, Tensor) else v for key, v in values.items()}
        for index, values in sorted(raw["state"].items())
    }
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in raw["param_groups"]]
    return {"state": state, "groups": groups}


def load_optimizer_state(drafter: nn.Module, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Load what :func:`whole_optimizer_state` gave into an optimizer of the same drafter, sharded or not."""
    plain = _plain(optimizer)
    parameters = dict(drafter.named_parameters())
    numbers = {name: index for index, name in enumerate(_names(drafter, plain))}
    state = {
        numbers[name]: {key: _place(name, key, value, parameters[name]) for key, value in values.items()}
        for name, values in saved["state"].items()
    }
    settings = {tuple(sorted(group["params"])): group for group in saved["groups"]}
    groups = []
    for group in plain.state_dict()["param_groups"]:
        names = [name for name, index in numbers.items() if index in set(group["params"])]
        groups.append({**settings.get(tuple(sorted(names)), group), "params": group["params"]})
    plain.load_state_dict({"state": state, "param_groups": groups})


def _place(name: str, key: str, value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or value.ndim == 0:
        return value
    if value.shape != parameter.shape:
        raise UnsupportedError(
            f"the optimizer keeps {key} of shape {tuple(value.shape)} for {name} {tuple(parameter.shape)}: only "
            "optimizers with state in the shape of the parameter (adamw, sgd, lion) resume with a sharded drafter"
        )
    return _like(value, parameter)
