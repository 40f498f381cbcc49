"""Law 7: two at once. However jobs on one folder are interleaved, and wherever one is killed, what was reported as saved loads.

The code of owners and readers runs over a bucket in memory and over a disk, interleaved at each request.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rescale_data import lease as leases
from rescale_data.checkpoint.storage import commit
from rescale_data.checkpoint.storage.claims import ONLY_STEP, SaveId, find_save
from rescale_data.checkpoint.storage.commit import Ownership, SupersededError
from rescale_data.checkpoint.storage.manifest import Manifest, read_manifest
from rescale_data.checkpoint.storage.readers import lease_on_checkpoint
from rescale_data.checkpoint.storage.run_folder import RunFolder
from rescale_data.checkpoint.storage.store import DiskStore, FileRecord, ObjectStore, Store, join
from tests.laws.scheduler import current, interrupt, play, request

CASTS = {
    "a zombie and its successor": ["zombie", "successor 105 110 105"],
    "a zombie and two successors": ["zombie", "successor 105 110", "successor 105 110"],
    "a zombie, one that deletes, a successor": ["zombie", "successor -100 105", "successor 100 105"],
    "three successors": ["successor 105", "successor 105 100", "successor 105"],
    "a zombie, a successor, readers": ["zombie", "successor 100 105 100 -105", "reader", "latest"],
    "a successor that deletes under readers": ["successor 105 -100 100 -105", "reader", "latest", "reader"],
    "lone saves of a step of a run": ["zombie", "lone 100", "successor 100", "reader"],
    "lone saves of one path": ["lone x", "lone x", "lone x", "reader x"],
    "lone saves, and readers of a path": ["lone x", "lone x", "reader x", "reader x"],
}
RUN = "run"


def turns(kind: type[Any], *methods: str) -> type[Any]:
    """A store or file system of this class with a turn of the scheduler before each request."""

    def before(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        def gated(self: Any, *given: Any, **named: Any) -> Any:
            request()
            return method(self, *given, **named)

        return gated

    return type(f"Gated{kind.__name__}", (kind,), {name: before(name) for name in methods})


Disk = turns(DiskStore, "names", "read", "open_write", "rename", "rm_file", "mkdir", "is_file", "remove_empty_folder")
Bucket = turns(MemoryFileSystem, "ls", "info", "cat_file", "_open", "rm_file")


class BucketStore(ObjectStore):
    """An object store in memory."""

    def __init__(self) -> None:
        Store.__init__(self, Bucket(skip_instance_cache=True))
        self._file_system.store, self._file_system.pseudo_dirs = {}, [""]

    def remove_folder(self, path: str) -> None:
        for key in [key for key in self._file_system.store if key == path or key.startswith(f"{path}/")]:
            self.rm_file(key)


class Place(NamedTuple):
    store: Store
    root: str

    @property
    def run(self) -> str:
        return join(self.root, RUN)

    def path(self, step: str) -> str:
        return join(self.run, f"step-{step}") if step.isdigit() else join(self.root, step)


class Told(NamedTuple):
    """A save that was reported as done, or a deletion."""

    path: str
    save: SaveId
    content: bytes | None
    lone: bool = False


class World:
    """What happened to one folder, and the law about it."""

    def __init__(self, place: Place) -> None:
        self.place, self.told, self.number = place, list[Told](), 0
        self.deleted = list[Told]()  # or begun to be
        self.superseded = 0
        self.owners = list[Ownership]()

    def open(self, path: str, **how: Any) -> Ownership:
        owner = Ownership(self.place.store, path, **how)
        owner.close.detach()  # a killed process closes nothing
        self.owners.append(owner)
        return owner

    def save(self, owner: Ownership, step: str) -> None:
        store, path = self.place.store, self.place.path(step)
        self.number += 1
        content = f"{current()} {self.number}".encode()
        what = ONLY_STEP if owner.path == path else f"step-{step}"
        save = owner.begin_save(what)
        for name in ("data", ".metadata"):
            store.put(join(path, save.folder, name), content)
        record = FileRecord(len(content))
        files = {f"{save.folder}/{name}": record for name in ("data", ".metadata")}
        owner.commit(what, save, Manifest(save_id=save.folder, files=files))
        lone = owner.path == path
        self.told.append(Told(path, owner.saves[ONLY_STEP if lone else f"step-{step}"], content, lone))
        owner.remove_obsolete()

    def delete(self, owner: Ownership, step: str) -> None:
        self.deleted.append(Told(self.place.path(step), SaveId(owner.owner, owner._num_saves + 1), None))
        owner.delete(f"step-{step}")

    def zombie(self, owner: Ownership) -> Callable[[], None]:
        return lambda: self._steps(lambda: owner, ["110", "100"])

    def successor(self, steps: list[str]) -> Callable[[], None]:
        def opened() -> Ownership:
            owner = self.open(self.place.run)
            owner.remove_obsolete()
            return owner

        return lambda: self._steps(opened, steps)

    def _steps(self, opened: Callable[[], Ownership], steps: list[str]) -> None:
        try:
            owner = opened()
            for step in steps:
                self.delete(owner, step[1:]) if step[0] == "-" else self.save(owner, step)
        except SupersededError:
            self.superseded += 1
        except FileNotFoundError:  # its successor has removed its draft, on a disk with the folder that it writes into
            with pytest.raises(SupersededError):
                owner.check_not_superseded()

    def lone(self, step: str) -> Callable[[], None]:
        def opened() -> Ownership:
            return self.open(self.place.path(step), has_one_checkpoint=True)

        return lambda: self._steps(opened, [step])

    def reader(self, step: str = "100") -> Callable[[], None]:
        return lambda: self._read(self.place.path(step))

    def latest(self) -> None:
        for step in reversed(RunFolder(self.place.store, self.place.run).steps_with_folder()):
            if self._read(self.place.path(str(step))):
                return

    def _read(self, path: str) -> bool:
        """Read as a load does, file by file; nothing may be missing."""
        store, was_there = self.place.store, any(told.path == path for told in self.told)
        with lease_on_checkpoint(store, path) as (_, save):
            if save is None:
                assert not was_there or any(gone.path == path for gone in self.deleted), (
                    "a step that is there is not found"
                )
                return False
            files = read_manifest(store, path, save).files
            contents = {store.read(join(path, name)) for name in sorted(files)}
            assert len(contents) == 1, "parts of two saves"
        return True

    def check(self) -> None:
        """What counts at this moment has all its files."""
        for path in {self.place.path(step) for step in ("100", "105", "110", "x")}:
            self.content(path)

    def content(self, path: str) -> bytes | None:
        store = self.place.store
        save = find_save(store, path)
        if save is None:
            return None
        found = {store.read(join(path, name)) for name in read_manifest(store, path, save).files}
        assert len(found) == 1
        return found.pop()

    def end(self) -> None:
        """What was reported is there, unless somebody has saved or deleted the step since; and stock DCP finds the same."""
        for path, save, content, lone in self.told:
            names = {other for other in map(SaveId.from_manifest, self.place.store.names(path)) if other}
            later = {told.save for told in [*self.told, *self.deleted] if told.path == path} | names
            now = self.content(path)
            if lone and path != self.place.path("x"):  # of it and the run's own save the one that is told later stands
                assert now is not None or any(gone.path == path for gone in self.deleted), (
                    f"{save} of {path} was reported"
                )
            elif not any((other.owner, other.save_number) > (save.owner, save.save_number) for other in later):
                assert now == content, f"{save} of {path} was reported"
        owner = self.open(self.place.run)
        owner.remove_obsolete()
        for name, save in owner.saves.items():
            folder = join(self.place.run, name)
            if not save.is_deletion and save.owner in owner._claims.all_owners:
                store = self.place.store
                assert store.read(join(folder, ".metadata")) == store.read(join(folder, save.folder, ".metadata"))


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks is in a namespace of its own, so that nobody sees whether another process lives."""
    process, number = leases.this_process(), itertools.count()
    for module in (commit, leases):
        monkeypatch.setattr(module, "this_process", lambda: process | {"namespace": f"{next(number)}"})
    monkeypatch.setattr(commit.gc, "collect", lambda: 0)
    monkeypatch.setattr(leases.Lease, "_renew_until_released", lambda _: None)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(params=["bucket", "disk"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Iterator[Place], int]:
    """New empty places, and how many runs of each cast are made there."""

    def buckets() -> Iterator[Place]:
        while True:
            yield Place(BucketStore(), "/bucket")

    def disks() -> Iterator[Place]:
        for number in range(10**9):
            (tmp_path / str(number)).mkdir()
            yield Place(Disk(), str(tmp_path / str(number)))

    return (buckets(), RUNS) if request.param == "bucket" else (disks(), RUNS // 8)


RUNS = int(os.environ.get("RESCALE_DATA_INTERLEAVINGS", "160"))


def begun(place: Place, cast: Sequence[str]) -> tuple[World, dict[str, Callable[[], object]]]:
    """Return a run of two steps, and what the actors of a cast do."""
    world = World(place)
    first = world.open(place.run)
    for step in ("100", "105"):
        world.save(first, step)
    works: dict[str, Callable[[], object]] = {}
    for number, words in enumerate(cast):
        what, *steps = words.split()
        work: Callable[[], Callable[[], object]] = {
            "zombie": lambda: world.zombie(first),
            "successor": lambda steps=steps: world.successor(steps),
            "reader": lambda steps=steps: world.reader(*steps),
            "lone": lambda steps=steps: world.lone(*steps),
            "latest": lambda: world.latest,
        }[what]
        works[f"{number} {words}"] = work()
    return world, works


def one(cast: list[str], place: Place, rng: random.Random) -> Counter[str]:
    world, works = begun(place, cast)
    ended = play(works, rng, world.check, 90)
    for actor in ended.values():
        if actor.failed is not None:
            raise actor.failed
    world.end()
    return Counter(told=len(world.told), superseded=world.superseded, killed=sum(a.left < 0 for a in ended.values()))


@pytest.mark.parametrize("cast", CASTS)
def test_what_was_reported_as_saved_can_be_loaded(cast: str, places: tuple[Iterator[Place], int]) -> None:
    found, (new, runs) = Counter[str](), places
    for number in range(runs):
        try:
            found += one(CASTS[cast], next(new), random.Random(number))
        except BaseException as error:
            error.add_note(f"in run {number}")
            raise
    assert found["told"] > 2 * runs
    assert found["killed"] > runs / 8


WORKS = ["zombie", "successor -100 105", "successor 100 105 -105", "lone 100", "reader"]


@pytest.mark.parametrize("cast", list(itertools.permutations(WORKS, 2)), ids=" then ".join)
def test_one_goes_on_after_all_that_another_did(cast: tuple[str, str]) -> None:
    """From each of its requests: few random runs come there, and it is where a look, or an order of two requests, counts."""
    for requests in itertools.count():
        world, works = begun(Place(BucketStore(), "/bucket"), cast)
        if not interrupt(*works.values(), requests):
            break
        world.check()
        world.end()
    assert requests > 3
