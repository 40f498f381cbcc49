"""Megatron's indexed datasets: documents out of a mapped file."""

from pathlib import Path

import fsspec
import numpy as np
import pytest

from rescale_data.sources.megatron import MegatronSource
from rescale_data.testing import assert_source
from tests.corpus import documents
from tests.formats import write_megatron

DOCS = documents([3, 0, 7, 1, 5, 9, 2, 2, 0, 4] * 3)


pytestmark = pytest.mark.usefixtures("small_fragments")


@pytest.mark.parametrize("sentences", [1, 3])
@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_rows_are_documents(sentences: int, dtype: str, tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", DOCS[:17], dtype, sentences)
    write_megatron(tmp_path / "b", DOCS[17:], dtype, sentences)
    source = MegatronSource(tmp_path)
    rows = [source.row(i)["tokens"] for i in range(source.num_rows)]
    assert [row.tolist() for row in rows] == DOCS
    assert {row.dtype for row in rows} == {np.dtype(dtype)}
    assert source.fragments.tolist() == [0, 7, 14, 17, 24, 30]
    assert source.locate(18) == f"{tmp_path}/b.bin, row 1"
    assert_source(source, columns=["tokens"])


def test_files_that_are_written_anew_are_read_anew_beside_a_local_store(tmp_path: Path) -> None:
    """Their index has the size of the one before."""
    for docs in ([[1, 1, 1], [2], [3, 3]], [[7], [8, 8], [9, 9, 9]]):
        write_megatron(tmp_path / "data" / "a", docs)
        for file in (tmp_path / "data").iterdir():
            fsspec.filesystem("memory").pipe(f"/written_anew/{file.name}", file.read_bytes())
        source = MegatronSource("memory://written_anew", cache_dir=tmp_path / "local")
        assert [source.row(i)["tokens"].tolist() for i in range(3)] == docs


@pytest.mark.parametrize("dtype", ["uint16", "int64"])
def test_knows_its_tokens_without_reading_them(dtype: str, tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", DOCS[:17], dtype, 2)
    write_megatron(tmp_path / "b", DOCS[17:], dtype, 1)
    source = MegatronSource(tmp_path)
    assert source.num_tokens(None) == source.num_tokens("tokens") == sum(map(len, DOCS))
    parts = [sum(map(len, DOCS[a:b])) for a, b in zip(source.fragments, source.fragments[1:], strict=False)]
    assert [source.num_tokens("tokens", np.array([i])) for i in range(len(parts))] == parts
    assert source.num_tokens("tokens", np.array([0, 3])) == parts[0] + parts[3]
