"""Expert parallelism: each rank holds E / R of the experts, and tokens travel to their experts and back.

    pairs, sorted by expert  --all-to-all-->  the pairs of this rank's experts, sorted by expert  --experts-->  back

No token is dropped and no capacity is set: the ranks first tell one another how many rows they send. The weights are
DTensors that are split by expert, so checkpoints, optimizers and gradient norms of FSDP2 take them like its own.

A rank's loss counts for the mean over ranks, as DDP and FSDP average gradients. Here an expert's gradient arrives from
all ranks already added up, so it is divided by their number.

Legend: M tokens of this rank, k experts a token, P = M k pairs, P' pairs that this rank computes, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from modelopt_spec.drafter.experts import Experts
from modelopt_spec.errors import ConfigError

__all__ = ["ExpertExchange", "shard_experts", "spread_for_training"]


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks that need them; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        distributed.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = grads[0].new_empty(sum(ctx.sent), *grads[0].shape[1:])
        distributed.all_to_all_single(back, grads[0].contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return back, None, None, None


class _MeanGradient(torch.autograd.Function):
    """The weight itself; its gradient divided by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.ranks, None


class ExpertExchange:
    """Where the experts of one layer are, and how its tokens get there."""

    def __init__(self, mesh: DeviceMesh, experts: int) -> None:
        self.group, self.ranks = mesh.get_group(), mesh.size()
        if experts % self.ranks:
            raise ConfigError(
                f"{experts} experts cannot be spread evenly over {self.ranks} ranks: choose a backbone.moe.num_experts "
                f"that {self.ranks} divides, or turn expert parallelism off"
            )
        self.own = experts // self.ranks

    def local(self, weight: Tensor) -> Tensor:
        """The part of a weight split by expert that this rank holds."""
        part = weight.to_local() if isinstance(weight, DTensor) else weight
        return _MeanGradient.apply(part, self.ranks)

    def __call__(self, rows: Tensor, counts: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Send rows to their experts and bring the results back in the same order.

        Args:
            rows: [P, D] sorted by expert. counts: [E] rows of each.
            compute: (rows [P', D] sorted by this rank's experts, rows of each [E / R]) -> [P', D].
        """
        theirs = torch.empty_like(counts)
        distributed.all_to_all_single(theirs, counts, group=self.group)
        by_source = theirs.view(self.ranks, self.own)
        sent, received = counts.view(self.ranks, self.own).sum(1).tolist(), by_source.sum(1).tolist()
        arrived = _AllToAll.apply(rows, sent, received, self.group)
        expert = torch.arange(self.own, device=counts.device).repeat(self.ranks).repeat_interleave(by_source.flatten())
        order = expert.argsort(stable=True)
        done = compute(arrived[order], by_source.sum(0))
        unsorted = torch.empty_like(order)
        unsorted[order] = torch.arange(len(order), device=order.device)
        return _AllToAll.apply(done[unsorted], received, sent, self.group)


def shard_experts(drafter: nn.Module, device: torch.device, mesh: DeviceMesh | None = None) -> list[nn.Module]:
    """Spread the experts of every layer over all ranks; each rank calls it with the same weights.

    Args:
        drafter: with experts. device: of this rank. mesh: one axis of ranks; all of them if None.

    Returns:
        The modules whose parameters are spread now: leave them to themselves when the rest is put under FSDP2.

    Raises:
        ConfigError: no experts, or a number of them that the ranks do not divide.
    """
    blocks = [module for module in drafter.modules() if isinstance(module, Experts)]
    if not blocks:
        raise ConfigError("training.expert_parallel needs a drafter with experts: set backbone.mlp to moe")
    mesh = mesh or init_device_mesh(device.type, (distributed.get_world_size(),))
    for block in blocks:
        block.exchange = ExpertExchange(mesh, block.num_experts)
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(block, name).detach().to(device)
            setattr(block, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)))
    return list(blocks)


def spread_for_training(drafter: nn.Module, arguments: Any) -> None:
    """Spread the experts of a drafter that transformers' Trainer is about to train; FSDP2 takes the other weights.

    Args:
        drafter: the same on every rank. arguments: the run's TrainingArguments.

    Raises:
        ConfigError: one rank only, no FSDP2, or what :func:`shard_experts` refuses.
    """
    if arguments.world_size < 2 or arguments.fsdp_plugin_args is None:
        raise ConfigError(
            "training.expert_parallel spreads experts over ranks whose other weights are under FSDP2: set "
            "training.fsdp to true and start at least two ranks, or set expert_parallel to false"
        )
    arguments.fsdp_plugin_args["ignored_modules"] = shard_experts(drafter, arguments.device)
