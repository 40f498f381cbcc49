"""`Block`: some documents end to end, and where each of them ends."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

TokenArray: TypeAlias = npt.NDArray[np.integer[Any]]

_BYTES_OF_AN_END = 40  # of a Python int and its place in a list


@dataclass(frozen=True, slots=True)
class Block:
    """Documents end to end, in the dtype they are stored in.

    Args:
        tokens: With ``bos_id`` and ``eos_id`` in their places.
        ends: For each document, the tokens up to its end.
        where: Where the document comes from, of which a block has then one only.
    """

    tokens: TokenArray
    ends: list[int]
    where: str | None = None

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + _BYTES_OF_AN_END * len(self.ends)

    def locate(self, stop: int, document: int) -> tuple[int, int]:
        """The document and the offset in it at which to go on after ``stop`` tokens, searched from ``document`` on."""
        ends = self.ends
        document = bisect_left(ends, stop, document)
        if ends[document] == stop:
            return document + 1, 0
        return document, stop - (ends[document - 1] if document else 0)

    def ends_between(self, start: int, stop: int) -> list[int]:
        """Where documents end in ``tokens[start:stop]``, counted from ``start``."""
        return [end - start for end in self.ends[bisect_right(self.ends, start) : bisect_right(self.ends, stop)]]


class BlockMaker:
    """Puts documents end to end.

    Args:
        eos_id, bos_id: Put after and before each document; `None` for nothing.
        dtype: In which the tokens must be representable in the end.
    """

    def __init__(self, eos_id: int | None, bos_id: int | None, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._front = int(eos_id is not None)
        self._between = [token for token in (eos_id, bos_id) if token is not None]
        self._ways: dict[str, _Way] = {}
        for name, token in (("eos_id", eos_id), ("bos_id", bos_id)):
            if token is not None and not 0 <= token <= np.iinfo(dtype).max:
                raise ValueError(
                    f"{name}={token}: give a token from 0 to {np.iinfo(dtype).max}, or None for no such token."
                )

    def make(self, documents: list[memoryview[Any]], where: str | None = None) -> Block:
        kind = documents[0].format
        way = self._ways.get(kind)
        if way is None:
            way = self._ways[kind] = self._way(np.dtype(kind))
        if way.widened:
            documents = [np.asarray(document).astype(way.dtype).data for document in documents]
        ends = np.cumsum(np.fromiter(map(len, documents), np.int64, len(documents)) + len(self._between))
        # One join of [nothing, the documents, nothing]: an eos too many at the front and a bos too many at the end.
        joined = np.frombuffer(way.separator.join((b"", *documents, b"")), dtype=way.dtype)
        tokens = joined[self._front : self._front + int(ends[-1])]
        if way.checked and len(tokens):
            self._check(tokens)
        return Block(tokens, ends.tolist(), where)

    def _way(self, stored: np.dtype[Any]) -> _Way:
        widened = any(token > np.iinfo(stored).max for token in self._between)
        dtype = self.dtype if widened else stored
        separator = np.array(self._between, dtype=dtype).tobytes()
        return _Way(dtype, separator, widened, not np.can_cast(stored, self.dtype))

    def _check(self, tokens: TokenArray) -> None:
        limits = np.iinfo(self.dtype)
        if int(tokens.max()) > limits.max or int(tokens.min()) < limits.min:
            raise ValueError(
                f"The tokens from {tokens.min()} to {tokens.max()} do not fit {self.dtype}: give a wider dtype."
            )


class _Way(NamedTuple):
    """How to join documents of one dtype: in which, what between them, and whether they must be converted or checked."""

    dtype: np.dtype[Any]
    separator: bytes
    widened: bool
    checked: bool
