"""Train on a (4,) mesh of XLA devices, go on from its checkpoint on (2, 2), then unsharded, beside a run that never stopped.

    pip install -c constraints-xla.txt -e '.[xla]' && python examples/xla_spmd.py        # 4 devices on this machine's CPU

`train` is what a training script of yours would hold: the sharded model, the loader and its batches on the devices.
"""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")  # before torch_xla is imported: devices are fixed from then on
os.environ.setdefault("CPU_NUM_DEVICES", "4")

import numpy as np
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

import rescale_data as rd
from rescale_data import checkpoint
from rescale_data.xla import Transfer, host_mesh

SEQ_LEN = 32
VOCABULARY = 256
GLOBAL_BATCH_SIZE = 16


@dataclass(frozen=True)
class Segment:
    """A stretch of the run on one mesh."""

    mesh_shape: tuple[int, ...] | None  # None: the model is not sharded
    num_workers: int
    stop: int  # the step before which it ends


SEGMENTS = (Segment((4,), 0, 4), Segment((2, 2), 2, 8), Segment(None, 1, 12))


class Decoder(nn.Module):
    """The smallest model of tokens that has something to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 48)
        self.up = nn.Linear(48, 96)
        self.down = nn.Linear(96, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.embedding(tokens))))


def pipeline(source: rd.Source, shard: rd.Shard) -> rd.BaseNode[Any]:
    """One logical shard: documents, end to end, cut into samples. It knows nothing of hosts and devices."""
    return rd.TokenPacker(rd.Reader(source, shard), column="tokens", seq_len=SEQ_LEN, eos_id=0, labels=True)


def train(source: rd.Source, segment: Segment, load_from: Path | None, save_to: Path | None) -> list[tuple[float, int]]:
    """One segment: the loss of each step, and a hash of its batch."""
    torch.manual_seed(0)
    model = Decoder().to("xla")
    sharding = None
    if segment.mesh_shape is not None:
        mesh = xs.Mesh(
            np.arange(xr.global_runtime_device_count()),
            segment.mesh_shape,
            ("data", "model")[: len(segment.mesh_shape)],
        )
        model_dim = mesh.axis_names[-1]
        xs.mark_sharding(model.up.weight, mesh, (model_dim, None))
        xs.mark_sharding(model.down.weight, mesh, (None, model_dim))
        # Each host's rows over its devices: without minibatch=True torch_xla takes them for the whole global batch.
        sharding = xs.ShardingSpec(mesh, (mesh.axis_names, None), minibatch=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    loader = rd.DataLoader(
        functools.partial(pipeline, source),
        global_batch_size=GLOBAL_BATCH_SIZE,
        num_workers=segment.num_workers,
        mesh=host_mesh(),  # one dp rank a host: here there is one
        repeat=True,
        transfer=Transfer(input_sharding=sharding),  # what is saved is what training has received
    )
    record: list[tuple[float, int]] = []
    with loader:
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        if load_from is not None:
            checkpoint.load(load_from, state)
        for _, batch in zip(range(loader.step, segment.stop), loader, strict=False):
            loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch_xla.sync()
            record.append((loss.item(), hash(batch["tokens"].cpu().numpy().tobytes())))
        if save_to is not None:
            checkpoint.save(save_to, state)
    return record


# What follows is the comparison around it.


def corpus() -> rd.Source:
    """The sources of this interpreter's standard library, byte for byte."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:120]
    documents = [np.frombuffer(file.read_bytes()[:4000], dtype=np.uint8).astype(np.int64) for file in files]
    return rd.DatasetSource([{"tokens": document} for document in documents if len(document)])


def main() -> None:
    xr.use_spmd()
    source = corpus()
    expected = train(source, Segment(None, 0, SEGMENTS[-1].stop), None, None)
    got: list[tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        previous: Path | None = None
        for number, segment in enumerate(SEGMENTS):
            path = Path(folder) / f"segment-{number}"
            first = len(got)
            got += train(source, segment, previous, path)
            print(
                f"steps {first:2d}..{segment.stop - 1:2d}   mesh {segment.mesh_shape or 'none'!s:8}   "
                f"{segment.num_workers} workers"
            )
            previous = path
    print(f"\n{'step':>4}  {'loss':>9}  {'uninterrupted':>13}  batch")
    for step, ((loss, batch), (other, same)) in enumerate(zip(got, expected, strict=True)):
        print(f"{step:4d}  {loss:9.5f}  {other:13.5f}  {'identical' if batch == same else 'ANOTHER'}")
    if [batch for _, batch in got] != [batch for _, batch in expected]:
        raise SystemExit("The batches differ.")
    if not np.allclose([loss for loss, _ in got], [loss for loss, _ in expected], rtol=1e-4):
        raise SystemExit("The losses differ.")


if __name__ == "__main__":
    main()
