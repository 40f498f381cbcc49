"""One LRU a process, within its budget."""

import gc
import sys
import threading
from collections import Counter
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import get_worker_info

import rescale_data as rd
from rescale_data.sources.decoded import cache as decoded_cache
from rescale_data.sources.decoded.cache import Cache, OpenFileCache, cache, owner_id, share_budget_with
from rescale_data.sources.decoded.cache_demand import num_sources_and_shards, warn_if_thrashing
from rescale_data.sources.decoded.columns import Fragment, flat_lists
from rescale_data.sources.decoded.sizes import memory_bytes_of
from rescale_data.sources.source import Source


class Sized:
    def __init__(self, nbytes):
        self.nbytes = nbytes


class Budget:
    def __init__(self, cache_bytes):
        self.cache_bytes = cache_bytes


def end_in_a_thread(work, *args):
    """Assert that some work ends in another thread while this one waits for it."""
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 9, 30, 50])), max_size=60))
def test_never_exceeds_the_budget_and_keeps_what_was_used_last(uses):
    lru, source = Cache(), Budget(100)
    lru.register(source)
    order = []
    sizes = {}
    for key, size in uses:
        if size:
            lru.put(key, Sized(size))
            sizes[key] = size
        else:
            assert (lru.get(key) is not None) == (key in order)
        if size or key in order:
            order = [*(k for k in order if k != key), key]
        kept, total = [], 0
        for k in reversed(order):
            if total + sizes[k] > 100:
                break
            kept.append(k)
            total += sizes[k]
        assert lru.nbytes <= 100
        assert [k for k in order if k in lru._key_sizes] == kept[::-1]
        order = kept[::-1]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 150)), max_size=40), st.data())
def test_the_budget_is_the_largest_of_the_living(puts, data):
    """Owners and large entries are found without a look at every entry: also after drops, and when a budget goes."""
    lru, small, large = Cache(), Budget(40), Budget(100)
    lru.register(small), lru.register(large)
    assert lru.budget == 100
    for owner, name, size in puts:
        lru.put((owner, name), Sized(size))
        if data.draw(st.integers(0, 5)) == 0:
            dropped = data.draw(st.integers(0, 2))
            lru.drop_entries_of(dropped)
            assert all(key[0] != dropped for key in lru._key_sizes)
    del large
    lru.put((3, 0), Sized(1))
    sizes = lru._key_sizes
    assert lru.budget == 40
    assert lru.nbytes == sum(sizes.values())
    assert lru.nbytes <= max(40, max(sizes.values()) * 9 // 8) or len(sizes) == 1
    for owner in range(4):
        lru.drop_entries_of(owner)
    assert not lru._key_sizes
    assert lru.nbytes == 0


def test_one_entry_above_the_budget_stays_with_what_is_made_of_it():
    lru, source = Cache(), Budget(10)
    lru.register(source)
    lru.put("huge", Sized(800))
    for i in range(100):
        lru.put(i, Sized(50))
        assert lru.get("huge") is not None
    lru.put("huge 2", Sized(800))
    assert lru.get("huge") is None
    assert lru.nbytes <= 900


def test_entries_go_with_their_owner():
    owner = Budget(1)
    key = (owner_id(owner), 0)
    assert owner_id(owner) == key[0]
    cache().put(key, Sized(1))
    del owner
    gc.collect()
    assert cache().get(key) is None


def test_two_threads_that_ask_at_once_get_one_owner(monkeypatch):
    """The other one asks before this one has its number."""
    sources, of_other, numbers = [Budget(1)], [], decoded_cache._owner_numbers

    def ask_in_between():
        monkeypatch.undo()
        of_other.append(owner_id(sources[0]))
        yield next(numbers)

    monkeypatch.setattr(decoded_cache, "_owner_numbers", ask_in_between())
    assert [owner_id(sources[0])] == of_other
    sources.clear()
    gc.collect()  # one finalizer: a second one would fail


class Leaving(Sized, decoded_cache.EvictionListener):
    has_left = False

    def handle_eviction(self):
        self.has_left = True


def test_a_value_is_told_that_there_was_no_room():
    lru, source, values = Cache(), Budget(30), [Leaving(size) for size in (11, 12, 13, 14)]
    lru.register(source)
    for value in values:
        lru.put(value.nbytes, value)
    lru.clear()
    assert [value.has_left for value in values] == [True, True, False, False]


class Held(Sized, decoded_cache.ReferencedCostlyValue):
    is_kept, is_used = True, False

    def on_dropped(self):
        self.is_kept = False

    def was_used(self):
        return self.is_used


def test_of_what_is_held_a_half_of_the_budget_stays_the_oldest_unused_one_goes_and_is_told():
    lru, source, held = Cache(), Budget(100), [Held(20), Held(20), Held(20)]
    lru.register(source)
    held[0].is_used = True
    for i, value in enumerate([*held, *(Sized(30) for _ in range(9))]):
        lru.put(i, value)
    assert [value.is_kept for value in held] == [True, False, True]


class Fragments(Source):
    name, num_rows = "web", 1000
    fragments = np.arange(0, 1001, 10)

    def __init__(self, fragment_bytes, cache_bytes, cache_dir_bytes=0):
        self.fragment_bytes, self.cache_bytes, self.disk_bytes = fragment_bytes, cache_bytes, cache_dir_bytes

    def manifest(self): ...
    def row(self, index): ...
    def locate(self, index): ...


ONE_SOURCE = ("web", "100 logical shards", "1000 bytes", "is 999", "up to 10 times", "cache_bytes=1000")
MANY = ("20 sources, web among them", "take 1000 bytes", "is 999", "cache_bytes=1000")


@pytest.mark.parametrize(("num_sources", "most_shards", "words"), [(1, 99, ONE_SOURCE), (20, 4, MANY)])
def test_warns_once_where_the_shards_of_all_sources_exceed_the_cache(num_sources, most_shards, words, caplog):
    sources = [Fragments(10, 999, 998) for _ in range(num_sources)]  # what is on disk is in the cache, too
    warn_if_thrashing(sources, most_shards)
    warn_if_thrashing([Fragments(10, 999, 1000)], 5000)
    assert not caplog.records
    warn_if_thrashing(sources, most_shards + 1)
    warn_if_thrashing(sources, most_shards + 2)
    (message,) = caplog.messages
    assert all(part in message for part in words)


def test_a_source_that_goes_waits_for_no_file_that_is_being_opened():
    """Its finalizer may run in the thread that makes the request for that file."""
    files = OpenFileCache()
    files.get_or_make((1, "a"), object)
    files.get_or_make((2, "b"), lambda: end_in_a_thread(files.drop_entries_of, 1))
    assert files.nbytes == 1


def _kept(row):
    info = get_worker_info()
    return -1 if info is None else info.id, cache().nbytes


def _read_all(source, shard):
    return rd.Map(rd.Reader(source, shard, shuffle=False), _kept)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("k", [0, 1, 3])
def test_what_all_processes_of_a_rank_keep_is_within_the_budget(k):
    source = rd.SyntheticSource(24 * 1024, length=16, cache_bytes=2**20)  # of 24 fragments of 73 kB
    [source.row(i) for i in range(0, source.num_rows, 1024)]  # this process has filled the cache
    pipeline = partial(_read_all, source)
    with rd.DataLoader(pipeline, global_batch_size=512, num_logical_shards=6, num_workers=k, collate_fn=list) as loader:
        kept = Counter()
        for batch in loader:
            for worker, nbytes in batch:
                kept[worker] = max(kept[worker], nbytes)
        assert sum(kept.values()) + cache().nbytes * (k > 0) <= 2**20
        assert cache().nbytes > 0
        assert sum(kept.values()) > 2**19 * k // (k + 1)
        assert len(kept) == max(1, k)
    assert cache().budget == 2**20


@pytest.mark.usefixtures("own_cache")
def test_the_end_of_workers_waits_for_nobody():
    """A finalizer may wait for it, in a thread that uses the cache."""
    share_budget_with(-1, 3)
    with cache()._lock:
        end_in_a_thread(share_budget_with, -1, 0)
    assert cache().budget == decoded_cache.DEFAULT_CACHE_BYTES


@pytest.mark.usefixtures("own_cache")
def test_a_loader_between_epochs_or_that_goes_elsewhere_leaves_the_cache_to_others():
    def make(**kwargs):
        return rd.DataLoader(source, global_batch_size=4, num_logical_shards=8, prefetch=0, **kwargs)

    def num_shards():
        return num_sources_and_shards(owner_id(source))[1]

    source = rd.SyntheticSource(64, length=4)
    train, by_epochs, by_steps = make(repeat=True), make(), make(repeat=True, steps_per_epoch=3)
    next(iter(train))
    assert num_shards() == 8
    for _ in range(2):
        batches = iter(by_epochs)
        next(batches)
        assert num_shards() == 16
        assert len(list(batches)) == 15
        assert num_shards() == 8
    state = by_steps.state_dict()
    for leave in (by_steps.reset, partial(by_steps.load_state_dict, state), by_steps.close):
        batches = iter(by_steps)
        for expected in (16, 16, 8):  # who counts the batches does not ask for the one after the last
            next(batches)
            assert num_shards() == expected
        next(iter(by_steps))
        assert num_shards() == 16
        leave()
        assert num_shards() == 8


@pytest.mark.parametrize("text", ["abc" * 99, "日本語" * 99, "😀" * 99])
def test_text_counts_with_the_bytes_that_it_takes(text):
    assert memory_bytes_of({"text": text}) == sys.getsizeof(text) >= max(map(ord, text)).bit_length() // 8 * len(text)


@pytest.mark.parametrize("kind", [pa.list_(pa.int8()), pa.list_(pa.int8(), 1), pa.large_list(pa.int8())])
def test_lists_count_with_the_arrays_that_rows_are_cut_from(kind):
    lists = pa.chunked_array([pa.array([[1]] * 1000, kind)])
    held = flat_lists(lists)
    assert held is not None
    assert Fragment(pa.table({"tokens": lists, "also": lists})).nbytes == 2 * held.nbytes
