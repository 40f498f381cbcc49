"""What holds for every logical shard is said once, however much there is to say."""

import json
import pickle
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

import rescale_data as rd
from rescale_data.sources.dataset import DatasetSource


class Counted(DatasetSource):
    """A source that counts how often its files are listed, and says so in the listing."""

    num_listed = 0

    def manifest(self) -> Mapping[str, Any]:
        self.num_listed += 1
        return {**super().manifest(), "files": [["a", 1, 2]] * 3}


def pipeline(source: Any, shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Reader(source, shard)


def test_the_files_are_listed_once_whatever_is_saved_and_loaded(monkeypatch) -> None:
    source = Counted([{"x": np.arange(3)} for _ in range(40)])
    loader = rd.DataLoader(partial(pipeline, source), global_batch_size=4, repeat=True)
    batches, texts = iter(loader), []
    read = json.loads
    monkeypatch.setattr(json, "loads", lambda text: [read(text), texts.append(text)][0])
    for _ in range(3):
        next(batches)
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        loader.load_state_dict(state)
        batches = iter(loader)
    assert source.num_listed == 1
