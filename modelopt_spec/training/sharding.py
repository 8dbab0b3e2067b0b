"""A drafter, its optimizer and its target when they are spread over ranks (DDP, FSDP2).

Checkpoints hold whole tensors by name, so they read the same however many ranks wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from modelopt_spec.drafter.drafter import Drafter, build_drafter
from modelopt_spec.errors import UnsupportedError

__all__ = [
    "leave_target_out_of_ddp",
    "load_drafter",
    "load_optimizer_state",
    "number",
    "whole_drafter",
    "whole_optimizer_state",
]


def leave_target_out_of_ddp(module: Any) -> None:
    """Keep DDP from sending the frozen target's weights and buffers: every rank has loaded the same."""
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    module._ddp_params_and_buffers_to_ignore = [name for name in names if not name.startswith("model.drafter.")]


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
