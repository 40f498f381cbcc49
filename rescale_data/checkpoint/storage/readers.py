"""Leases of processes that read checkpoints, so that the owner does not delete a checkpoint that is being read.

A reader puts its lease, which then covers the whole run, before it lists; once it has chosen, the lease names one save. The
owner puts its manifest, and then looks at the leases before it removes. One of the two always sees the other.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Generator, Mapping
from typing import Any

from rescale_data.checkpoint.storage.claims import SaveId, find_save, run_and_step
from rescale_data.checkpoint.storage.store import Store, join
from rescale_data.lease import HolderState, Lease, LeaseObserver

logger = logging.getLogger(__name__)

LEASES = ".leases"


@contextlib.contextmanager
def lease_on_checkpoint(store: Store, path: str) -> Generator[tuple[Lease | None, SaveId | None]]:
    """Yield a lease (None if none can be written) and the valid save of the checkpoint at `path` (None if none)."""
    if store.can_rename and find_save(store, path) is None:
        yield None, None  # no folder for leases is made where there is no checkpoint of ours
        return
    folder, step_name = run_and_step(path)
    lease = None
    try:
        store.mkdir(join(folder, LEASES))
        lease = Lease(store.file_system, join(folder, LEASES, f"{uuid.uuid4().hex}.json"))
    except Exception as error:
        logger.debug("No lease on %s: %s. An owner that deletes there cannot see this reader.", path, error)
    with lease or contextlib.nullcontext():
        save = find_save(store, path)
        if lease is not None and save is not None:
            lease.rewrite({"step": step_name, "save": save.folder})
        yield lease, save


class ReaderLeases:
    """The leases of the processes that read a run, as its owner sees them."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, join(folder, LEASES)
        self.lease_observer = LeaseObserver(store.file_system)

    def live_leases(self) -> list[tuple[HolderState, Mapping[str, Any]]]:
        """Return the leases of readers that are or may be alive, and remove the others."""
        leases: list[tuple[HolderState, Mapping[str, Any]]] = []
        for name in self._store.names(self._folder):
            holder_state, lease_content = self.lease_observer.observe_holder(lease_path := join(self._folder, name))
            if holder_state == "gone":
                self._store.rm_file(lease_path)
            else:
                leases.append((holder_state, lease_content))
        return leases


def lease_state(
    leases: list[tuple[HolderState, Mapping[str, Any]]], step_name: str, save: SaveId | None = None
) -> HolderState:
    """Return "alive" if a lease covers a step (or one save of it), "undecided" if one may, else "gone"."""
    holder_states = {
        state
        for state, content in leases
        if "owner" not in content
        and content.get("step", step_name) == step_name
        and (save is None or content.get("save", save.folder) == save.folder)
    }
    return "alive" if "alive" in holder_states else "undecided" if holder_states else "gone"
