"""`DatasetSource`: the rows of a map-style dataset."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from rescale_data.sources.source import Source


@runtime_checkable
class MapStyle(Protocol):
    """Anything with ``__len__`` and ``__getitem__``."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class DatasetSource:
    """Rows of anything with ``__len__`` and ``__getitem__``, as the dataset returns them.

    Args:
        dataset: It must pickle where there are worker processes, and return the same row for the same index.
        name: For logs and counters; default: the name of its class.

    Raises:
        TypeError: ``dataset`` has no ``__len__`` or no ``__getitem__``.
        ValueError: It has no rows.
    """

    def __init__(self, dataset: MapStyle, name: str | None = None) -> None:
        if not isinstance(dataset, MapStyle):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"A {type(dataset).__name__} is neither a source nor a map-style dataset. Give a rescale_data source, or "
                f"anything with __len__ and __getitem__: rows are read in an order of our own, so an iterable is not enough."
            )
        self.dataset = dataset
        self._name = name or type(dataset).__name__
        self._num_rows = len(dataset)
        if not self._num_rows:
            raise ValueError(f"The dataset {self._name} has no rows (its len() is 0). Give one that has some.")

    @property
    def name(self) -> str:
        return self._name

    @property
    def num_rows(self) -> int:
        return self._num_rows

    @property
    def fragments(self) -> None:
        return None

    def manifest(self) -> Mapping[str, Any]:
        """Class and length, and the fingerprint that Hugging Face datasets keep of their contents."""
        fingerprint = getattr(self.dataset, "_fingerprint", None)
        known = {"fingerprint": fingerprint} if isinstance(fingerprint, str) else {}
        return {"format": "dataset", "class": type(self.dataset).__qualname__, "rows": self._num_rows, **known}

    def row(self, index: int) -> Any:
        return self.dataset[index]

    def locate(self, index: int) -> str:
        return f"{self._name}[{index}]"


_wrapped: weakref.WeakValueDictionary[int, DatasetSource] = weakref.WeakValueDictionary()


def as_source(data: Source | MapStyle) -> Source:
    """``data`` itself if it is a source, else the one `DatasetSource` of this dataset object."""
    if isinstance(data, Source):
        return data
    source = _wrapped.get(id(data))  # the source holds its dataset, so the id cannot be that of another
    if source is None:
        source = _wrapped[id(data)] = DatasetSource(data)
    return source
