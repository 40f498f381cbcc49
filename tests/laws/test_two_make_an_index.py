"""Law 7 of index folders: however processes that make an index of one corpus are interleaved, and wherever they are killed,
whoever opens the corpus reads each row of each file under its own name.

Openers run by turns, one access to the index folder at a time. Whoever opens reads all rows; some opened it earlier, and open
what they have pickled once more; files join meanwhile.
"""

from __future__ import annotations

import builtins
import json
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import rescale_data as rd
from rescale_data import lease as leases
from rescale_data.sources import file_source, fragmented, index
from rescale_data.sources.decoded.cache import OpenFileCache
from rescale_data.sources.files import once
from tests.laws.pairs import Case, cases, name_of
from tests.laws.scheduler import Actor, Killed, current, play, request
from tests.laws.tables import FILES, write

RUNS = int(os.environ.get("RESCALE_DATA_INTERLEAVINGS", "160")) // 16
POLL_SECONDS = 20.0
"""What a maker's clock goes on at each look at somebody else's lease."""
NUM_FILES, JOIN = 3, ("a", "mm")
"""Files that there are at first, and the names of those that join, before others in the order."""
LATER = ("a0", "c2", "m0")


def table_of(ids: range) -> pa.Table:
    tokens = pa.array([[i] for i in ids], pa.list_(pa.uint16()))
    return pa.table({"id": list(ids), "text": ["x" * (i % 7) for i in ids], "tokens": tokens})


FORMATS = {kind: (kind, suffix) for kind, (_, suffix) in FILES.items() if kind != "arrow"}
FORMATS["jsonl.gz"] = ("jsonl", ".jsonl.gz")
"""Formats of files that have an index, and the suffix of the files."""


def id_of(row: dict[str, Any]) -> int:
    if "json" in row:
        return int(json.loads(row["json"])["id"])
    return int(row["id"] if "id" in row else row["tokens"][0])


class Corpus:
    """Files with ids of their own, in a folder, and the folder of their index."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.index = folder, folder / "index"
        self._kind, self._suffix = FORMATS[kind]
        self.ids: dict[str, range] = {}
        for path in (folder / "data", folder / "aside"):
            path.mkdir(parents=True)
        for name in "bdm"[:NUM_FILES]:
            self.add(name)

    def add(self, name: str) -> None:
        """Let a file join, all of it at once; those of Megatron's two are found by the second."""
        ids = range(100 * len(self.ids), 100 * len(self.ids) + 1 + len(self.ids) % 4 * 2)
        self.ids[name + self._suffix] = ids
        write(self._kind, self.folder / "aside" / name, table_of(ids), 2, self._suffix)
        for path in sorted((self.folder / "aside").iterdir(), key=lambda path: path.suffix == ".bin"):
            path.rename(self.folder / "data" / path.name)

    def open(self) -> rd.Source:
        return FILES[self._kind][0](self.folder / "data", index_dir=self.index)

    def check(self, source: Any) -> None:
        """Assert that a source has each row of its files, those of the beginning and all others, under its name."""
        found: dict[str, list[int]] = {}
        for i in range(source.num_rows):
            name = source.locate(i).rpartition("/")[2].partition(", ")[0]
            found.setdefault(name, []).append(id_of(source.row(i)))
        assert found == {name: list(self.ids[name]) for name in found}
        assert list(found) == sorted(found)
        assert len(found) >= NUM_FILES

    def check_all(self) -> None:
        source = self.open()
        self.check(source)
        assert source.num_rows == sum(map(len, self.ids.values()))


Work = Callable[[Corpus], None]


def opener(corpus: Corpus) -> None:
    corpus.check(corpus.open())


def joins(corpus: Corpus) -> None:
    corpus.add(JOIN[0] if f"{JOIN[0]}{corpus._suffix}" not in corpus.ids else JOIN[1])
    opener(corpus)


def reader(corpus: Corpus) -> None:
    source = corpus.open()
    for _ in range(2):
        corpus.check(pickle.loads(pickle.dumps(source)))


def deletes(corpus: Corpus) -> None:
    """Delete each index, as somebody may whose disk is full."""
    for path in corpus.index.glob("*.rdindex"):
        path.unlink(missing_ok=True)
    opener(corpus)


CASTS: dict[str, list[Work]] = {
    "two": [opener, opener],
    "three": [opener, opener, opener],
    "two and readers": [opener, opener, reader, reader],
    "a file joins": [opener, joins],
    "an index is deleted": [joins, deletes, deletes, opener],
    "files join under readers": [joins, reader, joins, opener],
}
DIMENSIONS: dict[str, list[Any]] = {
    "format": list(FORMATS),
    "cast": list(CASTS),
    "before": ["nothing", "an index", "parts of a killed one"],
    "hosts": ["one", "many"],
}


class Inline:
    """A pool whose work is done by the actor that gives it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, function: Callable[..., Any], *values: Any) -> Iterator[Any]:
        return map(function, *values)


class Entries(list[Any]):
    """What `os.scandir` found, some time ago; others have a turn before each."""

    def __iter__(self) -> Iterator[Any]:
        for entry in super().__iter__():
            request()
            yield entry

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None: ...


def gate(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Give others a turn before each access to an index folder below `root`, and between the parts of some."""

    def is_index(path: Any, given: dict[str, Any]) -> bool:
        inside = "dir_fd" in given or isinstance(path, int)
        return bool(current()) and (inside or (str(path).startswith(str(root)) and "/index" in str(path)))

    def gated(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *more: Any, **given: Any) -> Any:
            if is_index(path, given):
                request()
            return function(path, *more, **given)

        return call

    scandir, content = os.scandir, leases.Lease._lease_json

    def listed(path: Any = ".") -> Any:
        if not is_index(path, {}):
            return scandir(path)
        request()
        with scandir(path) as found:
            return Entries(found)

    def written(lease: leases.Lease) -> bytes:
        request()  # after the file was made, and before anything is in it
        return content(lease)

    for name in ("replace", "unlink", "remove", "rmdir", "mkdir", "stat"):
        monkeypatch.setattr(os, name, gated(getattr(os, name)))
    monkeypatch.setattr(os, "scandir", listed)
    monkeypatch.setattr(builtins, "open", gated(open))
    monkeypatch.setattr(leases.Lease, "_lease_json", written)


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[set[str]]:
    """Make actors as processes are: with open files of their own, one thread, a clock. Yield the names of those killed."""
    handles, now, killed = dict[str, OpenFileCache](), count(0, POLL_SECONDS), set[str]()

    def poll(_: float) -> None:
        next(now)
        request()

    with monkeypatch.context() as patch:
        patch.setattr(file_source, "open_files", lambda: handles.setdefault(current(), OpenFileCache()))
        patch.setattr(fragmented, "ThreadPoolExecutor", Inline)
        patch.setattr(index, "ThreadPoolExecutor", Inline)
        patch.setattr(fragmented.FragmentedSource, "FILES_A_PART", 2)
        patch.setattr(once, "time", SimpleNamespace(sleep=poll))
        patch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: next(now)))
        patch.setattr(leases.Lease, "_renew_until_released", lambda _: None)
        patch.setattr(leases, "this_process", lambda: {"pid": os.getpid(), "actor": current()})
        gate(patch, tmp_path)
        yield killed


def on_hosts(monkeypatch: pytest.MonkeyPatch, hosts: str, killed: set[str]) -> None:
    """Let it be seen which actors live, or not: then one that is long without a turn is taken for dead."""
    lives = {"one": lambda process: process.get("actor") not in killed if process else None, "many": lambda _: None}
    monkeypatch.setattr(leases, "is_running", lives[hosts])


def actor_of(name: str, work: Work, corpus: Corpus, killed: set[str]) -> Callable[[], None]:
    def act() -> None:
        try:
            work(corpus)
        except Killed:
            killed.add(name)
            raise

    return act


def kill_one(corpus: Corpus, requests: int, killed: set[str]) -> bool:
    """Open a corpus, and be killed after so many accesses to the index folder; return whether it came to that."""
    name = f"killed after {requests}"
    actor = Actor(name, actor_of(name, opener, corpus, killed), requests)
    actor.begin()
    while not actor.is_done:
        actor.go_on()
    if actor.failed is not None:
        raise actor.failed
    return actor.left < 0


def begun(corpus: Corpus, before: str, rng: random.Random, killed: set[str]) -> None:
    if before == "an index":
        opener(corpus)
        corpus.add("c2")
    if before == "parts of a killed one":
        kill_one(corpus, rng.randrange(5, 40), killed)
        corpus.add("c2")


@pytest.mark.parametrize("case", cases(DIMENSIONS), ids=name_of)
def test_rows_are_right_however_openers_are_interleaved(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: set[str]
) -> None:
    on_hosts(monkeypatch, case["hosts"], processes)
    found = Counter[bool]()
    for number in range(RUNS):
        rng = random.Random(number)
        processes.clear()
        corpus = Corpus(tmp_path / str(number), case["format"])
        begun(corpus, case["before"], rng, processes)
        cast = {f"{i} {work.__name__}": work for i, work in enumerate(CASTS[case["cast"]])}
        works = {name: actor_of(name, work, corpus, processes) for name, work in cast.items()}
        for actor in play(works, rng, lambda: None, 120).values():
            found[actor.left < 0] += 1
            if actor.failed is not None:
                actor.failed.add_note(f"in run {number}, the actor {actor.name}")
                raise actor.failed
        corpus.check_all()
    assert min(found[True], found[False]) > 0, "some are killed, and some are not"


@pytest.mark.parametrize("kind", FORMATS)
def test_one_that_is_killed_at_any_access(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: set[str]
) -> None:
    """Whoever comes next reads all files with what the killed one left: also one that joins, or without the last index."""
    for requests in count():
        on_hosts(monkeypatch, "many" if requests % 2 else "one", processes)
        corpus = Corpus(tmp_path / str(requests), kind)
        if requests % 3:
            corpus.open()
        for name in LATER:
            corpus.add(name)
        if not kill_one(corpus, requests, processes):
            break
        if requests % 3 == 1:
            for path in corpus.index.glob("*.rdindex"):
                path.unlink()
        if requests % 3 == 2:
            corpus.add(JOIN[0])
        corpus.check_all()
    assert requests > 20
