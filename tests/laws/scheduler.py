"""A scheduler that runs several actors by turns, one request to a store at a time, and kills them at any request."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

_here = threading.local()


class Killed(BaseException):
    """Raised in an actor at the request at which it is killed, and at each one after."""


class Actor:
    """A function in a thread that goes on only when the scheduler says so.

    Args:
        requests: The number of requests after which it is killed.
    """

    def __init__(self, name: str, work: Callable[[], object], requests: int) -> None:
        self.name, self.left, self.is_done = name, requests, False
        self.failed: BaseException | None = None
        self._resume, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, args=(work,), daemon=True)
        self._thread.start()

    def _main(self, work: Callable[[], object]) -> None:
        _here.actor = self
        try:
            self.pause()
            work()
        except Killed:
            pass
        except BaseException as error:
            self.failed = error
        finally:
            self.is_done = True
            self._paused.release()

    def pause(self) -> None:
        """Called in the actor, before each request."""
        if self.left < 0:
            raise Killed
        self._paused.release()
        self._resume.acquire()
        self.left -= 1
        if self.left < 0:
            raise Killed

    def go_on(self) -> None:
        """Called by the scheduler: let the actor make one request, and go to the next one."""
        self._resume.release()
        self._paused.acquire()

    def begin(self) -> None:
        self._paused.acquire()


def request() -> None:
    """Called by a store before each request; outside of actors nothing happens."""
    if (actor := getattr(_here, "actor", None)) is not None:
        actor.pause()


def current() -> str:
    """Return the name of the actor that this is called in, empty outside of actors."""
    actor = getattr(_here, "actor", None)
    return "" if actor is None else actor.name


def play(
    cast: dict[str, Callable[[], object]], rng: random.Random, check: Callable[[], object], most: int
) -> dict[str, Any]:
    """Run the actors interleaved at random, each killed at one of `most` requests or never; return them by name.

    Args:
        check: Called after each turn.
    """
    actors = {name: Actor(name, work, rng.choice((10**9, rng.randint(0, most)))) for name, work in cast.items()}
    for actor in actors.values():
        actor.begin()
    alive = list(actors.values())
    while alive:
        actor = rng.choice(alive)
        for _ in range(rng.choice((1, 1, 2, 4, 8, 16))):
            if actor.is_done:
                alive.remove(actor)
                break
            actor.go_on()
        check()
    return actors


def interrupt(work: Callable[[], object], other: Callable[[], object], requests: int) -> bool:
    """Run an actor for so many requests, then another one to its end, then the first; return whether it came so far."""
    actors = [Actor(name, each, 10**9) for name, each in (("interrupted", work), ("other", other))]
    for actor in actors:
        actor.begin()
    while not actors[0].is_done and requests:
        actors[0].go_on()
        requests -= 1
    is_interrupted = not actors[0].is_done
    for actor in reversed(actors):
        while not actor.is_done:
            actor.go_on()
        if actor.failed is not None:
            raise actor.failed
    return is_interrupted
