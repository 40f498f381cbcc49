"""What a node is, and what it can do besides. That asking for the end of an epoch changes nothing: law 1."""

from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import BaseNode

import rescale_data as rd
from rescale_data.nodes import abilities, below
from rescale_data.nodes.base import draw_and_drop, initial

NAMES = {
    "FIELDS", "READS_AHEAD", "children", "fields", "position", "bind", "seek", "next_epoch", "parameters", "locate", "walk",
    "of_shard", "one_for_one", "reads", "is_reread",
}  # fmt: skip
ABILITIES = abilities.Ability.__subclasses__()


SOURCE = rd.DatasetSource(range(32), name="numbers")


class Plain(rd.Node[Any]):
    def next(self) -> Any:
        return next(self.children["source"])


class Known(Plain):
    """Counts and leaves out samples by methods of its own alone."""

    def next(self) -> Any:
        return super().next()

    def epoch_end(self, rows: Any, shards: Any) -> Any:
        return below.epoch_end_of_source(self, rows, shards)

    def skip(self, num_samples: int) -> int:
        return below.skip(self.children["source"], num_samples)


def test_who_writes_a_node_sees_fifteen_names() -> None:
    """Beyond those of torchdata; what is added here is to be an ability, or a function."""
    node = Plain(source=rd.Reader(range(4), rd.Shard()))
    assert {name for name in dir(node) if not name.startswith("_")} - set(dir(BaseNode)) == NAMES


def test_what_a_node_cannot_do_is_done_by_drawing() -> None:
    rows, known = (kind(source=rd.Reader(range(8), rd.Shard(), shuffle=False)) for kind in (Plain, Known))
    row, shards = np.array(initial(rows))[None], np.array([0])
    assert below.epoch_end(rows, row, shards) is None
    assert below.epoch_end(known, row, shards)[0].tolist() == [8]
    for node in (rows, known):
        next(node)
        assert below.skip(node, 3) == 3
        assert list(node) == [4, 5, 6, 7]


class Log(Plain):
    """Helpers that have the names of methods; an ability has attributes as well."""

    def write(self, text: str) -> None: ...
    def reread_document(self) -> None: ...
    def convert_sample_format(self, rows: Any) -> None: ...

    skip = 3


class Off(Known):
    epoch_end = skip = None  # type: ignore[assignment]


class Below(Off):
    def next(self) -> Any:
        return super().next()


class Counting(abilities.Counts, Plain):
    def epoch_end(self, rows: Any, shards: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Plain, []),
        (Known, [abilities.Counts, abilities.Skips]),
        (Log, []),
        (Off, []),
        (Below, []),
        (Counting, [abilities.Counts]),
    ],
)
def test_a_node_has_the_abilities_whose_methods_it_has(kind: type[Plain], expected: list[type]) -> None:
    """Neither those of helpers with such a name, nor those whose method is None; nor is a class of it an ability."""
    assert [each for each in ABILITIES if issubclass(kind, each)] == expected
    assert not issubclass(Plain, Counting)
    loader = rd.DataLoader(lambda shard: kind(source=rd.Reader(range(8), shard, shuffle=False)), global_batch_size=8)
    assert sorted(next(iter(loader)).tolist()) == [*range(8)]


def test_a_subclass_gives_samples_without_many_at_once() -> None:
    """`write_many` set to `None`: all batches are written by the subclass's own `write`."""

    class Shifted(rd.TokenPacker):
        write_many = None  # type: ignore[assignment]

        def write(self, buffer: Any, sample_id_slots: int) -> None:
            super().write(buffer, sample_id_slots)
            buffer.row("tokens", sample_id_slots)[:] += 1000

    source = rd.SyntheticSource(256, length=(5, 20), vocab_size=100)
    loader = rd.DataLoader(
        lambda shard: Shifted(rd.Reader(source, shard), column="tokens", seq_len=16, eos_id=0),
        global_batch_size=4,
        repeat=True,
    )
    assert all((batch["tokens"] >= 1000).all() for _, batch in zip(range(4), loader, strict=False))


class TwoAtOnce:
    def next(self) -> Any:
        return super().next() + super().next()


class Sums(rd.Map):
    def next(self) -> Any:
        return super().next() + super().next()


class Summed(TwoAtOnce, rd.Map): ...


class Logged(rd.Map):
    one_for_one = True

    def next(self) -> Any:
        return super().next()


@pytest.mark.parametrize("kind", [Sums, Summed])
def test_a_subclass_with_a_next_of_its_own_is_not_one_for_one(kind: type[rd.Map]) -> None:
    def pipeline(shard: rd.Shard) -> rd.Map:
        return kind(rd.Reader(SOURCE, shard, shuffle=False), int)

    node = pipeline(rd.Shard())
    rd.nodes.skip(node, 3)
    assert next(node) == 6 + 7
    loader = rd.DataLoader(pipeline, global_batch_size=4, num_logical_shards=4)
    assert [sum(map(len, loader)) for _ in range(2)] == [16, 16]
    with pytest.raises(TypeError, match="how many samples come out of Sum"):
        len(loader)


@pytest.mark.parametrize(("num_samples", "returned"), [(2, None), (2, 3), (2, -1), (5, 5)])
def test_a_skip_that_does_not_say_how_many_it_left_out_is_an_error(num_samples: int, returned: int | None) -> None:
    class Silent(Plain):
        def skip(self, num_samples: int) -> Any:
            for _ in range(num_samples):
                self.next()
            return returned

    with pytest.raises(TypeError, match=rf"skip\({num_samples}\) of Silent returned .*: return the number"):
        rd.nodes.skip(Silent(source=rd.Reader(range(4), rd.Shard())), num_samples)


def test_a_subclass_that_says_so_is_one_for_one() -> None:
    loader = rd.DataLoader(lambda shard: Logged(rd.Reader(SOURCE, shard), int), global_batch_size=4)
    assert len(loader) == 8
    assert not Logged(rd.Reader(SOURCE, rd.Shard()), int, on_error="skip").one_for_one


class Fewer(rd.Shuffle):
    """Yields as many samples in an epoch as the number of the epoch says."""

    def next(self) -> Any:
        epoch, row = self.position[1:3]
        if row > epoch:
            self.next_epoch(self.position)
            self.bind(self.position)
            raise StopIteration
        return super().next()

    def skip(self, num_samples: int) -> int:
        return draw_and_drop(self, num_samples)

    def epoch_end(self, rows: Any, shards: Any) -> Any:
        end = rows.copy()
        end[:, 1], end[:, 2] = rows[:, 1] + 1, 0
        return rows[:, 1] + 1 - rows[:, 2], end

    write = None  # type: ignore[assignment]


def test_epochs_of_a_subclass_with_a_next_of_its_own_need_not_be_alike() -> None:
    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        rows = rd.Reader(SOURCE, shard, shuffle=False)
        return rd.WeightedSampler({"rows": Fewer(rows, 1, shard=shard)}, {"rows": 1})

    drawn, skipped = pipeline(rd.Shard(repeat=True)), pipeline(rd.Shard(repeat=True))
    samples = [next(drawn) for _ in range(20)]
    assert samples[:10] == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3]
    rd.nodes.skip(skipped, 15)
    assert [next(skipped) for _ in range(5)] == samples[15:]


class Adding(BaseNode):
    """Adds to the tensor of the state that it is given."""

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.count = torch.zeros(1, dtype=torch.int64) if initial_state is None else initial_state["count"]

    def next(self):
        if self.count == 4:
            raise StopIteration
        self.count += 1
        return int(self.count)

    def get_state(self):
        return {"count": self.count.clone()}


def test_a_foreign_node_may_write_into_the_state_that_it_is_given():
    loader = rd.DataLoader(lambda _: Adding(), global_batch_size=2, num_logical_shards=1)
    epochs = []
    for _ in range(2):
        epochs.append(torch.cat([*loader]).tolist())
        loader.reset()
    assert epochs == [[1, 2, 3, 4]] * 2
