"""`DatasetSource`: a map-style dataset's own rows."""

import pickle

import pytest

from rescale_data.sources.dataset import DatasetSource, as_source
from rescale_data.sources.source import Source


class Squares:
    _fingerprint = "abc"

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index**2


def test_is_a_source_of_the_datasets_own_rows() -> None:
    source = DatasetSource(Squares())
    assert isinstance(source, Source)
    assert [source.row(i) for i in range(source.num_rows)] == [0, 1, 4, 9, 16]
    assert source.fragments is None
    assert source.locate(3) == "Squares[3]"
    assert source.manifest() == {"format": "dataset", "class": "Squares", "rows": 5, "fingerprint": "abc"}
    assert DatasetSource([1], name="mine").name == "mine"
    assert pickle.loads(pickle.dumps(source)).row(2) == 4


def test_a_dataset_is_wrapped_once_and_a_source_not_at_all() -> None:
    dataset = Squares()
    source = as_source(dataset)
    assert as_source(dataset) is source
    assert as_source(source) is source
    assert as_source(Squares()) is not source


def test_what_is_no_dataset() -> None:
    with pytest.raises(TypeError, match="generator is neither a source nor a map-style dataset"):
        as_source(i for i in range(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="list has no rows"):
        DatasetSource([])
