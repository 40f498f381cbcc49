"""`TokenStream`: the tokens of documents end to end, from any position on, a sample at a time."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from rescale_data.errors import DataStateError
from rescale_data.nodes.base import copy_of
from rescale_data.nodes.reading.block import Block, BlockMaker, TokenArray
from rescale_data.nodes.reading.documents import Documents
from rescale_data.sources.decoded.cache import cache, owner_of
from rescale_data.state import Ints

_SILENT_EPOCHS = 2
_MAX_CUTS = 64  # at once, so that they take little memory beside the block

Run: TypeAlias = tuple[TokenArray, Ints]
"""Tokens in a row, and the places among them at which a document has ended. Not to be written to, nor kept."""

Cut: TypeAlias = tuple[int, int, int]
"""A sample in a block: its first token, and the document and the offset in it at which the next one begins."""


class TokenStream:
    """Tokens from ``position`` on, a row of ``[offset in the document | position of the documents]``.

    What has been put in order, a `Block`, lies in the cache of the process; this holds integers alone. A
    block that has been evicted is made again from the position. That is the one directly behind the last token, wherever blocks
    begin and end: documents without a token are passed on the way to the next one.

        block      | doc | document | d |   document   |
        samples    ---| gathered |   cut   |   cut   |--       those within a block are cut many at once

    Args:
        documents: Where documents come from.
        maker: Makes blocks of them.
        num_tokens: Tokens of a sample.
        num_ahead: As many of those behind it come along, and are not consumed.
        repeat: Whether to go on with the next epoch after the last document of one.
    """

    def __init__(
        self, documents: Documents, maker: BlockMaker, *, num_tokens: int, num_ahead: int, repeat: bool, with_ends: bool
    ) -> None:
        self._documents, self._maker = documents, maker
        self._num_tokens, self._num_ahead, self._repeat = num_tokens, num_ahead, repeat
        self._with_ends = with_ends
        self._width = num_tokens + num_ahead
        self._key = (owner_of(self), "block")
        self.where: list[str] = []
        """Where the documents of the run that was taken last come from, where that is asked for."""

    def bind(self, position: memoryview, *, settles: bool) -> None:
        """Go on from ``position``, and keep it up to date.

        Args:
            position: An offset in a document, and the position of the documents.
            settles: Whether what has changed between legs takes effect at the beginning of a document (`Node.settle`).
        """
        self._position, self._bookmark, self._settles = position, position[1:], settles
        self._forget()

    def take(self) -> Run:
        """The next sample's tokens and those ahead; less where the epoch ends."""
        if self._next < len(self._cuts):
            block: Block | None = cache().get(self._key)
            if block is not None:
                start, document, self._position[0] = self._cuts[self._next]
                self._next += 1
                before = self._document
                if document != before:
                    self._documents.advance(self._bookmark, document - before)
                    self._document = document
                ends = block.bounds[before + 1 : document + 1] - start if self._with_ends else _NO_ENDS
                return block.tokens[start : start + self._width], ends
            self._forget()
        return self._gather()

    def turn(self) -> None:
        """Move to the beginning of the next epoch, after `take` has found the end of this one."""
        self._documents.turn(self._bookmark)
        self._position[0] = 0
        self._forget()

    def _forget(self) -> None:
        self._at = -1  # the next token in the block behind the cuts, -1 where there is no block
        self._document = 0  # the document of the next token
        self._cuts: list[Cut] = []
        self._next = 0

    def _gather(self) -> Run:
        """A sample that is not within one block, and the cuts of those behind it that are."""
        parts: list[TokenArray] = []
        ends: list[Ints] = [_NO_ENDS]
        self.where = []
        length = 0
        block = self._block()
        while length < self._num_tokens and block is not None:
            start, before = self._at, self._document
            stop = min(start + self._num_tokens - length, len(block.tokens))
            parts.append(block.tokens[start:stop])
            self._move(block, stop)
            if self._with_ends:
                ends.append(block.bounds[before + 1 : self._document + 1] + (length - start))
            if block.where is not None:
                self.where.append(block.where)
            length += stop - start
            block = self._block() if length < self._width else block
        if not parts:
            return _NO_TOKENS, _NO_ENDS
        if block is not None:
            if length == self._num_tokens:
                parts.append(block.tokens[self._at : self._at + self._num_ahead])
            if self._at or self._position == self._origin:
                self._cut(block)
            else:
                self._step_back()
        return np.concatenate(parts, dtype=self._maker.dtype, casting="unsafe"), np.concatenate(ends)

    def _move(self, block: Block, stop: int) -> None:
        document, offset = block.locate(stop)
        if document != self._document:
            self._documents.advance(self._bookmark, int(document) - self._document)
        self._at, self._document, self._position[0] = stop, int(document), int(offset)

    def _cut(self, block: Block) -> None:
        """Find the samples that lie within the block from here on."""
        num_samples = min(_MAX_CUTS, (len(block.tokens) - self._num_ahead - self._at) // self._num_tokens)
        if num_samples < 1 or block.where is not None:
            return
        stop = self._at + self._num_tokens * num_samples
        starts = np.arange(self._at, stop, self._num_tokens)
        documents, offsets = block.locate(starts + self._num_tokens)
        self._cuts, self._next = list(zip(starts.tolist(), documents.tolist(), offsets.tolist(), strict=True)), 0
        self._at = stop

    def _block(self) -> Block | None:
        """The block with the next token; `None` where the stream ends."""
        block: Block | None = cache().get(self._key) if self._at >= 0 else None
        if block is None or self._at == len(block.tokens):
            block = self._load()
        return block

    def _step_back(self) -> None:
        """To before the documents without a token that were passed in search of the next one: none was needed yet."""
        self._position[:] = self._origin
        self._forget()

    def _load(self) -> Block | None:
        turns, has_passed = 0, False
        while turns <= _SILENT_EPOCHS:
            if self._settles and not self._position[0]:
                self._documents.settle(self._bookmark)
            if not has_passed:
                self._origin = copy_of(self._position)
            documents = self._documents.read(self._bookmark)
            if documents and len((block := self._maker.make(documents, self._documents.where())).tokens):
                cache().put(self._key, block)
                self._forget()
                self._at = self._position[0]
                return block
            has_passed = bool(documents)
            if documents:
                self._documents.advance(self._bookmark, len(documents))
            elif self._repeat:
                self._documents.turn(self._bookmark)
                turns += 1
            else:
                self._step_back()
                return None
        raise DataStateError(
            f"A logical shard had no token in {_SILENT_EPOCHS} whole epochs: its documents are empty or filtered out. "
            f"Check the column and the filters, or give fewer logical shards."
        )


_NO_TOKENS = _NO_ENDS = np.zeros(0, dtype=np.int64)
