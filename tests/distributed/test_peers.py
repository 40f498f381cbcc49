"""`peers=`: of the peers of a dp rank one reads, and all have its batches, its state and its errors."""

import functools
import gc
import os
import pickle
import time
import traceback
from unittest.mock import patch

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import rescale_data as rd
from rescale_data.engine.ranks import meeting as groups
from tests.distributed.ranks import fails, gathered, run_ranks
from tests.formats import write_table
from tests.sources.far import Far
from tests.states import opened

ROWS = 60
SIZES = {"global_batch_size": 8, "micro_batch_size": 2, "num_logical_shards": 8}


def write(folder):
    for file in range(2):
        rows = range(file * ROWS // 2, (file + 1) * ROWS // 2)
        columns = {"row": rows, "text": [f"row {row}" for row in rows], "image": [[row] * 3 for row in rows]}
        write_table(folder / f"{file}.parquet", columns, 10)


def nested(samples):
    """What a batch may be: tensors in dicts and tuples, arrays, strings, `None`."""
    rows = torch.tensor([int(sample["row"]) for sample in samples])
    return {
        "row": rows,
        "of": {"image": (np.stack([sample["image"] for sample in samples]), None)},
        "text": [sample["text"] for sample in samples],
        "empty": torch.empty(0, 3),
        "mask": (rows % 2 == 0)[:, None].expand(-1, 2),
    }


def fails_at(row, sample):
    if sample["row"] == row:
        raise KeyError(f"row {row} is bad")
    return sample


def pipeline(source, bad, shard):
    return rd.Map(rd.Reader(source, shard), functools.partial(fails_at, bad))


def open_data(folder, bad=-1):
    fsspec.register_implementation("far", Far, clobber=True)
    return functools.partial(pipeline, rd.ParquetSource(f"far://{folder}"), bad)


def make(data, dp, bad=-1, receives=True, **arguments):
    mesh = init_device_mesh("cpu", (dp, 4 // dp), mesh_dim_names=("dp", "tp"))
    given = {**SIZES, "mesh": mesh["dp"], "peers": mesh["tp"], "receives": receives}
    source = functools.partial(open_data, str(data), bad)
    return rd.DataLoader(source, **{**given, "collate_fn": nested, **arguments})


def row_sums(batch):
    return batch["row"].sum().item()


def plain(value):
    if isinstance(value, torch.Tensor | np.ndarray):
        return [type(value).__name__, str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {name: plain(of) for name, of in value.items()}
    return [plain(of) for of in value] if isinstance(value, list | tuple) else value


def rows(batches):
    return [row for batch in batches for row in batch["row"][2]]


def one_reads_and_all_have_the_batches_of_a_loader_and_go_on_as_one_dp_rank_of_4(data, epochs):
    me = dist.get_rank()
    with make(data, 2) as loader:
        batches, taken = iter(loader), []
        for _ in range(5):
            peeked = plain(loader.peek())
            taken.append(plain(next(batches)))
            assert taken[-1] == peeked
        assert (len(loader.progress()) > 1) == (me % 2 == 0)
        dcp.save({"loader": loader}, checkpoint_id=data.with_name("saved"))
        state = {name: tensor.tolist() for name, tensor in opened(loader.state_dict())["shards"].items()}
        assert taken + [plain(batch) for batch in batches] == epochs[me // 2]
        report = loader.report()
        assert report["read_bytes"].minimum > 0
        assert exit_code_of_a_fork(loader) == 3
    wider = make(data, 1)  # from 2 dp ranks of 2 TP peers each to one of 4
    dcp.load({"loader": wider}, checkpoint_id=data.with_name("saved"))
    later = rows([plain(batch) for batch in wider])
    assert gathered((state, report, later)) == [(state, report, later)] * 4
    first = gathered(rows(taken))
    assert sorted(first[0] + first[2] + later) == list(range(ROWS))
    assert (Far.asked.total() > 0) == (me % 2 == 0), "its peers make no request"


def exit_code_of_a_fork(loader):
    """Return 3 if a call in a forked child is an error that says so."""
    child = os.fork()
    if child == 0:
        try:
            loader.peek()
        except RuntimeError as error:
            os._exit(3 if "was forked from the rank" in str(error) else 2)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def a_state_of_dp_ranks_at_different_batches_is_loaded_into_but_not_kept(data, epochs):
    me = dist.get_rank()
    dcp.save({"loader": make(data, 2)}, checkpoint_id=data.with_name("saved"))
    uneven = make(data, 2)
    for _ in range(1 + me // 2):
        next(iter(uneven))
    fails("The ranks save at different batches", pickle.dumps, uneven.state_dict(), kind=rd.DataStateError)
    fails(
        r"peers= and 2 dp ranks[\s\S]*Call loader.state_dict\(\) on all ranks", uneven.local_state_dict, kind=TypeError
    )
    dcp.load({"loader": uneven}, checkpoint_id=data.with_name("saved"))
    assert [plain(batch) for batch in uneven] == epochs[me // 2]


def each_peer_sends_its_batches_to_its_own_device_and_a_stage_that_needs_none_has_none(data, epochs):
    me = dist.get_rank()
    sent = make(data, 2, collate_fn=None, transfer=row_sums)
    sums = [sum(batch["row"][2]) for batch in epochs[me // 2]]
    assert [sent.peek(), list(sent)] == [sums[0], sums]
    stages = gathered([plain(batch) for batch in make(data, 1, receives=me in (0, 3), pin_memory=True)])
    assert stages[0] == stages[3]
    assert len(rows(stages[0])) == 56
    assert stages[1] == stages[2] == [None] * 28


def peers_that_differ_are_told_where(data, _):
    me = dist.get_rank()
    different = rf"different seed: rank {me} has {me // 3}, and the ranks \[3\] another than rank 0"
    fails(different, make, data, 1, seed=me // 3, kind=ValueError)
    fails("different pipeline", make, data.with_name(str(me)), 1, kind=ValueError)
    training, validation = make(data, 1), make(data, 1)
    next(iter(training))
    if me == 3:
        fails("that of another loader", validation.peek, kind=RuntimeError)
    else:
        training.peek()
    if me in (2, 3):
        loader = numbers(2, 3)
        if me == 3:
            fails("make the same calls in the same order", loader.peek, kind=RuntimeError)
        else:
            loader.reset()


def a_mesh_without_one_of_the_peers_is_an_error_on_all(*_):
    me, dp = dist.get_rank(), DeviceMesh("cpu", [0], _init_backend=False)
    words = r"different mesh: rank 0 has dp rank 0 of 1" if me == 0 else rf"rank {me} has \[0\] without rank {me}"
    fails(words, numbers, 0, 1, 2, 3, mesh=dp, dp_rank=None, dp_world_size=None, kind=ValueError)


def a_message_that_ctrl_c_cuts_is_the_last_and_a_new_loader_has_all_of_them(*_):
    """Where one that reads was cut between the two parts of a message, the next one would be taken for its rest."""
    me, training, validation = dist.get_rank(), numbers(0, 1, 2, 3, timeout=5.0), numbers(0, 1, 2, 3, timeout=5.0)
    batches = iter(training)
    next(batches)
    if me == 0:
        peers, parts = training._peer_calls, []
        send = peers._broadcast

        def cut(*part):
            parts.append(part)
            if len(parts) == 2:
                raise KeyboardInterrupt
            send(*part)

        with patch.object(peers, "_broadcast", cut):
            fails("", next, batches, kind=KeyboardInterrupt)
    else:
        fails("waited at most 5 s", next, batches, kind=RuntimeError)
    for call in (lambda: next(batches), validation.peek):
        fails("was cut: .*Build their loaders anew, on all of them, and load a state", call, kind=RuntimeError)
    dist.barrier()
    assert next(iter(numbers(0, 1, 2, 3))).tolist() == [0, 1, 2, 3]


def a_batch_that_a_peer_cannot_send_to_its_device_is_said_to_be_lost_there(*_):
    me, calls = dist.get_rank(), []

    def send(batch):
        calls.append(0)
        if me >= 2 and len(calls) == 2:
            try:
                raise KeyError("cause")
            except KeyError:
                raise (StopIteration, OSError)[me == 3]  # noqa: B904 - the cause is implicit
        return batch.tolist()

    with numbers(0, 1, 2, 3, transfer=send) as loader:
        assert me or loader._stream.feed.is_prefetching, "as without peers"
        batches = iter(loader)
        assert next(batches) == [0, 1, 2, 3]
        if me >= 2:
            with pytest.raises((RuntimeError, OSError), match="" if me == 3 else "raised StopIteration") as raised:
                next(batches)
            assert "KeyError: 'cause'" in "".join(traceback.format_exception(raised.value))
            assert "is lost on this rank: its peers have it" in raised.value.__notes__[0]
        else:
            next(batches)
        assert next(batches) == [8, 9, 10, 11]


def errors_of_the_one_that_reads_are_raised_on_all(data, epochs):
    me, nothing = dist.get_rank(), data.with_name("nothing")
    fails("micro_batch_size", make, data, 2, micro_batch_size=3, kind=ValueError)
    fails("nothing", make, nothing, 2, kind=FileNotFoundError)
    failing = iter(make(data, 2, bad=epochs[0][2]["row"][2][0] if me < 2 else -1))
    assert [plain(next(failing)) for _ in range(2)] == epochs[me // 2][:2]
    if me < 2:
        fails("is bad", next, failing, kind=KeyError)
    assert [plain(batch) for batch in by_number(data, me // 2)] == epochs[me // 2]
    began = time.monotonic()
    fails("nothing", by_number, nothing, 1 - me // 2, kind=FileNotFoundError)
    assert time.monotonic() - began < 200, "timeout is 300"


def by_number(data, dp_rank):
    peers = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"].get_group()
    return make(data, 2, mesh=None, peers=peers, dp_rank=dp_rank, dp_world_size=2)


def when_a_peer_is_gone_the_others_are_told_so_and_given_nothing_else(*_):
    """Its sockets tell; the others try again and again."""
    me, heard = dist.get_rank(), []
    dist.barrier()  # gloo fails on a rank that still connects to one that has ended
    if me == 2:
        return
    loader = numbers(0, 1, 3, timeout=8.0)
    batches = iter(loader)
    next(batches)
    if me == 3:
        del batches, loader
        groups._values_by_group[dist.group.WORLD].pop(("peers", 0, 1, 3))
        gc.collect()
        return
    for _ in range(4):
        try:
            heard.append(str(next(batches).tolist()))
        except RuntimeError as error:
            heard.append(str(error))
    given = [text for text in heard if text.startswith("[")]
    assert given == [str(list(range(4 * i, 4 * i + 4))) for i in range(1, len(given) + 1)]
    first, *more = heard[len(given) :]
    others = "one of the ranks [1, 3]" if me == 0 else "rank 0, which reads"
    assert f"Rank {me} waited at most 8 s for {others}: it makes no call, or has died" in first
    assert more
    assert all(first in text for text in more)


def numbers(*peers, **given):
    where = {"peers": DeviceMesh("cpu", [*peers], _init_backend=False), "dp_rank": 0, "dp_world_size": 1, **given}
    return rd.DataLoader(lambda: range(1000), **where, global_batch_size=4, shuffle=False)


PROMISES = [
    one_reads_and_all_have_the_batches_of_a_loader_and_go_on_as_one_dp_rank_of_4,
    a_state_of_dp_ranks_at_different_batches_is_loaded_into_but_not_kept,
    each_peer_sends_its_batches_to_its_own_device_and_a_stage_that_needs_none_has_none,
    peers_that_differ_are_told_where,
    a_mesh_without_one_of_the_peers_is_an_error_on_all,
    a_message_that_ctrl_c_cuts_is_the_last_and_a_new_loader_has_all_of_them,
    a_batch_that_a_peer_cannot_send_to_its_device_is_said_to_be_lost_there,
    errors_of_the_one_that_reads_are_raised_on_all,
    when_a_peer_is_gone_the_others_are_told_so_and_given_nothing_else,
]


@pytest.mark.parametrize("promise", PROMISES)
def test_four_ranks(promise, tmp_path):
    data = tmp_path / "data"
    write(data)
    given = {**SIZES, "collate_fn": nested, "dp_world_size": 2}
    epochs = [
        [plain(batch) for batch in rd.DataLoader(open_data(str(data)), **given, dp_rank=rank)] for rank in range(2)
    ]
    run_ranks(4, promise, data, epochs)
