"""Checkpoints of format version 1, each with the digests of the batches that follow it.

shuffle   within a window of `rd.Shuffle`, on JSON lines        plain `dcp.save`
mixture   by tokens, within a `Schedule` and a packed document  plain `dcp.save`
packed    within a window of `rd.WholeDocumentPacker`           plain `dcp.save`
epoch     within the remainder of a filtered epoch              plain `dcp.save`
sharded   model and AdamW sharded by FSDP2 on 2 ranks           `rescale_data.checkpoint.save`
"""

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rescale_data as rd
from rescale_data import checkpoint
from tests.distributed.ranks import run_ranks
from tests.golden.pipelines import SIZES, batches, by_tokens, digests, jsonl, shuffled, tokenize, whole_documents

FOLDER, MADE_IN = Path(__file__).parent / "version_1", Path("/dev/shm/version_1")
NUM_AFTER = 60
"""Batches after a checkpoint that are pinned."""


def windows(folder: Path) -> rd.DataLoader:
    source = jsonl(folder)

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        rows = rd.Tokenize(rd.Reader(source, shard, shuffle=True), tokenize, "text")
        return rd.Shuffle(rd.TokenPacker(rows, column="tokens", seq_len=24, eos_id=0), window=8)

    return rd.DataLoader(pipeline, repeat=True, **SIZES)


PLAIN: Mapping[str, tuple[Callable[[Path], rd.DataLoader], int]] = {
    "shuffle": (windows, 37),
    "mixture": (by_tokens, 123),
    "packed": (whole_documents, 41),
    "epoch": (shuffled, 38),
}
"""The loader of a checkpoint, and how many batches it has delivered."""


def training(mesh: Any = None) -> tuple[torch.nn.Module, torch.optim.Optimizer, rd.DataLoader]:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rows = [{"x": torch.arange(6.0) + i % 7} for i in range(200)]
    return model, optimizer, rd.DataLoader(rows, mesh=mesh, **SIZES)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    model(batch["x"]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _save_sharded(path: str) -> list[list[float]]:
    model, optimizer, loader = training(init_device_mesh("cpu", (dist.get_world_size(),)))
    for batch in batches(loader, 11):
        step(model, optimizer, batch)
    checkpoint.save(path, {"model": model, "optimizer": optimizer, "loader": loader}, step=11)
    return [parameter.full_tensor().flatten().tolist() for parameter in model.parameters()]


def make(data: Path) -> None:
    """Write all checkpoints anew, by way of a folder whose path, which DCP keeps, is the same on each machine."""
    shutil.rmtree(MADE_IN, ignore_errors=True)
    MADE_IN.mkdir()
    found: dict[str, Any] = {}
    for name, (build, num) in PLAIN.items():
        (data / name).mkdir(parents=True)
        with build(data / name) as loader:
            for _ in batches(loader, num):
                pass
            dcp.save({"loader": loader}, checkpoint_id=MADE_IN / name)
            found[name] = digests(batches(loader, NUM_AFTER), 10)
    parameters = run_ranks(2, _save_sharded, str(MADE_IN / "sharded"))[0]
    for claim in MADE_IN.rglob(".claims/*.json"):
        _forget_the_machine(claim)
    shutil.rmtree(FOLDER, ignore_errors=True)
    shutil.move(MADE_IN, FOLDER)
    found["sharded"] = {"parameters": parameters, "batches": _after_sharded()[1]}
    (FOLDER / "after.json").write_text(json.dumps(found, indent=1) + "\n")


def _forget_the_machine(claim: Path) -> None:
    """Put another process in the place of the one that has put this claim."""
    record = json.loads(claim.read_text())
    assert zlib.crc32(record["claim"].encode()) == record["crc32"]
    content = json.loads(record["claim"])
    content["holder"] = dict.fromkeys(content["holder"], "golden") | {"pid": 1}
    text = json.dumps(content)
    claim.write_text(json.dumps({"claim": text, "crc32": zlib.crc32(text.encode())}))


def _after_sharded() -> tuple[list[list[float]], list[str]]:
    """Load on one rank: the parameters, and the digests of the batches that follow."""
    model, optimizer, loader = training()
    checkpoint.load(FOLDER / "sharded", {"model": model, "optimizer": optimizer, "loader": loader})
    parameters = [parameter.flatten().tolist() for parameter in model.parameters()]
    step(model, optimizer, next(batches(loader, 1)))
    return parameters, digests(batches(loader, 20), 10)


def after(name: str, data: Path) -> Any:
    """Load a checkpoint, and return what ``after.json`` has of it."""
    if name == "sharded":
        parameters, found = _after_sharded()
        return {"parameters": parameters, "batches": found}
    data.mkdir(parents=True, exist_ok=True)
    with PLAIN[name][0](data) as loader:
        checkpoint.load(FOLDER / name, {"loader": loader})
        return digests(batches(loader, NUM_AFTER), 10)
