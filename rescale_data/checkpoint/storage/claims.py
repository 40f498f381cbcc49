"""Claims: files that record which process owns a folder of checkpoints, and which manifests in the folder are valid.

    .claims/<n>-<id>.json                        a claim: its holder, and of each step the save that it accepts
    step-100/<n>-<id>-<k>/                       the data of the k-th save of the owner (n, id)
    step-100/rescale_data-<n>-<id>-<k>.json      its manifest; "-deleted" before ".json" says that the step is deleted

The highest claim owns the folder, and no claim is ever removed. The manifests that count are those that the newest finished
claim accepts, its owner's own, and those of owners that no claim knows: somebody copied such a step here. What an older owner
adds later does not count.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from rescale_data.checkpoint.storage.store import Store, join, split
from rescale_data.errors import DamagedCheckpointError

CLAIMS_FOLDER = ".claims"
STEP_PATTERN = re.compile(r"step-(\d+)")
ONLY_STEP = "."
"""Name of the only step of a folder that is a checkpoint itself, not a run."""
TEMPORARY_SUFFIX = re.compile(r"\.[0-9a-f]{12}\.tmp$")
"""Suffix of a small file's temporary name on a disk, until the file is complete."""
_CLAIM_PATTERN = re.compile(r"(\d+)-([0-9a-f]{8})\.json")
_SAVE_FOLDER_PATTERN = re.compile(r"(\d+)-([0-9a-f]{8})-(\d+)")
_MANIFEST_PATTERN = re.compile(r"rescale_data-(\d+)-([0-9a-f]{8})-(\d+)(-deleted)?\.json")


class OwnerId(NamedTuple):
    """Identity of one opening of a folder for writing: a number above all earlier ones, and a random id."""

    number: int
    random_id: str

    def __str__(self) -> str:
        return f"{self.number}-{self.random_id}"


class SaveId(NamedTuple):
    """Identity of one save or deletion by an owner; a later one of the same owner compares greater."""

    owner: OwnerId
    save_number: int
    is_deletion: bool = False

    @classmethod
    def from_folder(cls, name: str) -> SaveId | None:
        """Return the save whose data lie in a folder of this name; None for any other name."""
        match = _SAVE_FOLDER_PATTERN.fullmatch(name)
        return cls(OwnerId(int(match[1]), match[2]), int(match[3])) if match else None

    @classmethod
    def from_manifest(cls, name: str) -> SaveId | None:
        """Return the save whose manifest has this name; None for any other name."""
        match = _MANIFEST_PATTERN.fullmatch(name)
        return cls(OwnerId(int(match[1]), match[2]), int(match[3]), match[4] is not None) if match else None

    @property
    def folder(self) -> str:
        return f"{self.owner}-{self.save_number}"

    @property
    def manifest(self) -> str:
        return f"rescale_data-{self.folder}{'-deleted' * self.is_deletion}.json"


def save_of(name: str) -> SaveId | None:
    """Return the save that a file or folder in a checkpoint belongs to, by its name; None for any other name."""
    return SaveId.from_folder(name) or SaveId.from_manifest(TEMPORARY_SUFFIX.sub("", name))


@dataclass(frozen=True, kw_only=True)
class Claims:
    """All owners of a folder so far, and the saves that the newest finished claim accepts.

    Args:
        all_owners: All owners, in order.
        last_owner: The owner of the newest finished claim.
        accepted: The folders of the saves that this claim accepts, by the name of the step.
    """

    all_owners: Collection[OwnerId] = ()
    last_owner: OwnerId | None = None
    accepted: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def read(cls, store: Store, folder: str, *, excluded_owner: OwnerId | None = None) -> Self:
        """List the claims of `folder`, and read the newest finished one."""
        all_owners = list_owners(store, folder)
        for owner in reversed(all_owners):
            if owner != excluded_owner and (accepted_saves := read_claim(store, folder, owner)["accepts"]) is not None:
                return cls(all_owners=all_owners, last_owner=owner, accepted=accepted_saves)
        return cls(all_owners=all_owners)


def list_owners(store: Store, folder: str) -> list[OwnerId]:
    """Return the owners that have a claim in `folder`, the oldest first."""
    matches = map(_CLAIM_PATTERN.fullmatch, store.names(join(folder, CLAIMS_FOLDER)))
    return sorted(OwnerId(int(match[1]), match[2]) for match in matches if match)


def put_claim(store: Store, folder: str, owner: OwnerId, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, sort_keys=True)
    store.put(_claim_path(folder, owner), json.dumps({"claim": text, "crc32": zlib.crc32(text.encode())}).encode())


def read_claim(store: Store, folder: str, owner: OwnerId) -> dict[str, Any]:
    """Return the content of an owner's claim file.

    Returns:
        ``holder``, ``url``, ``closed``, the last save that was told as ``saved``, and ``accepts``: None until it is finished.
    """
    path = _claim_path(folder, owner)
    claim_bytes = store.read(path)
    try:
        claim_and_crc = json.loads(claim_bytes)
        if zlib.crc32(claim_and_crc["claim"].encode()) != claim_and_crc["crc32"]:
            raise ValueError("its content does not match its checksum")
        claim_fields = json.loads(claim_and_crc["claim"])
        return {key: claim_fields[key] for key in ("holder", "url", "closed", "accepts", "saved")}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"{path}, which says what counts in this folder, is damaged: {error}. Delete it to go by the claim before it."
        ) from error


def valid_save(file_names: Iterable[str], *claims_and_steps: tuple[Claims, str]) -> SaveId | None:
    """Return the save or the deletion of a training step that is valid according to the claims; None if there is neither.

    Args:
        file_names: The names of the files in the step's folder.
        claims_and_steps: The claims of each folder that decide, the outer one first, each with the step's name in that folder.
    """
    saves = [save for save in map(SaveId.from_manifest, file_names) if save]
    for claims, step_name in claims_and_steps:
        saves = [
            save
            for save in saves
            if save.owner == claims.last_owner
            or save.owner not in claims.all_owners
            or (save.folder == claims.accepted.get(step_name) and not save.is_deletion)
        ]
    for claims, _ in claims_and_steps:
        if newest_saves := [save for save in saves if save.owner == claims.last_owner]:
            return max(newest_saves)
    return max(saves, default=None)


def run_and_step(path: str) -> tuple[str, str]:
    """Return the run's folder and the step's name for a checkpoint's path; outside a run its own path and ``"."``."""
    folder, name = split(path)
    return (folder, name) if STEP_PATTERN.fullmatch(name) else (path, ONLY_STEP)


def find_save(store: Store, path: str, run_claims: Claims | None = None) -> SaveId | None:
    """Return the save that is the valid checkpoint at `path`; None if there is none, or it is deleted.

    Args:
        run_claims: The claims of its run, where they are known already.
    """
    names, names_before = store.names(path), list[str]()
    folder, step_name = run_and_step(path)
    # Again, since an owner may have replaced all that was listed, and another one opened the run, before its claims were read.
    while any(map(SaveId.from_manifest, names)) and names != names_before:
        claims_and_steps = [(run_claims or Claims.read(store, folder), step_name)] if step_name != ONLY_STEP else []
        if CLAIMS_FOLDER in names:
            claims_and_steps.append((Claims.read(store, path), ONLY_STEP))
        if (save := valid_save(names, *claims_and_steps)) is not None:
            return None if save.is_deletion else save
        names, names_before = store.names(path), names
    return None


def _claim_path(folder: str, owner: OwnerId) -> str:
    return join(folder, CLAIMS_FOLDER, f"{owner}.json")
