"""Functions that read a data loader's state from a checkpoint, on one process and without a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from rescale_data.checkpoint.storage.dcp import StateReader
from rescale_data.checkpoint.storage.open import read_checkpoint
from rescale_data.checkpoint.storage.store import StrPath
from rescale_data.checkpoint.tree import tree_of
from rescale_data.engine.states.codec import HEADER, TABLE, find_data_state, read_header
from rescale_data.engine.states.load import check_state_fits
from rescale_data.engine.stream import HasStream
from rescale_data.errors import checks_argument_types, require_type


@checks_argument_types
def read_data_state(
    path: StrPath, *, name: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the data loader's state, with all logical shards, from the checkpoint at ``path``.

    Runs on one process, whatever saved, and runs no code from the checkpoint: a data state is a tensor and a string.

    Args:
        name: The loader's name in the saved state, such as ``"loader"``; default: the only loader.
        storage_options: Passed on to fsspec.

    Returns:
        ``{"table": int64[N, columns], "header": str}``, for ``loader.load_state_dict()``, or to look into: the header is JSON.

    Raises:
        FileNotFoundError: no checkpoint at ``path``.
        ValueError: no data state in it, several and no ``name``, or damaged files.

    Example:
        >>> import json, tempfile
        >>> import rescale_data as rd
        >>> from rescale_data import checkpoint
        >>> loader = rd.DataLoader(range(8), global_batch_size=4)
        >>> batch = next(iter(loader))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save(f"{folder}/step-1", {"loader": loader})
        ...     json.loads(checkpoint.read_data_state(f"{folder}/step-1")["header"])["samples"]
        4
    """
    return read_checkpoint(path, lambda reader: _values(reader, name, TABLE, HEADER), storage_options=storage_options)


@checks_argument_types
def check_checkpoint(
    path: StrPath, loader: HasStream, *, name: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Raise `DataStateError`, with the reasons, if the data state of a DCP checkpoint does not fit a loader.

    Reads the checkpoint's metadata and the header of the data state; no tensor, and on this process alone.

    Args:
        path: The checkpoint's folder, or its URL.
        loader: A `DataLoader` or `LogicalShards`.
        name: The loader's name in the saved state, such as ``"loader"``; default: the only loader.
        storage_options: Passed on to fsspec.

    Raises:
        FileNotFoundError: There is no DCP checkpoint.
        DataStateError: It holds no data state, or one of another N, seed, dataset or pipeline.

    Example:
        >>> import tempfile
        >>> import rescale_data as rd
        >>> from rescale_data import checkpoint
        >>> loader = rd.DataLoader(range(8), global_batch_size=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save(f"{folder}/step-1", {"loader": loader})
        ...     rd.checkpoint.check_checkpoint(f"{folder}/step-1", loader)  # raises if it does not fit
    """
    header_values = read_checkpoint(path, lambda reader: _values(reader, name, HEADER), storage_options=storage_options)
    check_state_fits(read_header(header_values[HEADER]), loader)


@checks_argument_types
def load_changed(
    path: StrPath, loader: Stateful, *, name: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Load a loader's state although sources were added to its `WeightedSampler` or removed, which ``dcp.load`` refuses.

    For all else load the same checkpoint with ``dcp.load``, without the loader in its dict. The added sources begin with
    their first row, removed ones are dropped with a warning, the others go on; the new weights count from now on. Ranks,
    workers and batch sizes may change at the same time. Every rank reads the whole table, a few integers a logical shard.

    Args:
        path: The checkpoint's folder, or its URL.
        loader: A `DataLoader` with the new pipeline.
        name: The loader's name in the saved state, such as ``"loader"``; default: the only loader.
        storage_options: Passed on to fsspec.

    Raises:
        FileNotFoundError: There is no DCP checkpoint.
        DataStateError: It holds no data state, or one that differs in more than that.

    Example:
        >>> import tempfile
        >>> import rescale_data as rd
        >>> from rescale_data import checkpoint
        >>> def loader(*names: str) -> rd.DataLoader:
        ...     sources = {name: rd.SyntheticSource(512, length=8) for name in names}
        ...     readers = lambda shard: {name: rd.Reader(source, shard) for name, source in sources.items()}
        ...     mixture = lambda shard: rd.WeightedSampler(readers(shard), dict.fromkeys(names, 1.0))
        ...     return rd.DataLoader(mixture, global_batch_size=2, repeat=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save(f"{folder}/step-0", {"loader": loader("web")})
        ...     rd.checkpoint.load_changed(f"{folder}/step-0", loader("web", "code"))
    """
    require_type(Stateful, "the loader that is to load it", loader=loader)
    loader.load_state_dict(read_data_state(path, name=name, storage_options=storage_options))


def _values(reader: StateReader, loader_name: str | None, *keys: str) -> dict[str, Any]:
    """Return the named parts of a saved data state: its header (a string), its table (``int64[N, columns]``)."""
    saved_contents = reader.contents
    inner_paths = saved_contents.subtree(find_data_state(saved_contents.paths.values(), loader_name, reader.name)).paths
    key_paths = {flat_name: path for flat_name, path in inner_paths.items() if path[0] in keys}
    return tree_of(key_paths, reader.values(key_paths))
