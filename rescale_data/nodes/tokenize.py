"""`Tokenize`: turns text into tokens, many documents at a time."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from rescale_data.errors import checks_argument_types
from rescale_data.nodes.base import BaseNode, Node, View, bind_once, draw_and_drop, go_to
from rescale_data.nodes.below import epoch_end_of_source, has_provenance, may_change, open_texts, skip
from rescale_data.nodes.cache_check import CacheCheck
from rescale_data.nodes.column import DocumentsOrSamples
from rescale_data.nodes.empty_draws import EmptyDrawLimit
from rescale_data.nodes.error_handler import OnError, describe, error_handler
from rescale_data.nodes.function import require_function
from rescale_data.nodes.reading.documents import DocumentReader
from rescale_data.nodes.tokenized import NUM_FIRST_TEXTS, TokenizedDocuments, TokenizedSamples
from rescale_data.sources.decoded.cache import CostlyValue, cache, owner_id
from rescale_data.state import Ints, copy_of, counter

Tokenizer: TypeAlias = Callable[[list[str]], Sequence[Any]]
Tokens: TypeAlias = npt.NDArray[np.integer[Any]]

_BYTES_OF_A_SAMPLE = 512
_WHAT_TO_GIVE = "Give a function from a list of strings to a list of as many lists of token ids."

_log = logging.getLogger("rescale_data")

_FINGERPRINT_TEXTS = [
    "Tokens of 2 texts, to know a tokenizer by: naïve façade, 東京, x = [1.5e-3];\n\t",
    " 'a' \"b\" <c/> #d",
]


class _Sentinel(Enum):
    FAILED = 1
    END_OF_EPOCH = 2


class _CountError(ValueError):
    """Error raised if a tokenizer returned another number of sequences than it was given texts, whatever ``on_error`` is."""


@dataclass(frozen=True)
class TokenBatch(CostlyValue):
    """Samples that were tokenized together, each with the source's position after it; a mark replaces a missing sample.

    Args:
        locations: The location of each sample, for messages.
        samples_and_positions: Sample or mark, and the position of the source after it.
        nbytes: Size for the cache.
    """

    locations: list[str]
    samples_and_positions: list[tuple[dict[str, Any] | _Sentinel, View]]
    nbytes: int


class Tokenize(Node[dict[str, Any]]):
    """Replaces the text of each sample with its tokens.

    The tokenizer gets the texts of up to ``batch_size`` samples at a time. This must not make a difference: the tokens of a
    text depend on that text alone. The position is the source's position after the last yielded sample. So when a packer
    resumes within a document, that document is tokenized again, and no other document that was used.

    A state identifies the tokenizer by its tokens for a short text, so a changed tokenizer is an error. If the tokenizer raises
    for that text, it is not identified, and a warning says so.

    Args:
        source: A node whose samples hold a string under ``column``.
        tokenizer: Function from a list of strings to as many sequences of token ids. For Hugging Face tokenizers, a function
            that returns ``[e.ids for e in tokenizer.encode_batch(texts)]``; for tiktoken, ``encoding.encode_ordinary_batch``.
        column: The column of the text. Yielded samples do not have it.
        into: The column of the tokens: an array as the tokenizer returns it, ``int64`` of a list of ints.
        batch_size: Largest number of texts at a time. After a start or a resume the number is small, and doubles each time.
            So the first batch of many logical shards does not wait for texts that it does not need. Tokenized samples wait in
            the process's cache. If they do not fit, a warning names a ``batch_size`` that does: with the first full batch, or
            when the cache has evicted batches.
        on_error: As in `Map`, for samples without a string there, and for texts for which the tokenizer raises or returns
            something else than token ids. A function returns token ids, or `None`.

    Raises:
        ValueError: A sample has no string there. The tokenizer returned another number of sequences than it was given texts;
            this is raised whatever ``on_error`` is.
        TypeError: The tokenizer returned something else than token ids.

    Example:
        >>> import rescale_data as rd
        >>> reader = rd.Reader([{"text": "abc"}], rd.Shard())
        >>> next(rd.Tokenize(reader, lambda texts: [list(text.encode()) for text in texts], "text"))["tokens"].tolist()
        [97, 98, 99]
    """

    FIELDS = (counter("skipped"),)
    READS_AHEAD: ClassVar[bool] = True
    RESUME_UNIT = "document"  # and never is: it has no own slot that says where it stands
    epochs_are_equal = True

    @checks_argument_types
    def __init__(
        self,
        source: BaseNode[Any],
        tokenizer: Tokenizer,
        column: str,
        *,
        into: str = "tokens",
        batch_size: int = 64,
        on_error: OnError = "raise",
    ) -> None:
        require_function(tokenizer, "a list of texts")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give the number of texts to tokenize at a time, at least 1.")
        super().__init__(source=source)
        self.tokenizer, self.column, self.into, self.batch_size = tokenizer, column, into, batch_size
        self._source = self.children["source"]
        self._error_handler, self._draw_limit = error_handler(self, on_error), EmptyDrawLimit(self)
        self._cache_key, self._cache_room_warner = (owner_id(self), "batch"), CacheCheck(self, "batch_size", batch_size)

    def seek(self) -> None:
        self._bookmark = self.position[self._slots("source")]
        self._index = -1  # index in the cached batch; -1 before there is a batch
        self._num_next_texts = NUM_FIRST_TEXTS  # texts of the next batch
        self._is_epoch_over = False

    def next(self) -> dict[str, Any]:
        num_empty_draws = 0
        while not self._is_epoch_over:
            sample, next_position = self._next_entry()
            self._bookmark[:] = next_position
            if sample is _Sentinel.END_OF_EPOCH:
                self._is_epoch_over = True
            elif sample is _Sentinel.FAILED:
                self.position[0] += 1
                num_empty_draws = self._draw_limit.count_empty_draws(num_empty_draws)
            else:
                return sample
        raise StopIteration

    def skip(self, num_samples: int) -> int:
        if self._error_handler.skips:
            return draw_and_drop(self, num_samples)
        bind_once(self)
        if self._is_epoch_over:  # a new bind would let the source go on with its next epoch
            return 0
        go_to(self._source, self._bookmark)
        self._index = -1
        num_skipped = skip(self._source, num_samples)
        self._is_epoch_over = num_skipped < num_samples
        self._bookmark[:] = self._source.position
        return num_skipped

    def epoch_end(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        return None if self._error_handler.skips else epoch_end_of_source(self, rows, shards)

    def parameters(self) -> dict[str, Any]:
        return {"column": self.column, "into": self.into, "tokenizer": self._tokenizer_fingerprint()}

    def locate(self) -> str:
        batch: TokenBatch | None = cache().get(self._cache_key) if self._index > 0 else None
        return "" if batch is None or self._index > len(batch.locations) else batch.locations[self._index - 1]

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        return {"skipped_rows": float(rows[:, 0].sum())}

    def _next_entry(self) -> tuple[dict[str, Any] | _Sentinel, View]:
        batch: TokenBatch | None = cache().get(self._cache_key) if self._index >= 0 else None
        if batch is None or self._index == len(batch.samples_and_positions):
            was_dropped = batch is None and self._index >= 0
            batch, self._index = self._load_batch(), 0
            num_texts = len(batch.samples_and_positions)
            self._cache_room_warner.warn_if_full(batch.nbytes, num_texts, was_evicted=was_dropped)
            cache().put(self._cache_key, batch)
        self._index += 1
        return batch.samples_and_positions[self._index - 1]

    def open_documents(self, column: str) -> DocumentReader | None:
        needs_samples = any(has_provenance(node) or may_change(node) for _, node in self.walk())
        if column != self.into or self._error_handler.skips or needs_samples:
            return None
        texts = open_texts(self._source, self.column)
        if texts is None:
            return TokenizedSamples(self)
        return DocumentsOrSamples(TokenizedDocuments(self, texts), partial(TokenizedSamples, self))

    def dtype_of(self, column: str) -> np.dtype[Any] | None:
        return None

    def next_texts(self, max_texts: int) -> list[tuple[Tokens, View]]:
        """Return the tokens of the next texts, each with this node's position after it; no texts at the end of the epoch.

        The node moves to the last of these positions.
        """
        tokens_and_positions: list[tuple[Tokens, View]] = []
        for sample, next_position in self._load_batch(max_texts).samples_and_positions:
            if tokens_and_positions and isinstance(sample, _Sentinel):
                break
            self._bookmark[:] = next_position
            if not isinstance(sample, _Sentinel):
                tokens_and_positions.append((sample[self.into], copy_of(self.position)))
        return tokens_and_positions

    def _load_batch(self, max_texts: int = sys.maxsize) -> TokenBatch:
        """Draw and tokenize the samples after the last yielded one, up to ``max_texts``."""
        if self._source.position != self._bookmark:
            go_to(self._source, self._bookmark)
        samples, locations = list[Any](), list[str]()
        next_positions: list[View] = []
        while len(next_positions) < min(max_texts, self._num_next_texts) and len(samples) == len(next_positions):
            try:
                sample, location = next(self._source), self._source.locate()
                samples.append(sample)
                locations.append(location)
            except StopIteration:
                pass
            except Exception:
                # Raised again in the turn of its sample; until it is bound anew, a generator has ended with its error
                go_to(self._source, next_positions[-1] if samples else self._bookmark)
                if samples:
                    break
                raise
            next_positions.append(copy_of(self._source.position))
        self._num_next_texts = min(2 * self._num_next_texts, self.batch_size)
        tokens = self._tokenize(samples, locations)
        if len(tokens) < len(samples):  # the next sample raises an error, in its turn
            del samples[len(tokens) :], next_positions[len(tokens) :]
        tokenized = [self._with_tokens(*pair) for pair in zip(samples, tokens, strict=True)]
        entries = list(zip([*tokenized, _Sentinel.END_OF_EPOCH], next_positions, strict=False))
        return TokenBatch(locations, entries, sum(_BYTES_OF_A_SAMPLE + ids.nbytes for ids in tokens if ids is not None))

    def _tokenize(self, samples: list[Any], locations: list[str]) -> list[Tokens | None]:
        try:
            return self._tokens(samples)
        except Exception:
            return self._one_by_one(samples, locations)

    def _one_by_one(self, samples: list[Any], locations: list[str]) -> list[Tokens | None]:
        """Tokenize samples one by one, to handle the error of each sample that cannot be tokenized.

        Where an error must be raised, return the samples before. The error is raised again in the turn of its sample.
        """
        tokens: list[Tokens | None] = []
        num_failed = self.position[0]
        for sample, location in zip(samples, locations, strict=True):
            try:
                tokens += self._tokens([sample])
            except Exception as error:
                try:
                    if isinstance(error, _CountError):
                        raise
                    replacement = self._error_handler.handle_error(error, location, num_failed)
                    tokens.append(None if replacement is None else _to_token_array(replacement))
                except Exception:
                    if tokens:
                        break
                    raise
                num_failed += replacement is None
        return tokens

    def _tokens(self, samples: list[Any]) -> list[Tokens | None]:
        """Return the token ids of each sample; raise an error if a sample has no text, or a result is not theirs or no ids."""
        texts = [self._text(sample) for sample in samples]
        if not texts:
            return []
        ids_of_texts = self.tokenizer(texts)
        if not isinstance(ids_of_texts, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"The tokenizer returned a {type(ids_of_texts).__name__} for a list of texts. {_WHAT_TO_GIVE}"
            )
        tokens: list[Tokens | None] = [_to_token_array(ids) for ids in ids_of_texts]
        if len(tokens) != len(samples):  # the tokenizer may have changed its list of texts
            raise _CountError(f"The tokenizer returned {len(tokens)} values for {len(samples)} texts. {_WHAT_TO_GIVE}")
        return tokens

    def _text(self, sample: Any) -> str:
        text = sample.get(self.column) if isinstance(sample, Mapping) else None
        if not isinstance(text, str):
            raise ValueError(
                f"Tokenize(column={self.column!r}) was given a sample with {describe(sample)}, and under that key a "
                f"{type(text).__name__}. Yield dicts with a string there."
            )
        return text

    def _with_tokens(self, sample: Mapping[str, Any], tokens: Tokens | None) -> dict[str, Any] | _Sentinel:
        if tokens is None:
            return _Sentinel.FAILED
        return {**{key: value for key, value in sample.items() if key != self.column}, self.into: tokens}

    def _tokenizer_fingerprint(self) -> str:
        try:
            tokens = [_to_token_array(ids) for ids in self.tokenizer(list(_FINGERPRINT_TEXTS))]
        except Exception as error:  # the tokenizer may take something else than text
            _log.warning(
                "The tokenizer of Tokenize(column=%r) raises for the text that it is known by, %r (%s: %s). So "
                "another tokenizer is not noticed when a state is loaded: keep to this one for the whole run.",
                self.column, _FINGERPRINT_TEXTS, type(error).__name__, error,
            )  # fmt: skip
            return "unknown"
        return hashlib.blake2b(repr([ids.tolist() for ids in tokens]).encode(), digest_size=8).hexdigest()


def _to_token_array(ids: Any) -> Tokens:
    array = np.asarray(ids)
    if array.ndim == 1 and not len(array) and array.dtype.kind not in "iu":  # of an empty list
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            f"The tokenizer returned a {type(ids).__name__} for a text: give a list of token ids. Of Hugging Face encodings "
            f"those are the .ids."
        )
    return array
