"""`Audit`: finds the steps in which a run has served a document, and the documents of its steps."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from rescale_data.audit.replay import ReplayInterval, Served, pipeline_differences
from rescale_data.audit.rows import SourcePositions, find_rows
from rescale_data.checkpoint.data_state import read_data_state
from rescale_data.checkpoint.storage.claims import find_save
from rescale_data.checkpoint.storage.manifest import METADATA
from rescale_data.checkpoint.storage.open import open_store
from rescale_data.checkpoint.storage.run_folder import RunFolder
from rescale_data.checkpoint.storage.store import StrPath, join
from rescale_data.engine.as_pipeline import as_pipeline
from rescale_data.engine.options import Tail
from rescale_data.engine.recipe import Pipeline, path_name
from rescale_data.engine.schema import Schema
from rescale_data.engine.states.codec import SavedState, decode
from rescale_data.errors import DamagedCheckpointError, DataStateError, checks_argument_types
from rescale_data.nodes.reader import Reader
from rescale_data.sources.dataset import MapStyle
from rescale_data.sources.source import Source

logger = logging.getLogger(__name__)
_MIN_SHARE_KEPT_BY_FILTERS = 0.1
"""The least share of rows that nodes above a reader keep, for an estimate of how many epochs a window spans."""


@dataclass(frozen=True)
class Finding:
    """The result of `Audit.find`: the samples that served certain rows of a source.

    Args:
        rows: Number of rows that were looked for.
        drawn: Number of times that one of the rows was drawn, to be served or to be left out: by a blocklist, a filter, with a
            step or at the end of an epoch. Below a node of torchdata, the number of samples that served one.
        served: The samples that contain a part of one of the rows; their documents are these rows alone.
        steps: The range of steps that were searched: the first one, and the one after the last.
    """

    rows: int
    drawn: int
    served: list[Served]
    steps: tuple[int, int]


class Audit:
    """Finds the samples that a run has served, from its checkpoints and its pipeline, without a log.

    Between two checkpoints the samples are read again, which takes a process and no GPU, and at the second one they have to
    stand where the run stood. Ranks may have changed in between, and the global batch once.

    Args:
        run: The folder of the run, with its checkpoints, or a URL.
        pipelines: The pipeline that the loader was built with; all pipelines of the run if parameters have changed (weights,
            files, sources, blocklists, ``seq_len``). Between two checkpoints, the pipeline of the second one is read.
        name: Name of the loader in the checkpoints; default: the only loader.
        repeat, tail, num_workers: Arguments of the loader; ``num_workers`` matters if the run was not aligned.

    Raises:
        FileNotFoundError: There is no such folder, or no checkpoint in it.
        DataStateError: No checkpoint holds the state of a loader, or several and ``name`` does not say which.

    Example:
        >>> import tempfile
        >>> import rescale_data as rd
        >>> from rescale_data import checkpoint
        >>> source = rd.DatasetSource([{"x": i} for i in range(64)], name="web")
        >>> pipeline = lambda shard: rd.Reader(source, shard)
        >>> loader = rd.DataLoader(pipeline, global_batch_size=4)
        >>> with tempfile.TemporaryDirectory() as run:
        ...     batches = [batch for _, batch in zip(range(10), loader)]
        ...     checkpoint.save(f"{run}/step-10", {"loader": loader})
        ...     audit = rd.audit.Audit(run, pipeline)
        ...     row = int(batches[7]["x"][2])
        ...     [(served.step, served.sample) for served in audit.find(f"web:{row}").served]
        [(7, 2)]
    """

    @checks_argument_types
    def __init__(
        self,
        run: StrPath,
        *pipelines: Pipeline | Source | MapStyle,
        repeat: bool = False,
        tail: Tail = "drop",
        name: str | None = None,
        num_workers: int = 0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not pipelines:
            raise ValueError("Give the pipeline of the run, the function that its loader was built with.")
        self._pipelines, self._repeat, self._num_workers = [*map(as_pipeline, pipelines)], repeat, num_workers
        self._tail: Tail = tail
        self._states = _read_states(run, name, storage_options)

    @property
    def steps(self) -> tuple[int, int]:
        """The range of steps that can be audited: the first one, and the one after the last."""
        return 0, self._states[-1].header["step"]

    def documents(self, first: int, stop: int) -> Iterator[Served]:
        """Yield the samples of the steps ``first .. stop - 1``, in order of the steps.

        Raises:
            ValueError: There are no such steps, or there is no checkpoint behind them.
            DataStateError: The run was not what the pipelines say.
        """
        if not 0 <= first < stop <= self.steps[1]:
            raise ValueError(
                f"The steps {first} to {stop}: give the first, and the one after the last, from 0 to {self.steps[1]}, where "
                f"the newest checkpoint is."
            )
        for interval in self._replay_intervals():
            if interval.first_step < stop and first < interval.stop_step:
                yield from interval.replay(range(len(interval.state_at_end.table)), first, stop)

    def find(self, document: str) -> Finding:
        """Find the steps in which a row of a source was served, or the rows of a file.

        Only the logical shards are read again that had the row, between the checkpoints where they had it. Below a node of
        torchdata, whose state does not say it, in a run to which files or sources were added, and below windows where a
        blocklist has changed, all are read again.

        Args:
            document: ``"SOURCE:ROW"`` (numbered over all files, from 0), ``"SOURCE:FILE"``, or what messages and
                ``batch["provenance"]`` say, ``"SOURCE: FILE, row 17"``. Where several sources have one name, the place of the
                reader in its stead, ``"source.web"``; an error lists them.

        Raises:
            ValueError: There is no such source, row or file.
            DataStateError: The run was not what the pipelines say.
        """
        schema, readers, name = self._readers(document)
        reader = readers[0][1]
        rows = find_rows(reader.source, document.removeprefix(f"{name}:").strip())
        origin_lines = {f"{reader.source.name}: {reader.source.locate(row)}" for row in rows}
        replay_shards, num_drawn = defaultdict[int, set[int]](set), 0
        intervals, num_shards = self._replay_intervals(), len(self._states[-1].table)
        windows_above_readers = [self._windows_above_reader(schema, path) for path, _ in readers]
        for (path, reader), (num_window_nodes, num_documents) in zip(readers, windows_above_readers, strict=True):
            if num_window_nodes is None:
                for index in range(len(intervals)):
                    replay_shards[index].update(range(num_shards))
                continue
            positions = SourcePositions.from_states(self._states, path, num_window_nodes)
            for shard, position in positions.positions(reader, np.array(rows)):
                num_drawn += positions.is_drawn(shard, position)
                for index in positions.save_intervals_of(shard, position):
                    replay_shards[index].add(shard)
            # The windows may hold more documents than an epoch has: they span several.
            if _MIN_SHARE_KEPT_BY_FILTERS * reader.source.num_rows < num_documents * num_shards:
                for shard in range(num_shards):
                    for index in positions.save_intervals_read_ahead(shard):
                        replay_shards[index].add(shard)
        served = [sample for index in sorted(replay_shards) for sample in intervals[index].replay(replay_shards[index])]
        matched = [
            replace(sample, documents=[line for line in sample.documents if line in origin_lines]) for sample in served
        ]
        matching_samples = [sample for sample in matched if sample.documents]
        if any(num_window_nodes is None for num_window_nodes, _ in windows_above_readers):
            num_drawn = len(matching_samples)
        return Finding(len(rows), num_drawn, matching_samples, self.steps)

    def _windows_above_reader(self, schema: Schema, path: Sequence[str]) -> tuple[int | None, int]:
        """Return how many ancestors of a reader read a window ahead of their samples, and the most documents in these windows.

        The first is `None` if states do not tell what was read: below a node of torchdata, if files or sources were added, and
        below windows if a blocklist has changed. The second holds if no document is left out.
        """
        node, num_window_nodes, num_documents = schema.root, 0, 1
        for name in path:
            if name not in node.children:
                return None, num_documents
            num_window_nodes += node.READS_AHEAD
            num_documents *= getattr(node, "window", getattr(node, "seq_len", 1) if num_documents > 1 else 1)
            node = node.children[name]
        is_window_count_known = not self._data_changed and not (num_window_nodes and self._blocklists_changed)
        return num_window_nodes if is_window_count_known else None, num_documents

    def _replay_intervals(self) -> list[ReplayInterval]:
        start_states = [None, *self._states[:-1]]
        return [self._make_interval(start, end) for start, end in zip(start_states, self._states, strict=True)]

    def _make_interval(self, start: SavedState | None, end: SavedState) -> ReplayInterval:
        all_differences = [pipeline_differences(pipeline, end) for pipeline in self._pipelines]
        for pipeline, differences in zip(self._pipelines, all_differences, strict=True):
            if not differences:
                skipped_ranges = self._states[-1].clock.skipped
                return ReplayInterval(start, end, pipeline, skipped_ranges, self._repeat, self._tail, self._num_workers)
        raise DataStateError(
            f"Up to its checkpoint of step {end.header['step']} the run had another pipeline: "
            f"{'; '.join(min(all_differences, key=len))}. "
            f"Give that one, too."
        )

    def _readers(self, document: str) -> tuple[Schema, Sequence[tuple[Sequence[str], Reader]], str]:
        """Return the newest schema with the source that ``document`` names, the source's readers, and the source's name."""
        source_names = set[str]()
        for schema in self._schemas:
            readers = [(path, node) for path, node in schema.root.walk() if isinstance(node, Reader)]
            for name in {node.source.name for _, node in readers if document.startswith(f"{node.source.name}:")}:
                same_name_readers = [(path, node) for path, node in readers if node.source.name == name]
                first_source = same_name_readers[0][1].source
                if any(
                    node.source.locate(0) != first_source.locate(0) or node.source.manifest() != first_source.manifest()
                    for _, node in same_name_readers
                ):
                    reader_paths = sorted(path_name(path) for path, _ in same_name_readers)
                    raise ValueError(
                        f"{document!r}: several sources have the name {name!r}. Give the place of one of the readers in its "
                        f"stead: {reader_paths}."
                    )
                return schema, same_name_readers, name
            for path, node in readers:
                if document.startswith(f"{path_name(path)}:"):
                    return schema, [(path, node)], path_name(path)
            source_names.update(node.source.name for _, node in readers)
        raise ValueError(
            f"{document!r}: the pipeline reads the sources {sorted(source_names)}. Give SOURCE:ROW or SOURCE:FILE."
        )

    @cached_property
    def _data_changed(self) -> bool:
        """True if files or sources were added in the run: then no schema shows where each row was in each epoch."""
        return any(state.header["sources"] != self._states[0].header["sources"] for state in self._states)

    @cached_property
    def _blocklists_changed(self) -> bool:
        """True if a blocklist has changed in the run: then partly delivered windows were made again, of other rows."""
        blocklist_key = Reader.BLOCKED[-1].key
        blocklists = [
            {key: rows.tolist() for key, rows in state.values.items() if key.rpartition(".")[2] == blocklist_key}
            for state in self._states
        ]
        return any(state_blocklists != blocklists[0] for state_blocklists in blocklists)

    @cached_property
    def _schemas(self) -> list[Schema]:
        """Schemas of the pipelines that the run has had, the newest first."""
        newest_intervals = {id(interval.pipeline): interval for interval in self._replay_intervals()}
        return [interval.schema() for interval in sorted(newest_intervals.values(), key=lambda item: -item.first_step)]


def _read_states(run: StrPath, loader_name: str | None, storage_options: Mapping[str, Any] | None) -> list[SavedState]:
    """Return the loader states of a run's checkpoints, ordered by the samples served, without abandoned attempts."""
    store, folder = open_store(run, storage_options)
    RunFolder.open_existing(store, folder)
    paths = [join(folder, entry) for entry in store.names(folder) if not entry.startswith(".")]
    paths = [path for path in paths if find_save(store, path) or store.is_file(join(path, METADATA))]
    # by the samples and the origin: a save, and one after a load that begins steps anew
    state_by_samples: dict[tuple[int, int], SavedState] = {}
    last_error: Exception | None = None
    for path in sorted(paths):
        try:
            state = decode(read_data_state(path, name=loader_name, storage_options=storage_options))
        except DataStateError as error:
            last_error = error
        # The interval around it is replayed from its neighbours.
        except (DamagedCheckpointError, FileNotFoundError) as error:
            logger.warning("The audit goes without the checkpoint %s: %s", path, error)
            last_error = error
        else:
            state_by_samples[state.header["samples"], state.header["origin"]] = state
    if not state_by_samples:
        raise last_error or FileNotFoundError(f"No checkpoint in {folder}.")
    states = [state_by_samples[sample_and_origin] for sample_and_origin in sorted(state_by_samples)]
    skipped = states[-1].clock.skipped  # a checkpoint within a skipped range belongs to an attempt that was given up
    return [state for state in states if not any(start < state.header["samples"] < stop for start, stop in skipped)]
