"""`Audit`: what it says of a run is what the run has seen, whatever happened between its checkpoints."""

import itertools
import json
import shutil
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchdata import nodes

import rescale_data as rd
from rescale_data import checkpoint
from rescale_data.testing import full_state_dict
from tests.corpus import write
from tests.formats import write_jsonl

SIZES = {"web": 70, "code": 31, "few": 3}
N, LENGTHS = 6, np.random.default_rng(3).integers(1, 40, 200)
FIRST = dict(zip(SIZES, (1, 1001, 2001), strict=True))
ROWS = {
    name: [{"tokens": 100 * (i + FIRST[name]) + np.arange(LENGTHS[i])} for i in range(SIZES[name])] for name in SIZES
}
SOURCES = {name: rd.DatasetSource(of_name, name=name) for name, of_name in ROWS.items()}
NAME_OF = {i + FIRST[name]: f"{name}: {name}[{i}]" for name, size in SIZES.items() for i in range(size)}


def reader(name, shard, blocked=()):
    return rd.Reader(SOURCES[name], shard, shuffle=8, exclude=blocked if name == "web" else ())


def rows(shard, blocked=()):
    kept = rd.Filter(reader("web", shard, blocked), lambda row: row["tokens"][0] % 300 > 0, version=1)
    return rd.Map(kept, lambda row: {"tokens": row["tokens"][:1]}, version=1)


def numbers(shard, blocked=()):
    return rd.Map(reader("web", shard, blocked), lambda row: row["tokens"][:1], version=1)


def cut(shard, blocked=(), seq_len=24):
    return rd.TokenPacker(reader("web", shard, blocked), column="tokens", seq_len=seq_len, eos_id=None)


def mixture(shard, blocked=(), names=tuple(SIZES)):
    weights = {"web": 0.6, "code": 0.3, "few": 0.1}
    readers = {name: reader(name, shard, blocked) for name in names}
    documents = rd.WeightedSampler(readers, {name: weights[name] for name in names})
    return rd.TokenPacker(documents, column="tokens", seq_len=24, eos_id=None, labels=True)


def whole(shard, blocked=()):
    return rd.WholeDocumentPacker(reader("web", shard, blocked), column="tokens", seq_len=48, window=5)


def wide(shard, blocked=()):
    """Windows over several epochs of a source, in each of which a row is in another logical shard."""
    web = rd.Reader(SOURCES["web"], shard, exclude=blocked)
    readers = {"web": web, "code": rd.Reader(SOURCES["code"], shard)}
    documents = rd.WeightedSampler(readers, {"web": 0.5, "code": 0.5})
    return rd.WholeDocumentPacker(documents, column="tokens", seq_len=48, window=50)


def shuffled(shard, blocked=()):
    return rd.Shuffle(cut(shard, blocked), window=4)


def unbatched(shard, blocked=()):
    """Below nodes of torchdata, which read further than their samples, and without a blocklist."""
    del blocked
    return nodes.Unbatcher(nodes.Batcher(rows(shard), 3, drop_last=False))


PIPELINES = {
    pipeline.__name__: pipeline for pipeline in (rows, numbers, cut, mixture, whole, wide, shuffled, unbatched)
}
Seen = list[tuple[int, int, list[str]]]
"""Step, place in the global batch and documents of each sample, in no order."""


class Segment(NamedTuple):
    w: int
    b: int
    a: int
    steps: int
    begun: int = 0
    """Micro batches of one more step."""


class Recorded:
    def __init__(self, folder, names=NAME_OF, **arguments):
        self.folder, self.names, self.arguments, self.seen, self.state = folder, names, arguments, Seen(), None
        self.num_saves = 0

    def segment(self, pipeline, segment, change=None):
        w, b, a = segment[:3]
        given = {"global_batch_size": w * b * a, "micro_batch_size": b, "num_logical_shards": N} | self.arguments
        loaders = [rd.DataLoader(pipeline, dp_rank=rank, dp_world_size=w, **given) for rank in range(w)]
        for loader in loaders:
            if self.state is not None:
                loader.load_state_dict(self.state)
        for step in range(segment.steps + 1):
            for _ in range(segment.begun if step == segment.steps else loaders[0].gradient_accumulation_steps):
                self._micro_batch(loaders)
            for loader in loaders if change is not None and step < segment.steps else ():
                change(loader)
        self.state = full_state_dict(loaders)
        self.num_saves += 1
        checkpoint.save(f"{self.folder}/step-{loaders[0].step}-{self.num_saves}", {"loader": self.state})

    def _micro_batch(self, loaders):
        for rank, loader in enumerate(loaders):
            batch = next(iter(loader), None)
            batch = next(iter(loader)) if batch is None else batch
            layout, clock = loader._stream.layout, loader._stream.clock
            begun = clock.samples_in_begun_step(layout.global_batch_size) or layout.global_batch_size
            step = loader.step - (begun == layout.global_batch_size)
            m = begun // layout.micro_step_samples - 1
            first = rank * layout.global_batch_size // layout.dp_world_size + m * layout.micro_batch_size
            tokens = batch["tokens"] if isinstance(batch, dict) else batch
            for place, sample in enumerate(tokens[: loader.last_batch_samples].tolist()):
                documents = [self.names[i] for i in dict.fromkeys(t // 100 for t in sample) if i]
                self.seen.append((step, first + place, documents))

    def steps_of(self, document):
        return sorted((step, place) for step, place, documents in self.seen if document in documents)


def check(run, audit, documents):
    last = audit.steps[1]
    for first, stop in {(0, last), (last // 2, last // 2 + 1), (max(0, last - 2), last)} if last else ():
        served = [(s.step, s.sample, list(dict.fromkeys(s.documents))) for s in audit.documents(first, stop)]
        assert sorted(served) == sorted(sample for sample in run.seen if first <= sample[0] < stop)
    for number in documents:
        name = NAME_OF[number]
        found = audit.find(f"{name.partition(':')[0]}:{number % 1000 - 1}")
        assert sorted((s.step, s.sample) for s in found.served) == run.steps_of(name)


def segments(most):
    sizes = st.integers(1, most), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2])
    return st.lists(st.builds(Segment, *sizes, st.integers(0, 9), st.integers(0, 1)), min_size=1, max_size=4)


few = settings(max_examples=max(6, settings().max_examples // 16))
WITHIN = Segment(1, 3, 2, 3, 1)
"""It ends within a step."""
FEW = {1, 30, 70}

BLOCKED, ASKED = st.sets(st.integers(0, 69), max_size=20), st.sets(st.integers(1, 70), min_size=3, max_size=6)


@given(st.sampled_from(sorted(PIPELINES)), segments(3), BLOCKED, st.integers(1, 4), ASKED)
@few
@example("cut", [WITHIN, Segment(1, 3, 2, 0), Segment(1, 3, 2, 4)], set(), 4, FEW)  # it goes on with the same ranks,
@example("cut", [WITHIN, Segment(1, 3, 2, 0), Segment(1, 2, 3, 2), Segment(1, 3, 2, 4)], set(), 4, FEW)  # others then,
@example("cut", [WITHIN, Segment(1, 2, 3, 2), Segment(1, 3, 2, 4)], set(), 4, FEW)  # or at once, and begins it anew
@example("cut", [Segment(1, 3, 2, 5), Segment(1, 4, 1, 0), Segment(1, 4, 1, 3)], set(), 4, FEW)  # saved after a load
@example("whole", [Segment(1, 3, 1, steps) for steps in (3, 2, 4)], {*range(0, 70, 3)}, 1, {*range(1, 71)})
def test_it_says_what_a_run_has_seen(kind, parts, blocked, since, asked):
    """Other ranks, micro and global batches in each segment, aligned or not, and a blocklist since one of them."""
    with TemporaryDirectory() as folder:
        run = Recorded(folder, repeat=True)
        pipelines = [PIPELINES[kind], partial(PIPELINES[kind], blocked=sorted(blocked))]
        for number, segment in enumerate(parts):
            run.segment(pipelines[number >= since], segment)
        others = {"mixture": [1005, 2001], "wide": [1005, 1020]}
        check(run, rd.audit.Audit(folder, *pipelines, repeat=True), [*asked, *others.get(kind, [])])


@given(st.sampled_from(sorted(PIPELINES)), segments(1), st.sampled_from(["drop", "pad"]))
@few
def test_over_ends_of_epochs(kind, parts, tail):
    with TemporaryDirectory() as folder:
        run = Recorded(folder, repeat=False, tail=tail)
        for segment in parts:
            run.segment(PIPELINES[kind], segment)
        check(run, rd.audit.Audit(folder, PIPELINES[kind], tail=tail), [1, 30, 70])


def test_over_ends_of_epochs_that_several_ranks_found_by_reading(tmp_path):
    """Ranks that were aligned are read again by one, which needs no other to know what is left."""
    run = Recorded(tmp_path, repeat=False, num_logical_shards=8)
    run.segment(cut, Segment(1, 4, 1, 60))
    header = json.loads(run.state["header"]) | {"dp_world_size": 2, "micro_batch_size": 2}
    assert header["epoch"] > 0
    shutil.rmtree(tmp_path / "step-60-1")
    checkpoint.save(tmp_path / "step-60-1", {"loader": {**run.state, "header": json.dumps(header)}})
    check(run, rd.audit.Audit(tmp_path, cut), [1, 30, 70])


def test_served_blocked_and_filtered_rows_are_the_source_and_left_out_steps_are_not_served(tmp_path):
    run, blocked = Recorded(tmp_path, repeat=False, tail="pad"), [4, 5, 60]

    def leave_out(loader):
        if loader.step == 5:
            loader.skip(2 * 4)

    for steps in (2, 3, 2, 3):
        run.segment(partial(rows, blocked=blocked), Segment(1, 1, 4, steps), leave_out)
    audit = rd.audit.Audit(tmp_path, partial(rows, blocked=blocked), tail="pad")
    check(run, audit, [1, 30, 70])
    assert {step for step, *_ in run.seen} == {*range(12)} - {5, 6}
    left_out = set()
    for row in range(SIZES["web"]):
        found, dropped = audit.find(f"web:{row}"), row in blocked or (row + 1) % 3 == 0
        assert len(found.served) == 0 if dropped else len(found.served) <= found.drawn <= 2
        if not dropped and not found.served and found.drawn:
            left_out.add(row)
    assert 0 < len(left_out) <= 8  # of two steps


def ramp(sizes):
    """Return what changes the global batch in a process, by the step."""
    return lambda loader: loader.reopen(global_batch_size=sizes[loader.step]) if loader.step in sizes else None


def test_a_ramp_in_the_same_process_and_another_form_after_it(tmp_path):
    run, longer = Recorded(tmp_path, repeat=True), partial(cut, seq_len=40)
    run.segment(cut, Segment(2, 1, 3, 4))
    run.segment(cut, Segment(1, 2, 3, 5), ramp({6: 12}))
    run.segment(longer, Segment(2, 1, 6, 3))
    check(run, rd.audit.Audit(tmp_path, cut, longer, repeat=True), [1, 2, 30, 70])
    words = r"step 12 the run had another pipeline: root: seq_len.*Give that one"
    with pytest.raises(rd.DataStateError, match=words):
        rd.audit.Audit(tmp_path, cut, repeat=True).find("web:1")
    with pytest.raises(rd.DataStateError, match="another pipeline"):
        list(rd.audit.Audit(tmp_path, longer, repeat=True).documents(0, 2))


def test_a_step_within_which_the_run_was_saved_and_other_ranks_later_in_the_same_process(tmp_path):
    def end_the_step(loader):
        if loader.step == 6:
            run._micro_batch([loader])
            loader.reopen(micro_batch_size=2)

    run = Recorded(tmp_path, repeat=True)
    run.segment(cut, WITHIN)
    run.segment(cut, Segment(1, 3, 2, 5), end_the_step)
    check(run, rd.audit.Audit(tmp_path, cut, repeat=True), [1, 2, 30, 70])


def test_a_ramp_of_two_stages_without_a_checkpoint_between_is_an_error(tmp_path):
    """4, 8 and 16 a step: as many samples in as many steps as with 4 and 16."""
    run = Recorded(tmp_path, repeat=True, num_logical_shards=8)
    run.segment(cut, Segment(1, 2, 2, 1))
    run.segment(cut, Segment(1, 2, 2, 5), ramp({2: 8, 5: 16}))
    with pytest.raises(rd.DataStateError, match="another global batch in between"):
        list(rd.audit.Audit(tmp_path, cut, repeat=True).documents(0, 6))


def test_of_a_loader_of_files_and_of_shards_that_had_the_row_alone(tmp_path, monkeypatch):
    source = write("parquet", tmp_path / "corpus", [[100 * i] for i in range(48)])
    read = Counter()
    monkeypatch.setattr(source, "row", lambda index, row=source.row: (read.update([index]), row(index))[1])

    loader = rd.DataLoader(source, global_batch_size=4, num_logical_shards=8)
    seen = defaultdict(list)
    for step, batch in enumerate(loader):
        seen[step] = [int(tokens[0]) // 100 for tokens in batch["tokens"]]
        if step in (3, 7):
            checkpoint.save(tmp_path / "run" / f"step-{step + 1}", {"loader": loader})
    audit = rd.audit.Audit(tmp_path / "run", source)
    for row in range(48):
        read.clear()
        found = audit.find(f"corpus:{row}")
        assert [served.step for served in found.served] == [step for step in range(8) if row in seen[step]]
        assert found == audit.find(f"corpus: {source.locate(row)}")
        assert sum(read.values()) <= 4 * 2  # of the 32 rows that were served
    file = source.locate(0).rpartition(", ")[0]
    rows_of_it = source.rows_of_file(file)
    found = audit.find(f"corpus:{Path(file).name}")
    assert [(s.step, s.sample) for s in found.served] == [
        (step, place) for step in range(8) for place, row in enumerate(seen[step]) if row in rows_of_it
    ]
    assert found.rows == len(rows_of_it)


def test_of_a_run_to_which_files_were_added(tmp_path):
    """Each pipeline reads the files of then; the one of now would have read other rows."""

    def pipeline_of(files):
        source = rd.JsonlSource([tmp_path / "corpus" / f"{file}.jsonl" for file in files])
        return lambda shard: rd.Reader(source, shard)

    names = {}
    for first, file in ((100, "a"), (200, "d"), (300, "b")):
        path = write_jsonl(tmp_path / "corpus" / f"{file}.jsonl", [{"tokens": [100 * (first + i)]} for i in range(12)])
        names |= {first + i: f"corpus: {path}, line {i + 1}" for i in range(12)}
    run, then, now = Recorded(tmp_path / "run", names, repeat=True), pipeline_of("ad"), pipeline_of("abd")
    run.segment(then, Segment(1, 3, 1, 4))
    run.segment(now, Segment(1, 3, 1, 20))
    with pytest.raises(rd.DataStateError, match=r"step 4 the run had another pipeline: .* did not read b.jsonl"):
        rd.audit.Audit(tmp_path / "run", now).find("corpus:0")
    audit = rd.audit.Audit(tmp_path / "run", now, then, repeat=True)
    check(run, audit, [])
    for name in (names[102], names[201], names[311]):
        assert sorted((sample.step, sample.sample) for sample in audit.find(name).served) == run.steps_of(name)
        assert run.steps_of(name)


def test_of_a_source_that_the_run_has_no_more(tmp_path):
    run, pipelines = Recorded(tmp_path, repeat=True), (mixture, partial(mixture, names=("web", "code")))
    for pipeline in pipelines:
        run.segment(pipeline, Segment(1, 2, 3, 4))
    audit = rd.audit.Audit(tmp_path, *pipelines, repeat=True)
    check(run, audit, [1, 1005, 2001, 2002, 2003])
    served = [found for row in range(SIZES["few"]) if (found := audit.find(f"few:{row}")).served]
    assert served
    assert all(found.drawn for found in served)


def test_sources_of_one_name(tmp_path):
    """Folders of several corpora are often all called "train"."""
    firsts = {"web": 100, "code": 200}
    sources = {
        name: write("parquet", tmp_path / name / "train", [[first + i] * 3 for i in range(14)])
        for name, first in firsts.items()
    }

    def train(shard):
        readers = {name: rd.Reader(source, shard) for name, source in sources.items()}
        return rd.WeightedSampler(readers, {"web": 1, "code": 1})

    loader = rd.DataLoader(train, global_batch_size=4, repeat=True, num_logical_shards=4)
    seen = [batch["tokens"][:, 0].tolist() for _, batch in zip(range(6), loader, strict=False)]
    checkpoint.save(tmp_path / "run" / "step-6", {"loader": loader})
    audit = rd.audit.Audit(tmp_path / "run", train, repeat=True)
    with pytest.raises(ValueError, match=r"several sources have the name 'train'.*\['code', 'web'\]"):
        audit.find("train:5")
    for name, row in itertools.product(firsts, range(14)):
        served = {(one.step, one.sample) for one in audit.find(f"{name}:{row}").served}
        token = firsts[name] + row
        assert served == {(step, i) for step, tokens in enumerate(seen) for i, t in enumerate(tokens) if t == token}


WRONG = [
    (lambda audit: audit.find("web:70"), "web has the rows 0 to 69"),
    (lambda audit: audit.find("web:part-9"), "No row of web is 'part-9'. A row is called, say, 'web.0.'"),
    (lambda audit: audit.find("book:1"), r"reads the sources \['web'\]"),
    (lambda audit: list(audit.documents(3, 5)), "from 0 to 4, where the newest checkpoint is"),
    (lambda audit: list(audit.documents(-1, 2)), "from 0 to 4"),
]


def test_what_is_not_there_is_an_error(tmp_path):
    run = Recorded(tmp_path / "run", repeat=True)
    run.segment(cut, Segment(1, 1, 3, 4))
    for ask, message in WRONG:
        with pytest.raises(ValueError, match=message):
            ask(rd.audit.Audit(tmp_path / "run", cut, repeat=True))
    with pytest.raises(ValueError, match="Give the pipeline"):
        rd.audit.Audit(tmp_path / "run")
    checkpoint.save(tmp_path / "of a model" / "step-1", {"model": {"x": 1}})
    with pytest.raises(rd.DataStateError, match="holds 0 data states"):
        rd.audit.Audit(tmp_path / "of a model", cut)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="or an empty one"):
        rd.audit.Audit(tmp_path / "empty", cut)


def test_one_damaged_step_or_leftover_stops_no_question(tmp_path):
    """The segment around the damaged step is replayed between its neighbours."""
    loader = rd.DataLoader(rows, global_batch_size=4)
    batches = iter(loader)
    for step in (2, 4, 6):
        next(batches), next(batches)
        checkpoint.save(tmp_path / f"step-{step}", {"loader": loader})
    whole = list(rd.audit.Audit(tmp_path, rows).documents(0, 6))
    shutil.copytree(tmp_path / "step-2", tmp_path / f".step-1.deleted-{'0' * 32}")
    for path in (tmp_path / "step-4").rglob("*.distcp"):
        path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "step-6" / ".metadata").unlink()  # stock DCP's copy, which a kill may leave out
    assert list(rd.audit.Audit(tmp_path, rows).documents(0, 6)) == whole
