"""What rescale_data uses of DCP below its functions, with the torch at hand: run this first on a new release."""

import pickle

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from rescale_data import checkpoint
from rescale_data.checkpoint.storage.dcp import Contents, TensorPieces
from rescale_data.checkpoint.storage.metadata import read_metadata

STATE = {
    "model": {"weight": torch.arange(12.0).reshape(3, 4), "layers": [torch.ones(2), torch.zeros(())]},
    "step": 3,
    "names": ["a", "b"],
    "empty": {},
}
FLAT = ["model.layers.0", "model.layers.1", "model.weight", "names", "step"]
WHOLE = torch.arange(24.0).reshape(6, 4)


def in_pieces(whole, *cuts):
    """The rows between each two cuts on a device; with these pieces, and the elements of each read."""
    held = [whole[start:end].clone() for start, end in cuts]
    read = []
    pieces = torch.empty(()).expand(whole.shape).as_subclass(TensorPieces)
    pieces.write_items = [
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

    def find(index):
        return next(piece for (start, _), piece in zip(cuts, held, strict=True) if index.offset == (start, 0))

    def commit(item, tensor):
        read.append(tensor.numel())

    pieces.find_piece, pieces.commit_piece = find, commit
    return pieces, held, read


def test_metadata_that_is_made_anew_is_what_dcp_wrote(tmp_path):
    dcp.save(dict(STATE), checkpoint_id=tmp_path)
    content = (tmp_path / ".metadata").read_bytes()
    stock, ours = pickle.loads(content), read_metadata(content)
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.planner_data == stock.planner_data
    places = [
        {key: (p.relative_path, p.offset, p.length) for key, p in of.storage_data.items()} for of in (ours, stock)
    ]
    assert places[0] == places[1]
    saved = Contents.from_metadata(ours)
    assert sorted(saved.values) == sorted(FLAT)
    assert saved.paths["model.layers.1"] == ("model", "layers", 1)
    weight = saved.values["model.weight"]
    assert weight is not None
    assert (weight.shape, weight.dtype, weight.device.type) == ((3, 4), torch.float32, "meta")
    assert saved.values["step"] is None
    assert not saved.pathless


def test_pieces_are_saved_once_and_loaded_into_any_others(tmp_path):
    saved, _, _ = in_pieces(
        WHOLE, (0, 2), (0, 2), (2, 6), (6, 6)
    )  # one twice, as where devices hold copies, and one empty
    checkpoint.save(tmp_path / "c", {"t": saved})
    entry = dcp.FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata["t"]
    assert [list(chunk.sizes) for chunk in entry.chunks] == [[2, 4], [4, 4]]
    whole = torch.zeros(6, 4)
    checkpoint.load(tmp_path / "c", {"t": whole})
    assert torch.equal(whole, WHOLE)
    loaded, held, read = in_pieces(torch.zeros(6, 4), (0, 3), (3, 5), (5, 6))
    checkpoint.load(tmp_path / "c", {"t": loaded})
    assert torch.equal(torch.cat(held), WHOLE)
    assert sum(read) == 24
