"""From a Megatron model to the same files that its drafter would give beside a Hugging Face target.

The drafter is gathered to one rank under its Hugging Face names and handed to the ordinary save and export.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelopt_spec.errors import CheckpointError
from modelopt_spec.targets.base import Target, open_target, register_target
from modelopt_spec.targets.megatron_vocab import whole_state_dict

__all__ = ["PortableModel", "export_drafter", "gather_drafter", "save_drafter"]


class PortableModel(nn.Module):
    """A whole drafter with the identity of its target, for the functions that take a converted model.

    It cannot be run: it is what :func:`gather_drafter` returns on the rank that writes.
    """

    def __init__(self, drafter: Any, target: Any, config: Any) -> None:
        super().__init__()
        self.drafter = drafter
        self.config = config
        self._target = [target]

    @property
    def target(self) -> Any:
        """The Megatron target; kept in a list because it is no part of this module."""
        return self._target[0]


def _target_of(model: Any) -> Target:
    return model.target


register_target(lambda model: isinstance(model, PortableModel), _target_of)


def _portable_class(config: Any) -> type[PortableModel]:
    """Named after the target's architecture, which exports record."""
    architectures = getattr(config, "architectures", None)
    return type(architectures[0], (PortableModel,), {}) if architectures else PortableModel


@torch.no_grad()
def gather_drafter(model: Any) -> PortableModel | None:
    """The whole drafter on one rank, None on the others; every rank must call it.

    The rank is the first of the last stage's tensor- and data-parallel ranks.
    """
    from megatron.core import parallel_state as mpu

    from modelopt_spec.drafter.drafter import build_drafter

    drafter = getattr(model, "drafter", None)
    if drafter is None:
        if getattr(open_target(model), "hosts_drafter", True):
            raise CheckpointError("this model has no drafter: call modelopt_spec.convert on every rank first")
        return None
    weights = whole_state_dict(drafter)
    if mpu.get_tensor_model_parallel_rank() or mpu.get_data_parallel_rank(with_context_parallel=True):
        return None
    whole = build_drafter(drafter.config)
    whole.load_state_dict({name: tensor.cpu() for name, tensor in weights.items()}, assign=True)
    whole.bind(drafter.target)
    config = getattr(model, "hf_config", None)
    return _portable_class(config)(whole, drafter.target, config)


def _on_one_rank(model: Any, write: Callable[[PortableModel], Any]) -> Any:
    """Gather, write on one rank, and fail on every rank if that one failed."""
    portable = gather_drafter(model)
    result, message = None, ""
    if portable is not None:
        try:
            result = write(portable)
        except Exception as error:
            message, failure = str(error) or type(error).__name__, error
    messages: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(messages, message)
    if message:
        raise failure
    others = [text for text in messages if text]
    if others:
        raise CheckpointError(f"the rank that writes the drafter failed: {others[0]}")
    return result


def save_drafter(model: Any, path: str | Path, **options: Any) -> Path:
    """:func:`modelopt_spec.save` for a Megatron model; every rank must call it. Options are passed on."""
    from modelopt_spec.checkpoints.store import save

    _on_one_rank(model, lambda portable: save(portable, path, **options))
    return Path(path)


def export_drafter(model: Any, out: str | Path, **options: Any) -> Any:
    """:func:`modelopt_spec.export` for a Megatron model; every rank must call it. Options are passed on.

    Returns:
        The export's report on the rank that wrote it, None on the others.
    """
    from modelopt_spec.checkpoints.export import export

    return _on_one_rank(model, lambda portable: export(portable, out, **options))
