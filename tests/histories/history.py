"""A random history of a run: segments on other topologies, and in each whatever a trainer may do, checked as it goes.

History(random.Random(7)).play()      raises `Failure`, or an error of the loader's, with what was done in `log`
"""

import copy
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import rescale_data as rd
from rescale_data.engine.recipe import EPOCH_ENDED, NO_REMAINDER, REMAINDER_COLUMN
from rescale_data.sources.dataset import DatasetSource
from rescale_data.testing.epochs import check_epochs
from tests.histories.books import Books, Failure, Reference, check_blocked, comparable, require, same_state
from tests.histories.plans import Files, Pipeline, as_samples, numbers_in, plan_of
from tests.histories.ranks import Seats, Top, again
from tests.states import opened

TOPOLOGY = ("global_batch_size", "dp_world_size", "micro_batch_size")
LOSSY = ("drop", "Mapper", "Mix", "Stock", "Map-skip", "Batcher')", "-cut", "Filter", "Tokenize", "Clean", "Blocked")


class Passing(OSError):
    """A read that fails once."""


_fails_in = [0]


def fail_in(num_reads: int) -> None:
    """The last of so many reads fails; 0: none."""
    _fails_in[0] = num_reads


@contextmanager
def failing_reads() -> Iterator[None]:
    """Reading rows can be made to fail, once."""
    real = {kind: kind.row for kind in (DatasetSource, Files)}

    def row_of(kind: Any) -> Any:
        def row(self: Any, index: int) -> Any:
            if _fails_in[0]:
                _fails_in[0] -= 1
                if not _fails_in[0]:
                    raise Passing("this passes")
            return real[kind](self, index)

        return row

    try:
        for kind in real:
            kind.row = row_of(kind)  # type: ignore[method-assign]
        yield
    finally:
        _fails_in[0] = 0
        for kind, row in real.items():
            kind.row = row  # type: ignore[method-assign]


class History:
    """One run. What is drawn from ``r`` decides all of it."""

    def __init__(self, r: random.Random) -> None:
        self.r, self.log, self.ops = r, list[str](), Counter[str]()
        self.plan, self.collates = plan_of(r)
        self.blocks = r.random() < 0.1
        if self.blocks:
            self._with_a_blocklist()
        self.files = {f"f{i}": r.randint(1, 40) for i in r.sample(range(9), r.randint(1, 3))}
        self.first_files = self.files
        self.aligned, self.repeat = r.random() < 0.5, r.random() < 0.4 and not self.packs_blocked
        self.tail = "pad" if self.packs_blocked else r.choice(["drop", "pad"])
        self.verify = r.random() < 0.3 and "Stock" not in repr(self.plan)
        self.seed, self.steps = r.randrange(3), r.randint(1, 9) if r.random() < 0.15 else None
        self.faults = r.random() < 0.3 and "skip" not in repr(self.plan)
        self.o = r.choice([2, 4, 6, 8, 12, 16])
        self.n = self.o * r.choice([1, 1, 2]) if self.aligned or r.random() < 0.5 else r.choice([1, 2, 3, 5, 7, 10, 12])
        if self.aligned and r.random() < 0.2 and self.o >= 8:
            self.n = self.o // 2
        if "StreamReader" in repr(self.plan):
            self.n, self.repeat = min(self.n, 4), self.repeat and self.n <= 4
        self.aligned = self.aligned and (self.n % self.o == 0 or self.o % self.n == 0)
        if "'never'" in repr(self.plan):
            self.repeat = True
        if self.blocks or (not self.repeat and self.plan[0] == "Reader") or self.plan[0] == "Files":
            self.steps = self.steps if self.repeat else None
        self.number, self.lists = 0, [self._blocklist()]
        self.changes: list[str] = []  # what differs from when the state was saved
        self.prefetch = 0
        self.failed: Seats | None = None  # whose read has failed

    @property
    def packs_blocked(self) -> bool:
        return self.blocks and self.plan[0] == "Pack"

    def _with_a_blocklist(self) -> None:
        leaf = ("Reader", self.r.randrange(4), self.r.choice([False, True, 4]))
        rows = ("Blocked", leaf if self.r.random() < 0.5 else ("Files", self.r.choice([False, 4])))
        self.plan, self.collates = ("Map", rows) if self.r.random() < 0.5 else rows, False
        if self.r.random() < 0.4:
            options = {"seq_len": self.r.choice([3, 7]), "eos_id": None, "last": "pad"}
            self.plan, self.collates = ("Pack", tuple(options.items()), rows), True

    def _blocklist(self) -> set[int]:
        if not self.blocks:
            return set()
        bases = (3000, 4000, 5000, *range(20_000, 29_000, 1000))
        return {i for base in bases for i in range(base, base + 70) if self.r.random() < 0.2}

    def say(self, *what: Any) -> None:
        self.log.append(" ".join(map(str, what)))

    def aligned_tops(self, o: int) -> list[Any]:
        """Return the topologies that keep the order."""
        if self.n % o and o % self.n:
            return []
        found = rd.plan(o, num_logical_shards=self.n, num_workers=[0, 1, 2])
        return [p for p in found if p.dp_world_size <= 4]

    def top(self) -> Top:
        r = self.r
        r.random()  # so that seeds mean what they meant
        if self.aligned:
            chosen = r.choice(self.aligned_tops(self.o))
            return Top(chosen.dp_world_size, chosen.micro_batch_size, self.o, chosen.num_workers)
        for _ in range(9):
            w, b, k = r.choice([1, 1, 2, 3, 4]), r.randint(1, 4), r.choice([0, 0, 0, 1, 2])
            if w * max(k, 1) <= self.n:
                return Top(w, b, w * b * r.randint(1, 3), k)
        return Top(1, 1, self.o)

    def make(self, top: Top, **more: Any) -> rd.DataLoader:
        return rd.DataLoader(
            self.pipeline,
            global_batch_size=top.o,
            micro_batch_size=top.b,
            num_logical_shards=self.n,
            num_workers=top.k,
            prefetch=None if top.k else self.prefetch,
            seed=self.seed,
            repeat=self.repeat,
            tail=self.tail,  # type: ignore[arg-type]
            verify=self.verify,
            steps_per_epoch=self.steps,
            collate_fn=None if self.collates else as_samples,
            **more,
        )

    # The run

    def play(self) -> None:
        r, state, form = self.r, None, "plain"
        self.say("plan", self.plan)
        self.say(
            f"n={self.n} o={self.o} repeat={self.repeat} tail={self.tail} verify={self.verify} seed={self.seed} "
            f"steps={self.steps} faults={self.faults} aligned={self.aligned} blocks={self.blocks} files={self.files}"
        )
        self.books, self.saves = Books(), list[Any]()
        num_segments = r.randint(1, 5)
        for segment in range(num_segments):
            self.pipeline = Pipeline(self.plan, self.files, self.lists[-1], self.first_files)
            self.prefetch = 0 if self.faults else r.choice([0, 0, 0, 1, 3])
            if self.aligned and segment and r.random() < 0.2:
                self.o = r.choice([o for o in (2, 4, 6, 8, 12, 16, 24) if self.aligned_tops(o)])
            self.now = self.top()
            self.say(
                "segment",
                self.now,
                self.prefetch,
                "" if state is None else {k: opened(state)[k] for k in ("samples", "origin", "step", "epoch")},
                form,
            )
            self.seats = Seats(self.make, self.now)
            self.seats.steps = self.steps is not None
            if segment == 0 and r.random() < 0.4 and not any(word in repr(self.plan) for word in LOSSY):
                check_epochs(self.seats.lead.loader._stream.setup.recipe)
                self.ops["rows of sources"] += 1
            self.begin(state, form)
            for _ in range(r.randint(0, 6)):
                self.act()
            if segment == num_segments - 1 and not self.repeat and not self.steps and r.random() < 0.7:
                self.to_the_end()
            _fails_in[0] = 0
            form = r.choice(["plain", "pickle", "torch", "local"])
            state = self.seats.state(form)
            difference = same_state(state, self.seats.state())
            require(not difference, f"two states in a row differ in {difference}")
            self.check()
            self.seats.close()
            files, number = self.files, self.number
            if self.saves and r.random() < 0.15:
                state, form, books, files, number = r.choice(self.saves)
                self.books.go_back_to(books)
                self.say("back to", opened(state)["samples"])
            self.change()
            self.changes = ["files"] * (files != self.files) + ["blocklist"] * (number != self.number)
        self.check_batches()

    def change(self) -> None:
        """Between segments: files are added, the blocklist is another."""
        if (
            any(kind in repr(self.plan) for kind in ("Files", "Parquet"))
            and "Stock" not in repr(self.plan)
            and self.r.random() < 0.4
        ):
            new = [f"f{i}" for i in range(9) if f"f{i}" not in self.files]
            self.files = {**self.files, **{name: self.r.randint(1, 30) for name in new[: self.r.randint(0, 2)]}}
        if self.blocks and self.r.random() < 0.7:
            self.lists.append(self._blocklist())
            self.number = len(self.lists) - 1

    def begin(self, state: Any, form: str) -> None:
        r = self.r
        if state is None:
            self._refer()
            self.books.segments.append((0, None, self.pipeline, self.now.o))
        else:
            if r.random() < 0.1:
                self.seats.take(r.randint(1, 3), Books())
            for _ in range(1 + (r.random() < 0.1)):
                self.seats.load(state)
            self.check_load(state)
            self._refer()
        if r.random() < 0.3:
            self.ask()

    def _refer(self) -> None:
        """What shards yield, by the data of now and since when it is so: a state keeps what it needs of that, the books all."""
        schema, recipe = self.seats.lead.stream.schema, self.seats.lead.loader._stream.setup.recipe
        if self.blocks:
            bare = Pipeline(self.plan, self.files, listed=self.first_files)
            recipe = type(recipe)(bare, recipe.num_logical_shards, recipe.seed, recipe.repeat, recipe.verify)
        histories = self.books.histories
        for path, manifest in schema.manifests.items():
            now = schema.histories.get(path) or [(0, manifest)]  # a state keeps what it needs, the oracle all
            known = histories.get(path, [])
            same = [i for i, (_, files) in enumerate(known, 1) if files == now[0][1]]
            if same:  # a state that needs one entry alone says not since when it holds
                histories[path] = [*known[: same[-1]], *now[1:]]
            else:
                histories[path] = [*(each for each in known if each[0] < now[0][0]), *now]
        self.reference = Reference(recipe, copy.deepcopy(histories))

    def check_load(self, saved: dict[str, Any], *, blocked_then: bool = True) -> None:
        top, state, saved = self.now, self.seats.state(), opened(copy.deepcopy(saved))
        loaded = opened(state)
        was, now = tuple(saved[key] for key in TOPOLOGY), (top.o, top.w, top.b)
        at_step = (saved["samples"] - saved["origin"]) % was[0] == 0 and top.o == was[0]
        besides = (*TOPOLOGY, "sources", *(("pipeline",) if self.changes else ()))  # folded where it can be
        # rows of the remainder may be blocked
        anew = blocked_then and "blocklist" in self.changes and (saved["shards"]["remainder"] >= 0).any()
        if not anew and (at_step or now == was or saved["samples"] == saved["origin"]):
            difference = same_state(saved, loaded, besides)
        else:
            require(loaded["origin"] == loaded["samples"] == saved["samples"], "origin after a load")
            self.books.open = []
            if not (saved["shards"]["remainder"] == EPOCH_ENDED).all():
                saved["shards"]["remainder"].fill_(NO_REMAINDER)
            difference = same_state(saved, loaded, (*besides, "origin", "in_step"))
        require(not difference, f"a load changed {difference}")
        if loaded["origin"] != saved["origin"] or self.changes or was[0] != top.o:
            begun = (loaded["samples"] - loaded["origin"]) % top.o
            self.books.segments.append(
                (len(self.books.batches), copy.deepcopy(state), None if begun else self.pipeline, top.o)
            )

    # What a trainer does

    def act(self) -> None:
        r = self.r
        actions = {
            self.take: 45, self.ask: 12, self.iterate: 5, self.to_the_end: 10, self.skip: 8, self.set_epoch: 5, self.save: 5,
            self.load_live: 3, self.ramp: 4, self.rescale: 8, self.die: 4,
        }  # fmt: skip
        action = r.choices(list(actions), list(actions.values()))[0]
        may_fail = self.faults and action in (self.take, self.to_the_end, self.iterate)
        _fails_in[0] = r.choice([1, 3, 10, 40]) if may_fail else 0
        self.ops[action.__name__] += 1
        action()
        if may_fail and not _fails_in[0]:
            self.failed = self.seats

    def next(self) -> Any:
        return self.seats.next(self.books, self.number)

    def take(self, num: int | None = None) -> None:
        a = self.now.o // (self.now.w * self.now.b)
        num = min(12, self.r.choice([1, 1, 2, 3, a, 2 * a, 3 * a, self.r.randint(1, 30)])) if num is None else num
        self.say("take", num)
        for _ in range(num):
            empty = 0
            while self.next() is None:
                empty += 1
                require(empty < 3, "three empty iterators")

    def iterate(self) -> None:
        self.say("iter")
        self.seats.left = None
        self.seats.iterate(self.books)

    def to_the_end(self) -> None:
        if self.repeat and not self.steps:
            return
        self.say("to the end")
        for _ in range(3000):
            if self.next() is None:
                return
        raise Failure("an epoch without an end")

    def ask(self) -> None:
        _fails_in[0] = 0
        kind, before = self.r.randrange(5), self.seats.mark()

        def peek(seat: Any) -> bool:
            try:
                again(seat.loader.peek)
            except StopIteration:
                return False
            return True

        def left(seat: Any) -> int | None:
            try:
                return seat.loader.batches_left
            except TypeError:
                return None

        if kind == 0:
            self.seats.same(peek, "peek")
        elif kind == 1:
            self.seats.all(lambda seat: seat.loader.progress())
        elif kind == 2 and self.seats.begun:
            self.seats.left = self.seats.same(left, "batches_left")
        elif kind == 3:
            self.seats.all(lambda seat: again(seat.loader.start))
        self.seats.same(lambda seat: (seat.loader.epoch, seat.loader.step), "epoch and step")
        self.seats.tally(self.books, before)

    def set_epoch(self) -> None:
        before, seats = self.seats.mark(), self.seats
        epoch = seats.same(lambda seat: seat.loader.epoch, "epoch")
        self.say("set_epoch", epoch)
        seats.all(lambda seat: seat.loader.set_epoch(epoch))
        if seats.lead.ended and self.r.random() < 0.7:
            seats.all(lambda seat: seat.loader.set_epoch(epoch + 1))
            require(seats.same(lambda seat: seat.loader.epoch, "epoch") == epoch + 1, "set_epoch")
            seats.begun = False
        seats.left = None
        seats.tally(self.books, before, moved=True)

    def save(self) -> None:
        form = self.r.choice(["plain", "pickle", "local"])
        self.say("save", form)
        self.check()
        self.saves.append((self.seats.state(form), form, self.books.copy(), dict(self.files), self.number))

    def load_live(self) -> None:
        same = [each for each in self.saves if each[3] == self.files and each[4] == self.number]
        if not same:
            return
        state, _, books, _, _ = self.r.choice(same)
        self.say("load live", opened(state)["samples"], [opened(state)[key] for key in TOPOLOGY])
        self.books.go_back_to(books)
        self.seats.load(state)
        self.check_load(state, blocked_then=False)
        self._refer()

    @property
    def micro(self) -> int:
        return self.now.w * self.now.b

    @property
    def in_step(self) -> bool:
        clock = self.seats.lead.stream.clock
        return (clock.samples - clock.origin) % self.now.o != 0

    def ramp(self) -> None:
        """Another global batch, and other workers, on the same ranks."""
        if self.in_step:
            return
        o, k = self.micro * self.r.randint(1, 4), self.r.choice([self.now.k, self.now.k, 0, 1, 2])
        fits = {(p.dp_world_size, p.micro_batch_size, p.num_workers) for p in self.aligned_tops(o)}
        if (self.aligned and (self.now.w, self.now.b, k) not in fits) or self.now.w * max(k, 1) > self.n:
            return
        self.o = o if self.aligned else self.o
        self.say("ramp to", o, k)
        before, state = self.seats.mark(), self.seats.state()
        changed = {"global_batch_size": o, "num_workers": k, "prefetch": None if k else self.prefetch}
        self.seats.all(lambda seat: seat.loader.reopen(**changed))
        self.seats.tally(self.books, before)
        self.seats.left = None
        if o != self.now.o:
            self.books.open = []
            self.books.segments.append((len(self.books.batches), state, self.pipeline, o))
        self.now = self.seats.top = self.now._replace(o=o, k=k)

    # As if it had been taken: the same is taken by others

    def shadow(self, state: dict[str, Any], num: int) -> Seats:
        """Others at the same place that take what is left out, into the books."""
        state = copy.deepcopy(state)
        shadow = Seats(self.make, self.now)
        shadow.steps = self.steps is not None
        shadow.load(state)
        for seat, real in zip(shadow.seats, self.seats.seats, strict=True):
            cursor, unseen = seat.loader._stream.cursor, real.ended and self.steps is not None
            seat.loader._stream.cursor = cursor._replace(resumed=False, epochs_seen=cursor.epochs_seen - unseen)
        shadow.take(num, self.books, self.number)
        return shadow

    def _compare(self, shadow: Seats, what: str) -> None:
        difference = same_state(shadow.state(), self.seats.state(), ("sources",))  # what is over is folded by a load
        require(not difference, f"{what} is not as taking: {difference}")
        counts = [
            (each.stream.clock.dropped_samples, each.stream.clock.padded_samples, each.loader.epoch)
            for each in (shadow.lead, self.seats.lead)
        ]
        require(counts[0] == counts[1], f"{what} counts otherwise: taken {counts[0]}, {counts[1]}")
        shadow.close()

    def skip(self) -> None:
        r = self.r
        num = r.choice([1, 2, 5, r.randint(1, 30)] + ([20] if self.repeat else []))
        if self.failed is self.seats:  # an error that is still to come would end a skip half way
            return
        self.say("skip", num)
        shadow = self.shadow(self.seats.state(), num)
        self.seats.all(lambda seat: seat.loader.skip(num * self.micro))
        self.seats.begun, self.seats.left = False, None
        self._compare(shadow, f"skip({num})")

    # Other ranks

    def rescale(self) -> None:
        if self.in_step or self.changes or (self.seats.lead.ended and self.steps):
            return
        top = self.top()
        if top.o != self.now.o:
            fits = [b for b in range(1, self.now.o + 1) if self.now.o % (top.w * b) == 0]
            if not fits:
                return
            top = top._replace(o=self.now.o, b=self.r.choice(fits))
        if top.w * max(top.k, 1) > self.n:
            return
        num_stay = self.r.randint(1, min(top.w, self.now.w))
        order = self.r.sample(range(self.now.w), num_stay) + [-1] * (top.w - num_stay)
        self.r.shuffle(order)
        self.say("rescale", top, order)
        before, epoch, step = self.seats.state(), self.seats.lead.loader.epoch, self.seats.lead.loader.step
        self._go_on(top, order, before)
        require(
            (epoch, step) == (self.seats.lead.loader.epoch, self.seats.lead.loader.step), "epoch or step by rescale"
        )
        difference = same_state(before, self.seats.state(), (*TOPOLOGY, "sources"))
        require(not difference, f"a rescale changed {difference}")

    def _go_on(self, top: Top, order: list[int], state: dict[str, Any], delivered: int = 0) -> None:
        self.seats = self.seats.rescale(top, self.make, order, state, delivered)
        self.now = top

    def die(self) -> None:
        """Ranks die within a step; others go on behind the steps that were committed since the last state."""
        while self.in_step:
            self.take(1)
        a, steps, state = self.now.o // self.micro, self.r.randint(0, 4), self.seats.state()
        self.take(a * steps)
        committed, step = self.books.copy(), self.seats.lead.loader.step
        self.take(self.r.randint(0, a))
        lives = self.r.sample(range(self.now.w), self.r.randint(1, self.now.w))
        widths = [w for w in range(len(lives), 5) if self.now.o % w == 0 and w <= self.n]
        if not widths:
            return
        w = self.r.choice(widths)
        order = lives + [-1] * (w - len(lives))
        fits = [b for b in range(1, self.now.o + 1) if self.now.o % (w * b) == 0]
        if self.aligned:
            fits = [p.micro_batch_size for p in self.aligned_tops(self.o) if (p.dp_world_size, p.num_workers) == (w, 0)]
        if not fits:
            return
        top = Top(w, self.r.choice(fits), self.now.o)
        self.say("dies", top, order, "at step", step, "state", opened(state)["step"])
        self.books.go_back_to(committed)
        self.reference.forget()
        self._go_on(top, order, state, steps * self.now.o)
        require(step == self.seats.lead.loader.step, "step after a death")

    # What has to hold

    def check(self) -> None:
        books, at = self.books, self.seats.lead.stream
        books.ended = at.clock.epoch + bool((at.table[:, REMAINDER_COLUMN] == EPOCH_ENDED).all())
        if self.packs_blocked:
            self._check_tokens()
        elif self.blocks:
            check_blocked(books, self.reference, self.repeat, self.lists, lambda sample: sample["id"])
        else:
            self.reference.check(books, self.repeat)
            if not self.repeat:
                self.reference.check_epochs(books, self.n, self.tail)

    def _check_tokens(self) -> None:
        """Each token of a row that was never blocked comes once an epoch, no other twice."""
        ever = set().union(*self.lists)
        source = self.seats.lead.loader._stream.setup.schema.sources()
        (rows,) = source.values()
        for epoch in range(self.books.ended):
            given = [v for (e, _), v in self.books.delivered.items() if e == epoch]
            found = Counter(number for number in numbers_in(given) if number > 100)
            known = self.reference_rows(rows, epoch)
            whole = Counter(t for row in known for t in numbers_in(row))
            kept = Counter(t for row in known if row["id"] not in ever for t in numbers_in(row))
            require(not found - whole, f"epoch {epoch}: {found - whole} came too often")
            require(not kept - found, f"epoch {epoch}: {kept - found} never came")

    def reference_rows(self, source: Any, epoch: int) -> list[Any]:
        (history,) = self.reference.histories.values() or ([],)
        names = [manifest for since, manifest in history if since <= epoch]
        rows = [source.row(i) for i in range(source.num_rows)]
        if not names or "files" not in names[-1]:
            return rows
        return [row for name, size in names[-1]["files"] for row in Files({name: size}).documents]

    def check_batches(self) -> None:
        """R2: from wherever something changed, the global batches are those of one rank."""
        books = self.books
        if not self.aligned or self.blocks:
            return
        # what fills a last batch are first samples of a run: by the files of then, while a state lists them, else of later
        filled = all(len(history) == 1 for history in books.histories.values())
        ends = [*(begin for begin, *_ in books.segments[1:]), len(books.batches)]
        for (begin, state, pipeline, o), end in zip(books.segments, ends, strict=True):
            if end <= begin or pipeline is None:  # one rank cannot begin within a step
                continue
            self.pipeline = pipeline
            alone, mine = Seats(self.make, Top(1, o, o)), Books()
            if state is not None:
                alone.load(copy.deepcopy(state))
            alone.take(end - begin, mine)
            alone.close()
            for i, (x, y) in enumerate(zip(books.batches[begin:end], mine.batches, strict=True)):
                if comparable(x, filled=filled) != comparable(y, filled=filled):
                    raise Failure(
                        f"R2: global batch {begin + i} of {begin}..{end} is not that of one rank (remainder {x[1]}, {y[1]})"
                    )
