"""`Cache`: decoded data in the memory of one process, in one LRU cache with one byte budget for all sources and shards."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

DEFAULT_CACHE_BYTES = 2**30
_owner_numbers = itertools.count()


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


class EvictionListener:
    """Base class of cached values whose method `handle_eviction` is called when the cache evicts them for lack of room."""

    __slots__ = ()

    def handle_eviction(self) -> None:
        raise NotImplementedError


class CostlyValue:
    """Base class of cached values that are made from many others and are costly to make again: the cache evicts them last."""

    __slots__ = ()


class ReferencedCostlyValue(CostlyValue):
    """A `CostlyValue` value to which its user keeps a reference, so that it is used without a look-up in the cache."""

    __slots__ = ()
    on_dropped: Callable[[], None]
    """Callback that is called when the cache no longer keeps the value."""

    def was_used(self) -> bool:
        """Return True if the value was used since the last call; the cache then keeps it longer."""
        raise NotImplementedError


class Budgeted(Protocol):
    cache_bytes: int


class Cache:
    """Thread-safe cache with a byte budget, which evicts the least recently used entry first.

    A look-up takes the same time however many entries there are. `CostlyValue` values are evicted last, as long as they take
    at most half of the budget: fragments that pass through do not evict them. The budget is this process's part (`cache_share`)
    of the largest `cache_bytes` of the sources that are alive. One entry may be larger than the budget. It is kept while it
    is in use, with an eighth of its size for what is made from it: a fragment that exceeds the budget is decoded once, and not
    once for each window.
    """

    def __init__(self) -> None:
        self._key_sizes: dict[Hashable, int] = {}  # sizes
        self._costly: OrderedDict[Hashable, Any] = OrderedDict()
        self._ordinary_values: OrderedDict[Hashable, Any] = OrderedDict()
        self._costly_bytes = 0
        self._keys_of_owner: dict[Hashable, dict[Hashable, None]] = {}  # keys, by the owner at their beginning
        self._large_sizes: dict[Hashable, int] = {}  # sizes of the entries of more than half of the budget
        self._budgeted: weakref.WeakSet[Budgeted] = weakref.WeakSet()
        self._lock = threading.RLock()  # a finalizer may run inside any of the methods
        self._lock_by_key = weakref.WeakValueDictionary[Hashable, Any]()
        self.nbytes = 0
        self._rank_budget = self._budget_of_large = -1  # not known; the second is the budget of `_large_sizes`

    @property
    def budget(self) -> int:
        with self._lock:
            if self._rank_budget < 0:
                self._rank_budget = max((source.cache_bytes for source in self._budgeted), default=DEFAULT_CACHE_BYTES)
            budget = self._rank_budget // num_processes()
            if budget != self._budget_of_large:
                self._budget_of_large = budget
                self._large_sizes = {key: size for key, size in self._key_sizes.items() if size > budget // 2}
            return budget

    def register(self, source: Budgeted) -> None:
        """Make the budget at least the ``cache_bytes`` of a source, as long as that source is alive."""
        with self._lock:
            if source not in self._budgeted:
                self._budgeted.add(source)
                weakref.finalize(source, self._forget_budget).atexit = False
                self._forget_budget()

    def _forget_budget(self) -> None:
        self._rank_budget = -1

    def get(self, key: Hashable) -> Any:
        """Return the value at ``key``, or `None`."""
        with self._lock:
            for entries in (self._ordinary_values, self._costly):
                if key in entries:
                    entries.move_to_end(key)
                    return entries[key]
            return None

    def put(self, key: Hashable, value: Any) -> None:
        """Store ``value`` at ``key`` in place of an earlier value, and evict other entries if the budget is exceeded."""
        size, is_costly_value = self._size_of(value), isinstance(value, CostlyValue)
        with self._lock:
            self._pop(key)
            entries = self._costly if is_costly_value else self._ordinary_values
            keys = self._keys_of_owner.setdefault(_owner(key), {})
            self._key_sizes[key], keys[key], entries[key] = (size, None, value)  # no call: Ctrl-C does not interrupt it
            self.nbytes += size
            self._costly_bytes += size * is_costly_value
            budget = self.budget
            if size > budget // 2:
                self._large_sizes[key] = size
            if self.nbytes > budget:
                self._shrink(budget, key)

    def get_or_make(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the value at ``key``. If it is missing, one thread makes it and the others wait."""
        if (value := self.get(key)) is None:
            with self.lock_for(key):
                if (value := self.get(key)) is None:
                    self.put(key, value := compute())
        return value

    def lock_for(self, key: Hashable) -> AbstractContextManager[Any]:
        """Return the lock for making the value at ``key``; all threads that ask for it while it is in use get the same one."""
        with self._lock:
            return self._lock_by_key.setdefault(key, threading.RLock())

    def forget(self, key: Hashable) -> None:
        """Remove the value at ``key``, if there is one."""
        with self._lock:
            self._pop(key)

    def mark_for_eviction(self, key: Hashable) -> None:
        """Make the value at ``key`` the next one to be evicted, unless it is used again before."""
        with self._lock:
            if key in self._ordinary_values:
                self._ordinary_values.move_to_end(key, last=False)

    def evict_to_budget(self) -> None:
        """Evict entries until the others fit into the budget, after it has become smaller."""
        with self._lock:
            self._shrink(self.budget)

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            for key in list(self._key_sizes):
                self._pop(key)

    def drop_entries_of(self, owner: int) -> None:
        """Remove all entries of an owner: their key is a tuple that begins with ``owner``."""
        with self._lock:
            for key in list(self._keys_of_owner.get(owner, ())):
                self._pop(key)

    def _size_of(self, value: Any) -> int:
        return value.nbytes

    def _pop(self, key: Hashable) -> Any:
        owner = _owner(key)
        # No call up to the next comment: neither Ctrl-C nor a finalizer comes between
        if key not in self._key_sizes:
            return None
        size, entries = self._key_sizes[key], self._ordinary_values
        if key in self._costly:
            entries = self._costly
        value, keys = entries[key], self._keys_of_owner[owner]
        del self._key_sizes[key], entries[key], keys[key]
        self.nbytes -= size
        if entries is self._costly:
            self._costly_bytes -= size
        if key in self._large_sizes:
            del self._large_sizes[key]
        # All that counts is right from here on
        if not keys:
            self._keys_of_owner.pop(owner, None)
        if isinstance(value, ReferencedCostlyValue):
            value.on_dropped()
        return value

    def _shrink(self, budget: int, new_key: Hashable = None) -> None:
        largest_size = max(self._large_sizes.values(), default=0)
        limit = max(budget, largest_size * 9 // 8)
        costly_bytes_limit = min(limit // 2, limit - largest_size)
        while self.nbytes > limit and len(self._key_sizes) > 1:
            if self._ordinary_values and (
                self._costly_bytes <= costly_bytes_limit or (len(self._costly) == 1 and new_key in self._costly)
            ):
                key = next(iter(self._ordinary_values))
            else:
                key = self._oldest_costly_key()
            value = self._pop(key)
            if isinstance(value, EvictionListener):
                value.handle_eviction()

    def _oldest_costly_key(self) -> Hashable:
        """Return the key of the least recently used `CostlyValue` value, the next one to evict."""
        while True:
            key, value = next(iter(self._costly.items()))
            if not (isinstance(value, ReferencedCostlyValue) and value.was_used()):
                return key
            self._costly.move_to_end(key)


def _owner(key: Hashable) -> Hashable:
    return key[0] if isinstance(key, tuple) else None


class OpenFileCache(Cache):
    """Open files of a process, as many as the limit; the least recently used one is closed first.

    A thread that still reads a file that was dropped here holds a reference to it, and can finish.
    """

    def __init__(self, max_files: int = 64) -> None:
        super().__init__()
        self._max_files = max_files

    @property
    def budget(self) -> int:
        return self._max_files

    def _size_of(self, value: Any) -> int:
        return 1


_cache = Cache()
_handles = OpenFileCache()
_owner_by_object_id: dict[int, int] = {}
_dicts_by_owner: list[dict[int, Any]] = []
_other_processes: dict[int, int] = {}  # numbers of processes that share the budget, by group


def cache() -> Cache:
    """Return the `Cache` of this process, which keeps decoded data of all its sources and logical shards."""
    return _cache


def open_files() -> OpenFileCache:
    """Return this process's `OpenFileCache`, which holds the open files of its sources."""
    return _handles


def cache_share(source: Budgeted) -> int:
    """Return the bytes that this process may keep for a source: its part of the ``cache_bytes`` of a rank."""
    return source.cache_bytes // num_processes()


def share_budget_with(group_key: int, num_other_processes: int) -> None:
    """Share the budget with other processes of this rank, in equal parts; evict what no longer fits into this process's part.

    Args:
        group_key: Number of a group of processes, such as the workers of one loader.
        num_other_processes: Number of processes in the group; 0 when they have ended.
    """
    if num_other_processes:
        _other_processes[group_key] = num_other_processes
        _cache.evict_to_budget()
    else:  # without a lock: a finalizer in a thread that has the cache's may wait for the caller
        _other_processes.pop(group_key, None)


def num_processes() -> int:
    """Return the number of processes that share the budget: this one, and others of its rank."""
    return 1 + sum(_other_processes.values())


def owner_id(value: object) -> int:
    """Return the number with which an object's cache keys begin; its entries are removed when it is garbage-collected.

    Raises:
        TypeError: The object cannot have a weak reference, such as a list.
    """
    owner = _owner_by_object_id.get(id(value))
    if owner is None:
        weakref.ref(value)  # raises TypeError, before anything is kept
        new_owner = next(_owner_numbers)
        owner = _owner_by_object_id.setdefault(id(value), new_owner)  # another thread may ask at the same moment
        if owner == new_owner:
            weakref.finalize(value, _remove_entries, id(value)).atexit = False
    return owner


def new_dict_by_owner() -> dict[int, Any]:
    """Return a new dict whose keys are numbers of `owner_id`; an entry is removed when its object is garbage-collected."""
    _dicts_by_owner.append({})
    return _dicts_by_owner[-1]


def _remove_entries(object_id: int) -> None:
    owner = _owner_by_object_id.pop(object_id)
    for values_by_owner in _dicts_by_owner:
        values_by_owner.pop(owner, None)
    _cache.drop_entries_of(owner)
    _handles.drop_entries_of(owner)


def _reset_after_fork() -> None:
    """Replace cache and open files in a forked child: locks may be held, and files would share their offset with the parent."""
    global _cache, _handles
    _cache, _handles = Cache(), OpenFileCache()
    _other_processes.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
