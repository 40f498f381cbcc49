"""Law 5, rows: what is read is at most a fifth more than what is used, and what open windows hold, live and after each load.

Crossed: where calls are counted, node over rows, mixture, top, how long the sources are, how often the run is loaded.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import rescale_data as rd
from tests.laws.pairs import Case, cases, name_of
from tests.laws.tables import LENGTHS, MIXTURES, ROWS, SOURCES, TOPS, rows_of
from tests.nodes.resume import plain

N = 4
HELD = {"Shuffle": 4, "Tokenize": 3, "CleanDocuments": 1}
"""Rows that the window of a node over rows holds, of each source."""
HELD_ON_TOP = {
    "Shuffle": 5,
    "TokenPacker": 1,
    "TokenPacker-pad": 1,
    "WholeDocumentPacker": 5,
    "Shuffle-WholeDocumentPacker": 4 * 5,
}
"""Rows that a node on top holds: a document, a window, three samples that lie in up to four windows."""
DIMENSIONS: Mapping[str, Any] = {
    "counted": ["source", "Map", "predicate"],
    "rows": [*ROWS],
    "mixture": [*MIXTURES],
    "top": [*TOPS],
    "times": [1, 20],
    "segments": [1, 3, 12],
}
STEPS = 120


class Counted:
    """Rows of a map-style dataset, or a function of them, that counts its calls."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.calls = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return self.rows[index]

    def seen(self, row: Any) -> Any:
        self.calls += 1
        return row

    def is_kept(self, row: Any) -> bool:
        self.calls += 1
        return len(row["tokens"]) % 3 != 1


def counted_pipeline(case: Case, folder: Path) -> tuple[Callable[[rd.Shard], Any], list[Counted]]:
    counts, sources = dict[str, Counted](), dict[str, Any]()
    for i, (name, lengths) in enumerate(LENGTHS.items()):
        counts[name] = Counted(rows_of(lengths * case["times"], 1000 * i))
        (folder / name).mkdir()
        if case["counted"] == "source":
            sources[name] = rd.DatasetSource(counts[name], name=name)
        else:
            sources[name] = SOURCES["arrow"](folder / name, counts[name].rows)

    def build(shard: rd.Shard) -> Any:
        def below(name: str) -> Any:
            node: Any = rd.Reader(sources[name], shard)
            if case["counted"] == "Map":
                node = rd.Map(node, counts[name].seen)
            if case["counted"] == "predicate":
                node = rd.Filter(node, counts[name].is_kept, version=1)
            return ROWS[case["rows"]](node)

        return TOPS[case["top"]](MIXTURES[case["mixture"]](below))

    return build, list(counts.values())


@pytest.mark.parametrize("case", cases(DIMENSIONS), ids=name_of)
def test_rows_read_are_rows_used_and_windows(case: Case, tmp_path: Path) -> None:
    build, counts = counted_pipeline(case, tmp_path)
    state: Any = None
    for _ in range(case["segments"]):
        loader = rd.DataLoader(build, global_batch_size=N, num_logical_shards=N, repeat=True, collate_fn=plain)
        if state is not None:
            loader.load_state_dict(state)
        stream = iter(loader)
        for _ in range(STEPS // case["segments"]):
            next(stream)
        state = loader.state_dict()
    used = sum(value for key, value in loader.progress().items() if key.startswith("rows/"))
    num_sources = 1 if case["mixture"] == "one source" else len(counts)
    held = num_sources * HELD.get(case["rows"], 0) + HELD_ON_TOP.get(case["top"], 0)
    read = sum(count.calls for count in counts)
    assert read <= 1.2 * used + N * held * case["segments"]
