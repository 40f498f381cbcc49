"""`DatasetSource`: makes a map-style dataset a source of rows."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import pyarrow as pa

from rescale_data.errors import checks_argument_types
from rescale_data.sources.decoded.cache import DEFAULT_CACHE_BYTES
from rescale_data.sources.source import Source


@runtime_checkable
class MapStyle(Protocol):
    """A map-style dataset: anything with ``__len__`` and ``__getitem__``."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


_log = logging.getLogger("rescale_data")
_warned: set[str] = set()


class DatasetSource(Source):
    """Rows of a map-style dataset (``__len__`` and ``__getitem__``), as the dataset returns them.

    Each row is decoded when it is read. If the dataset has ``__getitems__``, many rows are fetched at a time. Format and
    transformations of a Hugging Face ``Dataset`` apply. Rows may be of any kind and of any length: ``collate_fn`` makes a batch
    of them. If reading a row fails, the error names the row, or the row is left out: see ``on_error`` of `Reader`.

    Args:
        dataset: Must return the same row for the same index, and must pickle if there are worker processes.
        name: Name for logs and counters; default: the name of the dataset's class.
        batch_rows: Number of rows of a shard that are fetched together at most, if the dataset has ``__getitems__``.
        cache_bytes: Bytes of rows fetched ahead that a rank may keep, see `ParquetSource`.

    Raises:
        TypeError: ``dataset`` has no ``__len__`` or no ``__getitem__``, or it is a path, a dict or a table.
        ValueError: ``dataset`` has no rows, or an argument is out of range.

    Example:
        >>> import rescale_data as rd
        >>> rd.DatasetSource(["one", "two"]).row(1)
        'two'
    """

    @checks_argument_types
    def __init__(
        self, dataset: MapStyle, name: str = "", *, batch_rows: int = 16, cache_bytes: int = DEFAULT_CACHE_BYTES
    ) -> None:
        if isinstance(dataset, pa.Table | pa.RecordBatch) or hasattr(dataset, "iloc"):
            raise TypeError(
                f"A {type(dataset).__name__} is a table, and table[3] a column of it, not a row. Give the rows: "
                f"table.to_pylist(), frame.to_dict('records'), a datasets.Dataset of it, or write it as Parquet for "
                f"rd.ParquetSource."
            )
        if isinstance(dataset, str | bytes | os.PathLike | Mapping) or not isinstance(dataset, MapStyle):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"The {type(dataset).__name__} {dataset!r:.120} is no data set: give rd.ParquetSource(...), or the source of "
                f"another format, for files, one split of a dict of data sets, or anything with __len__ and __getitem__; a "
                f"stream that has neither is an rd.IterableSource."
            )
        if batch_rows < 1 or cache_bytes < 1:
            raise ValueError(f"{batch_rows=}, {cache_bytes=}: each is at least 1.")
        self.dataset, self.cache_bytes = dataset, cache_bytes
        self.batch_rows = batch_rows if hasattr(dataset, "__getitems__") else 1
        self.name = name or type(dataset).__name__
        self.num_rows = len(dataset)
        _warn_of_ignored_state(dataset)
        if not self.num_rows:
            raise ValueError(f"The dataset {self.name} has no rows (its len() is 0). Give one that has some.")

    def manifest(self) -> Mapping[str, Any]:
        """Return the dataset's class and length and, for a Hugging Face dataset, the fingerprint of its contents."""
        fingerprint = getattr(self.dataset, "_fingerprint", None)
        extra_facts = {"fingerprint": fingerprint} if isinstance(fingerprint, str) else {}
        return {"format": "dataset", "class": type(self.dataset).__qualname__, "rows": self.num_rows, **extra_facts}

    def row(self, index: int) -> Any:
        return self.dataset[index]

    def rows(self, indices: Sequence[int]) -> Sequence[Any]:
        if self.batch_rows > 1:
            return cast(Any, self.dataset).__getitems__(list(indices))
        return super().rows(indices)

    def locate(self, index: int) -> str:
        return f"{self.name}[{index}]"


def _warn_of_ignored_state(dataset: MapStyle) -> None:
    """Warn, once for each class, if a dataset has a state of its own, which is not saved.

    `StatefulDataLoader` of torchdata would save it.
    """
    name = type(dataset).__qualname__
    if name not in _warned and all(callable(getattr(dataset, key, None)) for key in ("state_dict", "load_state_dict")):
        _warned.add(name)
        _log.warning(
            "The dataset %s has state_dict and load_state_dict, which are not called: a row is a function of its index alone, "
            "so that any rank can read it. Let an epoch or a random number come from the row, or use rd.RandomMap.", name,
        )  # fmt: skip


_source_of_dataset: weakref.WeakValueDictionary[int, DatasetSource] = weakref.WeakValueDictionary()


def as_source(data: Source | MapStyle | os.PathLike[str]) -> Source:
    """Return ``data`` if it is a source, else a `DatasetSource` around it, always the same one for the same dataset object.

    Raises:
        TypeError: ``data`` is no map-style dataset, or a path, a dict or a table: these hold no rows by number.
        ValueError: The dataset has no rows, or not as many as when its source, which still exists, was made.
    """
    if isinstance(data, Source):
        return data
    source = _source_of_dataset.get(id(data))  # the source holds its dataset, so no other object has this id
    if source is None:
        source = _source_of_dataset[id(data)] = DatasetSource(cast(MapStyle, data))
    elif source.num_rows != len(source.dataset):
        raise ValueError(
            f"The dataset {source.name} has {len(source.dataset)} rows, and had {source.num_rows} when a loader or a reader "
            f"that still exists was built. Build this one with rd.DatasetSource(dataset), which reads the rows of now."
        )
    return source
