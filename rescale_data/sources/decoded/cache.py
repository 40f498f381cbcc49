"""`Cache`: decoded data that a process keeps: one LRU with a byte budget for all sources, shards and files."""

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

DEFAULT_BYTES = 2**30
_owners = itertools.count()


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


class Evicted:
    """A value with a method that is called when the cache evicts it for lack of room."""

    __slots__ = ()

    def evicted(self) -> None:
        raise NotImplementedError


class Made:
    """A value made from many others, which must be read again to make it anew. The cache keeps it longer than others."""

    __slots__ = ()


class Held(Made):
    """A `Made` value that its user holds, and uses without a look-up in the cache."""

    __slots__ = ()
    dropped: Callable[[], None]
    """Called when the cache no longer keeps the value."""

    def was_used(self) -> bool:
        """Return True if the value was used since the last call; the cache then keeps it a while longer."""
        raise NotImplementedError


class Budgeted(Protocol):
    @property
    def cache_bytes(self) -> int: ...


class Cache:
    """Cache with a byte budget that evicts the least recently used entry first. It is safe under threads.

    A look-up takes the same time however many entries there are. `Made` values are evicted last, as long as they take at most
    half of the budget: fragments that pass through do not evict them. The budget is this process's part (`room_for`) of the
    largest `cache_bytes` of the sources that are alive. One entry may be larger than the budget. It is kept while it is in use,
    with an eighth of its size for what is made from it: a fragment that exceeds the budget is decoded once, and not once for
    each window.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, int] = {}  # sizes
        self._made: OrderedDict[Hashable, Any] = OrderedDict()
        self._others: OrderedDict[Hashable, Any] = OrderedDict()
        self._made_bytes = 0
        self._of_owner: dict[Hashable, dict[Hashable, None]] = {}  # keys, by the owner at their beginning
        self._large: dict[Hashable, int] = {}  # sizes of the entries of more than half of the budget
        self._budgeted: weakref.WeakSet[Budgeted] = weakref.WeakSet()
        self._lock = threading.RLock()  # a finalizer may run inside any of the methods
        self._makers = weakref.WeakValueDictionary[Hashable, Any]()
        self.nbytes = 0
        self._whole = self._judged = -1  # -1: not known; `_judged` is the budget for which `_large` holds

    @property
    def budget(self) -> int:
        with self._lock:
            if self._whole < 0:
                self._whole = max((source.cache_bytes for source in self._budgeted), default=DEFAULT_BYTES)
            budget = self._whole // num_processes()
            if budget != self._judged:
                self._judged = budget
                self._large = {key: size for key, size in self._entries.items() if size > budget // 2}
            return budget

    def register(self, source: Budgeted) -> None:
        """Count the budget of a source while it is alive."""
        with self._lock:
            if source not in self._budgeted:
                self._budgeted.add(source)
                weakref.finalize(source, self._forget_budget).atexit = False
                self._forget_budget()

    def _forget_budget(self) -> None:
        self._whole = -1

    def get(self, key: Hashable) -> Any:
        """Return the value at ``key``, or `None`."""
        with self._lock:
            for kept in (self._others, self._made):
                if key in kept:
                    kept.move_to_end(key)
                    return kept[key]
            return None

    def put(self, key: Hashable, value: Any) -> None:
        """Keep ``value`` at ``key``, in place of an earlier value."""
        size, is_made = self._size_of(value), isinstance(value, Made)
        with self._lock:
            self._pop(key)
            kept, of_owner = self._made if is_made else self._others, self._of_owner.setdefault(_owner(key), {})
            self._entries[key], of_owner[key], kept[key] = size, None, value  # no call: Ctrl-C does not interrupt it
            self.nbytes += size
            self._made_bytes += size * is_made
            budget = self.budget
            if size > budget // 2:
                self._large[key] = size
            if self.nbytes > budget:
                self._shrink(budget, key)

    def make(self, key: Hashable, maker: Callable[[], T]) -> T:
        """Return the value at ``key``. If it is missing, one thread makes it and the others wait."""
        value = self.get(key)
        if value is None:
            with self.alone(key):
                value = self.get(key)
                if value is None:
                    value = maker()
                    self.put(key, value)
        return value

    def alone(self, key: Hashable) -> AbstractContextManager[Any]:
        """Return the lock for making the value at ``key``. All threads that ask while it is in use get the same lock."""
        with self._lock:
            return self._makers.setdefault(key, threading.RLock())

    def forget(self, key: Hashable) -> None:
        """Remove the value at ``key``, if there is one."""
        with self._lock:
            self._pop(key)

    def give_up(self, key: Hashable) -> None:
        """Make the value at ``key`` the next one to be evicted, unless it is read or put again before."""
        with self._lock:
            if key in self._others:
                self._others.move_to_end(key, last=False)

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            for key in list(self._entries):
                self._pop(key)

    def drop(self, owner: int) -> None:
        """Remove the entries whose key is a tuple that begins with ``owner``."""
        with self._lock:
            for key in list(self._of_owner.get(owner, ())):
                self._pop(key)

    def _size_of(self, value: Any) -> int:
        return value.nbytes

    def _pop(self, key: Hashable) -> Any:
        size = self._entries.pop(key, -1)
        value = self._others.pop(key, None)
        if size >= 0:
            self.nbytes -= size
            self._large.pop(key, None)
            owner = _owner(key)
            self._of_owner[owner].pop(key)
            if not self._of_owner[owner]:
                del self._of_owner[owner]
            if value is None:
                value = self._made.pop(key)
                self._made_bytes -= size
                if isinstance(value, Held):
                    value.dropped()
        return value

    def _shrink(self, budget: int, new: Hashable) -> None:
        largest = max(self._large.values(), default=0)
        limit = max(budget, largest * 9 // 8)
        for_made = min(limit // 2, limit - largest)
        while self.nbytes > limit and len(self._entries) > 1:
            if self._others and (self._made_bytes <= for_made or (len(self._made) == 1 and new in self._made)):
                key = next(iter(self._others))
            else:
                key = self._unused()
            value = self._pop(key)
            if isinstance(value, Evicted):
                value.evicted()

    def _unused(self) -> Hashable:
        """Return the key of the least recently used `Made` value."""
        while True:
            key, value = next(iter(self._made.items()))
            if not (isinstance(value, Held) and value.was_used()):
                return key
            self._made.move_to_end(key)


def _owner(key: Hashable) -> Hashable:
    return key[0] if isinstance(key, tuple) else None


class Handles(Cache):
    """Open files of a process, as many as the limit; the least recently used one is closed first.

    A thread that still reads a file that was dropped here holds a reference to it, and can finish.
    """

    def __init__(self, limit: int = 64) -> None:
        super().__init__()
        self._limit = limit

    @property
    def budget(self) -> int:
        return self._limit

    def _size_of(self, value: Any) -> int:
        return 1


_cache = Cache()
_handles = Handles()
_owner_of: dict[int, int] = {}
_by_owner: list[dict[int, Any]] = []
_others: dict[int, int] = {}


def cache() -> Cache:
    """Return the cache of this process."""
    return _cache


def handles() -> Handles:
    """Return the open files of this process."""
    return _handles


def room_for(source: Budgeted) -> int:
    """Return the bytes that this process may keep for a source: its part of the ``cache_bytes`` of a rank."""
    return source.cache_bytes // num_processes()


def share_with(key: int, num_processes: int) -> None:
    """Share the budget with other processes of this rank, in equal parts.

    Args:
        key: Number of a group of processes, such as the workers of one loader.
        num_processes: Number of processes in the group; 0 when they have ended.
    """
    if num_processes:
        _others[key] = num_processes
    else:
        _others.pop(key, None)


def num_processes() -> int:
    """Return the number of processes that share the budget: this one, and others of its rank."""
    return 1 + sum(_others.values())


def owner_of(thing: object) -> int:
    """Return the number with which the keys of an object begin. Its entries are removed when the object is collected.

    Raises:
        TypeError: The object cannot have a weak reference, such as a list.
    """
    owner = _owner_of.get(id(thing))
    if owner is None:
        weakref.ref(thing)  # raises TypeError, before anything is kept
        mine = next(_owners)
        owner = _owner_of.setdefault(id(thing), mine)  # another thread may ask at the same moment
        if owner == mine:
            weakref.finalize(thing, _forget, id(thing)).atexit = False
    return owner


def by_owner() -> dict[int, Any]:
    """Return a new dict with numbers of `owner_of` as keys. Its entries are removed when their objects are collected."""
    _by_owner.append({})
    return _by_owner[-1]


def _forget(identity: int) -> None:
    owner = _owner_of.pop(identity)
    for known in _by_owner:
        known.pop(owner, None)
    _cache.drop(owner)
    _handles.drop(owner)


def _renew() -> None:
    """Begin anew in a forked child: another thread may have held the lock, and open files share their position."""
    global _cache, _handles
    _cache, _handles = Cache(), Handles()
    _others.clear()


os.register_at_fork(after_in_child=_renew)
