"""Tensors that a device has cut, by the protocol through which DCP looks at DTensors: with the torch at hand, and no device."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType

from rescale_data import checkpoint
from rescale_data.checkpoint.devices import Pieces

WHOLE = torch.arange(24.0).reshape(6, 4)


def in_pieces(whole: torch.Tensor, *cuts: tuple[int, int]) -> tuple[Pieces, list[torch.Tensor], list[int]]:
    """The rows between each two cuts on a device; with these pieces, and the elements of each read."""
    held = [whole[start:end].clone() for start, end in cuts]
    read: list[int] = []
    pieces = torch.empty(()).expand(whole.shape).as_subclass(Pieces)
    pieces.items = [
        WriteItem(
            MetadataIndex("", torch.Size((start, 0)), number),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((end - start, 4))),
                TensorProperties(dtype=whole.dtype),
                whole.size(),
            ),
        )
        for number, (start, end) in enumerate(cuts)
    ]

    def find(index: MetadataIndex) -> torch.Tensor:
        return next(piece for (start, _), piece in zip(cuts, held, strict=True) if index.offset == (start, 0))

    def commit(item: ReadItem, tensor: torch.Tensor) -> None:
        read.append(tensor.numel())

    pieces.find, pieces.commit = find, commit
    return pieces, held, read


def test_pieces_are_saved_once_and_loaded_into_any_others(tmp_path: Path) -> None:
    saved, _, _ = in_pieces(
        WHOLE, (0, 2), (0, 2), (2, 6), (6, 6)
    )  # one twice, as where devices hold copies, and one empty
    checkpoint.save(tmp_path / "c", {"t": saved})
    entry = dcp.FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata["t"]
    assert [list(chunk.sizes) for chunk in entry.chunks] == [[2, 4], [4, 4]]  # type: ignore[union-attr]
    whole = torch.zeros(6, 4)
    checkpoint.load(tmp_path / "c", {"t": whole})
    assert torch.equal(whole, WHOLE)
    loaded, held, read = in_pieces(torch.zeros(6, 4), (0, 3), (3, 5), (5, 6))
    checkpoint.load(tmp_path / "c", {"t": loaded})
    assert torch.equal(torch.cat(held), WHOLE)
    assert sum(read) == 24
