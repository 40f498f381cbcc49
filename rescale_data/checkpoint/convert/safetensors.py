"""Between DCP folders and safetensors, the format of https://github.com/huggingface/safetensors, written and read here.

A file is the length of its header (8 bytes, little endian), the header (JSON: dtype, shape and place of each tensor), and the
bytes. Beside the tensors' files lie ``model.safetensors.index.json`` where there are several, and what is no tensor in
``non_tensors.pt``, with the names' paths in the nested state.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rescale_data.checkpoint.convert.dcp import save_alone, write_aside
from rescale_data.checkpoint.convert.stored import BUDGET, StoredCheckpoint
from rescale_data.checkpoint.convert.torch_file import map_file
from rescale_data.checkpoint.convert.torch_zip import as_buffer
from rescale_data.checkpoint.storage.manifest import METADATA
from rescale_data.checkpoint.storage.store import StrPath
from rescale_data.checkpoint.tree import tree_of

NON_TENSORS = "non_tensors.pt"
INDEX = "model.safetensors.index.json"
_RESERVED = "__metadata__"  # of a file's header: what is said of the file as a whole

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def to_safetensors(
    path: StrPath,
    folder: StrPath,
    *,
    max_shard_size: int | str = "5GB",
    name: str | None = None,
    budget: int = BUDGET,
    checksums: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write a DCP folder as safetensors files, and return their names. Call it on one rank.

    Args:
        path: Of the checkpoint.
        folder: Local; made if there is none, without safetensors of before.
        max_shard_size: Bytes of a file, ``"5GB"`` or ``"500MiB"``; a larger tensor has a file of its own.
        name: Of one top-level entry, without its name: ``"model"`` makes what other tools expect.
        budget: Bytes in memory at once, or the largest tensor and its largest stored piece.

    Raises:
        FileNotFoundError: no checkpoint at ``path``.
        ValueError: damaged files, nothing named ``name``, a size that cannot be read, a dtype or a name that the format cannot
            have, or ``folder`` holds safetensors already.
    """
    limit = parse_size(max_shard_size)
    _refuse_used(Path(folder))
    with StoredCheckpoint(path, name=name, checksums=checksums, storage_options=storage_options) as stored:
        return _write_files(stored, Path(folder), _shards(stored, limit), budget)


def from_safetensors(
    folder: StrPath, path: StrPath, *, name: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Write safetensors files as a DCP folder, with their tensors mapped and not loaded. Call it on one rank.

    Args:
        folder: With ``*.safetensors``, of ``to_safetensors`` or of another tool; or one such file.
        path: Of the checkpoint, which must not exist.
        name: Put all of it under this top-level name, as ``load`` will ask for it: ``"model"``.

    Raises:
        FileNotFoundError: no safetensors there.
        ValueError: a damaged file, or one name in two files; or ``path`` is taken.
    """
    source = Path(folder)
    files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"No *.safetensors in {source}.{_what_is_there(source)}")
    leaves: dict[str, Any] = {}
    for file in files:
        mapped = map_tensors(file)
        if twice := leaves.keys() & mapped.keys():
            raise ValueError(f"{file}: {sorted(twice)[:3]} are in another file of {source}, too.")
        leaves |= mapped
    rest = source / NON_TENSORS if source.is_dir() else source
    extra: dict[str, Any] = (
        map_file(os.fspath(rest)) if rest.name == NON_TENSORS and rest.exists() else {"values": {}, "paths": {}}
    )
    leaves |= extra["values"]
    content = tree_of({key: tuple(extra["paths"].get(key, (key,))) for key in leaves}, leaves, extra.get("lost", ()))
    save_alone(path, content if name is None else {name: content}, storage_options)


def map_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file, read when they are used; ``ValueError`` where it is damaged."""
    try:
        with open(file, "rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        length = int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8 : 8 + length])
        header.pop(_RESERVED, None)
        return {key: _mapped(mapped, 8 + length, about) for key, about in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{file} is no safetensors file, or is damaged: {error}") from error


def parse_size(size: int | str) -> int:
    """Bytes; ``ValueError`` for what is no size."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", str(size))
    unit = match[2].upper() if match else "?"
    if match is None or unit not in _UNITS or float(match[1]) * _UNITS[unit] < 1:
        raise ValueError(
            f'max_shard_size={size!r}: give bytes, or a number with one of {", ".join(_UNITS)[2:]}, such as "5GB".'
        )
    return int(float(match[1]) * _UNITS[unit])


def _what_is_there(source: Path) -> str:
    dcp = (source / METADATA).exists()
    return " It holds a DCP checkpoint already: convert it to a file of torch.save or to safetensors." if dcp else ""


def _refuse_used(folder: Path) -> None:
    """Of two conversions in one folder nothing tells which files belong together."""
    if folder.suffix == ".safetensors":
        raise ValueError(
            f"{folder} is the name of a file. Give a folder (and --to safetensors): its files are named model*.safetensors."
        )
    used = [*folder.glob("*.safetensors"), *(file for name in (INDEX, NON_TENSORS) if (file := folder / name).exists())]
    if used:
        raise ValueError(f"{folder} holds {used[0].name} already. Give another folder, or remove the files first.")


def _write_files(stored: StoredCheckpoint, target: Path, shards: list[list[str]], budget: int) -> list[str]:
    target.mkdir(parents=True, exist_ok=True)
    several = len(shards) > 1
    files = {
        f"model-{n:05}-of-{len(shards):05}.safetensors" if several else "model.safetensors": s
        for n, s in enumerate(shards, 1)
    }
    for file, names in files.items():
        write_aside(target / file, lambda stream, names=names: _write(stream, stored, names, budget))
    if several:
        weight_map = {key: file for file, names in files.items() for key in names}
        index = {"metadata": {"total_size": sum(map(stored.num_bytes, weight_map))}, "weight_map": weight_map}
        write_aside(target / INDEX, lambda stream: stream.write(json.dumps(index, indent=2).encode()))
    content = {"values": stored.values(), "paths": stored.paths, "lost": stored.lost}
    write_aside(target / NON_TENSORS, lambda stream: torch.save(content, stream))
    return list(files)


def _shards(stored: StoredCheckpoint, limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for key, meta in stored.tensors.items():
        if meta.properties.dtype not in _NAMES:
            raise ValueError(f"{key} is {meta.properties.dtype}, which safetensors does not know. Use to_torch_save.")
        if key == _RESERVED:
            raise ValueError(f"safetensors keeps the name {key} for itself. Use to_torch_save.")
        if shards[-1] and size + stored.num_bytes(key) > limit:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += stored.num_bytes(key)
    return shards


def _write(stream: BinaryIO, stored: StoredCheckpoint, names: list[str], budget: int) -> None:
    header: dict[str, Any] = {_RESERVED: {"format": "pt"}}
    offset = 0
    for key in names:
        meta, end = stored.tensors[key], offset + stored.num_bytes(key)
        header[key] = {"dtype": _NAMES[meta.properties.dtype], "shape": list(meta.size), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for tensor in stored.stream(names, budget):
        stream.write(as_buffer(tensor))


def _mapped(mapped: mmap.mmap, start: int, about: Mapping[str, Any]) -> torch.Tensor:
    begin, end = about["data_offsets"]
    dtype = _DTYPES[about["dtype"]]
    if end == begin:
        return torch.empty(about["shape"], dtype=dtype)
    flat = torch.frombuffer(mapped, dtype=torch.uint8, offset=start + begin, count=end - begin)
    aligned = flat if (start + begin) % dtype.itemsize == 0 else flat.clone()
    return aligned.view(dtype).reshape(about["shape"])
