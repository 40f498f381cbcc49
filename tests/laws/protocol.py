"""A model of the commit protocol of checkpoints: puts, listings and looks, interleaved at each request and killed at each.

    python -m tests.laws.protocol [runs of each cast, default 100000]

It shares no line with the package. An owner's claim is unfinished (None) until it has listed the run and put what it accepts.
What counts: what the newest finished claim accepts, above that its owner's own, and lone saves that a step's own claims let
count. Nobody withdraws anything, a reader removes nothing, and an owner looks at the claims before it does.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeAlias

Owner: TypeAlias = tuple[int, int]
Save: TypeAlias = tuple[Owner, int]
Claims: TypeAlias = dict[Owner, dict[int, Save] | None]
Work: TypeAlias = Iterator[None]

LOOKS = ("look at the claims after opening", "look at the claims after a save", "look at the claims before a removal")
ORDERS = (
    "look at the leases before a removal",
    "put a lease before listing",
    "repair the copy for stock DCP when opening",
)
RULES = frozenset((*LOOKS, *ORDERS))
FIRST: Owner = (0, 0)


class Superseded(Exception):
    """There is a newer claim."""


class Run:
    """A folder and what its users were told. A save stands for its data, too: a name that no other save has."""

    def __init__(self, rules: frozenset[str], rng: random.Random) -> None:
        self.rules, self.rng = rules, rng
        self.claims: Claims = {FIRST: {}}
        self.lone: dict[int, Claims] = {}
        self.manifests: dict[int, dict[Save, bool]] = {100: {(FIRST, 1): True}}  # False: a deletion
        self.data: set[tuple[int, Save]] = {(100, (FIRST, 1))}
        self.copies: dict[int, Save] = {100: (FIRST, 1)}
        self.leases: dict[int, tuple[int, Save] | None] = {}
        self.told: list[tuple[int, Save, bool]] = []
        self.deleting: set[int] = set()
        self.wrong: set[str] = set()

    def counted(self, step: int, manifests: dict[Save, bool], views: list[Claims]) -> Save | None:
        """Return the save of a step that counts, or its deletion, by the run's claims and then by the step's own."""
        saves = list(manifests)
        for claims in views:
            newest = newest_finished(claims)
            accepted = (claims[newest] or {}).get(step) if newest else None
            saves = [save for save in saves if save[0] == newest or save[0] not in claims or save == accepted]
        for claims in views:
            if own := [save for save in saves if save[0] == newest_finished(claims)]:
                return max(own)
        return max(saves, default=None)

    def now(self, step: int) -> Save | None:
        save = self.counted(step, self.manifests.get(step, {}), self.views(step))
        return save if save and self.manifests[step][save] else None

    def views(self, step: int) -> list[Claims]:
        return [dict(self.claims), *([dict(self.lone[step])] if step in self.lone else [])]

    def check(self) -> None:
        for step in self.manifests:
            save = self.now(step)
            if save and (step, save) not in self.data:
                self.wrong.add("a step that counts has no data")

    def end(self) -> None:
        for step, save, is_there in self.told:
            later = [other for other in self.manifests[step] if other > save]
            if is_there and not later and self.now(step) != save:
                self.wrong.add("told saved, and does not count")


def newest_finished(claims: Claims) -> Owner | None:
    return max((owner for owner, accepts in claims.items() if accepts is not None), default=None)


class Holder:
    """An owner of the run, or with a step of that checkpoint alone."""

    def __init__(self, run: Run, owner: Owner, step: int | None = None) -> None:
        self.run, self.owner, self.lone, self.turn = run, owner, step, 0 if owner != FIRST else 1

    @property
    def claims(self) -> Claims:
        return self.run.claims if self.lone is None else self.run.lone.setdefault(self.lone, {})

    def look(self, rule: str) -> Work:
        yield
        if rule in self.run.rules and max(self.claims) > self.owner:
            raise Superseded

    def open(self) -> Work:
        run = self.run
        known = [owner[0] for owner in self.claims] + [s[0][0] for s in run.manifests.get(self.lone or -1, {})]
        yield
        self.owner = (1 + max(known, default=0), run.rng.randrange(10**9))
        self.claims[self.owner] = None
        yield
        others = {owner: accepts for owner, accepts in self.claims.items() if owner != self.owner}
        yield
        steps = [self.lone] if self.lone is not None else list(run.manifests)
        listed = {step: (dict(run.manifests.get(step, {})), {s for at, s in run.data if at == step}) for step in steps}
        yield
        accepts = {}
        for step, (manifests, _) in listed.items():
            inner = [dict(run.lone[step])] if self.lone is None and step in run.lone else []
            save = run.counted(step, manifests, [others, *inner])
            if save and manifests[save]:
                accepts[step] = save
        self.claims[self.owner] = accepts
        yield from self.look(LOOKS[0])
        if self.lone is not None:
            return
        for step, save in accepts.items():
            if ORDERS[2] in run.rules and run.copies.get(step) != save:
                yield
                run.copies[step] = save
        for step, (_, data) in listed.items():
            obsolete = {save for save in data if save != accepts.get(step) and save[0] in self.claims}
            for save in sorted(save for save in obsolete if not self.is_read(step, save)):
                yield
                run.data.discard((step, save))

    def save(self, step: int) -> Work:
        run = self.run
        yield from self.look(LOOKS[1])
        self.turn += 1
        save = (self.owner, self.turn)
        run.data.add((step, save))
        yield
        run.manifests.setdefault(step, {})[save] = True
        yield from self.look(LOOKS[1])
        if self.lone is not None:
            yield
            if run.now(step) != save:  # the run's manager has saved the step
                raise Superseded
        run.told.append((step, save, True))
        yield
        run.copies[step] = save
        yield
        data = {other for at, other in run.data if at == step}
        own = {other for other in data if other[0] == self.owner and other < save}
        yield from self.remove(
            step, own | {other for other in data if other[0] != self.owner and other[0] in self.claims}
        )

    def delete(self, step: int) -> Work:
        run = self.run
        yield
        if self.is_read(step):
            return
        self.turn += 1
        run.deleting.add(step)
        run.manifests.setdefault(step, {})[self.owner, self.turn] = False
        yield from self.look(LOOKS[1])
        data = {save for at, save in run.data if at == step}
        yield from self.remove(step, data)

    def remove(self, step: int, saves: set[Save]) -> Work:
        run = self.run
        yield from self.look(LOOKS[2])
        yield
        left = {save for save in saves if self.is_read(step, save)}
        for save in sorted(saves - left):
            yield
            run.data.discard((step, save))

    def is_read(self, step: int, save: Save | None = None) -> bool:
        leases = self.run.leases.values() if ORDERS[0] in self.run.rules else ()
        return any(lease is None or (lease[0] == step and save in (None, lease[1])) for lease in leases)


def zombie(run: Run) -> Work:
    holder = Holder(run, FIRST)
    yield from holder.save(110)
    yield from holder.save(100)


def successor(*steps: int, keep_latest: int | None = None) -> Callable[[Run], Work]:
    """An owner that opens the run, and saves steps; a negative one it deletes."""

    def work(run: Run) -> Work:
        holder = Holder(run, FIRST)
        yield from holder.open()
        for step in steps:
            yield from holder.delete(-step) if step < 0 else holder.save(step)
            if keep_latest:
                present = sorted(at for at in list(run.manifests) if run.now(at))
                for old in present[:-keep_latest]:
                    if old != step:
                        yield from holder.delete(old)

    return work


def lone(step: int) -> Callable[[Run], Work]:
    def work(run: Run) -> Work:
        newest = newest_finished(run.claims)
        if any(save[0] == newest for save in run.manifests.get(step, {})):
            return  # a step of a manager is its own
        holder = Holder(run, FIRST, step)
        yield from holder.open()
        yield from holder.save(step)

    return work


def reader(step: int) -> Callable[[Run], Work]:
    def work(run: Run) -> Work:
        own = run.rng.randrange(10**9)
        if ORDERS[1] in run.rules:
            run.leases[own] = None
            yield
        listed, before, save = dict(run.manifests.get(step, {})), None, None
        while not save and listed != before:
            yield
            save = run.counted(step, listed, run.views(step))
            yield
            before, listed = (listed, dict(run.manifests.get(step, {}))) if not save else (None, listed)
        if step == 100 and not save and not run.deleting:
            run.wrong.add("a step that was always there was not found")
        if not save or not listed[save]:
            run.leases.pop(own, None)
            return
        run.leases[own] = step, save
        for _ in range(3):
            yield
            if (step, save) not in run.data:
                run.wrong.add("what was read went")
        run.leases.pop(own)

    return work


CASTS: dict[str, list[Callable[[Run], Work]]] = {
    "zombie, successor": [zombie, successor(105, 110, 105)],
    "zombie, two successors": [zombie, successor(105, 110), successor(105, 110)],
    "zombie, deleter, successor": [zombie, successor(-100, 105), successor(100, 105)],
    "three successors": [successor(105), successor(105, 100), successor(105)],
    "zombie, three successors": [zombie, successor(110), successor(105), successor(110)],
    "zombie, successor, readers": [zombie, successor(100, 105, 100), reader(100), reader(105)],
    "retention, readers": [successor(105, 110, 100, keep_latest=1), reader(100), reader(105), reader(100)],
    "lone saves, reader": [lone(7), lone(7), lone(7), reader(7)],
    "zombie, successor, lone saves": [zombie, successor(105), lone(7), lone(7), reader(7)],
}


def one(cast: list[Callable[[Run], Work]], rng: random.Random, rules: frozenset[str] = RULES) -> set[str]:
    """Play one run, and return what was wrong in it."""
    run = Run(rules, rng)
    works = [work(run) for work in cast]
    left = [rng.choice((999, rng.randint(0, 40))) for _ in works]
    alive = list(range(len(works)))
    while alive:
        who = rng.choice(alive)
        for _ in range(rng.choice((1, 1, 2, 4, 8))):
            left[who] -= 1
            if left[who] < 0 or not _goes_on(works[who]):
                alive.remove(who)
                break
            run.check()
    run.end()
    return run.wrong | _after_another_owner(run)


def _goes_on(work: Work) -> bool:
    try:
        next(work)
    except (StopIteration, Superseded):
        return False
    return True


def _after_another_owner(run: Run) -> set[str]:
    """What the next owner of the folder finds wrong: it repairs the copies for stock DCP."""
    work = Holder(run, FIRST).open()
    while _goes_on(work):
        run.check()
    steps = {step: save for step in run.manifests if (save := run.now(step)) and save[0] in run.claims}
    return {"stock DCP finds another save" for step, save in steps.items() if run.copies.get(step) != save}


def main(runs: int) -> None:
    for without in (None, *LOOKS, *ORDERS):
        for name, cast in CASTS.items():
            rng, found = random.Random(1), Counter[str]()
            for _ in range(runs if without is None else runs // 10):
                found.update(one(cast, rng, RULES - {without}))
            print(
                f"without '{without}'" if without else "all rules", "|", name, "|", dict(found) or "0 wrong", flush=True
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
