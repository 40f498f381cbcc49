"""The order of rows, as pure functions of (seed, epoch, logical shard, position), so that no order is ever stored.

    rows of the source      | fragment 0 | fragment 1 | ... |        as they lie in the files
    rows in fragment order  | fragment 7 | fragment 2 | ... |        fragments permuted, once an epoch
    rows of a logical shard [i * R // N, (i + 1) * R // N)           a range of these rows
    as they are read        | window 0 | window 1 | ... |            rows permuted inside each window

Random numbers come from the raw stream of Philox, which NumPy keeps the same across versions (it does not for the methods
of `Generator`), keyed by a hash of all that the order depends on. Any change here is a breaking change of kind ORDER.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.random.bit_generator import ISeedSequence

from rescale_data.state import Ints

UInts: TypeAlias = npt.NDArray[np.uint64]

ROWS_PER_BLOCK = 1024
"""Number of rows whose order is computed at once if there is no window."""

_FEISTEL_ROUNDS = 12
_SPLITMIX_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def random_words(num_words: int, label: str, *key_numbers: int) -> UInts:
    """Return random words, ``uint64[num_words]``, a function of the label and the numbers alone."""
    return _philox(label, key_numbers).random_raw(num_words)


def generator(label: str, *key_numbers: int) -> np.random.Generator:
    """Return a random generator for users' functions; its stream depends on the label and the numbers alone."""
    return np.random.Generator(_philox(label, key_numbers))


def _philox(label: str, numbers: Sequence[int]) -> np.random.Philox:
    return np.random.Philox(_PhiloxKey(_digest(label, numbers)))  # pyright: ignore[reportArgumentType]  # NumPy's stubs know SeedSequence alone


def _digest(label: str, key_numbers: Sequence[int]) -> bytes:
    label_text = "/".join((label, *(str(int(number)) for number in key_numbers)))
    return hashlib.blake2b(label_text.encode(), digest_size=16).digest()


class _PhiloxKey(ISeedSequence):
    """A given key of Philox. The argument ``key=`` of Philox would be slower, since it first asks the system for entropy."""

    def __init__(self, key: bytes) -> None:
        self._key = np.frombuffer(key, dtype="<u8").astype(np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> UInts:
        del n_words, dtype  # Philox asks for two words of 64 bits
        return self._key


def permutation(num_items: int, label: str, *key_numbers: int) -> Ints:
    """Return a random permutation of ``0 .. num_items - 1``, ``int64``, a function of the label and the numbers alone."""
    return np.argsort(random_words(num_items, label, *key_numbers), kind="stable")


def encipher(index: Ints, domain_size: int, label: str, *key_numbers: int) -> Ints:
    """Return the image of each index under a keyed permutation of ``0 .. domain_size - 1``, without such an array.

    A Feistel network over the next power of two, walked until it falls below ``domain_size`` again (Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002): fewer than two steps on average. ``domain_size`` is at most 2**62.
    """
    round_keys = random_words(_FEISTEL_ROUNDS, label, *key_numbers)
    bits = max(2, (domain_size - 1).bit_length())
    image = _feistel(index.astype(np.uint64), bits, round_keys)
    out_of_domain = np.flatnonzero(image >= domain_size)
    while len(out_of_domain):
        image[out_of_domain] = _feistel(image[out_of_domain], bits, round_keys)
        out_of_domain = out_of_domain[image[out_of_domain] >= domain_size]
    return image.astype(np.int64)


def _feistel(words: UInts, bits: int, keys: UInts) -> UInts:
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = (np.uint64((1 << width) - 1) for width in (bits // 2, bits - bits // 2))
    low, high = words & low_mask, words >> low_bits
    for high_key, low_key in keys.reshape(-1, 2):
        high = high ^ (splitmix64(low + high_key) & high_mask)
        low = low ^ (splitmix64(high + low_key) & low_mask)
    return high << low_bits | low


def splitmix64(words: UInts) -> UInts:
    """Return the words, hashed by the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    words = (words ^ words >> np.uint64(30)) * _SPLITMIX_MULTIPLIERS[0]
    words = (words ^ words >> np.uint64(27)) * _SPLITMIX_MULTIPLIERS[1]
    return words ^ words >> np.uint64(31)


@dataclass(frozen=True)
class FragmentOrder:
    """The fragments of a source in the order in which one epoch reads them.

    Args:
        starts_in_order: ``int64[F + 1]``, the first row of each, counted in this order, and the number of rows.
        fragment_starts: ``int64[F]``, the row of the source at which each begins.
    """

    starts_in_order: Ints
    fragment_starts: Ints

    @staticmethod
    def of(starts: Ints, lengths: Ints) -> FragmentOrder:
        """Return fragments, given by their first rows and numbers of rows, in this order."""
        return FragmentOrder(np.concatenate([[0], np.cumsum(lengths)]), starts)

    @property
    def nbytes(self) -> int:
        return self.starts_in_order.nbytes + self.fragment_starts.nbytes

    def rows(self, rows_in_order: Ints) -> Ints:
        """Return the rows of the source for rows in this order: row numbers after the fragments were permuted."""
        fragment = np.searchsorted(self.starts_in_order, rows_in_order, side="right") - 1
        return self.fragment_starts[fragment] + (rows_in_order - self.starts_in_order[fragment])


def permuted_fragments(starts: Ints, lengths: Ints, seed: int, epoch: int) -> FragmentOrder:
    """Return fragments, given by their first rows and numbers of rows, in the random order of an epoch."""
    fragment_order = permutation(len(starts), "fragments", seed, epoch)
    return FragmentOrder.of(starts[fragment_order], lengths[fragment_order])


@dataclass(frozen=True, kw_only=True)
class GlobalBatchOrder:
    """Divides the rows of a source, in file order and by global batches, among the logical shards that serve them.

    With G = N / O and O <= N, draw n of shard i is row ``(n * G + i % G) * O + i // G``; where O is a multiple of N, each shard
    has its O / N rows of each global batch.
    """

    num_logical_shards: int
    global_batch_size: int

    @property
    def rows_per_read(self) -> int:
        """The number of consecutive rows that a shard reads at a time."""
        return max(1, self.global_batch_size // self.num_logical_shards)

    @property
    def rows_per_shard_cycle(self) -> int:
        """The number of rows after which each shard has been visited once."""
        return max(self.num_logical_shards, self.global_batch_size)

    def first_rows(self, shards: Ints) -> Ints:
        """Return the first row of each shard."""
        batches_per_cycle = max(1, self.num_logical_shards // self.global_batch_size)
        return shards % batches_per_cycle * self.global_batch_size + shards // batches_per_cycle * self.rows_per_read

    def shard_row_counts(self, shards: Ints, num_rows: int) -> Ints:
        """Return the number of rows that each shard reads."""
        cycles, num_extra_rows = divmod(num_rows, self.rows_per_shard_cycle)
        return cycles * self.rows_per_read + np.clip(num_extra_rows - self.first_rows(shards), 0, self.rows_per_read)

    def rows(self, shard: int, first_draw: int, stop_draw: int) -> Ints:
        """Return the source's rows that a shard reads in its draws ``first_draw .. stop_draw - 1``."""
        shard_cycles, offsets = np.divmod(np.arange(first_draw, stop_draw, dtype=np.int64), self.rows_per_read)
        return self.first_rows(np.array([shard])) + shard_cycles * self.rows_per_shard_cycle + offsets


@dataclass(frozen=True, kw_only=True)
class ShardOrder:
    """The order in which one logical shard reads its rows.

    Args:
        num_rows: R, the number of rows of the source.
        row_range_index: The number of the range that the logical shard reads, see `rescale_data.rounds`.
        num_logical_shards, seed: The same as of the `Shard`.
        window: The number of rows that are permuted among themselves; 0 keeps the order of the files.
        permutes_all_rows: True for one permutation of all rows of the source in place of fragments and windows.
        global_batch_order: The shard reads its rows of each global batch in place of a range; nothing is permuted.
    """

    num_rows: int
    row_range_index: int
    num_logical_shards: int
    seed: int
    window: int
    permutes_all_rows: bool = False
    global_batch_order: GlobalBatchOrder | None = None

    @property
    def shard_start(self) -> int:
        return self.row_range_index * self.num_rows // self.num_logical_shards

    @cached_property
    def num_shard_rows(self) -> int:
        if self.global_batch_order is not None:
            return int(self.global_batch_order.shard_row_counts(np.array([self.row_range_index]), self.num_rows)[0])
        return (self.row_range_index + 1) * self.num_rows // self.num_logical_shards - self.shard_start

    @property
    def rows_per_window(self) -> int:
        """The number of rows whose order is computed together."""
        if (order := self.global_batch_order) is not None:  # they lie in one cycle, or in BLOCK rows of the source
            return max(1, ROWS_PER_BLOCK // order.rows_per_shard_cycle) * order.rows_per_read
        return self.window or ROWS_PER_BLOCK

    def rows_in_order(self, first_row: int, stop_row: int) -> Ints:
        """Return the row numbers, after fragments were permuted, of the shard's rows ``first_row .. stop_row - 1``."""
        if self.global_batch_order is not None:
            return self.global_batch_order.rows(self.row_range_index, first_row, stop_row)
        return np.arange(self.shard_start + first_row, self.shard_start + stop_row, dtype=np.int64)

    def window_bounds(self, row: int) -> tuple[int, int]:
        """Return the range of the shard's rows that contains ``row`` and whose order is computed together."""
        first_row = row - row % self.rows_per_window
        return first_row, min(first_row + self.rows_per_window, self.num_shard_rows)

    def unshuffled_rows(self, epoch: int, first_row: int, stop_row: int, fragments: FragmentOrder | None) -> Ints:
        """Return the source's rows for the shard's rows ``first_row .. stop_row - 1``, before windows are permuted."""
        rows_in_order = self.rows_in_order(first_row, stop_row)
        if self.permutes_all_rows:
            return encipher(rows_in_order, self.num_rows, "full", self.seed, epoch)
        return rows_in_order if fragments is None else fragments.rows(rows_in_order)

    def rows(self, epoch: int, row: int, fragments: FragmentOrder | None) -> Ints:
        """Return the source's rows in `window_bounds` of ``row``, in the order in which they are read.

        With ``fragments=None`` the fragments keep their own order.
        """
        first_row, stop_row = self.window_bounds(row)
        rows = self.unshuffled_rows(epoch, first_row, stop_row, fragments)
        if self.permutes_all_rows or not self.window:
            return rows
        return rows[permutation(stop_row - first_row, "window", *self._window_key(epoch, first_row))]

    def permutation_key(self, epoch: int, row: int) -> bytes:
        """Return the 16-byte key of the random words that permute the window that begins at ``row``."""
        return _digest("window", self._window_key(epoch, row))

    def _window_key(self, epoch: int, first_row: int) -> tuple[int, ...]:
        return self.seed, epoch, self.row_range_index, first_row // self.window
