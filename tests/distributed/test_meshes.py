"""Data-parallel ranks that are part of a larger mesh, and what the checkpoint then holds."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.ranks import run_ranks
from tests.distributed.segments import ByRank, Data, Logged, Taken, check_exactly_once, global_batches, take

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

O, N = 24, 48  # noqa: E741
DATA = Data("every", 300, N)
EPOCH = Data("every", 100, N, repeat=False)
UNEVEN = Data("every", 300, 27)


class Case(NamedTuple):
    """How 4 ranks are used.

    Args:
        ranks_of: Global ranks by dp rank; those that share one read the same samples.
        blocks: Rows of each chunk of a field in the checkpoint: one a dp rank, or, where rows are gathered, a single one.
    """

    data: Data
    ranks_of: list[list[int]]
    blocks: list[int]


CASES = {
    "dp and tp": Case(DATA, [[0, 1], [2, 3]], [24, 24]),
    "tp and dp": Case(DATA, [[0, 2], [1, 3]], [24, 24]),
    "replicate and shard": Case(DATA, [[0], [1], [2], [3]], [12] * 4),
    "ranks out of order": Case(DATA, [[2], [0], [3], [1]], [48]),
    "ranks out of order, uneven": Case(UNEVEN, [[2], [0], [3], [1]], [27]),
    "tp alone": Case(DATA, [[0, 1, 2, 3]], [48]),
    "dp_rank of dp and tp": Case(DATA, [[0, 1], [2, 3]], [48]),
    "dp_rank of dp and tp, uneven": Case(UNEVEN, [[0, 1], [2, 3]], [27]),
    "dp_rank of dp and tp, epochs": Case(EPOCH, [[0, 1], [2, 3]], [48]),
    "dp and tp, epochs": Case(EPOCH, [[0, 1], [2, 3]], [48]),
    "one rank, by dp_rank": Case(DATA, [[0, 1, 2, 3]], [48]),
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


in_all_cases = pytest.mark.parametrize("name", CASES)


@in_all_cases
def test_ranks_that_share_a_dp_rank_read_the_same_samples(meshes: Any, name: str) -> None:
    for peers in CASES[name].ranks_of:
        assert all(meshes[1][peer][name] == meshes[1][peers[0]][name] for peer in peers)


@in_all_cases
def test_a_resume_is_exact(meshes: Any, name: str) -> None:
    assert all(rank[name].after == rank[name].resumed for rank in meshes[1])


@in_all_cases
def test_the_checkpoint_holds_each_row_once_and_goes_on_in_one_process(meshes: Any, name: str) -> None:
    """In the order of dp ranks, which for a mesh is row-major."""
    folder, ranks = meshes
    case = CASES[name]
    entries = dcp.FileSystemReader(folder / name).read_metadata().state_dict_metadata
    for key, entry in entries.items():
        if key.startswith("loader.shards."):
            assert [chunk.sizes[0] for chunk in entry.chunks] == case.blocks
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


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "seed": (0, 1),
    "tail": ("drop", "pad"),
    "verify": (False, True),
    "steps_per_epoch": (None, 5),
}


def refused(folder: Path) -> list[str]:
    """What is said where the mesh is not that of the dp ranks alone."""
    del folder
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    other = DeviceMesh("cpu", [1 - dist.get_rank()], _init_backend=False)
    said: list[str] = []
    for arguments in ({"mesh": mesh}, {"mesh": other}, {"mesh": mesh["dp"], "dp_rank": 0, "dp_world_size": 1}):
        with pytest.raises(ValueError) as error:
            DATA.loader(O, O // 2, **arguments)
        said.append(str(error.value))
    for name, value in DIFFERENT.items():
        with pytest.raises(ValueError) as error:
            DATA.loader(O, O // 2, **{name: value[dist.get_rank()]})
        said.append(str(error.value))
    with pytest.raises(ValueError) as error:
        DATA.loader(O, 2, dp_rank=dist.get_rank(), dp_world_size=4)
    said.append(str(error.value))
    logging.getLogger("rescale_data").setLevel(logging.INFO)
    with Logged(logging.INFO) as information:
        DATA.loader(O, O // 2)
    return [*said, *(line for line in information if "rows for" not in line)]  # that shards have few is said as well


def test_meshes_that_are_refused_and_what_is_said_without_one(tmp_path: Path) -> None:
    for rank, said in enumerate(run_ranks(2, tmp_path, refused, tmp_path)):
        expected = [
            "share their samples. Pass the data-parallel dims alone",
            f"This process has rank {rank}, but mesh holds the ranks [{1 - rank}]",
            "Give mesh= or dp_rank= and dp_world_size=, not both",
            *(
                f"The ranks built their loaders with different {name}; dp rank {rank} has {{'{name}': {value[rank]!r}}}"
                for name, value in DIFFERENT.items()
            ),
            "dp_world_size=4, but no process of the group was given dp_rank=2 (2 of the dp ranks are missing)",
            "No mesh given: all 2 ranks of the process group read different samples. With TP, PP or CP pass mesh=",
        ]
        assert len(said) == len(expected)
        assert all(part in whole for part, whole in zip(expected, said, strict=True)), said
