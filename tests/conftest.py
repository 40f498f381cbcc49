"""Settings of all tests: one thread, reproducible properties, and processes that start in milliseconds.

Tests run in two processes (pytest-xdist), a file in one of them, so that what its tests share is made once; ``-n 0`` runs
them in one, for a debugger.
"""

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; child processes inherit it

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from rescale_data.engine.processes import PRELOADED
from rescale_data.sources.decoded.cache import Cache
from rescale_data.sources.files import remote
from rescale_data.sources.parquet import ParquetSource

# `too_slow` measures the machine, and what else runs on it.
settings.register_profile("reproducible", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=1000)  # pytest --hypothesis-profile=explore
settings.load_profile("reproducible")

# Workers and ranks are forked from a server that has imported what they need, and no data: seconds a process saved.
PRELOADED += [
    "hypothesis",
    "pytest",
    "rescale_data.checkpoint.manager",
    "s3fs",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",  # stands for what the first DTensor of a process imports
]
multiprocessing.set_forkserver_preload(PRELOADED)


@pytest.fixture(autouse=True)
def no_times_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learn nothing from how fast requests are answered: a slow one would be made again, which tests that count would see."""
    monkeypatch.setattr(remote, "_MIN_ANSWERS_FOR_LIMIT", 2**60)
    remote._request_times.cache_clear()


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Let this process be the only one of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test a cache of its own: the budget of the process's is the largest of all sources that tests left alive."""
    monkeypatch.setattr("rescale_data.sources.decoded.cache._cache", Cache())


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count how often each fragment of Parquet files is decoded."""
    counts: Counter[int] = Counter()
    decode = ParquetSource._decode

    def count(self: Any, fragment: int, columns: Any) -> Any:
        counts[fragment] += 1
        return decode(self, fragment, columns)

    monkeypatch.setattr(ParquetSource, "_decode", count)
    return counts
