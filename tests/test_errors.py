"""What bad input gets: one clear error each, which names the value and the cure. Those of files are in tests/sources."""

import functools
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchdata.nodes import BaseNode, Batcher, IterableWrapper, Mapper, ParallelMapper, Prefetcher

import rescale_data as rd
from rescale_data.layout.layout import Layout
from rescale_data.state import Field
from tests.pipelines import Documents, Every, Rows, pipeline_of
from tests.states import closed, opened

ROWS = Rows(48)


def loader_of(data: Any = ROWS, **kwargs: Any) -> rd.DataLoader:
    return rd.DataLoader(data, **{"global_batch_size": 12, "num_logical_shards": 24, **kwargs})


class TestTopology:
    def test_a_global_batch_that_ranks_and_micro_batch_do_not_divide(self) -> None:
        """The nearest O, and every b that fits."""
        with pytest.raises(ValueError, match=r"global_batch_size=768 is not a multiple .* 48 \* 5 = 240") as raised:
            loader_of(global_batch_size=768, micro_batch_size=5, dp_rank=0, dp_world_size=48)
        assert "micro_batch_size is one of [1, 2, 4, 8, 16]" in str(raised.value)
        assert "the nearest global_batch_size are [720, 960]" in str(raised.value)

    def test_ranks_that_no_micro_batch_fits(self) -> None:
        with pytest.raises(ValueError, match="no micro_batch_size fits, as 5 ranks do not divide it") as raised:
            loader_of(global_batch_size=768, micro_batch_size=3, dp_rank=0, dp_world_size=5)
        assert "the nearest global_batch_size are [765, 780]" in str(raised.value)

    def test_a_global_batch_smaller_than_the_ranks(self) -> None:
        with pytest.raises(ValueError, match=r"global_batch_size=4 .*nearest global_batch_size are \[8\]"):
            loader_of(global_batch_size=4, micro_batch_size=1, dp_rank=0, dp_world_size=8)

    def test_a_micro_batch_that_nobody_named_over_several_ranks(self) -> None:
        """A default would double the batch, and what a device needs, when ranks halve; evaluation has the memory."""
        with pytest.raises(
            ValueError, match=r"micro_batch_size is missing: 3 dp ranks share global_batch_size=12\. Give"
        ):
            loader_of(dp_rank=0, dp_world_size=3)
        with pytest.raises(ValueError, match="micro_batch_size is missing"):
            rd.LogicalShards(rd.Reader, num_logical_shards=4, global_batch_size=4, dp_rank=0, dp_world_size=2)
        evaluated = rd.DataLoader(ROWS, shuffle=False, global_batch_size=12, dp_rank=0, dp_world_size=3)
        assert evaluated.gradient_accumulation_steps == loader_of().gradient_accumulation_steps == 1

    @pytest.mark.parametrize(("o", "w", "b"), [(768, 48, 5), (100, 3, 7), (12, 2, 5), (7, 2, 3), (5, 8, 2)])
    def test_what_is_listed_fits(self, o: int, w: int, b: int) -> None:
        with pytest.raises(ValueError) as raised:
            Layout(num_logical_shards=4 * o, global_batch_size=o, dp_world_size=w, micro_batch_size=b)
        sizes, nearest = listed(str(raised.value))
        assert sizes == [size for size in range(1, o + 1) if o % (w * size) == 0]
        assert all(
            Layout(num_logical_shards=4 * n, global_batch_size=n, dp_world_size=w, micro_batch_size=b) for n in nearest
        )
        assert {n // (w * b) for n in nearest} <= {o // (w * b), o // (w * b) + 1}

    def test_fewer_shards_than_ranks_times_workers(self) -> None:
        with pytest.raises(
            ValueError,
            match=r"num_logical_shards=5 is less than dp_world_size=3 times 2 worker.*fewer workers or ranks",
        ):
            loader_of(num_logical_shards=5, micro_batch_size=4, dp_rank=0, dp_world_size=3, num_workers=2)
        assert loader_of(num_logical_shards=6, micro_batch_size=4, dp_rank=0, dp_world_size=3, num_workers=2)

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"num_workers": 5}, r"num_workers=5 does not divide \(N/O\) \* A = 2; .* keep the order are \[2\]"),
            (
                {"num_logical_shards": 18, "micro_batch_size": 3},
                r"num_logical_shards=18 and global_batch_size=12: .* are \[9, 18\]",
            ),
            (
                {"num_logical_shards": 6, "micro_batch_size": 3, "dp_rank": 0, "dp_world_size": 4},
                r"=6 is not a multiple of dp_world_size=4",
            ),
            (
                {"num_logical_shards": 3, "global_batch_size": 24, "micro_batch_size": 12},
                r"micro_batch_size=12 and the 8 samples .* are \[8, 24\]",
            ),
            (
                {"num_logical_shards": 3, "micro_batch_size": 1, "num_workers": 2},
                "num_workers=2: with micro_batch_size=1 < 4 .* 0 or 1 fit",
            ),
        ],
    )
    def test_a_topology_that_is_not_aligned_is_warned_of_once(
        self, kwargs: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        loader_of(**kwargs)
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert re.match(rf"Not aligned: .*{message}", warnings[0])

    @pytest.mark.parametrize("name", ["global_batch_size", "micro_batch_size", "num_logical_shards"])
    def test_numbers_below_one(self, name: str) -> None:
        with pytest.raises(ValueError, match=rf"{name}=0: it is at least 1"):
            loader_of(**{name: 0})

    @pytest.mark.parametrize(
        ("kwargs", "error", "message"),
        [
            ({"num_workers": -1}, ValueError, "num_workers=-1: it is at least 0"),
            ({"timeout": 0}, ValueError, "timeout=0: give the seconds to wait"),
            ({"timeout": "9"}, TypeError, "timeout='9' is a str; give a number"),
            (
                {"num_logical_shards": 10**9},
                ValueError,
                r"num_logical_shards=1000000000: .* GB.* Give a small multiple",
            ),
            ({"repeat": "no"}, TypeError, "repeat='no' is a str; give True or False"),
            ({"mesh": "dp"}, TypeError, r"mesh='dp' is a str: give a DeviceMesh of the dp ranks"),
            ({"num_workers": 1, "prefetch": 0}, ValueError, "prefetch=0, num_workers=1: give the batches"),
            ({"prefetch": -1}, ValueError, "prefetch=-1, num_workers=0: give the batches"),
            (
                {"num_workers": 1, "multiprocessing_context": "bogus"},
                ValueError,
                "multiprocessing_context='bogus': give one of .*'forkserver'",
            ),
            (
                {"num_workers": 1, "multiprocessing_context": 3},
                ValueError,
                "multiprocessing_context=3: give one of .*'forkserver'",
            ),
            ({"tail": "keep"}, ValueError, "tail='keep': give 'drop' or 'pad'"),
            ({"dp_rank": 1}, ValueError, "dp_rank=1 and dp_world_size=None: give both, or neither"),
            (
                {"dp_rank": 2, "dp_world_size": 2},
                ValueError,
                "dp_rank=2, dp_world_size=2: a rank is at least 0 and less than",
            ),
        ],
    )
    def test_arguments(self, kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            loader_of(**kwargs)

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"mesh": "dp"}, "mesh='dp' is a str: give a DeviceMesh of the dp ranks"),
            ({"batch_size": 4}, "micro_batch_size= says the samples of one batch"),
            ({"step": 4}, "unexpected keyword argument 'step'"),
        ],
    )
    def test_arguments_of_reopen(self, kwargs: dict[str, Any], message: str) -> None:
        """Nothing has changed then."""
        loader = loader_of()
        batches = iter(loader)
        next(batches)
        with pytest.raises(TypeError, match=message):
            loader.reopen(**kwargs)
        assert len(next(batches)["row"]) == 12

    @pytest.mark.parametrize(
        ("name", "cure"),
        [("batch_size", "micro_batch_size="), ("sampler", "shuffle= and seed="), ("drop_last", "tail=")],
    )
    def test_arguments_of_torchs_loaders(self, name: str, cure: str) -> None:
        with pytest.raises(TypeError, match=rf"rd\.DataLoader has no argument {name}=.*{re.escape(cure)}"):
            rd.DataLoader(ROWS, **{name: 3})  # and no word on global_batch_size

    def test_arguments_without_a_name(self) -> None:
        with pytest.raises(TypeError, match=r"rd\.DataLoader has no argument batch_size=: micro_batch_size="):
            rd.DataLoader(ROWS, 2)  # type: ignore[misc, call-arg]

    @pytest.mark.parametrize("shuffle", [0, -1, 1.5, "yes"])
    def test_shuffle(self, shuffle: Any) -> None:
        with pytest.raises(ValueError, match=rf"shuffle={shuffle!r}: give True, False .*or the window in rows"):
            loader_of([1, 2], shuffle=shuffle)

    def test_no_function(self) -> None:
        with pytest.raises(TypeError, match="collate_fn=3 is a int: give a function"):
            loader_of(collate_fn=3)

    def test_no_shard(self) -> None:
        with pytest.raises(TypeError, match=r"rd\.Reader was given the shard 0: .*rd\.Shard\(\) to try"):
            rd.Reader(ROWS, 0)  # type: ignore[arg-type]

    @pytest.mark.parametrize("shuffle", [False, True, 8])
    def test_shuffle_of_a_pipeline(self, shuffle: Any) -> None:
        with pytest.raises(TypeError, match=rf"shuffle={shuffle} with a function.*rd\.Reader\(source, shard, shuffle="):
            loader_of(lambda shard: rd.Reader(ROWS, shard), shuffle=shuffle)

    def test_a_loader_as_a_dataset(self) -> None:
        with pytest.raises(TypeError, match=r"makes the batches itself, in place of torch\.utils\.data\.DataLoader"):
            next(iter(torch.utils.data.DataLoader(loader_of())))

    @pytest.mark.parametrize(
        ("top", "arguments", "why"),
        [
            (lambda rows: rows, {"repeat": True}, "repeat=True has no end"),
            (lambda rows: rd.TokenPacker(rows, column="tokens", seq_len=2, eos_id=0), {}, "come out of TokenPacker"),
            (lambda rows: rd.Map(rd.Filter(rows, bool), dict), {}, "come out of Filter"),
            (
                lambda rows: rd.TokenPacker(rd.Filter(rows, bool), column="tokens", seq_len=2, eos_id=0),
                {},
                "come out of Filter",
            ),
            (lambda rows: Batcher(rows, 2), {}, "come out of Batcher"),
        ],
    )
    def test_no_len(self, top: Any, arguments: dict[str, Any], why: str) -> None:
        rows = [{"tokens": [1, 2, 3]}] * 96
        loader = loader_of(lambda shard: top(rd.Reader(rows, shard)), **arguments)
        with pytest.raises(TypeError, match=rf"no number of batches: .*{why}\. Give it steps_per_epoch="):
            len(loader)
        with pytest.raises(TypeError, match=r"A torch DataLoader over it .* makes the batches itself"):
            next(iter(torch.utils.data.DataLoader(loader)))

    def test_an_iterable_dataset(self) -> None:
        class Stream(torch.utils.data.IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(range(3))

        with pytest.raises(TypeError, match=r"A Stream is an IterableDataset.*rd\.IterableSource"):
            loader_of(Stream())

    def test_text_in_place_of_tokens(self) -> None:
        with pytest.raises(TypeError, match=r"given a str.*rd\.Tokenize makes them"):
            next(rd.TokenPacker(rd.Reader([{"text": "a"}], rd.Shard()), column="text", seq_len=2, eos_id=0))

    def test_no_path(self) -> None:
        with pytest.raises(TypeError, match="paths=3 is a int: give a glob, a folder, a file, or a list"):
            rd.ParquetSource(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"paths=\['a', 3\] is a list: give a glob"):
            rd.ParquetSource(["a", 3])  # type: ignore[list-item]
        with pytest.raises(FileNotFoundError, match=r"No paths were given, \[''\]: give a glob"):
            rd.ParquetSource("")

    def test_a_loader_below_the_top_level_of_a_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(BaseException, match="at the top level of the dict"):
            dcp.save({"training": {"loader": loader_of()}}, checkpoint_id=tmp_path / "checkpoint")

    @pytest.mark.parametrize("make", [rd.Map, rd.Filter, rd.RandomMap, functools.partial(rd.Tokenize, column="row")])
    @pytest.mark.parametrize("fn", [None, 3])
    def test_what_is_no_function(self, make: Any, fn: Any) -> None:
        """Before a row is drawn: with ``on_error="skip"`` all would be left out."""
        with pytest.raises(
            TypeError, match=rf"{fn} is a {type(fn).__name__}: give a function of a (sample|list of texts)"
        ):
            make(rd.Reader(ROWS, rd.Shard()), fn, on_error="skip")

    def test_one_node_at_two_places(self) -> None:
        def pipeline(shard: rd.Shard) -> BaseNode[Any]:
            rows = rd.Reader(ROWS, shard)
            return rd.WeightedSampler({"a": rows, "b": rd.Map(rows, dict)}, {"a": 1, "b": 1})

        with pytest.raises(ValueError, match=r"One Reader stands at two places of the pipeline, a and b\.source"):
            loader_of(pipeline)

    def test_one_node_in_two_pipelines(self) -> None:
        """Two loaders would move one position, and each leave out what the other reads."""
        pipeline = functools.cache(lambda shard: rd.Reader(ROWS, shard))
        with pytest.raises(ValueError, match=r"Reader \(root\) that an earlier call had returned"):
            for _ in zip(loader_of(pipeline, repeat=True), loader_of(pipeline, repeat=True), strict=True):
                pass

    @pytest.mark.parametrize(
        ("other", "says"),
        [
            (lambda shard: rd.Shard(0, 8), "0 of 8 in the pipeline of 7 of 8"),
            (lambda shard: rd.Shard(shard.index, 16), "0 of 16 in the pipeline of 0 of 8"),
            (lambda shard: rd.Shard(), "0 of 1 in the pipeline of 0 of 8"),
        ],
        ids=["always the first", "of twice as many", "the whole"],
    )
    def test_a_reader_of_another_shard(self, other: Callable[[rd.Shard], rd.Shard], says: str) -> None:
        with pytest.raises(ValueError, match=rf"Reader \(source\) reads logical shard {says}: rows would"):
            loader_of(lambda shard: Mapper(rd.Reader(ROWS, other(shard)), dict), num_logical_shards=8)

    def test_a_seed_for_each_shard(self) -> None:
        """Each would divide another order, and nobody has all rows."""
        with pytest.raises(ValueError, match=r"logical shard 7 have the seeds \[7\], those of shard 0 \[0\]"):
            loader_of(lambda shard: rd.Reader(ROWS, replace(shard, seed=shard.index)), num_logical_shards=8)
        other = loader_of(lambda shard: rd.Reader(ROWS, replace(shard, seed=shard.seed + 7)))
        assert sorted(row for batch in other for row in batch["row"].tolist()) == list(range(len(ROWS)))


class TestBatches:
    def test_a_number_that_no_tensor_holds(self) -> None:
        with pytest.raises(ValueError, match=r"The column 'x' cannot be stacked.*\['int'\]"):
            next(iter(rd.DataLoader([{"x": 2**64 - 1}] * 4, global_batch_size=2)))

    @pytest.mark.parametrize("collate_fn", [None, rd.pad_collate(pad={"row": 0})])
    def test_samples_with_different_columns(self, collate_fn: Any) -> None:
        def pipeline(shard: rd.Shard) -> BaseNode[Any]:
            return Mapper(
                rd.Reader(ROWS, shard), lambda sample: {**sample, **({"more": 1} if sample["row"] % 2 else {})}
            )

        with pytest.raises(
            ValueError, match=r"different columns, \['(more', ')?row'\] and \['(more', ')?row'\]\. Give"
        ):
            next(iter(loader_of(pipeline, collate_fn=collate_fn)))

    @pytest.mark.parametrize("collate_fn", [None, rd.pad_collate(pad={"tokens": 0})])
    @pytest.mark.parametrize("other", [{"a": 1, "b": 2}, {"b": 1}, 3])
    def test_samples_with_different_keys_in_a_column(self, collate_fn: Any, other: Any) -> None:
        rows = [{"tokens": [1], "meta": {"of": {"a": 1}}}, {"tokens": [2], "meta": {"of": other}}]
        loader = rd.DataLoader(rows, global_batch_size=2, num_logical_shards=1, collate_fn=collate_fn)
        with pytest.raises(ValueError, match=r"different columns, .* and .*\. Give all samples the same ones"):
            next(iter(loader))

    def test_a_column_that_cannot_be_padded(self) -> None:
        with pytest.raises(ValueError, match=r"cannot pad the column 'row': .* types \['int'\]\. It pads sequences"):
            next(iter(loader_of(collate_fn=rd.pad_collate(pad={"row": 0}))))

    def test_a_column_with_the_name_of_the_mask(self) -> None:
        def pipeline(shard: rd.Shard) -> BaseNode[Any]:
            return Mapper(rd.Reader(ROWS, shard), lambda sample: {"valid": sample["row"]})

        with pytest.raises(ValueError, match=r"batch\['valid'\], but samples have a column 'valid'"):
            next(iter(loader_of(pipeline, repeat=True, tail="pad")))

    def test_no_run_goes_further_than_a_state_can_tell(self) -> None:
        loader = loader_of(range(480), repeat=True)
        most = (2**62 // 24 - 1) // 12 * 12
        with pytest.raises(ValueError, match=rf"skip\(num_samples={10**30 * 12}\): .* counts up to \d+\. Give less"):
            loader.skip(10**30 * 12)
        with pytest.raises(ValueError, match=r"delivered=1200+\): .* counts up to"):
            loader.load_state_dict(loader.state_dict(), delivered=10**30 * 12)
        loader.skip(most)
        state = loader.state_dict()
        with pytest.raises(ValueError, match=r"it would end at sample .* Give less"):
            loader.skip(12)
        resumed = loader_of(range(480), repeat=True)
        resumed.load_state_dict(state)
        assert resumed.step == loader.step == most // 12


def listed(message: str) -> tuple[list[int], list[int]]:
    """The micro batches and the global batches of a message."""
    found = re.search(
        r"(?:is one of \[(.*?)\]|no micro_batch_size fits).*nearest global_batch_size are \[(.*?)\]", message
    )
    assert found is not None
    sizes, nearest = ([int(n) for n in part.split(",")] if part else [] for part in found.groups())
    return sizes, nearest


class TestData:
    def test_an_epoch_without_a_whole_global_batch(self) -> None:
        with pytest.raises(
            ValueError, match=r"11 samples, less than one global batch of 12.*smaller global_batch_size, tail='pad'"
        ):
            loader_of(Rows(11))
        assert len(list(loader_of(Rows(11), tail="pad"))) == 1

    def test_epochs_without_a_whole_global_batch_that_must_be_counted(self) -> None:
        loader = loader_of(lambda shard: Every(rd.Reader(Rows(24), shard), 1), global_batch_size=12)
        assert list(loader) == []
        with pytest.raises(rd.DataStateError, match="Two epochs in a row hold less than one global batch of 12"):
            list(loader)

    def test_a_filter_that_keeps_nothing(self) -> None:
        loader = loader_of(lambda shard: Every(rd.Reader(Rows(24), shard), 1), repeat=True)
        with pytest.raises(
            rd.DataStateError, match=r"Logical shard \d+ of 24 yielded no sample in two whole epochs.*filtered"
        ):
            next(iter(loader))

    def test_a_finite_node_of_torchdata_that_does_not_start_again(self) -> None:
        class Once:
            def __init__(self) -> None:
                self.rows = iter(range(5))

            def __iter__(self) -> Iterator[int]:
                return self.rows

        with pytest.raises(rd.DataStateError, match=r"does not start again at reset\(None\)\. .* an rd\.Reader"):
            list(loader_of(lambda _: IterableWrapper(Once()), repeat=True))

    def test_an_epoch_end_that_ranks_cannot_agree_on(self) -> None:
        pipeline = pipeline_of("packed", Documents(96))
        with pytest.raises(ValueError, match=r"needs a process group.*dp_rank=0 and dp_world_size=2.*repeat=True"):
            loader_of(pipeline, micro_batch_size=6, dp_rank=0, dp_world_size=2)
        next(iter(loader_of(pipeline, micro_batch_size=6, dp_rank=0, dp_world_size=2, repeat=True)))

    def test_a_source_made_for_each_shard_is_warned_of(self, caplog: pytest.LogCaptureFixture) -> None:
        loader_of(lambda shard: rd.Reader(Rows(48), shard))
        assert "makes a new source for each of 24 logical shards" in caplog.text
        assert "Make the source once, outside of the pipeline" in caplog.text

    def test_an_epoch_that_is_shorter_than_it_says(self) -> None:
        class Liar(Mapped):
            def epoch_end(self, rows: Any, shards: Any) -> Any:
                left, after = self.children["source"].epoch_end(rows, shards)
                return left + 1, after

        loader = loader_of(lambda shard: Liar(rd.Reader(ROWS, shard)))
        with pytest.raises(rd.DataStateError, match=r"ended before its pipeline's epoch_end\(\) said.*Return None"):
            list(loader)


class Mapped(rd.Node[Any]):
    """As its source is."""

    def __init__(self, source: BaseNode[Any]) -> None:
        super().__init__(source=source)

    def next(self) -> Any:
        return next(self.children["source"])


class Stateful(BaseNode[Any]):
    """A torchdata node with any state, which may change as it goes on."""

    def __init__(self, source: BaseNode[Any], *values: Any) -> None:
        super().__init__()
        self.source, self.values, self.num = source, values, 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])

    def next(self) -> Any:
        self.num = min(self.num + 1, len(self.values) - 1)
        return next(self.source)

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "deep": {"value": self.values[self.num]}}


class TestPipelines:
    @pytest.mark.parametrize("data", [3, None, object()])
    def test_what_is_no_pipeline(self, data: Any) -> None:
        with pytest.raises(
            TypeError, match=rf"A {type(data).__name__} is no pipeline: give a function that makes the nodes of"
        ):
            loader_of(data)

    def test_a_class(self) -> None:
        with pytest.raises(
            TypeError, match=r"The class OrderedDict was given .*: give OrderedDict\(\.\.\.\), or a function"
        ):
            loader_of(OrderedDict)

    @pytest.mark.parametrize("data", ["corpus/*.parquet", Path("corpus"), {"train": ROWS}])
    def test_what_only_looks_like_a_dataset(self, data: Any) -> None:
        """Its characters, or its keys, would be read as rows."""
        with pytest.raises(TypeError, match=r"is no data set: give rd\.ParquetSource.*one split"):
            loader_of(data)
        if not isinstance(data, Path):
            with pytest.raises(TypeError, match="is no data set"):
                rd.Reader(data, rd.Shard())

    def test_a_table_whose_columns_would_be_its_rows(self) -> None:
        table = pa.table({str(i): list(range(48)) for i in range(48)})
        frame: Any = pytest.importorskip("pandas").DataFrame(np.zeros((48, 48)))
        for data in (table, table.to_batches()[0], frame):
            with pytest.raises(
                TypeError, match=r"is a table, and table\[3\] a column of it.*Give the rows: table\.to_pylist"
            ):
                loader_of(data)

    @pytest.mark.parametrize("columns", ["tokens", []])
    def test_columns_that_are_no_list_of_names(self, columns: Any, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match=r"columns=.*give a list with at least one name, or None"):
            rd.ParquetSource(tmp_path, columns=columns)

    def test_columns_that_name_one_twice(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"columns=\['id', 'id'\] has a name twice: give each name once"):
            rd.ParquetSource(tmp_path, columns=["id", "id"])

    def test_a_state_that_is_none(self) -> None:
        with pytest.raises(TypeError, match=r"The state is a NoneType. Give what loader\.state_dict\(\) returned"):
            loader_of().load_state_dict(None)  # type: ignore[arg-type]

    def test_a_mapper_that_maps_in_batches(self) -> None:
        with pytest.raises(TypeError, match=r"ParallelMapper\(prebatch=2\).*Leave prebatch out"):
            loader_of(lambda shard: ParallelMapper(rd.Reader(ROWS, shard), dict, num_workers=0, prebatch=2))

    def test_a_pipeline_that_returns_no_node(self) -> None:
        with pytest.raises(TypeError, match=r"it was given a list\. Return a torchdata\.nodes\.BaseNode") as raised:
            loader_of(lambda shard: [shard.index])
        assert "while the pipeline of logical shard 0 was built" in raised.value.__notes__

    @pytest.mark.parametrize(
        "node",
        [
            pytest.param(lambda rows: Prefetcher(rows, 2), id="Prefetcher"),
            pytest.param(lambda rows: ParallelMapper(rows, str, num_workers=2), id="ParallelMapper"),
            pytest.param(lambda rows: Mapper(Stateful(Prefetcher(rows, 2), 0), str), id="deep inside"),
        ],
    )
    def test_nodes_with_threads_inside_a_shard(self, node: Callable[[Any], BaseNode[Any]]) -> None:
        with pytest.raises(
            TypeError, match=r"owns threads or processes.*above rd\.LogicalShards, or use rd\.DataLoader\(num_workers"
        ):
            loader_of(lambda shard: node(rd.Reader(ROWS, shard)))
        with pytest.raises(TypeError, match="owns threads or processes"):
            rd.LogicalShards(lambda shard: node(rd.Reader(ROWS, shard)), num_logical_shards=24, global_batch_size=12)

    @pytest.mark.parametrize("value", ["text", None, [1, 2], b"bytes"])
    def test_a_state_that_is_no_position(self, value: Any) -> None:
        with pytest.raises(
            TypeError, match=rf"'deep\.value' is a {type(value).__name__}\. .*keep a position"
        ) as raised:
            loader_of(lambda shard: Stateful(rd.Reader(ROWS, shard), value))
        assert "while the pipeline of logical shard 0 was built" in raised.value.__notes__

    @pytest.mark.parametrize("later", [1.5, torch.zeros(3), "text"])
    def test_a_state_that_changes_its_type(self, later: Any) -> None:
        loader = loader_of(lambda shard: Stateful(rd.Reader(ROWS, shard), 1, later), repeat=True)
        with pytest.raises(TypeError, match=r"'deep\.value'") as raised:
            next(iter(loader))
        assert "in the pipeline of logical shard" in raised.value.__notes__[0]

    def test_shards_that_keep_different_states(self) -> None:
        def pipeline(shard: rd.Shard, odd: range) -> BaseNode[Any]:
            return Stateful(rd.Reader(ROWS, shard), 1.5 if shard.index in odd else 1)

        with pytest.raises(
            TypeError, match=r"shard 23 has the state .*'deep.value': 'float64.*the same for every shard"
        ):
            loader_of(functools.partial(pipeline, odd=range(3, 24)))
        loader = loader_of(functools.partial(pipeline, odd=range(3, 23)), repeat=True)
        with pytest.raises(TypeError, match=r"logical shard \d+ has the state .*the same for every shard"):
            list(zip(range(2), loader, strict=False))

    def test_shards_that_begin_in_different_states(self) -> None:
        """All would begin in that of shard 0. What a torchdata node begins in is its own."""

        def odd(shard: rd.Shard) -> BaseNode[Any]:
            return rd.WeightedSampler({name: rd.Reader(ROWS, shard) for name in "ab"}, {"a": 1, "b": 1 + shard.index})

        with pytest.raises(
            TypeError, match=r"'rule' begins as -?\d+ in logical shard 23 and as .* in shard 0.*same for"
        ):
            loader_of(odd)
        loader_of(lambda shard: Stateful(rd.Reader(ROWS, shard), shard.index))

    def test_parameters_that_are_no_json(self) -> None:
        class Odd(Mapped):
            def parameters(self) -> Any:
                return {"dtype": torch.int64}

        with pytest.raises(TypeError, match=r"Odd \(source\) has parameters\(\) that JSON cannot hold.*Return strings"):
            loader_of(lambda shard: Mapper(Odd(rd.Reader(ROWS, shard)), dict))

    @pytest.mark.parametrize("name", ["samples", "stamp", "remainder"])
    def test_a_field_with_a_name_of_the_table(self, name: str) -> None:
        class Clash(Mapped):
            FIELDS = (Field((name,)),)

        with pytest.raises(TypeError, match=rf"the paths \['{name}'\], which the table .*Rename"):
            loader_of(lambda shard: Clash(rd.Reader(ROWS, shard)))

    def test_a_shard_out_of_range(self) -> None:
        with pytest.raises(ValueError, match=r"index=4, num_logical_shards=4"):
            rd.Shard(4, 4)


class TestStates:
    """R6: a state of another run says what differs and what to do."""

    def saved(self, data: Any = ROWS, **kwargs: Any) -> dict[str, Any]:
        return loader_of(data, **kwargs).state_dict()

    @pytest.mark.parametrize(
        ("saved", "message"),
        [
            (
                {"num_logical_shards": 12},
                "num_logical_shards=12, the loader has num_logical_shards=24. It is fixed for a whole run",
            ),
            ({"seed": 3}, "seed=3, the loader has seed=0. Another seed is another order"),
            (
                {"data": Rows(50)},
                "The sources differ .*root: rows: saved 50, now 48.*restore the files, or begin a new run",
            ),
            ({"data": Documents(48)}, 'The sources differ .*root: class: saved "Documents", now "Rows"'),
            (
                {"data": lambda shard: rd.Reader(ROWS, shard, shuffle=8)},
                'The pipeline differ.*root: shuffle: saved 8, now "full".*use the saved',
            ),
            (
                {"data": lambda shard: Every(rd.Reader(ROWS, shard), 3)},
                "The fields differ.*Build the pipeline that was saved, with the saved verify=",
            ),
        ],
    )
    def test_of_another_run(self, saved: dict[str, Any], message: str) -> None:
        state = self.saved(**saved)
        with pytest.raises(rd.DataStateError, match=message):
            loader_of().load_state_dict(state)

    def test_of_another_parameter_deep_in_the_pipeline(self) -> None:
        def pipeline(eos_id: int) -> Any:
            return lambda shard: Mapper(
                rd.TokenPacker(rd.Reader(DOCUMENTS, shard), column="tokens", seq_len=8, eos_id=eos_id), dict
            )

        state = self.saved(pipeline(2), repeat=True)
        with pytest.raises(rd.DataStateError, match=r"The pipeline differ.*source: eos_id: saved 2, now 3"):
            loader_of(pipeline(3), repeat=True).load_state_dict(state)

    def test_of_a_newer_format(self) -> None:
        with pytest.raises(
            rd.DataStateError,
            match=r"format version 7, this rescale_data reads the version 1. Load it with the release",
        ):
            loader_of().load_state_dict(closed({**opened(self.saved()), "version": 7}))

    def test_without_some_keys(self) -> None:
        state = self.saved()
        parts = {key: value for key, value in opened(state).items() if key not in ("samples", "pipeline")}
        with pytest.raises(
            rd.DataStateError,
            match=r"The header of the state lacks \['pipeline', 'samples'\]\. Give what loader\.state_dict",
        ):
            loader_of().load_state_dict(closed(parts))
        with pytest.raises(rd.DataStateError, match=r"The state lacks \['header', 'table'\]"):
            loader_of().load_state_dict(opened(state))

    @pytest.mark.parametrize("table", [None, [1, 2], "rows"])
    def test_without_a_table(self, table: Any) -> None:
        with pytest.raises(rd.DataStateError, match=r"The table of the state is a .*, not a tensor\. Give what"):
            loader_of().load_state_dict({**self.saved(), "table": table})

    def test_with_rows_that_nobody_saved(self) -> None:
        """What DCP leaves in the placeholders of a rank that was lost: its old rows, with another stamp."""
        loader = loader_of()
        next(iter(loader))
        state = loader.state_dict()
        opened(state)["shards"]["stamp"][6:12] = 0
        with pytest.raises(
            rd.DataStateError,
            match=r"rows of 6 of 24 logical shards \(the first: \[6, 7, 8, 9, 10\]\) are not of sample 12",
        ):
            loader_of().load_state_dict(state)

    def test_with_a_tensor_of_another_shape_or_dtype(self) -> None:
        for tensor in (torch.zeros(23, dtype=torch.int64), torch.zeros(24), torch.zeros(24, 2, dtype=torch.int64)):
            state = self.saved()
            state["table"] = tensor
            with pytest.raises(
                rd.DataStateError,
                match=r"The table of the state has shape and dtype .* by its header it has \(\(24, 6\), torch.int64",
            ):
                loader_of().load_state_dict(state)

    def test_in_mid_step_on_another_topology_is_warned_of(self, caplog: pytest.LogCaptureFixture) -> None:
        loader = loader_of(micro_batch_size=4)
        next(iter(loader))
        loader_of(micro_batch_size=4).load_state_dict(loader.state_dict())
        assert not caplog.records
        loader_of(micro_batch_size=2).load_state_dict(loader.state_dict())
        assert "in the middle of a step" in caplog.text
        assert "global batches begin anew at sample 4. loader.step goes on from 0" in caplog.text


DOCUMENTS = Documents(48)


def test_a_subclass_whose_samples_would_be_gone_past() -> None:
    with pytest.raises(
        TypeError, match=r"Marked has a next\(\) of its own, and from Reader open_documents\(\), texts\(\), skip\(\)"
    ):

        class Marked(rd.Reader):
            def next(self) -> Any:
                return {**super().next(), "mark": 1}

    with pytest.raises(
        TypeError, match=r"Shifted has a next\(\) of its own, and from TokenPacker write_ready\(\), which"
    ):

        class Shifted(rd.TokenPacker):
            def next(self) -> Any:
                return super().next()

            def write(self, buffer: Any, place: int) -> None:
                super().write(buffer, place)

            def skip(self, num_samples: int) -> None:
                super().skip(num_samples)

    with pytest.raises(
        TypeError, match=r"Written has a write\(\) of its own, and from TokenPacker write_ready\(\), which"
    ):

        class Written(rd.TokenPacker):
            def write(self, buffer: Any, place: int) -> None:
                super().write(buffer, place)

    with pytest.raises(
        TypeError, match=r"Skipped has a skip\(\) of its own, and from WeightedSampler skip_ahead\(\), which"
    ):

        class Skipped(rd.WeightedSampler):
            def skip(self, num_samples: int) -> None:
                super().skip(num_samples)

    class Mixin:
        def write(self, buffer: Any, place: int) -> None: ...

    with pytest.raises(
        TypeError, match=r"Mixed has the write\(\) of Mixin, and from TokenPacker write_ready\(\), which go past it"
    ):

        class Mixed(Mixin, rd.TokenPacker): ...

    class Named(rd.Reader):  # and this one has none
        name = "mine"

    assert list(Named(range(3), rd.Shard(), shuffle=False)) == [0, 1, 2]
