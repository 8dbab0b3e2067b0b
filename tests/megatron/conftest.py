from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from megatron_workers import WorkerPool

collect_ignore_glob = ["jobs_*.py", "megatron_tiny.py", "megatron_workers.py", "cpu_shim.py"]


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    pool = WorkerPool()
    yield pool
    pool.close()
