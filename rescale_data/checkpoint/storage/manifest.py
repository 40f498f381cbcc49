"""The manifest of a checkpoint: lists its files. It is written last, so a checkpoint that has one is complete."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rescale_data.checkpoint.storage.claims import SaveId, find_save
from rescale_data.checkpoint.storage.store import FileRecord, Store, join
from rescale_data.checkpoint.tree import UnflattenHints
from rescale_data.errors import DamagedCheckpointError

METADATA = ".metadata"
FORMAT_NAME = "rescale_data checkpoint"
SAVE_ID_PREFIX = "rescale_data-"
"""Prefix of the save id in DCP's metadata: a folder that has it but no manifest is incomplete."""
FORMAT_VERSION = 1


class NewerFormatError(ValueError):
    """Error raised for a manifest that a newer rescale_data wrote; it is not damaged."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a checkpoint with their sizes and checksums, and its step, metrics and versions.

    Args:
        save_id: Identifies one call of save, so that files of two saves are never taken for one.
        files: Records by name, relative to the checkpoint's folder, without the manifest's own.
        created: Seconds since the epoch.
        lost: The structure of the state that flattened names lose: see ``tree.UnflattenHints``.
    """

    save_id: str
    files: Mapping[str, FileRecord] = field(default_factory=dict[str, FileRecord])
    world_size: int = 1
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    created: float = 0.0
    torch: str = ""
    lost: UnflattenHints = ()

    @property
    def metadata_name(self) -> str:
        """Name of the file with DCP's metadata, relative to the checkpoint's folder."""
        return f"{self.save_id}/{METADATA}"

    def to_json(self) -> bytes:
        content: dict[str, Any] = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **asdict(self)}
        content["crc32"] = _checksum(content)
        return json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Parse a manifest; raise ``ValueError`` if it is none, or its checksum is wrong."""
        content = json.loads(text)
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT_NAME:
            raise ValueError("not a manifest of rescale_data")
        if content.get("version") != FORMAT_VERSION:
            raise NewerFormatError(
                f"written by a newer rescale_data: version {content.get('version')}, known is {FORMAT_VERSION}"
            )
        crc32 = content.pop("crc32", None)
        if crc32 != _checksum({"format": FORMAT_NAME, **content}):
            raise ValueError("its content does not match its checksum")
        del content["version"]
        files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
        manifest = cls(files=files, **content)
        for name in (*files, manifest.metadata_name):
            refuse_outside_path(name)
        if files and manifest.metadata_name not in files:  # that of a deletion has no files
            raise ValueError(f"it lacks its file {manifest.metadata_name!r}")
        return manifest


def refuse_outside_path(name: str) -> None:
    """Raise ``ValueError`` if a file name, relative to a checkpoint's folder, leads out of this folder."""
    if name.startswith("/") or "\\" in name or ".." in name.split("/"):
        raise ValueError(f"it names the file {name!r}, outside of the folder")


def read_manifest(store: Store, path: str, save: SaveId) -> Manifest:
    """Return the manifest of a save in the checkpoint at ``path``; raise ``ValueError`` if it is damaged or too new."""
    name = join(path, save.manifest)
    manifest_bytes = store.read(name)
    try:
        return Manifest.from_json(manifest_bytes)
    except NewerFormatError as error:
        raise NewerFormatError(
            f"{name} was {error}. Install that rescale_data, or load an earlier checkpoint."
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"{name} is damaged: {error}. Load another checkpoint, or delete this one."
        ) from error


def manifest_at(store: Store, path: str) -> Manifest | None:
    """Return the manifest of the checkpoint at ``path``, or None if there is no checkpoint."""
    save = find_save(store, path)
    return None if save is None else read_manifest(store, path, save)


def checked_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics as floats; raise ``TypeError`` for a value that is no number. nan is allowed."""
    checked_values: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            checked_values[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metrics[{name!r}] is {value!r}; a metric is one number, such as loss.item().") from error
    return checked_values


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
