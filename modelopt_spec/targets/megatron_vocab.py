"""A drafter beside a vocabulary that tensor-parallel ranks share: its W_out is split as the output layer is.

Everything else of the drafter is small and the same on every rank. Legend: V vocabulary, V' this rank's part, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_spec.errors import CheckpointError

__all__ = [
    "VocabParallelOut",
    "VocabShard",
    "gather_vocabulary",
    "load_whole_state_dict",
    "out_name",
    "shard_drafter",
    "whole_state_dict",
    "whole_tensor",
]


@dataclass(frozen=True)
class VocabShard:
    """The rows of the vocabulary that one tensor-parallel rank holds."""

    vocab_size: int
    """V: tokens that exist."""
    rows: int
    """Rows of a rank, padding included; the same on every rank."""
    rank: int
    size: int
    group: Any
    """The tensor-parallel process group."""

    @classmethod
    def of(cls, padded: int, vocab_size: int, group: Any) -> VocabShard:
        """The shard of this rank in ``group`` of a vocabulary that Megatron padded to ``padded`` rows."""
        return cls(vocab_size, padded // group.size(), group.rank(), group.size(), group)

    @property
    def start(self) -> int:
        """First token of this rank."""
        return self.rank * self.rows

    @property
    def width(self) -> int:
        """V': tokens of this rank that exist (0 on a rank that holds nothing but padding)."""
        return max(0, min(self.rows, self.vocab_size - self.start))

    def take(self, whole: Tensor) -> Tensor:
        """Cut out this rank's rows, [V, R] -> [rows, R], padded with zeros."""
        part = whole[self.start : self.start + self.width]
        return torch.cat([part, part.new_zeros(self.rows - self.width, *part.shape[1:])])


def all_gather(tensor: Tensor, group: Any) -> list[Tensor]:
    """Equal-shaped tensors of all ranks of a group."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
    return parts


@torch.no_grad()
def gather_vocabulary(shard: Tensor, vocab: VocabShard) -> Tensor:
    """Logits of all ranks, [..., V'] -> [..., V], without the padding."""
    if vocab.size == 1:
        return shard
    padded = nn.functional.pad(shard, (0, vocab.rows - shard.shape[-1]))
    return torch.cat(all_gather(padded, vocab.group), dim=-1)[..., : vocab.vocab_size]


class VocabParallelOut(nn.Linear):
    """One rank's rows of W_out, [rows, R], under the name that the whole matrix has.

    Called, it gathers the logits of all ranks (evaluation); training multiplies with :attr:`weight` itself.
    """

    def __init__(self, whole: nn.Linear, vocab: VocabShard) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.in_features, vocab.vocab_size
        self.vocab = vocab
        self.weight = nn.Parameter(vocab.take(whole.weight.detach()).clone())
        self.register_parameter("bias", None)
        for name, value in {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}.items():
            setattr(self.weight, name, value)

    def forward(self, input: Tensor) -> Tensor:
        """[..., R] -> [..., V] without gradients."""
        return gather_vocabulary(nn.functional.linear(input, self.weight[: self.vocab.width]), self.vocab)


def out_name(drafter: Any) -> str | None:
    """State-dict name of W_out without ``.weight``; None without a correction head."""
    if drafter.head is None:
        return None
    out = drafter.head.out
    return next(name for name, module in drafter.named_modules() if module is out)


@torch.no_grad()
def shard_drafter(drafter: Any, vocab: VocabShard, data_group: Any) -> None:
    """Split W_out over the tensor-parallel ranks and make everything else the same on every rank, in place.

    Replicated parameters are marked so that Megatron averages their gradients over the tensor-parallel group, which
    keeps the copies equal to the last bit.
    """
    for group in (vocab.group, data_group):
        if group.size() > 1:
            source = torch.distributed.get_global_rank(group, 0)
            for tensor in (*drafter.parameters(), *drafter.buffers()):
                torch.distributed.broadcast(tensor, src=source, group=group)
    name = out_name(drafter)
    if name is not None and vocab.size > 1:
        parent, _, child = name.rpartition(".")
        setattr(drafter.get_submodule(parent), child, VocabParallelOut(drafter.get_submodule(name), vocab))
    for parameter in drafter.parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            parameter.average_gradients_across_tp_domain = True


def _shards(drafter: Any) -> dict[str, VocabShard]:
    """Name of each split parameter and its shard."""
    return {
        f"{name}.weight": module.vocab
        for name, module in drafter.named_modules()
        if isinstance(module, VocabParallelOut)
    }


@torch.no_grad()
def whole_tensor(drafter: Any, name: str, tensor: Tensor) -> Tensor:
    """A parameter of a drafter, or its gradient, as one rank alone would hold it; all tensor-parallel ranks call it."""
    vocab = _shards(drafter).get(name)
    if vocab is None:
        return tensor.detach()
    return torch.cat(all_gather(tensor.detach(), vocab.group))[: vocab.vocab_size]


@torch.no_grad()
def whole_state_dict(drafter: Any) -> dict[str, Tensor]:
    """The state dict that the same drafter has beside a Hugging Face target; all tensor-parallel ranks together."""
    return {name: whole_tensor(drafter, name, tensor).clone() for name, tensor in drafter.state_dict().items()}


@torch.no_grad()
def load_whole_state_dict(drafter: Any, state_dict: dict[str, Tensor]) -> None:
    """Load a drafter that was trained beside a Hugging Face target, or :func:`whole_state_dict` of another layout."""
    local = dict(state_dict)
    for name, vocab in _shards(drafter).items():
        if name in local:
            if local[name].shape[0] != vocab.vocab_size:
                raise CheckpointError(
                    f"{name} has {local[name].shape[0]} rows, the drafter's vocabulary {vocab.vocab_size}"
                )
            local[name] = vocab.take(local[name])
    drafter.load_state_dict(local)
