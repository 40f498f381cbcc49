"""`Reader(exclude=)`: served, blocked and filtered rows together are the source, whatever changes between segments.

What another list does to rows is asked by `tests.histories`; that it keeps all other tokens, and that what comes again is
said, by `tests.laws.test_changes_keep_the_rest`.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import compute, parquet

import rescale_data as rd
from tests.corpus import unreadable, write
from tests.nodes.resume import BATCH, alone, plain, ranks_of

NUM = 150
rows_of = st.sets(st.integers(0, NUM - 1), max_size=NUM // 2)


def documents(lengths: list[int], first: int = 0) -> list[list[int]]:
    """Documents whose tokens say their numbers, and where they are within."""
    return [list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths, first)]


def rows_with(docs: list[list[int]], name: str) -> rd.DatasetSource:
    return rd.DatasetSource([{"tokens": np.array(doc, np.int64), "id": i} for i, doc in enumerate(docs)], name=name)


LENGTHS = np.random.default_rng(5).integers(0, 30, NUM).tolist()
DOCUMENTS = rows_with(documents(LENGTHS), "documents")


@given(rows_of, rows_of, st.sampled_from([1, 3]))
@settings(max_examples=max(5, settings().max_examples // 5))
def test_served_blocked_unreadable_and_filtered_rows_are_the_source(
    blocked: set[int], bad: set[int], keep: int
) -> None:
    """Also behind a row that cannot be read no blocked row is served."""
    if len(blocked | bad) > NUM - 4 * BATCH * keep:
        return
    source = rd.DatasetSource(unreadable(({"id": i} for i in range(NUM)), bad), name="documents")

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        return rd.Filter(
            rd.Reader(source, shard, on_error="skip", exclude=blocked), lambda row: row["id"] % keep == 0, version=keep
        )

    [run] = ranks_of(pipeline, repeat=False, tail="pad")
    found = [i for batch in run for i in batch["id"][batch["valid"]].tolist()]
    counts = run.progress()
    assert Counter(found) == Counter(i for i in range(NUM) if i not in blocked | bad and i % keep == 0)
    num_unreadable = len(bad - blocked)
    assert counts["skipped_rows"] == num_unreadable
    assert counts["blocked_rows"] == len(blocked | bad) - num_unreadable
    assert counts["filtered_rows"] == NUM - len(blocked | bad) - len(found)


CODE = documents([5] * 4, 50)


def mixture(web: Any, code: Any, stop: Any) -> rd.BaseNode[Any]:
    return rd.WeightedSampler({"web": web, "code": code}, {"web": 1, "code": 1}, stop=stop)


class TestFiles:
    @staticmethod
    def source(folder: Any, *, keep: Any = None, **files: int) -> rd.ParquetSource:
        """Files of so many rows, each of which names its file and its number there."""
        folder.mkdir(exist_ok=True)
        for name, size in files.items():
            table = pa.table({"id": [f"{name}{i}" for i in range(size)], "n": range(size)})
            parquet.write_table(table, folder / f"{name}.parquet", row_group_size=3)
        return rd.ParquetSource(folder, filter=keep)

    def test_a_file_that_joins_shifts_no_row(self, tmp_path: Path) -> None:
        exclude = {"m.parquet": [0, 7], "z.parquet": [2]}
        one = rd.Reader(self.source(tmp_path, m=8, z=4), rd.Shard(), exclude=exclude)
        more = rd.Reader(self.source(tmp_path, a=5, n=5), rd.Shard(), exclude=exclude)
        for reader in (one, more):
            assert not {"m0", "m7", "z2"} & {row["id"] for row in reader}
            assert reader.get_state()["blocked"] == 3
        assert one.parameters()["exclude"] == more.parameters()["exclude"]

    @pytest.mark.parametrize("top", ["rows", "TokenPacker", "WholeDocumentPacker"])
    @pytest.mark.parametrize("mixed", [False, True])
    def test_an_epoch_whose_first_rows_are_blocked_has_not_begun(self, tmp_path: Path, top: str, mixed: bool) -> None:
        def loader(blocked: list[int], state: Any = None) -> rd.DataLoader:
            source = rd.ParquetSource(tmp_path)

            def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
                rows: Any = rd.Reader(source, shard, shuffle=False, exclude={"m.parquet": blocked})
                rows = rd.WeightedSampler({"m": rows}, {"m": 1}, stop="all") if mixed else rows
                return rows if top == "rows" else getattr(rd, top)(rows, column="tokens", seq_len=2, eos_id=None)

            opened = rd.DataLoader(pipeline, global_batch_size=1, num_logical_shards=1, collate_fn=list)
            if state is not None:
                opened.load_state_dict(state)
            return opened

        def write(name: str, num_rows: int) -> None:
            parquet.write_table(pa.table({"tokens": [[i, i] for i in range(num_rows)]}), tmp_path / f"{name}.parquet")

        write("m", 6)
        before = loader([0, 1])
        assert len(list(before)) == 4
        assert before.progress()["blocked_rows"] == 2
        assert len(list(loader([], before.state_dict()))) == 6
        write("z", 2)
        assert len(list(loader([0, 1], before.state_dict()))) == 6

    def test_behind_a_filter_rows_are_numbered_as_files_and_messages_have_them(self, tmp_path: Path) -> None:
        source = self.source(tmp_path, keep=compute.field("n") >= 3, a=2, m=8)
        assert source.locate(1).endswith("m.parquet, row 4")
        assert source.file_row(1) == ("m.parquet", 4)
        exclude = {"a.parquet": [0, 1], "m.parquet": [1, 4]}  # of "a" the filter keeps no row
        reader = rd.Reader(source, rd.Shard(), shuffle=False, exclude=exclude)
        assert [row["n"] for row in reader] == [3, 5, 6, 7]
        for name, num_rows in (("a", 2), ("m", 8)):
            rd.Reader(source, rd.Shard(), exclude={f"{name}.parquet": [num_rows - 1]})
            with pytest.raises(ValueError, match=rf"{name}.parquet of .* has the rows 0 to {num_rows - 1}"):
                rd.Reader(source, rd.Shard(), exclude={f"{name}.parquet": [0, num_rows]})

    def test_a_list_is_the_same_however_it_spells_a_path(self, tmp_path: Path) -> None:
        self.source(tmp_path, a=2)
        self.source(tmp_path / "b", m=8)
        source, path = rd.ParquetSource(f"{tmp_path}/**/*.parquet"), tmp_path / "b" / "m.parquet"

        def digest(exclude: Any) -> Any:
            reader = rd.Reader(source, rd.Shard(), exclude=exclude)
            assert len([row for row in reader if row["id"] in ("m1", "m4")]) == (exclude.get("b/m.parquet") == [1, 5])
            return reader.parameters()["exclude"]

        expected = digest({"b/m.parquet": [1, 4]})
        for name in ("./b/m.parquet", "b//m.parquet", "b/../b/m.parquet", str(path), f"file://{path}"):
            assert digest({name: [1, 4]}) == expected
        assert digest({"b/m.parquet": [1], str(path): [1, 4]}) == expected
        with pytest.raises(ValueError, match=r"'m.parquet' is the end of .*b/m.parquet, .* give 'b/m.parquet'"):
            digest({"m.parquet": [1, 4]})  # a file m.parquet may join
        assert digest({"b/m.parquet": [1, 5]}) != expected

    def test_find_rows_names_files_and_what_cannot_be_read(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        found = rd.find_rows(self.source(tmp_path, m=8, z=4), ["z1", "m3", "m7", "nowhere"])
        assert json.loads(json.dumps(found)) == found == {"m.parquet": [3, 7], "z.parquet": [1]}
        assert rd.find_rows(
            rd.DatasetSource(unreadable([{"id": i} for i in range(9)], {4}), name="doubt"), {2, 4, 8}
        ) == [2, 8]
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
            ({0: [1], "m.parquet": [3]}, "the key 0: give the names of files"),
            ({"q.parquet": [0]}, "0 of the files .* are named 'q.parquet'"),
            ({"m.parquet": [8]}, "m.parquet of .* has the rows 0 to 7: there are none from 8 to 8"),
            ({"m.parquet": [-1]}, "from -1 to -1"),
            ({"m.parquet": [0.5]}, "float64 for m.parquet"),
        ],
    )
    def test_what_does_not_fit_is_an_error(self, tmp_path: Path, exclude: Any, message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            rd.Reader(self.source(tmp_path, m=8), rd.Shard(), exclude=exclude)


def clean(node: rd.BaseNode[Any]) -> rd.BaseNode[Any]:
    return rd.CleanDocuments(node, "tokens", max_length=2)


def whole(node: rd.BaseNode[Any], seq_len: int = 5) -> rd.BaseNode[Any]:
    return rd.WholeDocumentPacker(node, column="tokens", seq_len=seq_len, window=3, pad_id=-1)


LISTED: dict[str, Callable[[Any, Any], rd.BaseNode[Any]]] = {
    "clean": lambda web, code: clean(web),
    "mixed": lambda web, code: mixture(clean(web), clean(code), "all"),
    "whole": lambda web, code: whole(web),
    "shuffled": lambda web, code: rd.Shuffle(rd.TokenPacker(web, column="tokens", seq_len=6, eos_id=None), 4),
    "shuffled whole": lambda web, code: rd.Shuffle(whole(web, 18), 4),
}


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize(("old", "new"), [([], [1]), ([3], []), ([0], [2]), ([1], [4])])
def test_a_list_that_has_changed_once_is_that_of_the_next_segments_too(
    name: str, old: list[int], new: list[int], tmp_path: Path
) -> None:
    """Who loads another list and resumes at each sample gets what one that never stops gets: windows go on where they were."""
    source = write("parquet", tmp_path, documents([9, 3, 17, 5, 9, 2, 17, 4]), NUM)

    def begun(blocked: list[int], state: Any = None) -> rd.DataLoader:
        def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
            web = rd.Reader(source, shard, shuffle=False, exclude={"000.parquet": blocked})
            return LISTED[name](web, rd.Reader(rows_with(CODE, "code"), shard, exclude=()))

        return alone(pipeline, state, collate_fn=lambda samples: plain(samples[0]["tokens"]))

    first = begun(old)
    for state in [first.state_dict(), *(first.state_dict() for _ in itertools.islice(first, 6))]:
        expected, found, now = list(begun(new, state)), [], state
        for _ in expected[:9]:
            loader = begun(new, now)
            found.append(next(iter(loader)))
            now = loader.state_dict()
        assert found == expected[:9]


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
        run = alone(lambda shard: rd.Reader(DOCUMENTS, shard, exclude=listed), collate_fn=list)
        assert {sample["id"] for batch in run for sample in batch} == {*range(NUM)} - {*blocked}


@pytest.mark.parametrize("num_loaders", [1, 2, 3])
def test_a_long_list_is_read_once_a_loader_and_not_for_each_logical_shard(num_loaders: int) -> None:
    num_reads = 0

    class Listed(list[int]):
        def __iter__(self) -> Iterator[int]:
            nonlocal num_reads
            num_reads += 1
            return super().__iter__()

    listed = Listed([1, 3])
    for _ in range(num_loaders):
        for index in range(12):
            reader = rd.Reader(DOCUMENTS, rd.Shard(index, 12), exclude=listed)
            assert reader.parameters()["exclude"]["rows"] == 2
    assert num_reads <= 3 * num_loaders


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_a_node_that_is_reset_without_a_loader_begins_blocked_documents_again(num: int) -> None:
    source = rows_with(documents([7] * 6), "rows")

    def packer(blocked: list[int]) -> rd.TokenPacker:
        reader = rd.Reader(source, rd.Shard(), shuffle=False, exclude=blocked)
        pieces = rd.CleanDocuments(reader, "tokens", max_length=4)
        return rd.TokenPacker(pieces, column="tokens", seq_len=3, eos_id=None)

    first = packer([])
    last = [next(first)["tokens"].tolist()[-1] for _ in range(num)][-1]
    other = packer([last // 100])
    other.reset(first.get_state())
    tokens = [token for sample in other for token in sample["tokens"].tolist()]
    assert tokens[0] % 100 == 0
    assert all(b == a + 1 or b % 100 == 0 for a, b in itertools.pairwise(tokens))
