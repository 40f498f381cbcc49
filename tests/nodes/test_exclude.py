"""`Reader(exclude=)`: served, blocked and filtered rows together are the source, whatever changes between segments."""

import functools
import itertools
import json
import logging
import tempfile
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import compute, parquet

import rescale_data as rd
from rescale_data.testing import full_state_dict

N, BATCH = 6, 12
NUM = 150
LENGTHS = np.random.default_rng(5).integers(0, 30, NUM)
DOCUMENTS = rd.DatasetSource(
    [{"id": f"d{i}", "tokens": 100 * i + np.arange(n)} for i, n in enumerate(LENGTHS)], name="documents"
)
some = settings(max_examples=max(5, settings().max_examples // 5))
ODD, EVEN = set(range(1, NUM, 2)), set(range(0, NUM, 2))
rows_of = st.sets(st.integers(0, NUM - 1), max_size=NUM // 2)


def loader(pipeline: Any, rank: int = 0, world_size: int = 1, *, repeat: bool = False) -> rd.DataLoader:
    return rd.DataLoader(
        pipeline,
        global_batch_size=BATCH,
        micro_batch_size=BATCH // world_size,
        num_logical_shards=N,
        dp_rank=rank,
        dp_world_size=world_size,
        repeat=repeat,
        tail="pad",
    )


def rows(blocked: set[int], *, keep: int = 1, source: Any = DOCUMENTS) -> Any:
    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        left = rd.Reader(source, shard, on_error="raise" if source is DOCUMENTS else "skip", exclude=blocked)
        return rd.Map(
            rd.Filter(left, lambda row: int(row["id"][1:]) % keep == 0), lambda row: {"n": int(row["id"][1:])}
        )

    return pipeline


class Unreadable(list[Any]):
    """Rows of which some cannot be read."""

    bad: frozenset[int] = frozenset()

    def __getitem__(self, index: Any) -> Any:
        if index in self.bad:
            raise ValueError(f"row {index} cannot be read")
        return super().__getitem__(index)


@given(rows_of, rows_of, st.sampled_from([1, 3]))
@some
def test_served_blocked_unreadable_and_filtered_rows_are_the_source(
    blocked: set[int], bad: set[int], keep: int
) -> None:
    """Also behind a row that cannot be read no blocked row is served."""
    if len(blocked | bad) > NUM - 4 * BATCH * keep:
        return
    rows_in_doubt = Unreadable({"id": f"d{i}"} for i in range(NUM))
    rows_in_doubt.bad = frozenset(bad)
    source = rd.DatasetSource(rows_in_doubt, name="documents")
    found: list[int] = []
    with loader(rows(blocked, keep=keep, source=source)) as run:
        for batch in run:
            found += batch["n"][batch["valid"]].tolist()
        counts = run.progress()
    assert Counter(found) == Counter(i for i in range(NUM) if i not in blocked | bad and i % keep == 0)
    num_unreadable = len(bad - blocked)
    assert counts["skipped_rows"] == num_unreadable
    assert counts["blocked_rows"] == len(blocked | bad) - num_unreadable
    assert counts["filtered_rows"] == NUM - len(blocked | bad) - len(found)


@given(st.lists(st.tuples(rows_of, st.sampled_from([1, 2, 3]), st.integers(0, 3)), min_size=2, max_size=4))
@some
def test_another_list_in_each_segment(segments: list[tuple[set[int], int, int]]) -> None:
    """Each row is drawn once an epoch, and is served or blocked as the list of that segment says."""
    state: Any = None
    epochs: dict[int, list[int]] = defaultdict(list)
    total = 0
    for blocked, world_size, steps in segments:
        ranks = [loader(rows(blocked), r, world_size, repeat=True) for r in range(world_size)]
        for one in ranks if state is not None else []:
            one.load_state_dict(state)
        for _ in range(steps):
            for one in ranks:
                taken = one._stream.take()
                for shard, n in zip(taken.shards, taken.batch["n"].tolist(), strict=True):
                    assert n not in blocked
                    epochs[shard].append(n)
        state = full_state_dict(ranks)
        total += steps * BATCH
        drawn = sum(one.progress()["rows/documents"] for one in ranks)
        assert drawn == total + sum(one.progress()["blocked_rows"] for one in ranks)
    for shard, served in epochs.items():
        size = len(range(shard * NUM // N, (shard + 1) * NUM // N))
        reader = rd.Reader(DOCUMENTS, rd.Shard(shard, N, repeat=True))
        order: list[int] = []
        while len(order) < 8 * size:
            order += [int(row["id"][1:]) for row in reader]
            reader.reset(reader.get_state())
        at = iter(order)
        assert all(n in at for n in served)  # a subsequence of what the shard reads


@functools.cache
def in_blocks() -> rd.ArrowSource:
    """The documents at rest, which packers read many at a time."""
    table = pa.table(
        {"tokens": pa.array([DOCUMENTS.row(i)["tokens"].tolist() for i in range(NUM)], pa.list_(pa.int64()))}
    )
    path = f"{_FOLDER.name}/a.arrow"
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    return rd.ArrowSource(path)


_FOLDER = tempfile.TemporaryDirectory()


def packed(blocked: set[int], kind: str = "reader") -> Any:
    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        node: Any = rd.Reader(DOCUMENTS, shard, exclude=blocked)
        if kind == "blocks":
            node = rd.Reader(in_blocks(), shard, shuffle=4, exclude={"a.arrow": blocked})
        if kind == "mixture":
            other = rd.Reader(OTHERS, shard, exclude=blocked)
            node = rd.WeightedSampler({"a": node, "b": other}, {"a": 0.5, "b": 0.5})
        return rd.TokenPacker(node, column="tokens", seq_len=16, eos_id=99)

    return pipeline


OTHERS = rd.DatasetSource(
    [{"id": f"o{i}", "tokens": 100_000 + 100 * i + np.arange(7 + i % 30)} for i in range(NUM)], name="others"
)


@given(
    rows_of, rows_of, st.sampled_from([1, 2, 3]), st.integers(1, 9), st.sampled_from(["reader", "blocks", "mixture"])
)
@example(ODD, set(), 1, 3, "blocks")
@example(ODD, set(), 1, 4, "blocks")
@example(ODD, EVEN, 1, 5, "blocks")
@example(ODD, set(), 1, 3, "reader")
@example(ODD, EVEN, 1, 5, "mixture")
@some
def test_a_document_that_is_blocked_within_ends_there(
    first: set[int], second: set[int], world_size: int, steps: int, kind: str
) -> None:
    """What follows begins with its first token; a document that is not blocked goes on with its next one."""
    ranks = [loader(packed(first, kind), r, world_size, repeat=True) for r in range(world_size)]
    before, after = tokens_of(ranks, steps), defaultdict(list)
    state = full_state_dict(ranks)
    ranks = [loader(packed(second, kind), r, 3, repeat=True) for r in range(3)]
    for one in ranks:
        one.load_state_dict(state)
    after = tokens_of(ranks, 4)
    for shard, tokens in after.items():
        last = before[shard][-1]
        number = last % 100_000 // 100
        expected = LENGTHS[number] if last < 100_000 else 7 + number % 30
        within = last != 99 and last % 100 + 1 <= expected
        if within and number not in second:
            rest = list(range(last + 1, last - last % 100 + expected))
            assert tokens[: len(rest) + 1] == [*rest, 99]
        elif within:
            assert tokens[0] == 99 or tokens[0] % 100 == 0
        for one, following in itertools.pairwise(tokens):
            assert following == 99 or one == 99 or following == one + 1
            assert one != 99 or following == 99 or following % 100 == 0
    assert not {t % 100_000 // 100 for tokens in after.values() for t in tokens if t != 99} & second


@pytest.mark.parametrize("window", [1, 4])
def test_each_shard_of_a_mixture_passes_its_own_rows(window: int) -> None:
    """Below a node that reads samples one at a time, which asks the mixture to pass what is blocked."""
    blocked = set(range(0, NUM, 3)) | {50, 52, 53}

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        nodes = {s.name: rd.Reader(s, shard, shuffle=8, exclude=blocked) for s in (DOCUMENTS, OTHERS)}
        mixed = rd.WeightedSampler(nodes, {"documents": 1, "others": 1}, stop="all")
        through = rd.Map(rd.Shuffle(mixed, window), lambda row: {"tokens": row["tokens"]})
        return rd.TokenPacker(through, column="tokens", seq_len=16, eos_id=None, last="pad", pad_id=99)

    with loader(pipeline) as run:
        found = [token for batch in run for token in batch["tokens"][batch["valid"]].flatten().tolist() if token != 99]
    kept = [s.row(i)["tokens"].tolist() for s in (DOCUMENTS, OTHERS) for i in range(NUM) if i not in blocked]
    assert Counter(found) == Counter(token for tokens in kept for token in tokens if token != 99)


def tokens_of(ranks: list[rd.DataLoader], steps: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for _ in range(steps):
        for one in ranks:
            taken = one._stream.take()
            for shard, tokens in zip(taken.shards, taken.batch["tokens"].tolist(), strict=True):
                found[shard] += tokens
    return found


def test_packers_read_blocks_of_documents_over_arrow_as_one_by_one(tmp_path: Any) -> None:
    ids = pa.array([f"d{i}" for i in range(NUM)])
    table = pa.table(
        {
            "id": ids,
            "tokens": pa.array([row.tolist() for row in (100 * i + np.arange(n) for i, n in enumerate(LENGTHS))]),
        }
    )
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    source = rd.ArrowSource(str(tmp_path / "a.arrow"))
    blocked = {0, 1, 2, 17, 40, 41, 99, 148, 149}

    def pipeline(shard: rd.Shard, through: Any) -> rd.TokenPacker:
        reader = rd.Reader(source, shard, exclude={"a.arrow": blocked})
        return rd.TokenPacker(through(reader), column="tokens", seq_len=16, eos_id=99, last="pad")

    for shard in range(4):
        blocks, one_by_one = (pipeline(rd.Shard(shard, 4), through) for through in (_itself, Through))
        for _ in range(2):
            one, other = list(blocks), list(one_by_one)
            assert len(one) == len(other) > 10
            assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(one, other, strict=True))
            states = blocks.get_state()["source"], one_by_one.get_state()["source"]["source"]
            assert states[0] == states[1]
            assert states[0]["blocked"] > 0
            blocks.reset(None)
            one_by_one.reset(None)


class Through(rd.Node[Any]):
    """Samples as they come, and no documents."""

    def __init__(self, source: Any) -> None:
        super().__init__(source=source)

    def next(self) -> Any:
        return next(self.children["source"])


def _itself(node: Any) -> Any:
    return node


def test_a_window_is_begun_again_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def pipeline(blocked: set[int]) -> Any:
        return lambda shard: rd.Shuffle(rd.Reader(DOCUMENTS, shard, exclude=blocked), window=8)

    def make(blocked: set[int]) -> rd.DataLoader:
        collate = lambda samples: [int(sample["id"][1:]) for sample in samples]  # noqa: E731
        return rd.DataLoader(
            pipeline(blocked), global_batch_size=6, num_logical_shards=6, repeat=True, collate_fn=collate
        )

    run = make(set())
    seen = [n for _, batch in zip(range(3), run, strict=False) for n in batch]
    same, other = make(set()), make(set(range(0, NUM, 2)))
    same.load_state_dict(run.state_dict())
    assert not set(next(iter(same))) & set(seen)
    with caplog.at_level(logging.INFO, "rescale_data"):
        other.load_state_dict(run.state_dict())
        later = [n for _, batch in zip(range(4), other, strict=False) for n in batch]
    assert all(n % 2 for n in later)
    assert "source: exclude: rows: saved 0, now 75" in caplog.text
    assert "6 of 6 logical shards were within a document or window" in caplog.text


few_of = st.sets(st.integers(0, NUM - 1), max_size=20)  # with as few steps each token comes once


@given(few_of, few_of, st.integers(1, 4), st.sampled_from(["whole", "shuffled", "filtered", "mixture", "reader"]))
@some
def test_what_is_repeated_is_said_and_nothing_else_is(first: set[int], second: set[int], steps: int, kind: str) -> None:
    """Of a window, and of a document below a filter, the old list says what it was; a packer finds its document without."""

    def pipeline(blocked: set[int]) -> Any:
        def of(shard: rd.Shard) -> rd.BaseNode[Any]:
            if kind in ("mixture", "reader"):
                return packed(blocked, kind)(shard)
            node: Any = rd.Reader(DOCUMENTS, shard, exclude=blocked)
            if kind == "whole":
                return rd.WholeDocumentPacker(node, column="tokens", seq_len=24, window=5, eos_id=99)
            if kind == "filtered":
                node = rd.Filter(node, lambda row: len(row["tokens"]) % 3 > 0, version=1)
            node = rd.TokenPacker(node, column="tokens", seq_len=16, eos_id=None)
            return rd.Shuffle(node, window=3) if kind == "shuffled" else node

        return of

    [run] = before = [loader(pipeline(first), repeat=True)]
    seen = tokens_of(before, steps)
    after, records = loader(pipeline(second), repeat=True), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("rescale_data").addHandler(handler)
    try:
        after.load_state_dict(run.state_dict())
    finally:
        logging.getLogger("rescale_data").removeHandler(handler)
    said = [record.args[0] for record in records if "begin it again" in record.msg]
    more = tokens_of([after], 1)
    again = sum(bool((set(more[shard]) & set(seen[shard])) - {99}) for shard in more)
    assert again <= (said[0] if said else 0)
    assert not (said and (first == second or kind in ("mixture", "reader")))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rd.Reader(range(3), rd.Shard(), exclude=[3]), "range has the rows 0 to 2"),
        (lambda: rd.Reader(range(3), rd.Shard(), exclude="d17"), "exclude='d17'.*give a list"),
        (lambda: rd.Reader(range(3), rd.Shard(), exclude=2), "exclude=2.*give"),
        (lambda: rd.Reader(range(3), rd.Shard(), exclude={"a": [1]}), "given a dict.*does not name the files"),
        (lambda: rd.Reader(range(3), rd.Shard(), exclude=[0.5]), "values of float64"),
        (lambda: rd.Reader(range(3), rd.Shard(), exclude=np.array([True, False, True])), "values of bool"),
        (lambda: rd.find_rows([1, 2], ["a"]), "No row of list can be looked up by its column 'id'"),
        (lambda: rd.find_rows(DOCUMENTS, "d17"), "ids='d17': give a list"),
    ],
)
def test_what_does_not_fit_is_an_error(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


class TestFiles:
    @staticmethod
    def source(folder: Any, **files: int) -> rd.ParquetSource:
        """Files of so many rows, each of which names its file and its number there."""
        for name, size in files.items():
            table = pa.table({"id": [f"{name}{i}" for i in range(size)], "n": range(size)})
            parquet.write_table(table, folder / f"{name}.parquet", row_group_size=3)
        return rd.ParquetSource(folder)

    def test_a_file_that_joins_shifts_no_row(self, tmp_path: Any) -> None:
        exclude = {"m.parquet": [0, 7], "z.parquet": [2]}
        alone = rd.Reader(self.source(tmp_path, m=8, z=4), rd.Shard(), exclude=exclude)
        more = rd.Reader(self.source(tmp_path, a=5, n=5), rd.Shard(), exclude=exclude)
        for reader in (alone, more):
            assert not {"m0", "m7", "z2"} & {row["id"] for row in reader}
            assert reader.progress(*at_end(reader))["blocked_rows"] == 3
        assert alone.parameters()["exclude"] == more.parameters()["exclude"]

    def test_rows_are_numbered_as_messages_have_them_also_behind_a_filter(self, tmp_path: Any) -> None:
        self.source(tmp_path, m=8)
        source = rd.ParquetSource(tmp_path, filter=compute.field("n") >= 3)
        assert source.locate(1).endswith("m.parquet, row 4")
        assert source.file_row(1) == ("m.parquet", 4)
        left = list(rd.Reader(source, rd.Shard(), shuffle=False, exclude={"m.parquet": [1, 4]}))
        assert [row["n"] for row in left] == [3, 5, 6, 7]

    def test_a_file_of_which_a_filter_keeps_no_row_has_none_to_leave_out(self, tmp_path: Any) -> None:
        self.source(tmp_path, a=2, m=8)
        source = rd.ParquetSource(tmp_path, filter=compute.field("n") >= 3)
        exclude = {"a.parquet": [0, 1], "m.parquet": [4]}
        reader = rd.Reader(source, rd.Shard(), shuffle=False, exclude=exclude)
        assert [row["n"] for row in reader] == [3, 5, 6, 7]

    @pytest.mark.parametrize("name", ["a", "m"])
    def test_a_row_beyond_the_end_of_a_file_is_an_error_also_behind_a_filter(self, tmp_path: Any, name: str) -> None:
        self.source(tmp_path, a=2, m=8)
        num_rows = {"a": 2, "m": 8}[name]
        for keeps in (compute.field("n") >= 3, compute.field("n") == 4):
            source = rd.ParquetSource(tmp_path, filter=keeps)
            rd.Reader(source, rd.Shard(), exclude={f"{name}.parquet": [num_rows - 1]})
            with pytest.raises(ValueError, match=rf"{name}.parquet of .* has the rows 0 to {num_rows - 1}"):
                rd.Reader(source, rd.Shard(), exclude={f"{name}.parquet": [0, num_rows]})

    def test_a_list_is_the_same_however_it_spells_a_path(self, tmp_path: Any) -> None:
        (tmp_path / "b").mkdir()
        self.source(tmp_path / "b", m=8)
        self.source(tmp_path, a=2)
        source = rd.ParquetSource(f"{tmp_path}/**/*.parquet")
        expected = rd.Reader(source, rd.Shard(), exclude={"b/m.parquet": [1, 4]}).parameters()["exclude"]
        path = tmp_path / "b" / "m.parquet"
        for name in ("m.parquet", "./b/m.parquet", "b//m.parquet", "b/../b/m.parquet", str(path), f"file://{path}"):
            reader = rd.Reader(source, rd.Shard(), exclude={name: [1, 4]})
            assert reader.parameters()["exclude"] == expected
            assert [row["id"] for row in reader if row["id"] in ("m1", "m4")] == []
        twice = rd.Reader(source, rd.Shard(), exclude={"m.parquet": [1], str(path): [1, 4]})
        assert twice.parameters()["exclude"] == expected
        other = rd.Reader(source, rd.Shard(), exclude={"b/m.parquet": [1, 5]})
        assert other.parameters()["exclude"] != expected

    def test_find_rows_names_files_and_what_cannot_be_read(
        self, tmp_path: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        source = self.source(tmp_path, m=8, z=4)
        found = rd.find_rows(source, ["z1", "m3", "m7", "nowhere"])
        assert found == {"m.parquet": [3, 7], "z.parquet": [1]}
        assert json.loads(json.dumps(found)) == found
        rows_in_doubt = Unreadable({"id": i} for i in range(9))
        rows_in_doubt.bad = frozenset({4})
        with caplog.at_level(logging.WARNING, "rescale_data"):
            assert rd.find_rows(rd.DatasetSource(rows_in_doubt, name="doubt"), {2, 4, 8}) == [2, 8]
        assert "doubt[4] cannot be looked up: ValueError: row 4 cannot be read" in caplog.text

    @pytest.mark.parametrize("ids", [["1"], torch.tensor([1]), [b"1"]])
    def test_ids_of_another_type_than_the_column_are_an_error(self, ids: Any) -> None:
        source = rd.DatasetSource([{"id": i} for i in range(3)], name="web")
        with pytest.raises(TypeError, match="the column 'id' of web values of Number"):
            rd.find_rows(source, ids)
        assert rd.find_rows(source, ["1", 1]) == rd.find_rows(source, np.array([1], np.uint8)) == [1]
        assert rd.find_rows(source, [7]) == rd.find_rows(source, []) == []

    @pytest.mark.parametrize(
        ("exclude", "message"),
        [
            ([3], "{file: rows in it}"),
            ({"q.parquet": [0]}, "0 of the files .* are named 'q.parquet'"),
            ({"m.parquet": [8]}, "m.parquet of .* has the rows 0 to 7: there are none from 8 to 8"),
            ({"m.parquet": [-1]}, "from -1 to -1"),
            ({"m.parquet": [0.5]}, "float64 for m.parquet"),
        ],
    )
    def test_what_does_not_fit_is_an_error(self, tmp_path: Any, exclude: Any, message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            rd.Reader(self.source(tmp_path, m=8), rd.Shard(), exclude=exclude)


def at_end(reader: Any) -> Any:
    return np.array(reader.position)[None], np.zeros(1, np.int64), np.zeros(1, np.int64)


def clean(node: rd.BaseNode[Any]) -> rd.BaseNode[Any]:
    return rd.CleanDocuments(node, "tokens", max_length=2)


def padded(node: rd.BaseNode[Any]) -> rd.BaseNode[Any]:
    return rd.Map(
        node, lambda s: {"tokens": np.pad(s["tokens"], (0, 8 - len(s["tokens"])), constant_values=-1)}, version=1
    )


LISTED: dict[str, Any] = {
    "clean": lambda read, other: padded(clean(read)),
    "whole": lambda read, other: rd.WholeDocumentPacker(read, column="tokens", seq_len=5, window=3, pad_id=-1),
    "mixed": lambda read, other: padded(
        rd.WeightedSampler({"a": clean(read), "b": clean(other)}, {"a": 1, "b": 1}, stop="all")
    ),
}


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize(("old", "new"), [([], [1]), ([3], []), ([0], [2]), ([7], [])])
def test_a_list_that_has_changed_once_is_that_of_the_next_segment_too(
    name: str, old: list[int], new: list[int], tmp_path: Any
) -> None:
    """The next segment goes on where one that never stopped does."""
    tokens = pa.array([[100 * i + k for k in range(5)] for i in range(8)], pa.list_(pa.int64()))
    parquet.write_table(pa.table({"tokens": tokens}), tmp_path / "a.parquet")
    source = rd.ParquetSource(str(tmp_path))
    other = rd.DatasetSource([{"tokens": 100 * i + np.arange(5)} for i in range(50, 54)])

    def begun(blocked: list[int], state: Any = None) -> rd.DataLoader:
        def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
            exclude = {"a.parquet": blocked} if blocked else ()
            read = rd.Reader(source, shard, exclude=exclude)
            return LISTED[name](read, rd.Reader(other, shard, exclude=()))

        run = rd.DataLoader(pipeline, global_batch_size=1, num_logical_shards=1)
        if state is not None:
            run.load_state_dict(state)
        return run

    first = begun(old)
    for _ in zip(range(5), first, strict=False):
        changed = begun(new, first.state_dict())
        states, served = [], []
        for batch in changed:
            served.append(batch["tokens"].tolist())
            states.append(changed.state_dict())
        for num, state in enumerate(states[:4], 1):
            assert [batch["tokens"].tolist() for batch in begun(new, state)] == served[num:]


@pytest.mark.parametrize(
    ("listed", "change"),
    [
        ([1], lambda rows: rows.append(3)),
        ([1], lambda rows: rows.__setitem__(0, 3)),
        ({1, 2}, lambda rows: (rows.remove(1), rows.add(3))),
        (np.array([1, 2]), lambda rows: rows.__setitem__(0, 3)),
        (torch.tensor([1, 2]), lambda rows: rows.__setitem__(0, 3)),
    ],
)
def test_a_list_that_was_changed_is_another_one(listed: Any, change: Any) -> None:
    for is_changed in (False, True):
        if is_changed:
            change(listed)
        blocked = [int(row) for row in listed]
        run = rd.DataLoader(
            lambda shard: rd.Reader(DOCUMENTS, shard, exclude=listed), global_batch_size=1, num_logical_shards=1,
            collate_fn=lambda samples: samples,
        )  # fmt: skip
        served = {sample["id"] for batch in run for sample in batch}
        assert served == {f"d{i}" for i in range(NUM)} - {f"d{i}" for i in blocked}


@pytest.mark.parametrize("stop", ["all", "never"])
@pytest.mark.parametrize("name", ["web", "code"])
def test_a_document_is_cut_from_its_beginning_whatever_another_list_blocks(name: str, stop: Any) -> None:
    """Also where the source that is chosen next has ended, and the document is of another choice."""
    sources = {
        "web": rd.DatasetSource([{"tokens": 100 * i + np.arange(5)} for i in range(12)]),
        "code": rd.DatasetSource([{"tokens": 100 * i + np.arange(5)} for i in range(50, 54)]),
    }

    def begun(blocked: list[int]) -> rd.DataLoader:
        def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
            readers = {
                each: rd.Reader(source, shard, shuffle=False, exclude=blocked if each == name else ())
                for each, source in sources.items()
            }
            mixed = rd.WeightedSampler(readers, {"web": 1, "code": 1}, stop=stop)
            return rd.TokenPacker(mixed, column="tokens", seq_len=3, eos_id=None)

        return rd.DataLoader(pipeline, global_batch_size=1, num_logical_shards=1, repeat=stop == "never")

    nothing: list[int] = []
    first = begun(nothing)
    for batch in itertools.islice(first, 19):
        state, last = first.state_dict(), batch["tokens"].flatten().tolist()[-1]
        for row in range(sources[name].num_rows):
            after = begun([row])
            after.load_state_dict(state)
            tokens = [last]
            for packed in itertools.islice(after, 10):
                tokens += packed["tokens"].flatten().tolist()
            assert all(b == a + 1 or b % 100 == 0 for a, b in itertools.pairwise(tokens))


PACKED = {
    "cut": lambda rows: rd.TokenPacker(rows, column="tokens", seq_len=6, eos_id=None),
    "whole": lambda rows: rd.WholeDocumentPacker(rows, column="tokens", seq_len=18, window=3, eos_id=None),
}


@pytest.mark.parametrize("packer", PACKED)
def test_a_window_over_documents_that_began_with_another_list_goes_on_where_it_was(packer: str) -> None:
    """Who loads another list and resumes at each sample gets what one that never stops gets: a window is not begun again."""
    documents = [{"tokens": 100 * i + np.arange(n)} for i, n in enumerate([9, 3, 17, 5, 9, 2, 17, 4, 11, 6])]

    def begun(blocked: list[int], state: Any) -> rd.DataLoader:
        def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
            return rd.Shuffle(PACKED[packer](rd.Reader(documents, shard, shuffle=False, exclude=blocked)), 4)

        loader = rd.DataLoader(
            pipeline, global_batch_size=1, num_logical_shards=1, collate_fn=lambda batch: batch[0]["tokens"].tolist()
        )
        if state is not None:
            loader.load_state_dict(state)
        return loader

    before = begun([1], None)
    states = [before.state_dict(), *(before.state_dict() for _ in before)]
    for state in states:
        expected, found, now = list(begun([4], state)), [], state
        for _ in expected:
            loader = begun([4], now)
            found.append(next(iter(loader)))
            now = loader.state_dict()
        assert found == expected


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_a_node_that_is_reset_without_a_loader_begins_blocked_documents_again(num: int) -> None:
    source = rd.DatasetSource([{"tokens": 100 * i + np.arange(7)} for i in range(6)])

    def packer(blocked: list[int]) -> rd.TokenPacker:
        reader = rd.Reader(source, rd.Shard(), shuffle=False, exclude=blocked)
        return rd.TokenPacker(
            rd.CleanDocuments(reader, "tokens", max_length=4), column="tokens", seq_len=3, eos_id=None
        )

    first = packer([])
    for _ in range(num):
        last = next(first)["tokens"].tolist()[-1]
    other = packer([last // 100])
    other.reset(first.get_state())
    tokens = [token for sample in other for token in sample["tokens"].tolist()]
    assert tokens[0] % 100 == 0
    assert all(b == a + 1 or b % 100 == 0 for a, b in itertools.pairwise(tokens))
