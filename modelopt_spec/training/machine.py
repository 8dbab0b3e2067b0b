"""What a run is planned for: a GPU by name, or the machine at hand."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from modelopt_spec.errors import ConfigError, nearest

__all__ = ["GPUS", "Machine", "available_memory", "check_gpu", "choose_machine", "gpu_key"]

GPUS: dict[str, tuple[float, float]] = {
    "a100-40gb": (312, 40),
    "a100-80gb": (312, 80),
    "b200": (2250, 180),
    "gh200": (989, 96),
    "h100": (989, 80),
    "h200": (989, 141),
    "l4": (121, 24),
    "l40s": (362, 48),
    "mi300x": (1307, 192),
    "rtx-4090": (165, 24),
}
"""Dense bf16 peak in TFLOP/s and memory in GB, from the vendors' data sheets."""

ASSUMED_GPU = "h100"
"""For several ranks on a machine without a GPU: they will train elsewhere."""

_SIZE, _SECONDS = 768, 0.3


@dataclass(frozen=True)
class Machine:
    """One rank's device."""

    name: str
    kind: Literal["gpu", "cpu"]
    peak_tflops: float
    memory_gb: float
    peak_from: Literal["data sheet", "measured here"]
    here: bool
    """Whether it is the machine at hand."""


def check_gpu(name: str | None) -> None:
    """Refuse a GPU that :data:`GPUS` does not hold.

    Raises:
        ConfigError: it does not.
    """
    if name is not None and name not in GPUS:
        raise ConfigError(f"gpu is {name!r}.{nearest(name, GPUS)} Known: {', '.join(GPUS)}")


def choose_machine(gpu: str | None, ranks: int = 1, *, half: bool = True) -> Machine:
    """The device that a plan is for.

    Args:
        gpu: a name of :data:`GPUS`; None: this machine's GPU, else its CPU; else, for several ranks, an H100.
        ranks: that will train.
        half: train in bfloat16 (what the peak of a device that is in no data sheet here is measured in).
    """
    import torch

    check_gpu(gpu)
    if gpu is None and torch.cuda.is_available():
        found, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory / 1e9
        key = gpu_key(found)
        if key is not None:
            return Machine(found, "gpu", GPUS[key][0], memory, "data sheet", here=True)
        return Machine(found, "gpu", _matmul_tflops("cuda", half), memory, "measured here", here=True)
    if gpu is None and ranks == 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        name = f"this machine's CPU ({cores} core{'s' if cores > 1 else ''})"
        return Machine(name, "cpu", _matmul_tflops("cpu", half), _total_memory() / 1e9, "measured here", here=True)
    peak, memory = GPUS[gpu or ASSUMED_GPU]
    return Machine(gpu or ASSUMED_GPU, "gpu", peak, memory, "data sheet", here=False)


def gpu_key(name: str) -> str | None:
    """The entry of :data:`GPUS` that a driver's device name means: ``NVIDIA A100-SXM4-80GB`` is ``a100-80gb``."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if "laptop" in words:
        return None
    return next((key for key in GPUS if set(key.split("-")) <= words), None)


def _matmul_tflops(device: str, half: bool) -> float:
    """Rate of a square matrix product, the best of a third of a second."""
    import torch

    size = _SIZE if device == "cpu" else 8 * _SIZE
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if half else torch.float32)
    best, end, product = float("inf"), time.perf_counter() + _SECONDS, a @ a
    while True:
        start = time.perf_counter()
        product = a @ a
        if device == "cuda":
            product[0, 0].item()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            return 2 * size**3 / best / 1e12


# ---- memory ----------------------------------------------------------------------------------------------------------


def available_memory() -> int | None:
    """Bytes of host memory that are free or can be freed; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in lines)
    if "MemAvailable" not in values:
        return None
    return min(int(values["MemAvailable"].split()[0]) * 1024, _limit() or 1 << 62)


def _total_memory() -> int:
    """Bytes of host memory, or what a container may use of it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, _limit() or total)


def _limit() -> int | None:
    """What the control group allows, where there is one with a limit."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
