"""Data-parallel ranks that are part of a larger mesh, and what the checkpoint then holds."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.ranks import run_ranks
from tests.distributed.segments import ByRank, Data, Taken, check_exactly_once, global_batches, take

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

O, N = 24, 48  # noqa: E741
DATA = Data("every", 300, N)
EPOCH = Data("every", 100, N, repeat=False)
UNEVEN = Data("every", 300, 27)


class Case(NamedTuple):
    """How 4 ranks are used.

    Args:
        ranks_of: Global ranks by dp rank; those that share one read the same samples.
    """

    data: Data
    ranks_of: list[list[int]]


CASES = {
    "dp and tp": Case(DATA, [[0, 1], [2, 3]]),
    "tp and dp": Case(DATA, [[0, 2], [1, 3]]),
    "replicate and shard": Case(DATA, [[0], [1], [2], [3]]),
    "ranks out of order": Case(DATA, [[2], [0], [3], [1]]),
    "ranks out of order, uneven": Case(UNEVEN, [[2], [0], [3], [1]]),
    "tp alone": Case(DATA, [[0, 1, 2, 3]]),
    "dp_rank of dp and tp": Case(DATA, [[0, 1], [2, 3]]),
    "dp_rank of dp and tp, uneven": Case(UNEVEN, [[0, 1], [2, 3]]),
    "dp_rank of dp and tp, epochs": Case(EPOCH, [[0, 1], [2, 3]]),
    "dp and tp, epochs": Case(EPOCH, [[0, 1], [2, 3]]),
    "one rank, by dp_rank": Case(DATA, [[0, 1, 2, 3]]),
}


def arguments(name: str) -> dict[str, Any]:
    """Of the loader on this rank, of 4."""
    if name.startswith("dp_rank"):
        return {"dp_rank": dist.get_rank() // 2, "dp_world_size": 2}
    if name.startswith("one rank"):
        return {"dp_rank": 0, "dp_world_size": 1}
    if name.startswith("ranks out of order"):
        return {"mesh": DeviceMesh("cpu", [[2, 0], [3, 1]], mesh_dim_names=("replicate", "shard"))}
    dims = {"tp and dp": ("tp", "dp"), "replicate and shard": ("replicate", "shard")}.get(name, ("dp", "tp"))
    mesh = init_device_mesh("cpu", (1, 4) if name == "tp alone" else (2, 2), mesh_dim_names=dims)
    return {"mesh": mesh["dp"] if "dp" in dims else mesh}


class Seen(NamedTuple):
    before: list[Taken]
    after: list[Taken]
    resumed: list[Taken]


def on_4_ranks(folder: Path) -> dict[str, Seen]:
    return {name: _run(case, arguments(name), folder / name) for name, case in CASES.items()}


def _run(case: Case, where: dict[str, Any], folder: Path) -> Seen:
    """Four micro batches, a save, six more; and six from the save."""
    w = len(case.ranks_of)
    loader = case.data.loader(O, O // w // 2, **where)
    before = take(loader, 4)
    dcp.save({"loader": loader}, checkpoint_id=folder)
    after = take(loader, 6)
    again = case.data.loader(O, O // w // 2, **where)
    dcp.load({"loader": again}, checkpoint_id=folder)
    return Seen(before, after, take(again, 6))


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Seen]]]:
    folder = tmp_path_factory.mktemp("meshes")
    return folder, run_ranks(4, folder, on_4_ranks, folder)


@pytest.mark.parametrize("name", CASES)
def test_peers_read_the_same_samples_and_a_checkpoint_goes_on_exactly_here_and_in_one_process(
    meshes: Any, name: str
) -> None:
    """In the order of dp ranks, which for a mesh is row-major."""
    (folder, ranks), case = meshes, CASES[name]
    for peers in case.ranks_of:
        assert all(ranks[peer][name] == ranks[peers[0]][name] for peer in peers)
    assert all(rank[name].after == rank[name].resumed for rank in ranks)
    by_dp_rank = [ranks[peers[0]][name] for peers in case.ranks_of]
    before: ByRank = [seen.before for seen in by_dp_rank]
    after: ByRank = [seen.after for seen in by_dp_rank]
    alone = case.data.loader(O, O)
    dcp.load({"loader": alone}, checkpoint_id=folder / name)
    resumed: ByRank = [take(alone, 3)]
    check_exactly_once(case.data, before, resumed)
    check_exactly_once(case.data, before, after)
    if case.data is not UNEVEN:
        assert global_batches(after, O) == global_batches(resumed, O)
        assert global_batches([take(case.data.loader(O, O), 2)], O) == global_batches(before, O)
