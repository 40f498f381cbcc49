"""`TokenStream`: the tokens of documents end to end, from any position on."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from rescale_data.errors import DataStateError
from rescale_data.nodes.block import Block, BlockMaker, TokenArray
from rescale_data.nodes.documents import Documents
from rescale_data.sources.cache import cache, owner_of

_SILENT_EPOCHS = 2


Run: TypeAlias = tuple[TokenArray, list[int]]
"""Tokens in a row, and the places among them at which a document has ended. Not to be written to, nor kept."""


class TokenStream:
    """Tokens from ``position`` on, a row of ``[offset in the document | position of the documents]``.

    What has been put in order, a `Block`, lies in the cache of the process; this holds integers alone. A
    block that has been evicted is made again from the position.

    Args:
        documents: Where documents come from.
        maker: Makes blocks of them.
        repeat: Whether to go on with the next epoch after the last document of one.
        with_ends: Whether runs tell where documents end.
    """

    def __init__(self, documents: Documents, maker: BlockMaker, *, repeat: bool, with_ends: bool) -> None:
        self._documents, self._maker = documents, maker
        self._repeat, self._with_ends = repeat, with_ends
        self._key = (owner_of(self), "block")
        self.where: list[str] = []
        """Where the documents of the run that was taken last come from, where that is asked for."""

    def bind(self, position: memoryview) -> None:
        """Go on from ``position``, and keep it up to date."""
        self._position, self._bookmark = position, position[1:]
        self._at = (
            -1
        )  # the next token in the cached block, of which `_document` is the document; -1 before there is one
        self._document = 0

    def take(self, num_tokens: int, num_ahead: int) -> Run:
        """The next tokens, and behind them some of those that follow, which are not consumed; less where the epoch ends."""
        start = self._at
        block: Block | None = cache().get(self._key) if start >= 0 else None
        if block is None or block.where is not None or start + num_tokens + num_ahead > len(block.tokens):
            return self._gather(num_tokens, num_ahead)
        ends = block.ends_between(start, start + num_tokens) if self._with_ends else _NO_ENDS
        self._move(block, start + num_tokens)
        return block.tokens[start : start + num_tokens + num_ahead], ends

    def turn(self) -> None:
        """Move to the beginning of the next epoch, after `take` has found the end of this one."""
        self._documents.turn(self._bookmark)
        self._position[0] = 0
        self._at = -1

    def _gather(self, num_tokens: int, num_ahead: int) -> Run:
        parts: list[TokenArray] = []
        ends: list[int] = []
        self.where = []
        length = 0
        while length < num_tokens and (block := self._block()) is not None:
            start, stop = self._at, min(self._at + num_tokens - length, len(block.tokens))
            parts.append(block.tokens[start:stop])
            ends += [length + end for end in block.ends_between(start, stop)]
            length += stop - start
            if block.where is not None:
                self.where.append(block.where)
            self._move(block, stop)
        if length == num_tokens and num_ahead and (block := self._block()) is not None:
            parts.append(block.tokens[self._at : self._at + num_ahead])
        return np.concatenate(parts, dtype=self._maker.dtype, casting="unsafe") if parts else _NO_TOKENS, ends

    def _move(self, block: Block, stop: int) -> None:
        document, offset = block.locate(stop, self._document)
        if document != self._document:
            self._documents.advance(self._bookmark, document - self._document)
        self._position[0] = offset
        self._at, self._document = stop, document

    def _block(self) -> Block | None:
        """The block with the next token; `None` where the stream ends."""
        block: Block | None = cache().get(self._key) if self._at >= 0 else None
        if block is None or self._at == len(block.tokens):
            block = self._load()
        return block

    def _load(self) -> Block | None:
        turns = 0
        while turns <= _SILENT_EPOCHS:
            if not self._position[0]:
                self._documents.settle(self._bookmark)
            documents = self._documents.read(self._bookmark)
            if documents and (block := self._maker.make(documents, self._documents.where())).ends[-1]:
                cache().put(self._key, block)
                self._at, self._document = self._position[0], 0
                return block
            if documents:
                self._documents.advance(self._bookmark, len(documents))
            elif self._repeat:
                self._documents.turn(self._bookmark)
                turns += 1
            else:
                return None
        raise DataStateError(
            f"A logical shard had no token in {_SILENT_EPOCHS} whole epochs: its documents are empty or filtered out. "
            f"Check the column and the filters, or give fewer logical shards."
        )


_NO_TOKENS = np.zeros(0, dtype=np.int64)
_NO_ENDS: list[int] = []
