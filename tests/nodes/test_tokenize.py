"""`Tokenize`: batches that nobody sees, and no text tokenized again that has been used."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rescale_data as rd
from rescale_data.nodes.tokenize import _to_token_array
from rescale_data.nodes.tokenized import concatenate_ids
from tests.corpus import unreadable
from tests.laws.tables import letters as by_letters
from tests.nodes.resume import endless
from tests.nodes.resume import plain as as_values

pytestmark = pytest.mark.usefixtures("own_cache")

TEXTS = [{"id": i, "text": f"{i:02d}" * (1 + i % 5)} for i in range(30)]


class Counting:
    """A tokenizer that remembers what it was given."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.sizes: list[int] = []

    def __call__(self, texts: list[str]) -> list[list[int]]:
        self.texts += texts
        self.sizes.append(len(texts))
        return by_letters(texts)


def tokenize(
    tokenizer: Any, shuffle: bool | int = 4, shard: rd.Shard | None = None, source: Any = TEXTS, **kwargs: Any
) -> rd.Tokenize:
    return rd.Tokenize(rd.Reader(source, shard or rd.Shard(), shuffle=shuffle), tokenizer, "text", **kwargs)


@pytest.fixture(params=["rows", "lines"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The same texts as rows, and as lines of which many are read at a time."""
    return TEXTS if request.param == "rows" else lines_of(TEXTS, tmp_path)


def lines_of(rows: list[Any], folder: Path) -> rd.JsonlSource:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return rd.JsonlSource(folder)


def packed(tokenizer: Any, **kwargs: Any) -> rd.TokenPacker:
    return rd.TokenPacker(tokenize(tokenizer, **kwargs), column="tokens", seq_len=7, eos_id=1)


def test_yields_tokens_in_place_of_text_and_keeps_the_rest() -> None:
    samples = list(tokenize(by_letters, shuffle=False, batch_size=7))
    assert [sample["id"] for sample in samples] == list(range(30))
    assert all(set(sample) == {"id", "tokens"} for sample in samples)
    assert [sample["tokens"].tolist() for sample in samples] == by_letters([row["text"] for row in TEXTS])


def test_texts_go_in_batches_which_are_small_after_a_start_and_a_resume() -> None:
    tokenizer = Counting()
    node = tokenize(tokenizer, batch_size=8)
    next(node)
    state = node.get_state()
    list(node)
    assert tokenizer.sizes == [1, 2, 4, 8, 8, 7]
    resumed = Counting()
    node = tokenize(resumed, batch_size=8)
    node.reset(state)
    list(node)
    assert resumed.sizes == [1, 2, 4, 8, 8, 6]


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_a_resumed_packer_tokenizes_one_used_document_again_at_most(batch_size: int, source: Any) -> None:
    whole = Counting()
    live = packed(whole, batch_size=batch_size, source=source)
    order = [row["text"] for row in rd.Reader(source, rd.Shard(), shuffle=4)]
    for _ in itertools.islice(endless(live), 20):
        state = live.get_state()
        used = order[: state["source"]["source"]["row"]]
        tokenizer = Counting()
        resumed = packed(tokenizer, batch_size=batch_size, source=source)
        resumed.reset(state)
        next(endless(resumed))
        assert tokenizer.texts[0] == order[len(used)]  # the one of the next token
        assert not set(tokenizer.texts) & set(used)
        assert len(tokenizer.texts) <= 2 * 2 - 1  # a sample has 7 tokens and a text 3 at least: not a whole batch
    assert len(whole.texts) <= 20 * 7 + 64
    assert len(whole.texts) == len(set(whole.texts))


def test_skip_tokenizes_nothing_that_is_skipped() -> None:
    tokenizer = Counting()
    node = tokenize(tokenizer, batch_size=5)
    node.reset(None)
    next(node)
    tokenizer.texts.clear()
    node.skip(20)
    order = [row["id"] for row in rd.Reader(TEXTS, rd.Shard(), shuffle=4)]
    assert [sample["id"] for sample in node] == order[21:]
    assert len(tokenizer.texts) == 9


def fails(texts: list[str]) -> list[list[int]]:
    if any(text.startswith(("13", "21")) for text in texts):
        raise ValueError("no such letter")
    return by_letters(texts)


def wrong_for_some(texts: list[str]) -> list[Any]:
    return [[0.5] if text.startswith("21") else ids for text, ids in zip(texts, by_letters(texts), strict=True)]


BAD_DATA: list[tuple[Any, Any, list[int], str]] = [
    ([*TEXTS[:13], {"id": 13, "text": None}, *TEXTS[14:]], by_letters, [13], "under that key a NoneType"),
    ([*TEXTS[:13], ["text"], *TEXTS[14:]], by_letters, [13], "was given a sample with a list"),
    (TEXTS, wrong_for_some, [21], "The tokenizer returned a list for a text"),
    (TEXTS, fails, [13, 21], "no such letter"),
]


@pytest.mark.parametrize(("rows", "tokenizer", "bad", "message"), BAD_DATA)
@pytest.mark.parametrize("batch_size", [1, 6, 64])
def test_errors_name_the_row_or_are_skipped_and_counted(
    rows: Any, tokenizer: Any, bad: list[int], message: str, batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of a function and those in the data, wherever in a batch."""

    def node(on_error: Any) -> rd.Tokenize:
        return tokenize(tokenizer, False, source=rows, batch_size=batch_size, on_error=on_error)

    samples: list[Any] = []
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        samples.extend(node("raise"))
    assert len(samples) == bad[0], "it comes in the turn of its row"
    assert caught.value.__notes__ == [f"in the function of Tokenize, given list: list[{bad[0]}]"]
    skipping = node("skip")
    assert [sample["id"] for sample in skipping] == [i for i in range(30) if i not in bad]
    assert skipping.get_state() == {"skipped": len(bad), "source": {"epoch": 1, "row": 0, "skipped": 0}}
    for number, row in enumerate(bad, 1):
        assert f"list[{row}] (number {number}" in caplog.text


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("times", [0, 2])
def test_another_number_of_sequences_is_an_error_in_the_turn_of_its_row(times: int, on_error: Any) -> None:
    def miscounts(texts: list[str]) -> list[list[int]]:
        return by_letters([text for text in texts for _ in range(times if text.startswith("13") else 1)])

    node = tokenize(miscounts, False, on_error=on_error)
    assert [next(node)["id"] for _ in range(13)] == [*range(13)]
    for _ in range(2):
        with pytest.raises(ValueError, match=f"returned {times} values for 1 texts"):
            next(node)


def test_an_error_of_reading_comes_in_the_turn_of_its_row_again_and_again() -> None:
    node = tokenize(by_letters, False, source=unreadable(TEXTS, {13}))
    assert [next(node)["id"] for _ in range(13)] == [*range(13)]
    for _ in range(2):
        with pytest.raises(ValueError, match="row 13 cannot be read"):
            next(node)


@pytest.mark.parametrize(("rows", "tokenizer", "bad", "message"), BAD_DATA)
def test_an_error_below_a_packer_names_the_row(
    rows: Any, tokenizer: Any, bad: list[int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether texts are read or rows; and the samples before it are the same."""

    def found() -> tuple[list[Any], BaseException]:
        node, samples = packed(tokenizer, source=lines_of(rows, tmp_path), shuffle=False), []
        with pytest.raises((ValueError, TypeError)) as caught:
            samples.extend(as_values(sample) for sample in node)
        return samples, caught.value

    samples, error = found()
    monkeypatch.setattr(rd.JsonlSource, "texts", None)
    assert found()[0] == samples
    assert message in str(error) or "not an object" in str(error)
    assert f"line {bad[0] + 1}" in "".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("batch_size", [1, 6, 64])
def test_an_error_above_names_the_row_and_not_the_last_of_the_batch(batch_size: int) -> None:
    failing = [0, 11, 17, 29]

    def fn(sample: Any) -> Any:
        if sample["id"] in failing:
            raise ValueError("by hand")
        return sample

    node = rd.Map(tokenize(by_letters, shuffle=False, batch_size=batch_size), fn)
    found: dict[int, str] = {}
    ids: list[int] = []
    for i in range(30):
        try:
            ids.append(next(node)["id"])
        except ValueError as error:
            found[i] = error.__notes__[0]
    assert found == {i: f"in the function of Map, given list: list[{i}]" for i in failing}
    assert ids == [i for i in range(30) if i not in failing]


def test_another_tokenizer_is_an_error_when_a_state_is_loaded() -> None:
    def loader(tokenizer: Any) -> rd.DataLoader:
        return rd.DataLoader(lambda shard: packed(tokenizer, shard=shard), global_batch_size=2, num_logical_shards=2)

    state = loader(by_letters).state_dict()
    loader(by_letters).load_state_dict(state)
    with pytest.raises(rd.DataStateError, match="tokenizer: saved"):
        loader(lambda texts: [ids[1:] for ids in by_letters(texts)]).load_state_dict(state)


def test_a_tokenizer_that_cannot_be_known_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def letters_of_dna(texts: list[str]) -> list[list[int]]:
        return [["ACGT".index(letter) for letter in text] for text in texts]

    assert tokenize(letters_of_dna).parameters()["tokenizer"] == "unknown"
    assert "another tokenizer is not noticed when a state is loaded" in caplog.text
    caplog.clear()
    tokenize(by_letters).parameters()
    assert not caplog.text


@pytest.mark.parametrize(
    "found",
    [
        [[1, 2], [], [2**40]], [[], []], [[2**63], [1]], [[1.0]], [[1], (2,)], [[[1]]], [[1], None],
        [np.array([1, 2], np.uint8), np.zeros(0, np.int32), np.array([2**40])], [np.zeros(0)], [np.array([1.5])],
        [[True, False]], [[1, 2], [False]], [[True, 5]], [np.array([True])],
        [np.ones((2, 1), np.int64)], [np.array([2**63], np.uint64), np.array([-1])], [np.array([3], ">i4")],
    ],
)  # fmt: skip
def test_tokens_end_to_end_are_those_of_each_text(found: list[Any]) -> None:
    """Or not made: each text is then looked at by itself."""
    try:
        each = [_to_token_array(ids).tolist() for ids in found]
    except TypeError:
        each = None
    try:
        values, length = concatenate_ids(found) or (None, None)
    except (TypeError, OverflowError, ValueError):
        values = length = None
    if values is not None:
        assert values.dtype.isnative
        assert each == [part.tolist() for part in np.split(values, np.cumsum(length)[:-1])]


def test_what_passes_through_the_cache_leaves_what_was_tokenized(tmp_path: Path) -> None:
    """Many shards of a mixture beyond the cache: row groups are decoded again, texts are not tokenized again."""
    for name in "ab":
        texts = [f"{name}{i:02d} " * 300 for i in range(64)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}.parquet", row_group_size=8)
    sources = {name: rd.ParquetSource(tmp_path / f"{name}.parquet", cache_bytes=100_000) for name in "ab"}
    counting = Counting()

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        mixture = rd.WeightedSampler({k: rd.Reader(s, shard) for k, s in sources.items()}, {"a": 1, "b": 1}, stop="all")
        cut = rd.Tokenize(mixture, lambda texts: [ids[:20] for ids in counting(texts)], "text", batch_size=16)
        return rd.TokenPacker(cut, column="tokens", seq_len=20, eos_id=None)

    list(rd.DataLoader(pipeline, global_batch_size=16, num_logical_shards=16))
    times = Counter(text for text in counting.texts if text[:1] in "ab")
    assert len(times) == 128
    assert set(times.values()) == {1}
