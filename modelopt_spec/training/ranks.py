"""Small agreements between the ranks of a run; with one rank they cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import distributed
from transformers import TrainingArguments

__all__ = ["any_rank", "gather", "wait"]

T = TypeVar("T")


def any_rank(flag: bool, args: TrainingArguments) -> bool:
    """Whether the flag is set on any rank; the same answer everywhere."""
    if args.world_size <= 1:
        return flag
    shared = torch.tensor(int(flag), device=args.device)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return bool(shared)


def gather(value: Sequence[T], args: TrainingArguments) -> list[list[T]]:
    """Every rank's list, in order of rank."""
    if args.world_size <= 1:
        return [list(value)]
    parts: list[list[T]] = [[] for _ in range(args.world_size)]
    distributed.all_gather_object(parts, list(value))
    return parts


def wait(args: TrainingArguments) -> None:
    """Until all ranks are here."""
    if args.world_size > 1:
        distributed.barrier()
