"""Convert between DCP folders and safetensors, the format of https://github.com/huggingface/safetensors.

Beside the tensors' files lie ``model.safetensors.index.json`` where there are several, and what is no tensor in
``non_tensors.pt``, with the names' paths in the nested state. The package maps files; they are written here, since it
would want a file's tensors at once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rescale_data.checkpoint.convert.stored import DEFAULT_BUDGET_BYTES, StoredCheckpoint
from rescale_data.checkpoint.convert.torch_save import as_buffer, memory_map_file
from rescale_data.checkpoint.devices import nested_values
from rescale_data.checkpoint.saving import save_from_one_process
from rescale_data.checkpoint.storage.manifest import METADATA
from rescale_data.checkpoint.storage.open import CheckpointReader, memory_mappable_path, open_store, read_checkpoint
from rescale_data.checkpoint.storage.store import Store, StrPath, join, new_folder
from rescale_data.checkpoint.tree import tree_of
from rescale_data.errors import checks_argument_types

logger = logging.getLogger(__name__)

NON_TENSORS_FILE = "non_tensors.pt"
INDEX_FILE = "model.safetensors.index.json"
_FILE_METADATA = "__metadata__"  # of a file's header: what is said of the file as a whole
_SET_FILE_PATTERN = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


@checks_argument_types
def to_safetensors(
    path: StrPath,
    folder: StrPath,
    *,
    max_shard_size: int = 5 * 10**9,
    name: str | None = None,
    budget: int = DEFAULT_BUDGET_BYTES,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write a DCP folder as safetensors files, and return their names. Call it on one rank.

    What is no tensor is in ``non_tensors.pt``. A tensor within a tuple is a part of such a value: a warning names it, and that
    file is among the names that are returned.

    The folder appears when it is whole. In an object store the files come one by one and the index last;
    ``from_safetensors`` refuses what was not finished.

    Args:
        path: The path of the checkpoint.
        folder: A local path or a URL; made if there is none, else empty.
        max_shard_size: Bytes of a file; a larger tensor has a file of its own.
        name: The name of one top-level entry, left out of the tensors' names: ``"model"`` makes what other tools expect.
        budget: Bytes in memory at once, or the largest tensor and its largest stored piece.
        storage_options: Passed on to fsspec, for ``path`` and for ``folder``.

    Raises:
        FileNotFoundError: no checkpoint at ``path``.
        ValueError: damaged files, nothing named ``name``, a size below 1, a dtype or a name that the format cannot
            have, or ``folder`` is a file or holds anything already.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save(f"{folder}/step-1", {"model": torch.nn.Linear(2, 1)})
        ...     checkpoint.to_safetensors(f"{folder}/step-1", f"{folder}/model", name="model")
        ['model.safetensors']
    """
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size={max_shard_size}: give a number of bytes.")
    _safetensors()
    store, destination = open_store(folder, storage_options, to_write=True)
    _require_empty(store, destination)

    def write(reader: CheckpointReader) -> list[str]:
        stored = StoredCheckpoint(reader, name)
        values, files = stored.values(), _tensors_by_file(stored, max_shard_size)
        with new_folder(store, destination) as temporary_folder:
            _write_files(store, temporary_folder, stored, values, files, budget)
        keys_with_tensors = [
            key for key, value in values.items() if any(isinstance(leaf, torch.Tensor) for leaf in nested_values(value))
        ]
        if keys_with_tensors:
            key_list = ", ".join(keys_with_tensors)
            logger.warning("Tensors within tuples are in %s, and in no safetensors: %s.", NON_TENSORS_FILE, key_list)
        return [*([NON_TENSORS_FILE] if keys_with_tensors else []), *files]

    return read_checkpoint(path, write, storage_options=storage_options)


@checks_argument_types
def from_safetensors(
    folder: StrPath, path: StrPath, *, name: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Convert safetensors files to a DCP folder; their tensors are mapped, not loaded. Call it on one rank.

    Args:
        folder: Local, with ``*.safetensors``, of ``to_safetensors`` or of another tool; or one such file. Where there is an
            index (``*.safetensors.index.json``) it says which files belong together.
        path: The path of the checkpoint, which must not exist.
        name: Put all of it under this top-level name, as ``load`` will ask for it: ``"model"``.

    Raises:
        FileNotFoundError: no safetensors there, or only a part of those that the index or a name (``-of-00003``) tells.
        ValueError: a damaged file, a tensor that the index names is not there, one name in two files; or ``path`` is taken.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from safetensors.torch import save_file
        >>> from rescale_data import checkpoint
        >>> state = {"model": {"weight": torch.zeros(2)}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"weight": torch.ones(2)}, f"{folder}/model.safetensors")
        ...     checkpoint.from_safetensors(f"{folder}/model.safetensors", f"{folder}/step-0", name="model")
        ...     report = checkpoint.load(f"{folder}/step-0", state)
        >>> state["model"]["weight"]
        tensor([1., 1.])
    """
    source_path = Path(memory_mappable_path(folder))
    leaves = _memory_map_files([source_path]) if source_path.is_file() else _memory_map_folder(source_path)
    non_tensors_file = source_path / NON_TENSORS_FILE
    extras: dict[str, Any] = (
        memory_map_file(os.fspath(non_tensors_file)) if non_tensors_file.exists() else {"values": {}, "paths": {}}
    )
    leaves |= extras["values"]
    content = tree_of({key: tuple(extras["paths"].get(key, (key,))) for key in leaves}, leaves, extras.get("lost", ()))
    save_from_one_process(path, content if name is None else {name: content}, storage_options)


def _safetensors() -> Any:
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError as error:
        raise ImportError("This conversion needs the extra: pip install 'rescale_data[convert]'") from error


def _memory_map_folder(source: Path) -> dict[str, Any]:
    """Return the memory-mapped tensors of a folder by name: from the files in its index, or from all if it has no index."""
    indices = sorted(source.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise ValueError(f"{source} holds {len(indices)} indices, {indices[0].name} and others. Give a folder of each.")
    weight_map = _weight_map(indices[0]) if indices else None
    found_names = {file.name for file in source.glob("*.safetensors")}
    file_names = found_names if weight_map is None else set(weight_map.values())
    file_names = file_names | {name for file in file_names for name in _files_of_set(file)}
    if not file_names:
        raise FileNotFoundError(f"No *.safetensors in {source}.{_contents_hint(source)}")
    if missing_files := sorted(name for name in file_names if not (source / name).is_file()):
        raise FileNotFoundError(
            f"{source} holds only a part of a conversion: {missing_files[:3]}{' ...' if len(missing_files) > 3 else ''} "
            f"{'is' if len(missing_files) == 1 else 'are'} missing. Copy all files, or convert again into another folder."
        )
    leaves = _memory_map_files([source / name for name in sorted(file_names)])
    if missing_tensors := sorted((weight_map or {}).keys() - leaves.keys()):
        raise ValueError(
            f"{indices[0]} names {missing_tensors[:3]}, which its files do not hold: they are of another conversion."
        )
    return leaves


def _weight_map(index_file: Path) -> dict[str, str]:
    try:
        return {str(key): str(file) for key, file in json.loads(index_file.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index_file} is no index of safetensors, or is damaged: {error}") from error


def _files_of_set(file: str) -> list[str]:
    """Return the names of all files of a set, given one of them, such as ``model-00001-of-00003.safetensors``."""
    match = _SET_FILE_PATTERN.fullmatch(file)
    if match is None:
        return []
    return [f"{match[1]}-{number:0{len(match[2])}}-of-{match[3]}.safetensors" for number in range(1, int(match[3]) + 1)]


def _memory_map_files(files: list[Path]) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for file in files:
        try:
            mapped_tensors = _safetensors().torch.load_file(file)
        except (_safetensors().SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"{file} is no safetensors file, or is damaged: {error}") from error
        if duplicate_names := leaves.keys() & mapped_tensors.keys():
            raise ValueError(f"{file}: {sorted(duplicate_names)[:3]} are in another file of {file.parent}, too.")
        leaves |= mapped_tensors
    return leaves


def _contents_hint(source_folder: Path) -> str:
    if not source_folder.exists():
        return " There is nothing at this path."
    is_dcp = (source_folder / METADATA).exists()
    return " It holds a DCP checkpoint already: convert it to a file of torch.save or to safetensors." if is_dcp else ""


def _require_empty(store: Store, folder: str) -> None:
    """Raise ``ValueError`` if the target folder is not empty, or is a file, or has the name of a safetensors file."""
    if folder.endswith(".safetensors") or store.is_file(folder):
        raise ValueError(
            f"{folder} is the name of a file. Give a folder (and --to safetensors): its files are named model*.safetensors."
        )
    if existing_names := store.names(folder):
        raise ValueError(f"{folder} holds {existing_names[0]} already. Give another folder, or remove the files first.")


def _tensors_by_file(stored: StoredCheckpoint, byte_limit: int) -> dict[str, list[str]]:
    """Return the names of the safetensors files to write, each with the names of its tensors."""
    batches = list(stored.name_batches(stored.meta_tensors, byte_limit))
    if len(batches) < 2:
        return {"model.safetensors": [*stored.meta_tensors]}
    return {f"model-{number:05}-of-{len(batches):05}.safetensors": names for number, names in enumerate(batches, 1)}


def _write_files(
    store: Store,
    folder: str,
    stored: StoredCheckpoint,
    plain_values: dict[str, Any],
    names_by_file: Mapping[str, list[str]],
    byte_budget: int,
) -> None:
    """Write the values that are no tensors, then the safetensors files, and last the index, if there are several files."""
    headers = {file: _header(stored, names) for file, names in names_by_file.items()}
    non_tensor_content = {"values": plain_values, "paths": stored.paths_by_name, "lost": stored.unflatten_hints}
    store.put(join(folder, NON_TENSORS_FILE), lambda stream: torch.save(non_tensor_content, stream))
    for file, names in names_by_file.items():
        tensors = stored.stream(names, byte_budget)
        store.put(join(folder, file), functools.partial(_write_tensors, headers[file], tensors))
    if len(names_by_file) == 1:
        return
    weight_map = {key: file for file, names in names_by_file.items() for key in names}
    index_content = {"metadata": {"total_size": sum(map(stored.num_bytes, weight_map))}, "weight_map": weight_map}
    store.put(join(folder, INDEX_FILE), json.dumps(index_content, indent=2).encode())


def _header(stored: StoredCheckpoint, names: list[str]) -> bytes:
    """Return a safetensors header: its length (8 bytes, little endian), then dtype, shape and place of each tensor."""
    header: dict[str, Any] = {_FILE_METADATA: {"format": "pt"}}
    offset = 0
    for key in names:
        if key == _FILE_METADATA:
            raise ValueError(f"safetensors keeps the name {key} for itself. Use to_torch_save.")
        meta_tensor, end_offset = stored.meta_tensors[key], offset + stored.num_bytes(key)
        header[key] = {
            "dtype": _dtype_name(key, meta_tensor.dtype),
            "shape": list(meta_tensor.shape),
            "data_offsets": [offset, end_offset],
        }
        offset = end_offset
    header_text = json.dumps(header).encode()
    header_text += b" " * (-len(header_text) % 8)
    return len(header_text).to_bytes(8, "little") + header_text


def _dtype_name(key: str, dtype: torch.dtype) -> str:
    """Return the name of a dtype in the safetensors format, such as ``"F32"``."""
    with contextlib.suppress(_safetensors().SafetensorError, KeyError):
        entry = json.loads(_safetensors().torch.save({"x": torch.empty(0, 1, dtype=dtype, device="cpu")})[8:])["x"]
        if entry["shape"] == [0, 1]:  # numbers of 4 bits have another shape there
            return entry["dtype"]
    raise ValueError(f"{key} is {dtype}, which safetensors does not know. Use to_torch_save.")


def _write_tensors(header: bytes, tensors: Iterable[torch.Tensor], stream: BinaryIO) -> None:
    stream.write(header)
    for tensor in tensors:
        stream.write(as_buffer(tensor))
