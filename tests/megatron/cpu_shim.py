"""Lets megatron-core run on a CPU with gloo. Import it before anything from ``megatron``; for tests only.

megatron-core asks CUDA for its current device, random state, streams and tensors even where every weight lives on the
host. The stand-ins below answer on the CPU's behalf; nothing of the arithmetic changes. They patch ``torch`` for the
whole process, so the test suite only imports this module in worker processes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

if any(name.split(".")[:2] == ["megatron", "core"] for name in sys.modules):
    raise ImportError("import cpu_shim before megatron.core: it reads torch.cuda while it is imported")

CPU = torch.device("cpu")


class Stream:
    """A stream that is always idle."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Stream) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> Event:
        return Event()


class Event:
    """An event that has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    yield


def _is_cuda(device: Any) -> bool:
    return device is not None and str(device).startswith("cuda")


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Factory function that makes its tensor on the CPU when it is asked for CUDA."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return function(*args, **kwargs)

    return wrapped


def _patch_factories() -> None:
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "zeros_like", "empty_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    move = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(CPU if isinstance(a, (str, torch.device)) and _is_cuda(a) else a for a in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return move(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    name_type = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """``Tensor.type()`` names the CUDA class, which Megatron's optimizers assert."""
        answer = name_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]


def _patch_cuda() -> None:
    cuda = torch.cuda
    replacements: dict[str, Any] = {
        "current_device": lambda: CPU,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "Stream": Stream,
        "Event": Event,
        "stream": _on_stream,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    for name, value in replacements.items():
        setattr(cuda, name, value)
    cuda.random.get_rng_state = replacements["get_rng_state"]
    cuda.random.set_rng_state = replacements["set_rng_state"]


def _patch_collectives() -> None:
    """Gloo wants split sizes as lists of integers, and has no average."""
    scatter, reduce = torch.distributed.all_to_all_single, torch.distributed.all_reduce

    def as_list(sizes: Any) -> Any:
        return None if sizes is None else [int(s) for s in sizes]

    @functools.wraps(scatter)
    def all_to_all_single(
        output: torch.Tensor, input: torch.Tensor, output_sizes: Any = None, input_sizes: Any = None, **kwargs: Any
    ) -> Any:
        sizes = [kwargs.pop("output_split_sizes", output_sizes), kwargs.pop("input_split_sizes", input_sizes)]
        return scatter(output, input, *map(as_list, sizes), **kwargs)

    @functools.wraps(reduce)
    def all_reduce(
        tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None, **kwargs: Any
    ) -> Any:
        if op != torch.distributed.ReduceOp.AVG:
            return reduce(tensor, op=op, group=group, **kwargs)
        reduce(tensor, op=torch.distributed.ReduceOp.SUM, group=group)
        tensor /= torch.distributed.get_world_size(group)
        return None

    torch.distributed.all_to_all_single = all_to_all_single
    torch.distributed.all_reduce = all_reduce


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    megatron_random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    moe_utils.te_general_gemm = None


_patch_factories()
_patch_cuda()
_patch_collectives()
_patch_megatron()
