"""What documents carry along: each image once, with its document, within the limits, over any chain of topologies and forms."""

import itertools
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.engine.collate import pin
from rescale_data.nodes.packing.fit import best_fit
from rescale_data.nodes.packing.payload import PerDocument
from rescale_data.testing import assert_rescalable, full_state_dict
from tests.nodes.resume import assert_ends, assert_resumes, endless, plain

N, BATCH, WINDOW, PAD = 6, 12, 8, 9_999
some = settings(max_examples=max(6, settings().max_examples // 8))


def conversation(number: int, num_tokens: int, num_images: int | None) -> dict[str, Any]:
    """Tokens, images and a box for each image that name their row; `None` images where there are none."""
    images = None if num_images is None else [f"{number}/{i}".encode() for i in range(num_images)]
    boxes = np.full((num_images or 0, 4), number, dtype=np.float32)
    return {"tokens": np.full(num_tokens, number), "images": images, "boxes": boxes, "id": f"row {number}"}


RNG = np.random.default_rng(14)
ROWS = [conversation(i, int(RNG.integers(0, 40)), [None, 0, 1, 2, 4, 5][int(RNG.integers(6))]) for i in range(120)]
SOURCE = rd.DatasetSource(ROWS, name="chats")
PAYLOAD = {"payload": ["images", "boxes", "id"], "limits": {"images": 5}}


def packer(source: Any, shard: rd.Shard | None = None, **others: Any) -> rd.WholeDocumentPacker:
    form = {"column": "tokens", "seq_len": 48, "window": WINDOW, "pad_id": PAD, **PAYLOAD}
    return rd.WholeDocumentPacker(rd.Reader(source, shard or rd.Shard(), shuffle=4), **{**form, **others})


def num(value: Any) -> int:
    return 0 if value is None else len(value)


def first_pieces(sample: dict[str, Any], rows: list[dict[str, Any]], limits: dict[str, int]) -> list[int]:
    """The rows that begin in a sample: what they carry is there, and within the limits."""
    values = plain(sample)
    ids, tokens = values["doc_ids"], values["tokens"]
    numbers = [tokens[ids.index(doc)] for doc in range(max(ids) + 1)]
    begins = [doc for doc, name in enumerate(values["id"]) if name is not None]
    for doc, number in enumerate(numbers):
        expected = plain(rows[number]) if doc in begins else dict.fromkeys(PAYLOAD["payload"])
        assert {name: values[name][doc] for name in PAYLOAD["payload"]} == {k: expected[k] for k in PAYLOAD["payload"]}
    for name, most in limits.items():
        assert sum(map(num, values[name])) <= most
    assert {len(values[name]) for name in PAYLOAD["payload"]} == {len(numbers)}
    return [numbers[doc] for doc in begins]


@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.sampled_from([None, 0, 1, 2, 3, 6])), min_size=1, max_size=30),
    long=st.sampled_from(["split", "truncate", "drop"]),
    limits=st.fixed_dictionaries({}, optional={"images": st.integers(1, 7), "boxes": st.integers(5, 9)}),
    max_documents=st.integers(1, 4),
)
@settings(max_examples=80)
def test_each_document_has_what_it_carries_once(rows: Any, long: Any, limits: Any, max_documents: int) -> None:
    data = [conversation(i, *row) for i, row in enumerate(rows)]
    over = {i for i, row in enumerate(data) for name, most in limits.items() if num(row[name]) > most}
    node = packer(data, seq_len=16, long=long, limits=limits, max_documents=max_documents)
    if over and long != "drop":
        with pytest.raises(ValueError, match="more than a whole sample may") as caught:
            list(node)
        assert "given list: list[" in "".join(caught.value.__notes__)
        return
    came = [number for sample in node for number in first_pieces(sample, data, limits)]
    dropped = (
        {i for i, (length, _) in enumerate(rows) if length and (length > 16 or i in over)} if long == "drop" else set()
    )
    assert sorted(came) == [i for i, (length, _) in enumerate(rows) if length and i not in dropped]
    if long == "drop":
        assert node.get_state()["long"] == len(dropped)


def loaders(world_size: int, **others: Any) -> list[rd.DataLoader]:
    sizes = {"global_batch_size": BATCH, "micro_batch_size": BATCH // world_size, "num_logical_shards": N}
    arguments = {**sizes, "dp_world_size": world_size, "repeat": True}
    return [
        rd.DataLoader(lambda shard: packer(SOURCE, shard, **others), dp_rank=rank, **arguments)
        for rank in range(world_size)
    ]


def samples_of(chain: list[tuple[dict[str, Any], int, int]]) -> dict[int, list[Any]]:
    """By logical shard, over segments of ``(form, ranks, steps)``."""
    state, found = None, defaultdict(list)
    for form, world_size, steps in chain:
        ranks = loaders(world_size, **form)
        for loader in ranks if state is not None else []:
            loader.load_state_dict(state)
        for loader in ranks * steps:
            taken = loader._stream.take()
            for i, shard in enumerate(taken.shards):
                found[shard].append({key: value[i] for key, value in taken.batch.items()})
        state = full_state_dict(ranks)
    return found


def segments(forms: Any) -> Any:
    return st.lists(st.tuples(forms, st.sampled_from([4, 2, 3, 1]), st.integers(0, 3)), min_size=2, max_size=3)


@given(segments(st.just({})), st.sampled_from(["split", "truncate", "drop"]), st.sampled_from([16, 48]))
@some
def test_rescaled_it_is_as_if_nothing_had_interrupted(chain: Any, long: str, seq_len: int) -> None:
    form = {"long": long, "seq_len": seq_len}
    for shard, samples in samples_of([(form, *segment) for _, *segment in chain]).items():
        expected = packer(SOURCE, rd.Shard(shard, N, repeat=True), **form)
        assert [plain(sample) for sample in samples] == [plain(next(expected)) for _ in samples]


FORMS = st.fixed_dictionaries(
    {"seq_len": st.sampled_from([40, 96]), "limits": st.sampled_from([{"images": n} for n in (5, 9)])}
)


@given(segments(FORMS))
@some
def test_each_comes_once_where_limits_and_length_change_within_windows(chain: Any) -> None:
    for shard, samples in samples_of(chain).items():
        came = [row for sample in samples for row in first_pieces(sample, ROWS, {"images": 9})]
        reader = endless(rd.Reader(SOURCE, rd.Shard(shard, N, repeat=True), shuffle=4))
        read = [int(row["tokens"][0]) for row in itertools.islice(reader, len(came) + 60) if len(row["tokens"])]
        assert not Counter(came) - Counter(read[: len(came) + WINDOW])
        assert not Counter(read[: max(0, len(came) - WINDOW + 1)]) - Counter(came)


def test_resumes_at_every_position() -> None:
    assert_resumes(lambda: packer(SOURCE, rd.Shard(1, 3, repeat=True)), 12)
    assert_ends(lambda: packer(SOURCE, rd.Shard(0, 3)))


def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
    return packer(SOURCE, shard)


def through_nodes(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Map(rd.Shuffle(packer(SOURCE, shard), 4), dict)


@pytest.mark.parametrize(("pipeline", "workers"), [(pipeline, 1), (through_nodes, 0)])
def test_batches_hold_a_list_per_sample_with_workers_too(pipeline: Any, workers: int) -> None:
    """In place and collated, sent between processes or not, the batch is the same."""

    def make(rank: int, world_size: int, micro: int, num_workers: int) -> rd.DataLoader:
        return rd.DataLoader(
            pipeline, global_batch_size=6, num_logical_shards=6, dp_rank=rank, dp_world_size=world_size,
            micro_batch_size=micro, num_workers=num_workers, repeat=True,
        )  # fmt: skip

    assert_rescalable(make, [(2, 3, 0), (1, 3, workers)], steps=1)
    batch = next(iter(make(0, 1, 6, 0)))
    assert len(batch["images"]) == 6 == len(batch["tokens"])
    assert {type(value) for value in batch["images"]} == {PerDocument}
    assert {type(images) for sample in batch["images"] for images in sample} <= {list, type(None)}


def test_the_last_batch_is_filled_up_with_what_its_samples_carry() -> None:
    loader = rd.DataLoader(pipeline, global_batch_size=8, num_logical_shards=4, tail="pad", dp_rank=0, dp_world_size=1)
    came = []
    for batch in loader:
        for i in range(int(batch["valid"].sum())):
            came += first_pieces({key: value[i] for key, value in batch.items()}, ROWS, {"images": 5})
    assert sorted(came) == [i for i, row in enumerate(ROWS) if len(row["tokens"])]


def test_tensors_within_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    assert pin({"images": [PerDocument([[torch.tensor(1)], None, b"x"])]}) == {"images": [[[2], None, b"x"]]}


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4), st.integers(0, 4)), max_size=30), st.integers(1, 5))
@some
def test_bins_keep_all_limits(items: list[tuple[int, int, int]], max_items: int) -> None:
    lengths, *others = zip(*items, strict=True) if items else ((), (), ())
    bins = best_fit(lengths, 10, max_items, [(sizes, 4) for sizes in others])
    assert sorted(item for chosen in bins for item in chosen) == list(range(len(items)))
    for chosen in bins:
        assert len(chosen) <= max_items
        assert sum(lengths[i] for i in chosen) <= 10
        assert all(sum(sizes[i] for i in chosen) <= 4 for sizes in others)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"payload": "images"}, "give a list of columns"),
        ({"payload": ["tokens"]}, "yields itself"),
        ({"payload": ["labels"]}, "yields itself"),
        ({"payload": ["id"]}, "give at least 1, for columns of payload="),
        ({"limits": {"images": 0}}, "give at least 1"),
        ({"limits": ["images"]}, "give {column: most}"),
        ({"limits": {"images": 1.5}}, "give an int"),
        ({"payload": ["images", "audio"]}, "has 'audio', but a sample has the keys"),
    ],
)
def test_what_cannot_be_is_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        next(packer(SOURCE, **arguments))


def test_another_payload_is_an_error_at_the_load() -> None:
    [saved], [other] = loaders(1), loaders(1, payload=["images"])
    with pytest.raises(rd.DataStateError, match="payload"):
        other.load_state_dict(saved.state_dict())
