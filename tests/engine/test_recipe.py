"""What holds for every logical shard is said once, however much there is to say."""

import pickle
from collections.abc import Mapping
from typing import Any

import rescale_data as rd


class Counted(rd.DatasetSource):
    """A source that counts how often its files are listed."""

    num_listed = 0

    def manifest(self) -> Mapping[str, Any]:
        self.num_listed += 1
        return {**super().manifest(), "files": [["a", 1, 2]] * 3}


def test_the_files_are_listed_once_whatever_is_saved_and_loaded() -> None:
    source = Counted(range(40))
    loader = rd.DataLoader(lambda shard: rd.Reader(source, shard), global_batch_size=4, repeat=True)
    for _ in range(3):
        next(iter(loader))
        loader.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
    assert source.num_listed == 1
