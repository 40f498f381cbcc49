"""What is no argument of a node, or no sample for it: the error says what is wrong, what to give, and which row it was.

Errors of functions: `test_functions`; wrong types of any argument: `tests.test_arguments`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from torchdata import nodes

import rescale_data as rd
from tests.corpus import documents, write
from tests.nodes.zoo import WEB, read

Make = Callable[..., Any]
ROW = {"tokens": [1, 2, 3], "text": "abc", "images": [b"i"]}


def rows(*samples: Any) -> rd.Reader:
    return rd.Reader(rd.DatasetSource([*samples] or [ROW], name="rows"), rd.Shard(), shuffle=False)


def cut(node: Any = None, **given: Any) -> rd.BaseNode[Any]:
    return rd.TokenPacker(node or rows(), **{"column": "tokens", "seq_len": 2, "eos_id": 1, **given})


def whole(node: Any = None, **given: Any) -> rd.BaseNode[Any]:
    return rd.WholeDocumentPacker(node or rows(), **{"column": "tokens", "seq_len": 2, **given})


def clean(node: Any = None, **given: Any) -> rd.BaseNode[Any]:
    return rd.CleanDocuments(node or rows(), "tokens", **given)


def mixed(*names: str, weights: Any = None, **given: Any) -> rd.BaseNode[Any]:
    sources = {name: read(WEB, rd.Shard(0, 5000, repeat=True)) for name in names or "a"}
    return rd.WeightedSampler(sources, {"a": 1} if weights is None else weights, **given)


def by_tokens(node: Any) -> rd.BaseNode[Any]:
    return rd.WeightedSampler({"a": node}, {"a": 1}, unit="tokens", column="tokens")


def scheduled(*later: Any, how: Any = "step", keys: Any = None) -> rd.Schedule:
    return rd.Schedule([(0, {"a": 1, "b": 2}), *later] if keys is None else keys, how)


def excluding(exclude: Any) -> rd.Reader:
    return rd.Reader(range(3), rd.Shard(), exclude=exclude)


class NoReader(rd.Node[int]):
    def next(self) -> int:
        return 1


A, B = {"a": 1, "b": 2}, {"a": 2, "b": 1}
ARGUMENTS: list[tuple[Make, str]] = [
    (lambda: rd.Reader(WEB, rd.Shard(), on_error="ignore"), "on_error='ignore'"),  # type: ignore[arg-type]
    (lambda: rd.Map(rows(), dict, on_error="ignore"), "'raise', 'skip' to leave"),  # type: ignore[arg-type]
    (lambda: rd.RandomMap(NoReader(), lambda _, rng: rng), "No node below reads a logical shard"),
    (lambda: rd.Shuffle(rows(), 0), "window=0: give the samples that are permuted .* at least 1"),
    (lambda: rd.Shuffle(nodes.IterableWrapper(range(3)), 3), "shard=, what the pipeline was called with"),
    (lambda: rd.Tokenize(rows(), len, "text", batch_size=0), "batch_size=0"),
    (partial(clean, min_length=-1), "min_length"),
    (partial(clean, max_length=0), "min_length"),
    (partial(clean, min_length=5, max_length=4), "min_length"),
    # blocklists
    (lambda: excluding([3]), "range has the rows 0 to 2"),
    (lambda: excluding("d17"), "exclude='d17'.*give a list"),
    (lambda: excluding(2), "exclude=2.*give"),
    (lambda: excluding({"a": [1]}), "given a dict.*does not name the files"),
    (lambda: excluding([0.5]), "values of float64"),
    (lambda: excluding(np.array([True, False, True])), "values of bool"),
    (lambda: rd.find_rows([1, 2], ["a"]), "No row of list can be looked up by its column 'id'"),
    (lambda: rd.find_rows(WEB, "d17"), "ids='d17': give a list"),
    # packers
    *((partial(make, seq_len=0), "seq_len=0") for make in (cut, whole)),
    *((partial(make, dtype=torch.int16), "dtype=torch.int16") for make in (cut, whole)),
    (partial(cut, last="keep"), "last='keep'"),
    (partial(cut, eos_id=-1), "eos_id=-1"),
    (partial(cut, bos_id=2**40, dtype=torch.int32), "bos_id="),
    (partial(whole, window=0), "window=0"),
    (partial(whole, max_documents=0), "max_documents=0"),
    (partial(whole, long="keep"), "long='keep'"),
    *(
        (
            partial(make, dtype=torch.int32, pad_id=2**31),
            r"pad_id=2147483648 does not fit torch.int32: give a token from -",
        )
        for make in (cut, whole)
    ),
    *((partial(make, columns={"tokens": torch.int64}), "yields itself") for make in (cut, whole)),
    *((partial(make, columns={"loss_mask": torch.int64}), "is torch.bool") for make in (cut, whole)),
    *((partial(make, columns={"x": torch.complex64}), "give one of") for make in (cut, whole)),
    *((partial(make, columns=["loss_mask"]), "give {name: dtype}") for make in (cut, whole)),
    (partial(whole, payload="images"), "give a list of columns"),
    (partial(whole, payload=["tokens"]), "yields itself"),
    (partial(whole, payload=["labels"]), "yields itself"),
    (partial(whole, payload=["id"], limits={"images": 5}), "give at least 1, for columns of payload="),
    (partial(whole, payload=["images"], limits={"images": 0}), "give at least 1"),
    (partial(whole, payload=["images"], limits=["images"]), "give {column: most}"),
    (partial(whole, payload=["images"], limits={"images": 1.5}), "give an int"),
    # mixtures
    (partial(mixed, weights={"b": 1}), r"nodes \['a'\] and the weights \['b'\]"),
    (lambda: rd.WeightedSampler({}, {}), "a weight for each"),
    (partial(mixed, "a.b", weights={"a.b": 1}), "cannot be part of a state's path"),
    (partial(mixed, "drawn", weights={"drawn": 1}), "cannot be part of a state's path"),
    (partial(mixed, "root", weights={"root": 1}), "cannot be part of a state's path"),
    (partial(mixed, weights={"a": 0}), "not all 0"),
    (partial(mixed, weights={"a": -1}), "none negative"),
    (partial(mixed, weights={"a": float("nan")}), "finite"),
    (partial(mixed, weights={"a": float("inf")}), "finite"),
    (partial(mixed, weights={"a": 10**400}), "finite"),
    (partial(mixed, "a", "b", weights={"a": 1e308, "b": 1e308}), "of a finite sum"),
    (partial(mixed, unit="words"), "'samples' or 'tokens'"),
    (partial(mixed, stop="now"), "'never', 'first' or 'all'"),
    (partial(mixed, unit="tokens"), "column=None"),
    (partial(mixed, column="tokens"), "column='tokens'"),
    (partial(mixed, weights={"a": True}), r"weights\['a'\]=True is a bool; give a number"),
    (partial(mixed, weights=[1]), r"weights=\[1\] is a list; give a dict"),
    (partial(mixed, weights={1: 1, "a": 1}), r"the weights \[1, 'a'\]"),
    (partial(mixed, max_epochs={"a": "3"}), r"max_epochs\['a'\]='3' is a str"),
    (partial(mixed, max_epochs=["a"]), r"max_epochs=\['a'\] is a list; give a dict"),
    (partial(mixed, max_epochs={"wob": 3}), "max_epochs has 'wob', and the sources are"),
    (partial(mixed, max_epochs={"a": 0}), "at least 1; for a source that rests, weight 0"),
    (partial(mixed, max_epochs={"a": 1}), r"fewer rows than there are logical shards \(5000\).*Schedule"),
    (partial(scheduled, keys=[]), "the first at 0"),
    (partial(scheduled, keys=[(5, A)]), "the first at 0"),
    (partial(scheduled, keys={0: A}), r"give a list of \(progress, {name: weight}\)"),
    (partial(scheduled, (9, None)), r"give a list of \(progress, {name: weight}\)"),
    (partial(scheduled, (9, B), (7, A)), "each later than the one before"),
    (partial(scheduled, (9, {"a": 1})), r"at 9 has weights of \['a'\]"),
    (partial(scheduled, (9, {"a": 0, "b": 0})), "in the key at 9: give finite"),
    (partial(scheduled, (9, {**A, "a": "1"})), r"weights\['a'\]='1' in the key at 9 is a str"),
    (partial(scheduled, how="cubic"), "'step' or 'linear'"),
    (lambda: rd.weights_by_size({"web": WEB}, "tokens"), "web does not know how many tokens"),
    (lambda: rd.weights_by_size({"web": WEB}, "words"), "'rows' or 'tokens', and a number above 0"),  # type: ignore[arg-type]
    (lambda: rd.weights_by_size({"web": WEB}, temperature=0), "'rows' or 'tokens', and a number above 0"),
    (lambda: rd.weights_by_size({"web": WEB}, temperature=float("nan")), "'rows' or 'tokens', and a number above 0"),
]


@pytest.mark.parametrize(("make", "message"), ARGUMENTS)
def test_what_is_no_argument_is_refused_where_it_is_given(make: Make, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_a_column_that_a_source_does_not_have_is_refused_where_it_is_given(tmp_path: Any) -> None:
    source = write("arrow", tmp_path, documents([3]))
    with pytest.raises(ValueError, match=r"no column 'ids'. It has 'tokens'"):
        cut(rd.Reader(source, rd.Shard()), column="ids")


def tokenize(node: Any, found: Any = None) -> rd.BaseNode[Any]:
    return rd.Tokenize(node, lambda texts: [[1] if found is None else found for _ in texts], "text")


BOTH: tuple[Make, ...] = (cut, whole)
SAMPLES: list[tuple[Make, Any, str]] = [
    *((make, {"tokens": None}, r"^{name}\(.*column='tokens'\) was given") for make in (*BOTH, clean, by_tokens)),
    *((make, {"ids": [1]}, r"keys \['ids'\]") for make in (*BOTH, clean, by_tokens)),
    (by_tokens, 3, "given a sample with a int"),
    (cut, [1, 2], "a sample with a list"),
    (cut, {"tokens": [1.5]}, "float64"),
    (cut, {"tokens": [[1, 2]]}, r"shape \[1, 2\]"),
    (cut, {"tokens": [[1, 2], [3]]}, "1-D array"),
    (cut, {"tokens": "text"}, "a str"),
    (tokenize, {"body": "abc"}, r"column='text'.*keys \['body'\].*NoneType"),
    (tokenize, {"text": 3}, "under that key a int"),
    (tokenize, ["text"], "was given a sample with a list"),
    (partial(tokenize, found=object()), {"text": ""}, "those are the .ids"),
    (partial(tokenize, found=[1.5]), {"text": ""}, "a list of token ids"),
    (partial(tokenize, found=[0.5, 1]), {"text": ""}, "The tokenizer returned a list for a text"),
    (
        lambda node: rd.Tokenize(node, cast("Any", lambda _: None), "text"),
        {"text": ""},
        "returned a NoneType for a list of texts. Give a f",
    ),
    *(
        (
            partial(make, columns={"loss_mask": torch.bool}),
            {**ROW, "loss_mask": [True]},
            r"has shape \[1\], and 'tokens' 3 t",
        )
        for make in BOTH
    ),
    *(
        (
            partial(make, columns={"reward": torch.int64}),
            {**ROW, "reward": [1.0, 2.5, 3.0]},
            "'reward' holds values of float64",
        )
        for make in BOTH
    ),
    *((partial(make, columns={"x": torch.int64}), ROW, "has 'x', but a sample has the keys") for make in BOTH),
    (partial(whole, payload=["images", "audio"]), ROW, "has 'audio', but a sample has the keys"),
    (
        partial(whole, payload=["images"], limits={"images": 1}),
        {**ROW, "images": [b"i", b"j"]},
        "more than a whole sample may",
    ),
]


@pytest.mark.parametrize(("make", "sample", "message"), SAMPLES)
def test_a_sample_that_does_not_fit_is_an_error_that_names_node_and_row(make: Make, sample: Any, message: str) -> None:
    node = make(rows(sample))
    with pytest.raises((ValueError, TypeError), match=message.replace("{name}", type(node).__name__)) as caught:
        next(node)
    assert any("given rows: rows[0]" in note for note in caught.value.__notes__)


def test_shards_that_yield_other_columns() -> None:
    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        return cut(rd.Reader([ROW] * 8, shard), seq_len=2 + shard.index)

    with pytest.raises(TypeError, match=r"logical shard 1 yields the columns .*Samples of all shards"):
        next(iter(rd.DataLoader(pipeline, global_batch_size=2, num_logical_shards=2)))


def test_provenance_of_samples_that_are_no_dicts() -> None:
    with pytest.raises(TypeError, match="a sample is a int"):
        next(rd.Reader(range(3), rd.Shard(), provenance=True))


def test_a_source_that_yields_nothing_is_named() -> None:
    nodes = {"web": read(WEB, rd.Shard()), "none": rd.Filter(read(WEB, rd.Shard()), lambda _: False)}
    with pytest.raises(rd.DataStateError, match="'none' of a mixture yielded no sample in 2 whole epochs"):
        list(rd.WeightedSampler(nodes, {"web": 1, "none": 1}))
