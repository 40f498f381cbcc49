"""Commit and remove checkpoints, on disks and in buckets: a folder has one owner at a time, known by its claim.

    open     put a claim ── list the run ── put what it accepts ── look at the claims
    save     data into a folder of the save's own ── put the manifest ── put the claim ── look at the claims ── copy .metadata
    remove   list what does not count ── look at the claims ── look at the leases of readers

Whoever sees a newer claim raises. Nobody has to be known dead: what a zombie adds does not count, and it removes nothing. A
kill at any moment leaves the checkpoint that was or the one that will be. Only what a claim of this folder made is removed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
import uuid
import weakref
from collections.abc import Generator, Iterable
from typing import Any

from rescale_data.checkpoint.storage.claims import (
    CLAIMS_FOLDER,
    ONLY_STEP,
    STEP_PATTERN,
    TEMPORARY_SUFFIX,
    Claims,
    OwnerId,
    SaveId,
    find_save,
    list_owners,
    put_claim,
    read_claim,
    run_and_step,
    save_of,
    valid_save,
)
from rescale_data.checkpoint.storage.manifest import METADATA, Manifest, read_manifest
from rescale_data.checkpoint.storage.open import wrong_sizes
from rescale_data.checkpoint.storage.readers import LEASES, ReaderLeases, lease_state
from rescale_data.checkpoint.storage.store import Store, join, split
from rescale_data.lease import RENEW_SECONDS, HolderState, Lease, is_running, this_process

logger = logging.getLogger(__name__)

_owners_of_process = set[OwnerId]()
"""Owners of this process that have not ended; their claims may be out of date, if the last write failed."""


class SupersededError(ValueError):
    """Error raised because another process has opened the folder since: this process may no longer save or remove in it."""


class Ownership:
    """The right to save and remove checkpoints in a run's folder, or with ``has_one_checkpoint`` a single checkpoint.

    Args:
        wait: `None` for a trainer, which supersedes an owner on another host. Other programs find out first if that owner
            lives: True looks until it is known, False once.

    Raises:
        ValueError: The last owner lives on this host, or ``wait`` is given and it lives elsewhere, or is False and one look
            does not tell; or a checkpoint lies at ``path`` itself.
        SupersededError: Somebody else has opened the folder in the meantime, or saves this step of a run.
    """

    def __init__(self, store: Store, path: str, *, has_one_checkpoint: bool = False, wait: bool | None = None) -> None:
        self.store, self.path, self._holds_one_checkpoint = store, path, has_one_checkpoint
        self._readers = ReaderLeases(store, run_and_step(path)[0] if has_one_checkpoint else path)
        self._num_saves, self._leases = 0, list[Lease]()
        self._committing_save: SaveId | None = None
        self._claims_by_owner: dict[OwnerId, dict[str, Any]] = {}
        self._metrics: dict[SaveId, dict[str, float]] = {}
        saves_in_folder = [save for save in map(SaveId.from_manifest, store.names(path)) if save]
        if saves_in_folder and not has_one_checkpoint:
            raise ValueError(f"{path} is a checkpoint itself; give the folder of the run, {split(path)[0]}.")
        if saves_in_folder and run_and_step(path)[1] != ONLY_STEP:
            newest_owner = Claims.read(store, run_and_step(path)[0]).last_owner
            if any(save.owner == newest_owner for save in saves_in_folder):
                raise _managed_step_error(path)
        earlier_owners = list_owners(store, path)
        self._supersede(earlier_owners, wait)
        owner_numbers = [owner.number for owner in earlier_owners] + [save.owner.number for save in saves_in_folder]
        self.owner = OwnerId(1 + max(owner_numbers, default=0), uuid.uuid4().hex[:8])
        self._claim: dict[str, Any] = {
            "holder": this_process(),
            "url": path,
            "closed": False,
            "accepts": None,
            "saved": 0,
        }
        self.close = weakref.finalize(self, _close, store, path, self.owner, self._claim, self._leases)
        self.close.atexit = False
        _owners_of_process.add(self.owner)
        try:
            self._open_for_writing()
        except BaseException:
            self.close()
            raise

    def _open_for_writing(self) -> None:
        self.store.mkdir(join(self.path, CLAIMS_FOLDER))
        self._put_claim()
        self._claims = Claims.read(self.store, self.path, excluded_owner=self.owner)
        step_names = (
            [ONLY_STEP] if self._holds_one_checkpoint else filter(STEP_PATTERN.fullmatch, self.store.names(self.path))
        )
        names = {name: self.store.names(self._step_folder(name)) for name in step_names}
        self.saves = {
            name: save
            for name, folder_names in names.items()
            if (save := self._valid_save(name, folder_names) or self._find_begun_deletion(folder_names))
        }
        """The valid save or deletion of each step, by the step's name."""
        self._steps_to_sweep = {
            name for name, folder_names in names.items() if self._obsolete_names(folder_names, self.saves.get(name))
        }
        self._steps_to_restore = {name for name, save in self.saves.items() if not save.is_deletion}
        self._claim["accepts"] = {name: self.saves[name].folder for name in sorted(self._steps_to_restore)}
        self._put_claim()
        self.check_not_superseded()
        all_owners, accepted = self._claims.all_owners, self._claim["accepts"]
        self._claims = Claims(all_owners=all_owners, last_owner=self.owner, accepted=accepted)
        if not self._holds_one_checkpoint:
            self.store.mkdir(join(self.path, LEASES))
            self._leases.append(Lease(self.store.file_system, self._lease_path(self.owner), {"owner": str(self.owner)}))

    def check_not_superseded(self) -> None:
        """Raise `SupersededError` if another process has opened the folder for writing since (a newer claim)."""
        newest_owner = max(list_owners(self.store, self.path), default=self.owner)
        if newest_owner > self.owner:
            holder = _holder_name(read_claim(self.store, self.path, newest_owner)["holder"])
            raise SupersededError(
                f"{self.path} was opened for writing by {holder} after this process had opened it (claim {newest_owner} after "
                f"{self.owner}): this process may not save there any more. End the job that should not run, or give it "
                f"another folder."
            )

    def begin_save(self, step_name: str) -> SaveId:
        """Begin a save of a step: make a folder for its data, named after the save, and return the save.

        Raises:
            SupersededError: Somebody else owns the folder, who would find the data there.
        """
        self.check_not_superseded()
        save = self._new_save()
        self.store.mkdir(join(self._step_folder(step_name), save.folder))
        return save

    def commit(self, step_name: str, save: SaveId, manifest: Manifest) -> None:
        """Commit a save, whose data are written, as the checkpoint of its step: write its manifest.

        Raises:
            SupersededError: Somebody else owns the folder; the save does not count, or will not for long.
            ValueError: Files that the manifest lists are not there.
        """
        store, final_path = self.store, self._step_folder(step_name)
        if size_errors := wrong_sizes(store, final_path, manifest.files):
            self.check_not_superseded()  # a newer owner has removed them
            error_lines = "\n  ".join(size_errors.values())
            raise ValueError(
                f"The files that all ranks wrote are not in {join(final_path, save.folder)}:\n  {error_lines}\n"
                f"Give a folder that all ranks share."
            )
        for folder in (join(final_path, save.folder), final_path, split(final_path)[0]):
            store.sync_folder(folder)
        self._committing_save = save
        _put_with_retry(store, join(final_path, save.manifest), manifest.to_json())
        self._claim["closed"] = self._holds_one_checkpoint  # by the same request
        self._put_claim()
        self.check_not_superseded()
        if self._holds_one_checkpoint and find_save(store, final_path) != save:
            raise _managed_step_error(final_path)
        self._record_save(step_name, save)
        with _log_errors(f"{final_path} is saved, and stock DCP's copy of its metadata is not"):
            store.put(join(final_path, METADATA), store.read(join(final_path, save.folder, METADATA)))

    def discard_save(self, step_name: str, save: SaveId | None) -> None:
        """Remove the data of a failed save, unless its manifest may have been written."""
        self._claim["closed"] = False  # the put that says so may have failed
        try:
            if save is not None and save != self._committing_save:
                self.store.remove_folder(join(self._step_folder(step_name), save.folder))
                self.store.remove_empty_folder(self._step_folder(step_name))
        finally:
            if self._holds_one_checkpoint:
                self.close()

    def delete(self, step_name: str) -> HolderState:
        """Delete the checkpoint of a step; if the step is a link, remove only the link.

        Returns:
            "gone" if it is deleted; "alive" or "undecided" if somebody reads it, or may do so, and it is left.
        """
        final_path = self._step_folder(step_name)
        if self.store.is_link(final_path):
            self.check_not_superseded()
            self.store.rm_file(final_path)
            self.saves.pop(step_name, None)
            return "gone"
        if (lease_status := lease_state(self._readers.live_leases(), self._leased_step(step_name))) != "gone":
            return lease_status
        save = self._new_save()._replace(is_deletion=True)
        _put_with_retry(self.store, join(final_path, save.manifest), Manifest(save_id=save.folder).to_json())
        self._claim["accepts"].pop(step_name, None)
        self._put_claim()
        self.check_not_superseded()
        self._record_save(step_name, save)
        self.remove_obsolete()
        return "gone"

    def _record_save(self, step_name: str, save: SaveId) -> None:
        self.saves[step_name] = save
        self._claim["saved"] = save.save_number  # put with the next claim: nobody who is superseded before says so
        self._steps_to_sweep.add(step_name)

    def remove_obsolete(self) -> None:
        """Remove data that are no longer valid and that nobody reads, and restore copies of ``.metadata``. Never raises."""
        for name in sorted(self._steps_to_restore):
            with _log_errors(f"Stock DCP's copy of the metadata of {self._step_folder(name)} was not looked at"):
                self._restore_metadata(name)
                self._steps_to_restore.discard(name)
        for name in sorted(self._steps_to_sweep):
            with _log_errors(f"What does not count in {self._step_folder(name)} was not removed"):
                if self._sweep_step(name):
                    self._steps_to_sweep.discard(name)

    def steps(self, candidate_steps: Iterable[int]) -> list[int]:
        """Return the given steps that have a checkpoint, also one that was copied here since the folder was opened."""
        steps: list[int] = []
        for name, step in ((f"step-{step}", step) for step in candidate_steps):
            if name not in self.saves and (save := self._valid_save(name, self.store.names(self._step_folder(name)))):
                self.saves[name] = save
            if name in self.saves and not self.saves[name].is_deletion:
                steps.append(step)
        return steps

    def metrics(self, steps: Iterable[int]) -> dict[int, dict[str, float]]:
        """Return the metrics of the given steps, from their manifests; none for a damaged manifest."""
        saves = {step: self.saves[f"step-{step}"] for step in steps}
        for step, save in saves.items():
            if save not in self._metrics:
                self._metrics[save] = metrics_of(self.store, self._step_folder(f"step-{step}"), save)
        self._metrics = {save: self._metrics[save] for save in saves.values()}
        return {step: self._metrics[save] for step, save in saves.items()}

    def _sweep_step(self, step_name: str) -> bool:
        """Remove obsolete files of a step that nobody reads; True if none are left."""
        final_path, save, step = self._step_folder(step_name), self.saves.get(step_name), self._leased_step(step_name)
        deletion = save if save is not None and save.is_deletion else None
        obsolete_names = self._obsolete_names(self.store.names(final_path), save)
        self.check_not_superseded()
        leases = self._readers.live_leases()
        unread_names = [entry for entry in obsolete_names if lease_state(leases, step, save_of(entry)) == "gone"]
        if deletion and len(unread_names) < len(obsolete_names):
            return False
        # Stock DCP's copy first, so that it names nothing that is gone; the deletion last.
        for entry in sorted(
            unread_names, key=lambda entry: (entry != METADATA, deletion is not None and entry == deletion.manifest)
        ):
            self.store.remove_folder(join(final_path, entry))
        if unread_names:
            logger.info("Removed from %s what was deleted, replaced or never finished.", final_path)
        self.store.remove_empty_folder(final_path)
        if deletion:
            del self.saves[step_name]
        return len(unread_names) == len(obsolete_names)

    def _obsolete_names(self, names: list[str], save: SaveId | None) -> list[str]:
        """Return the entries of a step's folder that belong to obsolete saves; all entries if `save` is a deletion."""
        if save is not None and save.is_deletion:
            return list(names)
        return [name for name in names if (other_save := save_of(name)) and self._is_obsolete(other_save, save, names)]

    def _is_obsolete(self, other_save: SaveId, save: SaveId | None, names: list[str]) -> bool:
        if other_save.owner == self.owner:  # the manifest of a save that failed may still come, below a later one
            return save is not None and save.owner == self.owner and other_save.save_number < save.save_number
        claim = self._known_claim(other_save.owner)
        if claim.get("url") != self.path:
            return False
        if save is not None:
            return other_save.folder != save.folder
        # Nobody's but where its owner was told of it: then somebody has taken the step away and put it back.
        return other_save.manifest not in names or other_save.save_number > claim["saved"]

    def _find_begun_deletion(self, names: list[str]) -> SaveId | None:
        """Return the deletion that an earlier owner began in a step's folder without a valid checkpoint, or None."""
        for save in map(SaveId.from_manifest, names):
            if save and save.is_deletion and self._known_claim(save.owner).get("url") == self.path:
                return save
        return None

    def _known_claim(self, owner: OwnerId) -> dict[str, Any]:
        """Return an owner's claim, read once; empty if missing. In a copied folder it still has the original folder's URL."""
        if owner not in self._claims_by_owner and owner in self._claims.all_owners:
            self._claims_by_owner[owner] = read_claim(self.store, self.path, owner)
        return self._claims_by_owner.get(owner, {})

    def _restore_metadata(self, step_name: str) -> None:
        final_path, save = self._step_folder(step_name), self.saves.get(step_name)
        if save is None or save.is_deletion or self._known_claim(save.owner).get("url") != self.path:
            return
        metadata, copy_path = self.store.read(join(final_path, save.folder, METADATA)), join(final_path, METADATA)
        with contextlib.suppress(FileNotFoundError):
            if self.store.read(copy_path) == metadata:
                return
        self.store.put(copy_path, metadata)

    def _supersede(self, earlier_owners: list[OwnerId], wait: bool | None) -> None:
        """Raise ``ValueError`` if the last owner still runs; warn if it did not close the folder and may still run."""
        if not earlier_owners:
            return
        last_owner = earlier_owners[-1]
        claim = read_claim(self.store, self.path, last_owner)
        is_own, holder = claim["holder"] == this_process(), _holder_name(claim["holder"])
        if is_own and last_owner in _owners_of_process:
            gc.collect()  # a manager that was dropped may wait for that
            holder = "this process"
        is_alive = not claim["closed"] and (last_owner in _owners_of_process if is_own else is_running(claim["holder"]))
        if is_alive is None and wait is not None:
            is_alive = self._is_owner_alive(last_owner, wait_for_owner=wait)
        if is_alive and wait is None and claim["url"] != self.path:  # this is a copy of its folder, or another mount
            is_alive, holder = None, f"{holder} as {claim['url']}"
        if is_alive:
            raise ValueError(
                f"{self.path} is held by {holder}, which saves to it. End that first (a CheckpointManager of this process by "
                f"close()), or give this run another folder; to read the checkpoints there use RunReader."
            )
        if is_alive is None:
            logger.warning(
                "%s was opened for writing by %s, which did not close it. If it still runs, its saves here fail from now on.",
                self.path,
                holder,
            )

    def _is_owner_alive(self, owner: OwnerId, *, wait_for_owner: bool) -> bool:
        while (holder_state := self._readers.lease_observer.observe_holder(self._lease_path(owner))[0]) == "undecided":
            if not wait_for_owner:
                raise ValueError(
                    f"One look does not tell if the owner {owner} of {self.path} still runs. Try again with --wait, which "
                    f"looks twice, about a minute apart."
                )
            time.sleep(RENEW_SECONDS)
        return holder_state == "alive"

    def _put_claim(self) -> None:
        put_claim(self.store, self.path, self.owner, self._claim)

    def _valid_save(self, step_name: str, names: list[str]) -> SaveId | None:
        claims_and_steps = [(self._claims, step_name)]
        if not self._holds_one_checkpoint and CLAIMS_FOLDER in names:
            claims_and_steps.append((Claims.read(self.store, self._step_folder(step_name)), ONLY_STEP))
        return valid_save(names, *claims_and_steps)

    def _step_folder(self, step_name: str) -> str:
        return self.path if self._holds_one_checkpoint else join(self.path, step_name)

    def _leased_step(self, step_name: str) -> str:
        return run_and_step(self.path)[1] if self._holds_one_checkpoint else step_name

    def _lease_path(self, owner: OwnerId) -> str:
        return join(self.path, LEASES, f"{owner}.json")

    def _new_save(self) -> SaveId:
        self._num_saves += 1
        return SaveId(self.owner, self._num_saves)


def require_free_target(store: Store, path: str, *, overwrite: bool) -> None:
    """Raise `ValueError` unless ``path`` may be saved to; replace a link to a folder by a folder of links to the files."""
    if not (store.is_link(path) and overwrite):
        if store.is_file(path):
            raise ValueError(f"{path} is a file; a checkpoint is a folder. Give another path, or move the file away.")
        names = store.names(path)
        if any(name == METADATA or ((save := SaveId.from_manifest(name)) and not save.is_deletion) for name in names):
            if not overwrite:
                raise ValueError(
                    f"{path} already holds a checkpoint. Give another path, or overwrite=True to replace it."
                )
        elif foreign := [name for name in names if not _is_name_of_ours(name)]:
            raise ValueError(f"{path} holds {foreign[:3]} and is no checkpoint; it is not replaced. Give another path.")
    if store.is_link(path):
        _replace_link_by_links(store, path)


def _is_name_of_ours(name: str) -> bool:
    return save_of(name) is not None or name in (CLAIMS_FOLDER, LEASES) or TEMPORARY_SUFFIX.search(name) is not None


def metrics_of(store: Store, path: str, save: SaveId) -> dict[str, float]:
    """Return the metrics in the manifest of a save; empty if it is damaged."""
    with contextlib.suppress(ValueError):
        return dict(read_manifest(store, path, save).metrics)
    return {}


def _replace_link_by_links(store: Store, link_path: str) -> None:
    target_folder, temporary_folder = os.path.realpath(link_path), f"{link_path}.{uuid.uuid4().hex[:12]}.tmp"
    store.mkdir(temporary_folder)
    for name in store.names(target_folder):
        if name not in (CLAIMS_FOLDER, LEASES):
            os.symlink(join(target_folder, name), join(temporary_folder, name))
    store.rm_file(link_path)
    store.rename(temporary_folder, link_path)


def _put_with_retry(store: Store, path: str, content: bytes) -> None:
    """Write a file with a unique name; on an error write it again, since only the response may have been lost."""
    try:
        store.put(path, content)
    except Exception as error:
        logger.info("%s is put again: %s", path, error)
        store.put(path, content)


def _managed_step_error(path: str) -> SupersededError:
    return SupersededError(
        f"{path} is a step that the manager of its run has saved: another save of it does not count. Give another path."
    )


def _holder_name(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('host')}"


def _close(store: Store, path: str, owner: OwnerId, claim: dict[str, Any], leases: list[Lease]) -> None:
    """Record in a claim that its owner has ended, and release its leases."""
    if claim["holder"]["pid"] != os.getpid():
        return  # a forked child
    _owners_of_process.discard(owner)
    for lease in leases:
        lease.release()
    if not claim["closed"]:
        claim["closed"] = True
        with contextlib.suppress(Exception):
            put_claim(store, path, owner, claim)


@contextlib.contextmanager
def _log_errors(message: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        logger.warning("%s: %s", message, error)
