"""Distributed checkpoints of a converted Megatron model: saved at one parallel layout, loaded at another.

A directory holds Megatron's sharded state dict (every tensor with its place in the whole) and, in ``modelopt_state/``,
ModelOpt's record of the conversion, written and read by ModelOpt's own Megatron plugin. A model that was not converted
gets its drafter from that record before the weights are read.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from modelopt_spec.errors import CheckpointError
from modelopt_spec.targets.base import open_target
from modelopt_spec.targets.megatron_vocab import out_name

__all__ = ["describe_shards", "load_checkpoint", "save_checkpoint", "sharded_state_dict"]


def sharded_state_dict(
    drafter: Any, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Megatron's sharded state dict of a drafter: W_out split over the tensor-parallel ranks, the rest replicated."""
    from megatron.core import parallel_state as mpu
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
    from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

    tensors = drafter.state_dict(prefix="", keep_vars=True)
    groups = {
        "tp_group": mpu.get_tensor_model_parallel_group(),
        "dp_cp_group": (metadata or {}).get("dp_cp_group") or mpu.get_data_parallel_group(with_context_parallel=True),
    }
    name = out_name(drafter)
    out = tensors.pop(f"{name}.weight") if name is not None else None
    result = make_sharded_tensors_for_checkpoint(tensors, prefix, {}, sharded_offsets, **groups)
    if out is not None:
        key = f"{prefix}{name}.weight"
        result[key] = make_tp_sharded_tensor_for_checkpoint(
            out, key, tp_axis=0, prepend_offsets=sharded_offsets, allow_shape_mismatch=True, **groups
        )
    return result


def describe_shards(drafter: Any) -> None:
    """Let Megatron's ``model.sharded_state_dict()`` find :func:`sharded_state_dict` on the drafter."""
    drafter.sharded_state_dict = functools.partial(sharded_state_dict, drafter)


def _model_state(model: Any, target: bool) -> dict[str, Any]:
    from megatron.core import parallel_state as mpu

    metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    state = model.sharded_state_dict(prefix="", metadata=metadata)
    return state if target else {name: value for name, value in state.items() if name.startswith("drafter.")}


def _optimizer_state(model: Any, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    state = optimizer.sharded_state_dict(_model_state(model, target=True), is_loading=is_loading)
    if not is_loading:
        _share_step(state)
    return state


def _share_step(state: dict[str, Any]) -> None:
    """Give every rank the optimizer's step count.

    Megatron writes it from rank 0 alone, which under pipeline parallelism has no drafter and so has never counted.
    """
    moments = state.get("optimizer", state).get("state")
    if moments is None:
        return
    steps: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(steps, moments.get("common_step"))
    known = [step for step in steps if step is not None]
    if known:
        moments["common_step"] = known[0]


def save_checkpoint(
    model: Any,
    directory: str | Path,
    *,
    target: bool = True,
    optimizer: Any = None,
    common: dict[str, Any] | None = None,
) -> None:
    """Write a converted model; every rank must call it, with the same arguments.

    Args:
        model: the unwrapped ``GPTModel``.
        directory: created; must be on storage that all ranks see.
        target: also write the frozen target. False writes the drafter alone, to be loaded beside the same target.
        optimizer: a Megatron optimizer, to continue training.
        common: small values that are the same on every rank (the step, the seed).
    """
    from megatron.core import dist_checkpointing
    from modelopt.torch.opt.plugins.mcore_dist_checkpointing import save_sharded_modelopt_state

    path = Path(directory)
    if torch.distributed.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    state: dict[str, Any] = {"model": _model_state(model, target), "common": dict(common or {})}
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(model, optimizer, is_loading=False)
    dist_checkpointing.save(state, str(path))
    save_sharded_modelopt_state([model], str(path))


def load_checkpoint(model: Any, directory: str | Path, *, target: bool = True, optimizer: Any = None) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` wrote, at any layout, and return its ``common``; every rank must call it.

    A model without a drafter is converted first, as the saved one was.

    Raises:
        CheckpointError: the directory is not such a checkpoint.
    """
    from megatron.core import dist_checkpointing
    from modelopt.torch.opt.conversion import ModeloptStateManager
    from modelopt.torch.opt.plugins.mcore_dist_checkpointing import restore_sharded_modelopt_state

    path = Path(directory)
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise CheckpointError(f"{path} is not a Megatron distributed checkpoint: it needs a metadata.json")
    if not ModeloptStateManager.is_converted(model):
        if not (path / "modelopt_state").is_dir():
            raise CheckpointError(
                f"{path} has no modelopt_state: convert the model before loading, or save it converted"
            )
        restore_sharded_modelopt_state([model], str(path))
    state: dict[str, Any] = {"model": _model_state(model, target), "common": {}}
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(model, optimizer, is_loading=True)
    loaded = dist_checkpointing.load(state, str(path))
    missing, unexpected = model.load_state_dict(loaded.get("model", {}), strict=False)
    wanted = {name for name in state["model"] if "_extra_state" not in name}
    lost = sorted(wanted.intersection(missing)) + sorted(unexpected)
    if lost:
        raise CheckpointError(f"{path} does not fit this model: {', '.join(lost[:5])}")
    if optimizer is not None:
        optimizer.load_state_dict(loaded["optimizer"])
    holder = getattr(model, "drafter", None)
    adapter: Any = holder.target if holder is not None else open_target(model)
    adapter.sync_embedding()
    return loaded.get("common", {})
