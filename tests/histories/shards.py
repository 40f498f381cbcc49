"""A random history of `rd.LogicalShards` under torchdata's `Loader`, beside one of a `rd.DataLoader`: both say the same."""

import pickle
import random
from typing import Any

from torchdata import nodes

import rescale_data as rd
from tests.histories.books import difference, require
from tests.histories.crew import Crew
from tests.histories.history import History, fail_in
from tests.histories.plans import Pipeline
from tests.histories.ranks import Top
from tests.nodes.resume import plain
from tests.states import opened


class Pair:
    """One rank's, of both."""

    def __init__(self, make: Any, top: Top, above: str) -> None:
        sizes = {"global_batch_size": top.o, "micro_batch_size": top.b}
        root: Any = rd.LogicalShards(*make[0], **sizes, **make[1])
        root = nodes.Mapper(root, lambda batch: batch) if above == "Mapper" else root
        root = nodes.Prefetcher(root, 2) if above == "Prefetcher" else root
        self.loader = nodes.Loader(root, restart_on_stop_iteration=False)
        self.mirror = rd.DataLoader(*make[0], **sizes, **make[1], collate_fn=list)
        self.one: Any = None

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)
        self.mirror.load_state_dict(_shards_in(state))

    def state(self) -> Any:
        return rd.whole_state(self.loader.state_dict()), self.mirror.state_dict()

    def begin(self) -> None:
        self.one, self.other = iter(self.loader), iter(self.mirror)

    def next(self) -> Any:
        one, other = next(self.one, None), next(self.other, None)
        require(plain(one) == plain(other), f"{one} is not {other}")
        return one


def _shards_in(state: Any) -> Any:
    """That of `LogicalShards`, whatever is above it."""
    if not isinstance(state, dict) or "table" in state:
        return state if isinstance(state, dict) else None
    return next((found for value in state.values() if (found := _shards_in(value))), None)


class UnderTorchdata(History):
    def play(self) -> None:
        r, state = self.r, None
        above = r.choice(["", "Mapper", "Prefetcher"])  # its state is of one kind
        self.say("LogicalShards", above, self.plan, self.n, self.o, self.repeat, self.files)
        for _ in range(r.randint(2, 5)):
            top = self.top()._replace(k=0)
            while above == "Prefetcher" and top.w > 1:  # ranks of a crew are threads
                top = self.top()._replace(k=0)
            given = {"num_logical_shards": self.n, "seed": self.seed, "repeat": self.repeat}
            make = (Pipeline(self.plan, self.files, listed=self.first_files),), given
            crew = Crew(top.w)
            pairs = crew.all(lambda _, *it: Pair(*it), make, top, above)
            self.say("segment", top, "" if state is None else opened(_shards_in(state))["samples"])
            if state is not None:
                crew.all(lambda i, of, saved: of[i].load(saved), pairs, state)
            state = self._segment(crew, pairs, above)
            crew.all(lambda i, of: of[i].mirror.close(), pairs)
            self.grow()

    def _segment(self, crew: Crew, pairs: list[Pair], above: str) -> Any:
        r, begun = self.r, False
        for _ in range(r.randint(1, 4)):
            num = r.choice([1, 2, 5, 12, 60])
            self.say("take", num)
            for _ in range(num):
                if not begun:
                    crew.all(lambda i: pairs[i].begin())
                found = crew.all(lambda i: pairs[i].next())
                require(len({each is None for each in found}) == 1, "the ranks end at different micro batches")
                begun = found[0] is not None
            if begun and above != "Prefetcher" and not pairs[0].mirror._stream.epoch_ended and r.random() < 0.1:
                self.say("iter")  # as torchdata has it: back to the beginning
                crew.all(lambda i: pairs[i].mirror.reset())
                begun = False
        states = crew.all(lambda i: pairs[i].state())
        state = pickle.loads(pickle.dumps(states[-1][0]))
        if begun:  # `Loader` stays at an end that was seen until it begins anew
            found = difference(_shards_in(state), states[0][1])
            require(not found, f"the states differ in {found}")
        return state


def history_of(seed: int) -> History:
    """Every eighth is one of these; a read that the history before had yet to fail fails in none of them."""
    fail_in(0)
    return (UnderTorchdata if seed % 8 == 7 else History)(random.Random(seed))
