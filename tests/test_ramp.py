"""`DataLoader.reopen`: what changes at once and what is refused. That a ramp is a save and a load: `tests.test_histories`."""

import functools
import threading
from typing import Any

import pytest
import torch.distributed as dist

import rescale_data as rd


def loader_of(**others: Any) -> rd.DataLoader:
    return rd.DataLoader([{"x": i} for i in range(96)], **{"global_batch_size": 8, "micro_batch_size": 4, **others})


def test_the_order_of_the_dataset_is_that_of_one_global_batch() -> None:
    loader = loader_of(shuffle=False, num_logical_shards=24)
    with pytest.raises(rd.DataStateError, match="root: global_batch_size: saved 8, now 12"):
        loader.reopen(global_batch_size=12)
    loader.reopen(global_batch_size=8)
    assert [x for batch in loader for x in batch["x"].tolist()] == list(range(96))


@pytest.mark.parametrize(("before", "after"), [(10, 5), (5, 10), (4, 3), (3, 7)])
@pytest.mark.parametrize("step", [1, 2, 6, 11, 13])
def test_the_iterator_goes_on_where_epochs_have_other_lengths(step: int, before: int, after: int) -> None:
    loader = loader_of(micro_batch_size=8, repeat=True, steps_per_epoch=before)
    batches = iter(loader)
    for _ in range(step):
        if next(batches, None) is None:
            batches = iter(loader)
            next(batches)
    loader.reopen(steps_per_epoch=after)
    assert len(list(batches)) == after - step % after
    assert loader.epoch == loader.step // after


def test_off_a_boundary_it_names_the_next_one() -> None:
    loader = loader_of()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with pytest.raises(ValueError, match=r"1 of its 2 micro batches .* when loader.step is 2, after 1 more"):
        loader.reopen(global_batch_size=12)
    next(batches)
    assert loader.step == 2
    loader.reopen(global_batch_size=12)
    next(batches)


def test_a_tokenizer_is_never_called_by_two_threads() -> None:
    """Also not while the new pipeline asks it for the tokens that it is known by; Rust's say "Already borrowed"."""
    calling, is_asked, num_at_once = list[int](), threading.Event(), list[int]()

    def letters(texts: list[str]) -> list[list[int]]:
        calling.append(0)
        num_at_once.append(len(calling))
        if threading.current_thread() is threading.main_thread():
            is_asked.set()
        elif len(num_at_once) > 8:  # in the thread, ahead: until the main thread comes
            is_asked.wait(0.2)
        calling.pop()
        return [[len(text)] for text in texts]

    rows = [{"text": "x" * i} for i in range(96)]
    loader = rd.DataLoader(
        lambda shard: rd.Tokenize(rd.Reader(rows, shard), letters, "text", batch_size=1),
        global_batch_size=4,
        num_logical_shards=4,
        prefetch=9,
    )
    is_asked.clear()
    next(iter(loader))
    loader.reopen(prefetch=3)
    assert is_asked.is_set()
    assert set(num_at_once) == {1}


def packed(num_rows: int, shard: rd.Shard) -> rd.Node[Any]:
    documents = rd.DatasetSource([{"tokens": list(range(1 + i * 7 % 13))} for i in range(num_rows)], "documents")
    return rd.TokenPacker(rd.Reader(documents, shard), column="tokens", seq_len=5, eos_id=None)


@pytest.mark.parametrize(("kind", "num_rows"), [("rows", 50), ("packed", 22), ("packed", 44)])
@pytest.mark.parametrize("num_before", range(1, 15))
def test_a_trainer_that_counts_iterators_trains_as_many_epochs(kind: str, num_rows: int, num_before: int) -> None:
    """After the last batch of an epoch, too: whether its end was seen is known to the object, and not to a state."""
    pipeline = range(num_rows) if kind == "rows" else functools.partial(packed, num_rows)
    loader = rd.DataLoader(pipeline, global_batch_size=4, micro_batch_size=4, num_logical_shards=8)
    batches = iter(loader)
    for _ in range(num_before):
        next(batches, None)
    epoch, ended = loader.epoch, loader._stream.epoch_ended
    loader.reopen(micro_batch_size=2)
    assert loader.epoch == epoch
    assert next(iter(loader), None) is not None
    assert loader.epoch == epoch + ended


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "changed", [{"pipeline": range}, {"transfer": "cpu"}, {"pin_memory": True}, {"timeout": 5.0}], ids=str
)
def test_what_the_peers_of_a_dp_rank_agreed_on_stays(changed: dict[str, Any]) -> None:
    ranks: dict[str, Any] = {"peers": dist.group.WORLD, "dp_rank": 0, "dp_world_size": 1}
    loader = rd.DataLoader(functools.partial(range, 96), global_batch_size=8, **ranks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"with peers= what they share: \['{min(changed)}'\] cannot change"):
        loader.reopen(**changed)
