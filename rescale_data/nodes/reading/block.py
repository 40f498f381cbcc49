"""`Block`: some documents end to end, and where each of them ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rescale_data.errors import require_int
from rescale_data.state import Ints

TokenArray: TypeAlias = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Block:
    """Documents end to end, in the dtype they are stored in.

    Args:
        tokens: With ``bos_id`` and ``eos_id`` in their places.
        bounds: ``int64[D + 1]``, where each document begins, and the end of the last.
        where: Where the document comes from, of which a block has then one only.
    """

    tokens: TokenArray
    bounds: Ints
    where: str | None = None

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.bounds.nbytes

    def locate(self, stops: Ints | int) -> tuple[Any, Any]:
        """Where to go on after so many tokens: which document, and the offset in it; where one ends, in the next.

        That may have no token. Documents without any are not passed before one behind them is needed, so that the place
        does not depend on how many of them are in the block.
        """
        documents = self.bounds.searchsorted(stops)
        documents -= self.bounds[documents] > stops
        return documents, stops - self.bounds[documents]


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
            if token is not None:
                require_int(**{name: token})
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
        bounds = np.zeros(len(documents) + 1, dtype=np.int64)
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        np.cumsum(lengths + len(self._between), out=bounds[1:])
        # One join of [nothing, the documents, nothing]: an eos too many at the front and a bos too many at the end.
        joined = np.frombuffer(way.separator.join((b"", *documents, b"")), dtype=way.dtype)
        tokens = joined[self._front : self._front + int(bounds[-1])]
        if way.checked and len(tokens):
            self._check(tokens)
        return Block(tokens, bounds, where)

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
