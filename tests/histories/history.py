"""A random history of a run: segments on other topologies, and in each whatever a trainer may do, checked as it goes.

History(random.Random(7)).play()      raises `Failure`, or an error of the loader's, with what was done in `log`
"""

import copy
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import rescale_data as rd
from rescale_data.engine.recipe import EPOCH_ENDED, NO_REMAINDER, REMAINDER_COLUMN
from rescale_data.sources.dataset import DatasetSource
from rescale_data.testing.epochs import check_epochs
from tests.histories.books import Books, Failure, Silent, comparable, difference, require
from tests.histories.plans import Files, Pipeline, plan_of
from tests.histories.ranks import Seats, Top, again
from tests.pipelines import as_samples
from tests.states import opened

TOPOLOGY = ("global_batch_size", "dp_world_size", "micro_batch_size")
LOSSY = ("drop", "Mapper", "Mix", "Stock", "Map-skip", "Batcher')", "-cut", "Filter", "Tokenize", "Clean", "Kind")
EMPTY = ("no sample in two whole epochs", "no token in 2 whole", "no sample in 2 whole", "and kept none", "no row of")
REFUSED = (
    "An epoch has", "steps_per_epoch=", "hold less than one global batch", "Two epochs in a row",
    "are not those of one reader", "No node below reads a logical shard", "Files were added to the source",
    "has fewer rows than there are logical shards",
)  # fmt: skip


def accepts(error: BaseException) -> bool:
    """True if an error refuses what was drawn: too little data, on any rank, or on all a pipeline that cannot be."""
    alone = any("ALONE" in note for note in getattr(error, "__notes__", ()))
    words = EMPTY if alone else EMPTY + REFUSED
    return isinstance(error, Silent) or (isinstance(error, ValueError) and any(each in str(error) for each in words))


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
    """One run. What is drawn from ``r`` decides all of it.

    Attributes:
        actions: What a trainer does, and how often.
        sizes: The global batches that an aligned run may change to.
    """

    max_ranks = 4
    actions: Mapping[str, int] = {
        "take": 45, "ask": 12, "iterate": 5, "to_the_end": 10, "skip": 8, "set_epoch": 5, "save": 5, "load_live": 3, "ramp": 4,
        "rescale": 8, "die": 4,
    }  # fmt: skip

    def __init__(self, r: random.Random) -> None:
        self.r, self.log, self.ops = r, list[str](), Counter[str]()
        self.plan, self.collates = plan_of(r)
        self.files = {f"f{i}": r.randint(1, 40) for i in r.sample(range(9), r.randint(1, 3))}
        self.first_files = self.files
        self.aligned, self.repeat, self.tail = r.random() < 0.5, r.random() < 0.4, r.choice(["drop", "pad"])
        self.verify = r.random() < 0.3 and "Stock" not in repr(self.plan)
        self.seed, self.steps = r.randrange(3), r.randint(1, 9) if r.random() < 0.15 else None
        self.faults = r.random() < 0.3 and "skip" not in repr(self.plan)
        self.o, self.sizes = r.choice([2, 4, 6, 8, 12, 16]), [2, 4, 6, 8, 12, 16, 24]
        self.n = self.o * r.choice([1, 1, 2]) if self.aligned or r.random() < 0.5 else r.choice([1, 2, 3, 5, 7, 10, 12])
        if self.aligned and r.random() < 0.2 and self.o >= 8:
            self.n = self.o // 2
        if "StreamReader" in repr(self.plan):
            self.n, self.repeat = min(self.n, 4), self.repeat and self.n <= 4
        self.aligned = self.aligned and (self.n % self.o == 0 or self.o % self.n == 0)
        if "'never'" in repr(self.plan):
            self.repeat = True
        if not self.repeat and self.plan[0] in ("Reader", "Files"):
            self.steps = None
        self.grown = False  # files differ from when the state was saved
        self.prefetch = 0
        self.reference: Any = None
        self.failed: Seats | None = None  # whose read has failed

    def say(self, *what: Any) -> None:
        self.log.append(" ".join(map(str, what)))

    def aligned_tops(self, o: int) -> list[Any]:
        """Return the topologies that keep the order."""
        if self.n % o and o % self.n:
            return []
        found = rd.plan(o, num_logical_shards=self.n, num_workers=[0, 1, 2])
        return [p for p in found if p.dp_world_size <= self.max_ranks]

    def top(self) -> Top:
        r = self.r
        if self.aligned:
            chosen = r.choice(self.aligned_tops(self.o))
            return Top(chosen.dp_world_size, chosen.micro_batch_size, self.o, chosen.num_workers)
        for _ in range(9):
            w, b, k = r.choice([1, 1, 2, 3, 4, 5]), r.randint(1, 4), r.choice([0, 0, 0, 1, 2])
            if w * max(k, 1) <= self.n:
                return Top(w, b, w * b * r.randint(1, 3), k)
        return Top(1, 1, self.o)

    def make(self, top: Top) -> rd.DataLoader:
        sizes: Any = {"global_batch_size": top.o, "micro_batch_size": top.b, "num_logical_shards": self.n}
        workers: Any = {"num_workers": top.k, "prefetch": None if top.k else self.prefetch}
        how: Any = {"seed": self.seed, "repeat": self.repeat, "tail": self.tail, "verify": self.verify}
        how |= {"steps_per_epoch": self.steps, "collate_fn": None if self.collates else as_samples}
        return rd.DataLoader(self.pipeline, **sizes, **workers, **how)

    # The run

    def play(self) -> None:
        r, state, form = self.r, None, "plain"
        self.say("plan", self.plan)
        self.say(
            f"n={self.n} o={self.o} repeat={self.repeat} tail={self.tail} verify={self.verify} seed={self.seed} "
            f"steps={self.steps} faults={self.faults} aligned={self.aligned} files={self.files}"
        )
        self.books, self.saves = Books(), list[Any]()
        num_segments = r.randint(1, 5)
        for segment in range(num_segments):
            self.pipeline = Pipeline(self.plan, self.files, listed=self.first_files)
            self.prefetch = 0 if self.faults else r.choice([0, 0, 0, 1, 3])
            if self.aligned and segment and r.random() < 0.2:
                self.o = r.choice([o for o in self.sizes if self.aligned_tops(o)])
            self.now = self.top()
            at = {} if state is None else opened(state)
            self.say("segment", self.now, self.prefetch, {k: at.get(k) for k in ("samples", "origin", "step")}, form)
            self.seats = Seats(self.make, self.now, steps=self.steps is not None)
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
            found = difference(state, self.seats.state())
            require(not found, f"two states in a row differ in {found}")
            self.check()
            self.seats.close()
            files = self.files
            if self.saves and r.random() < 0.15:
                state, form, books, files = r.choice(self.saves)
                self.books.go_back_to(books)
                self.say("back to", opened(state)["samples"])
            self.grow()
            self.grown = files != self.files
        self.check_batches()

    def grow(self) -> None:
        """Between segments files are added."""
        plan = repr(self.plan)
        if ("Files" in plan or "Parquet" in plan) and "Stock" not in plan and self.r.random() < 0.4:
            new = [f"f{i}" for i in range(9) if f"f{i}" not in self.files]
            self.files = {**self.files, **{name: self.r.randint(1, 30) for name in new[: self.r.randint(0, 2)]}}

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
        schema, histories = self.seats.lead.stream.schema, self.books.histories
        for path, manifest in schema.manifests.items():
            now = schema.histories.get(path) or [(0, manifest)]  # a state keeps what it needs, the oracle all
            known = histories.get(path, [])
            same = [i for i, (_, files) in enumerate(known, 1) if files == now[0][1]]
            if same:  # a state that needs one entry alone says not since when it holds
                histories[path] = [*known[: same[-1]], *now[1:]]
            else:
                histories[path] = [*(each for each in known if each[0] < now[0][0]), *now]
        if self.reference is None or self.reference.histories != histories:
            self.reference = self.seats.reference(histories)
        self.reference.forget()

    def check_load(self, saved: dict[str, Any]) -> None:
        top, state, saved = self.now, self.seats.state(), opened(copy.deepcopy(saved))
        loaded = opened(state)
        was, now = tuple(saved[key] for key in TOPOLOGY), (top.o, top.w, top.b)
        at_step = (saved["samples"] - saved["origin"]) % was[0] == 0 and top.o == was[0]
        besides = (*TOPOLOGY, "sources", *(("pipeline",) if self.grown else ()))  # folded where it can be
        counted = saved["shards"]["remainder"]
        joined = self.grown and bool((counted >= 0).any() and (loaded["shards"]["remainder"] < 0).all())
        if not joined and (at_step or now == was or saved["samples"] == saved["origin"]):
            found = difference(saved, loaded, besides)
        else:  # what is left of an epoch is counted anew
            require(loaded["origin"] == loaded["samples"] == saved["samples"], "origin after a load")
            self.books.open = []
            if not (counted == EPOCH_ENDED).all():
                counted.fill_(NO_REMAINDER)
            found = difference(saved, loaded, (*besides, "origin", "in_step"))
        require(not found, f"a load changed {found}")
        if loaded["origin"] != saved["origin"] or self.grown or was[0] != top.o:
            begun = (loaded["samples"] - loaded["origin"]) % top.o
            self.books.segments.append(
                (len(self.books.batches), copy.deepcopy(state), None if begun else self.pipeline, top.o)
            )

    # What a trainer does

    def act(self) -> None:
        r = self.r
        action = getattr(self, r.choices(list(self.actions), list(self.actions.values()))[0])
        may_fail = self.faults and action in (self.take, self.to_the_end, self.iterate)
        _fails_in[0] = r.choice([1, 3, 10, 40]) if may_fail else 0
        self.ops[action.__name__] += 1
        action()
        if may_fail and not _fails_in[0]:
            self.failed = self.seats

    def take(self, num: int | None = None) -> None:
        a = self.now.o // (self.now.w * self.now.b)
        num = min(12, self.r.choice([1, 1, 2, 3, a, 2 * a, 3 * a, self.r.randint(1, 30)])) if num is None else num
        self.say("take", num)
        self.seats.take(num, self.books)

    def iterate(self) -> None:
        self.say("iter")
        self.seats.left = None
        self.seats.iterate(self.books)

    def to_the_end(self) -> None:
        if self.repeat and not self.steps:
            return
        self.say("to the end")
        for _ in range(3000):
            if self.seats.next(self.books) is None:
                return
        raise Failure("an epoch without an end")

    def ask(self) -> None:
        _fails_in[0] = 0
        kind, before = self.r.randrange(5), self.seats.mark()

        def peek(seat: Any) -> str | None:
            try:
                return repr(again(seat.loader.peek))
            except StopIteration:
                return None

        def left(seat: Any) -> int | None:
            try:
                return seat.loader.batches_left
            except TypeError:
                return None

        if kind == 0:
            state, shown = self.seats.state(), self.seats.all(peek)
            require(
                len({each is None for each in shown}) == 1, "the ranks differ in whether there is a batch to peek at"
            )
            require(shown == self.seats.all(peek), "another batch is peeked at")
            found = difference(state, self.seats.state())
            require(not (found and self.seats.begun), f"a peek changes {found}")  # before, it may plan a remainder
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
        self.saves.append((self.seats.state(form), form, self.books.copy(), dict(self.files)))

    def load_live(self) -> None:
        same = [each for each in self.saves if each[3] == self.files]
        if not same:
            return
        state, _, books, _ = self.r.choice(same)
        self.say("load live", opened(state)["samples"], [opened(state)[key] for key in TOPOLOGY])
        self.books.go_back_to(books)
        self.seats.load(state)
        self.check_load(state)
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

    def skip(self) -> None:
        """As if it had been taken: others at the same place take what is left out, into the books."""
        num = self.r.choice([1, 2, 5, self.r.randint(1, 30)] + ([20] if self.repeat else []))
        if self.failed is self.seats:  # an error that is still to come would end a skip half way
            return
        self.say("skip", num)
        shadow, seats = Seats(self.make, self.now, steps=self.seats.steps), self.seats
        shadow.load(seats.state())
        for seat, real in zip(shadow.seats, seats.seats, strict=True):
            cursor, unseen = seat.stream.cursor, real.ended and seats.steps
            seat.stream.cursor = cursor._replace(resumed=False, end_of_steps_seen=not unseen)
        shadow.take(num, self.books)
        seats.all(lambda seat: seat.loader.skip(num * self.micro))
        seats.begun, seats.left = False, None
        found = difference(shadow.state(), seats.state(), ("sources",))  # what is over is folded by a load
        require(not found, f"skip({num}) is not as taking: {found}")
        clocks = [(each.lead.stream.clock, each.lead.loader.epoch) for each in (shadow, seats)]
        taken, skipped = [(clock.dropped_samples, clock.padded_samples, epoch) for clock, epoch in clocks]
        require(taken == skipped, f"skip({num}) counts otherwise: taken {taken}, {skipped}")
        shadow.close()

    # Other ranks

    def rescale(self) -> None:
        if self.in_step or self.grown or (self.seats.lead.ended and self.steps):
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
        found = difference(before, self.seats.state(), (*TOPOLOGY, "sources"))
        require(not found, f"a rescale changed {found}")

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
        widths = [w for w in range(len(lives), self.max_ranks + 1) if self.now.o % w == 0 and w <= self.n]
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
        self.reference.check(books, self.repeat)
        if not self.repeat:
            self.reference.check_epochs(books, self.n, self.tail)

    def check_batches(self) -> None:
        """R2: from wherever something changed, the global batches are those of one rank."""
        books = self.books
        if not self.aligned:
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
