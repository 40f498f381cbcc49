"""Ranks come together, by name, before they exchange anything: so who is missing is known, and nothing is left half done.

    each rank      adds what it has to say to one text in the store
    the last one   reads that text, and writes what follows from it: the verdict
    all of them    wait for the verdict; the first whose time is over looks who is missing, and writes these as the verdict

A rank asks for one key at a time, however many ranks there are. One that was left alone may come again.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch.distributed as dist

_LOOK = 2.0
"""Seconds between looks for the verdict."""
_SIGN = 1.0
"""Seconds between signs of life of a rank that reads."""


class Missing(Exception):
    """Some ranks did not come in time; `None` where the store cannot be asked."""

    def __init__(self, ranks: list[int] | None) -> None:
        super().__init__(ranks)
        self.ranks = ranks


@dataclass(frozen=True)
class Coming:
    """That this rank has come to a call.

    Args:
        name: Of the call, which is repeated.
        turn: How often it was made before.
        base: Begins its keys in the store, the same on every rank.
    """

    name: str
    turn: int
    base: str


class RollCall:
    """Who has come to what, kept in a store that all ranks share.

    Args:
        store: Of these ranks alone, or a part of one.
        me: Index of this rank.
        names: Names of all ranks by index, for messages.
    """

    def __init__(self, store: Any, me: int, names: Sequence[int]) -> None:
        self._home = Answering(store)
        self._me, self._names = me, list(names)
        self._thread, self._own = threading.get_ident(), threading.local()
        self._turns: dict[str, int] = {}
        self._last: dict[str, str] = {}
        self._done, self._next = 0, threading.Condition()
        self._readers: set[int] = set()  # threads
        self._signs: threading.Thread | None = None

    def come(self, name: str, value: str, decide: Callable[[list[str]], str], seconds: float) -> Coming:
        """Say that this rank has come to the next call of this name.

        Args:
            value: What this rank has to say, one line.
            decide: What follows from the values of all ranks, by index; run on the last rank that comes.
            seconds: In which the store answers.

        Raises:
            Missing: The store cannot be asked.
        """
        self._store.seconds = seconds
        try:
            return self._come(name, value, decide)
        except (RuntimeError, dist.DistError):
            raise Missing(None) from None

    def _come(self, name: str, value: str, decide: Callable[[list[str]], str]) -> Coming:
        turn = self._turns.get(name, 0)
        base = f"{name}/{turn}.{self._store.add(f'{name}/failed', 0)}"
        self._store.append(f"{base}/came", f"{self._me} {value}\n")
        count = self._store.add(f"{base}/count", 1)
        if count == len(self._names):
            came = self._came(base)
            self._decide(base, f"all {decide([came[index] for index in range(count)])}")
            self._forget(self._last.get(name))  # all have come to this call: nobody asks for the one before any more
        self._turns[name], self._last[name] = turn + 1, base
        return Coming(name, turn, base)

    def wait(self, coming: Coming, seconds: float, pauses_for_reading: bool = False) -> str:
        """What was decided, once all have come; `Missing` where that takes longer than ``seconds``.

        Args:
            pauses_for_reading: Whether time stands still while some rank says that it reads.
        """
        self._store.seconds = seconds
        try:
            verdict = self._verdict(coming, seconds, pauses_for_reading)
        except (RuntimeError, dist.DistError):
            raise Missing(None) from None
        kind, _, what = verdict.partition(" ")
        if kind != "all":
            self._turns[coming.name] = coming.turn  # it may be made again
            raise Missing([self._names[int(index)] for index in what.split()])
        return what

    def ticket(self, _: object = None) -> str:
        """A decision: the number of an exchange that all ranks are ready for."""
        return str(self._store.add("tickets", 1))

    @contextlib.contextmanager
    def in_turn(self, ticket: int, seconds: float) -> Generator[None]:
        """One exchange at a time, in the order of their tickets: threads may have come to several at once."""
        with self._next:
            if not self._next.wait_for(lambda: self._done >= ticket - 1, seconds):
                raise Missing([self._names[self._me]])
        try:
            yield
        finally:
            with self._next:
                self._done = max(self._done, ticket)
                self._next.notify_all()

    @contextlib.contextmanager
    def reading(self) -> Generator[None]:
        """While this rank reads, others may wait for it: they see signs of life, so that this time does not count."""
        if self._signs is None:
            self._signs = threading.Thread(target=_sign, args=(weakref.ref(self),), daemon=True)
            self._signs.start()
        self._readers.add(threading.get_ident())
        try:
            yield
        finally:
            self._readers.discard(threading.get_ident())

    def sign(self) -> None:
        if self._readers:
            with contextlib.suppress(RuntimeError, dist.DistError):  # whoever waits hears of a lost store by itself
                self._store.add("reading", 1)

    @property
    def _store(self) -> Answering:
        """A connection for each thread: one that waits keeps its own busy."""
        if threading.get_ident() == self._thread:
            return self._home
        if not hasattr(self._own, "store"):
            self._own.store = Answering(self._home.clone())
        return self._own.store

    def _verdict(self, coming: Coming, seconds: float, pauses_for_reading: bool) -> str:
        def signs() -> int:
            return self._store.add("reading", 0) if pauses_for_reading else 0

        base, is_over, seen, since = coming.base, False, signs(), time.monotonic()
        while not self._appears(f"{base}/verdict", min(_LOOK, seconds / 4)):
            if (now := signs()) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since >= seconds:
                if self._store.add(f"{base}/looks", 1) == 1 or is_over:  # the first one may have died since
                    came = self._came(base)
                    self._decide(base, f"missing {' '.join(str(i) for i in range(len(self._names)) if i not in came)}")
                is_over = True
        return self._store.get(f"{base}/verdict").decode()

    def _decide(self, base: str, verdict: str) -> None:
        """The first verdict holds."""
        is_first = self._store.compare_set(f"{base}/verdict", "", verdict).decode() == verdict
        if is_first and verdict.startswith("missing"):
            self._store.add(f"{base.rsplit('/', 1)[0]}/failed", 1)

    def _came(self, base: str) -> dict[int, str]:
        """What the ranks that have come say, by index."""
        lines = self._store.get(f"{base}/came").decode().splitlines()
        return {int(index): value for index, _, value in (line.partition(" ") for line in lines)}

    def _appears(self, key: str, seconds: float) -> bool:
        try:
            self._store.wait([key], datetime.timedelta(seconds=seconds))
        except NoAnswer:
            raise
        except (RuntimeError, dist.DistError):
            return self._store.check([key])  # which fails too where the store is gone
        return True

    def _forget(self, base: str | None) -> None:
        for what in ("came", "count", "looks", "verdict") if base is not None else ():
            self._store.delete_key(f"{base}/{what}")


def _sign(of: weakref.ref[RollCall]) -> None:
    while (roll_call := of()) is not None:
        roll_call.sign()
        del roll_call
        time.sleep(_SIGN)


class NoAnswer(RuntimeError):
    """The store has not answered in time."""


class _Request(NamedTuple):
    work: Callable[[], Any]
    answer: SimpleQueue[tuple[Any, Exception | None]]


class Answering:
    """A store that answers in time or counts as gone; for one thread at a time: a request that waits keeps the others waiting.

    The host of a store may vanish without a word. A request to it then waits as long as the kernel believes in the connection,
    a quarter of an hour; so a thread of its own makes the requests, and it is that thread which is left waiting.

    Args:
        store: One of torch's. What is called on this is called on it; `NoAnswer` where that takes longer than ``seconds``.
    """

    seconds: float = 300.0
    """For one request from now on."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        threading.Thread(target=_answer, args=(self._requests,), daemon=True, name="rescale_data-store").start()
        weakref.finalize(self, self._requests.put, None).atexit = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            request = _Request(lambda: getattr(self._store, name)(*args), SimpleQueue())
            self._requests.put(request)
            try:
                value, error = request.answer.get(timeout=self.seconds)
            except Empty:
                raise NoAnswer(f"the store has not answered for {self.seconds:g} s") from None
            if error is not None:
                raise error
            return value

        return ask


def _answer(requests: SimpleQueue[_Request | None]) -> None:
    while (request := requests.get()) is not None:
        try:
            request.answer.put((request.work(), None))
        except Exception as error:
            request.answer.put((None, error))
        del request
