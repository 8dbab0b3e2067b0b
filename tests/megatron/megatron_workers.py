"""A pool of worker processes for gloo tests: they import megatron-core once and serve many jobs of 1, 2 or 4 ranks.

A job is ``"module:function"`` with JSON-like keyword arguments. Every rank runs it inside an initialised process group
and sends back what it returns (tensors included); an exception comes back as :class:`WorkerError` with its traceback.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 540.0


class WorkerError(AssertionError):
    """A job that failed on a rank."""


def _serve(connection: Connection) -> None:
    """Run jobs until the other side hangs up."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:0] = [str(HERE), str(HERE.parents[1])]
    import warnings

    warnings.simplefilter("ignore")
    import cpu_shim  # noqa: F401
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        name, rank, world, store, kwargs = job
        faulthandler.dump_traceback_later(0.9 * TIMEOUT_S)
        try:
            torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
            module, function = name.split(":")
            result = getattr(importlib.import_module(module), function)(**kwargs)
            answer: tuple[str, Any] = ("ok", result)
        except BaseException:
            answer = ("error", traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        if answer[0] == "ok":
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
        try:
            connection.send(answer)
        except BrokenPipeError:
            return
        if answer[0] == "error":
            return  # the other ranks may hang in a collective: the pool starts afresh


class WorkerPool:
    """Lazily started processes, kept between jobs, restarted after a failure."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self._failed = False
        self._context = mp.get_context("spawn")
        atexit.register(self.close)

    def run(self, job: str, world: int = 1, **kwargs: Any) -> list[Any]:
        """Run ``job`` on ranks ``0 .. world-1`` and return their results in order of rank."""
        while len(self._workers) < world:
            ours, theirs = self._context.Pipe()
            # Not daemonic: Megatron's checkpoint writer starts processes of its own.
            process = self._context.Process(target=_serve, args=(theirs,))
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        with tempfile.TemporaryDirectory() as directory:
            store = os.path.join(directory, "store")
            pending = {}
            for rank in range(world):
                connection = self._workers[rank][1]
                connection.send((job, rank, world, store, kwargs))
                pending[connection] = rank
            results: dict[int, Any] = {}
            while pending:
                ready = wait(list(pending), timeout=TIMEOUT_S)
                if not ready:
                    self._failed = True
                    self.close()
                    raise WorkerError(f"{job}: ranks {sorted(pending.values())} of {world} gave no answer")
                for connection in ready:
                    rank = pending.pop(connection)  # type: ignore[index]
                    try:
                        status, value = connection.recv()  # type: ignore[union-attr]
                    except EOFError:
                        status, value = "error", "the process died"
                    if status == "error":
                        self._failed = True
                        self.close()
                        raise WorkerError(f"{job} failed on rank {rank} of {world}:\n{value}")
                    results[rank] = value
            return [results[rank] for rank in range(world)]

    def close(self) -> None:
        """End the processes of this pool: they return when the connection closes, unless they hang in a collective."""
        for _, connection in self._workers:
            connection.close()
        for process, _ in self._workers:
            process.join(20 if not self._failed else 2)
            if process.is_alive():
                process.terminate()
                process.join(10)
        self._workers, self._failed = [], False
