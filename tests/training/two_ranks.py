"""Run a function in several forked processes that form a gloo group, as torchrun would start them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState, GradientState
from torch import distributed

SECONDS = 500


def run_ranks(function: Callable[..., Any], *args: Any, directory: Path, world: int = 2, expect: int = 0) -> list[Any]:
    """What ``function(*args)`` returned on each rank.

    The processes are forked, so nothing is imported again; they run with one thread. ``expect`` is the exit status.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def body(rank: int) -> None:
        torch.set_num_threads(1)
        values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in values.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        try:
            result = function(*args)
        except BaseException:
            (directory / f"error-{rank}").write_text(traceback.format_exc())
            raise
        torch.save(result, directory / f"result-{rank}")
        if distributed.is_initialized():
            distributed.destroy_process_group()

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=body, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(SECONDS)
        codes = [process.exitcode for process in processes]
        errors = "\n".join(path.read_text() for path in sorted(directory.glob("error-*")))
        assert codes == [expect] * world, f"exit statuses {codes}\n{errors}"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [torch.load(directory / f"result-{rank}", weights_only=False) for rank in range(world)]


def allow_fsdp_on_cpu() -> None:
    """Accelerate offers FSDP on accelerators only; the same code runs on gloo once its state says so."""
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = init
