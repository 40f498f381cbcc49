"""Megatron's indexed datasets: documents out of a mapped file."""

from pathlib import Path

import fsspec
import numpy as np
import pytest

from rescale_data.sources import megatron
from rescale_data.sources.megatron import MegatronSource
from rescale_data.testing import assert_source
from tests.corpus import documents
from tests.formats import write_megatron

DOCS = documents([3, 0, 7, 1, 5, 9, 2, 2, 0, 4] * 3)


@pytest.fixture(autouse=True)
def small_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "FRAGMENT_ROWS", 7)


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


def test_urls(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", DOCS)
    fsspec.filesystem("memory").put(str(tmp_path), "/megatron", recursive=True)
    source = MegatronSource("memory://megatron")
    assert [source.row(i)["tokens"].tolist() for i in range(30)] == DOCS


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
    with pytest.raises(ValueError, match="no column 'text'"):
        source.num_tokens("text")


class TestBadData:
    @pytest.mark.parametrize("kept", [0, 8, 33, 60, -300])
    def test_an_index_that_was_cut_off(self, kept: int, tmp_path: Path) -> None:
        write_megatron(tmp_path / "a", DOCS)
        (tmp_path / "a.idx").write_bytes((tmp_path / "a.idx").read_bytes()[:kept])
        with pytest.raises(ValueError, match=r"a\.bin cannot be read as megatron: its \.idx"):
            MegatronSource(tmp_path)

    @pytest.mark.parametrize("kept", [0, 10, -1])
    def test_tokens_that_were_cut_off(self, kept: int, tmp_path: Path) -> None:
        write_megatron(tmp_path / "a", DOCS)
        (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:kept])
        with pytest.raises(ValueError, match=r"a\.bin cannot be read as megatron: its index speaks of .* half-written"):
            MegatronSource(tmp_path)

    def test_without_an_index(self, tmp_path: Path) -> None:
        write_megatron(tmp_path / "a", DOCS)
        (tmp_path / "a.idx").unlink()
        with pytest.raises(FileNotFoundError, match=r"a\.bin has no index: there is no .*a\.idx"):
            MegatronSource(tmp_path)

    def test_without_documents(self, tmp_path: Path) -> None:
        write_megatron(tmp_path / "a", [])
        with pytest.raises(ValueError, match="have no rows"):
            MegatronSource(tmp_path)
        write_megatron(tmp_path / "b", DOCS)
        assert MegatronSource(tmp_path).num_rows == 30

    def test_files_with_different_dtypes(self, tmp_path: Path) -> None:
        write_megatron(tmp_path / "a", DOCS)
        write_megatron(tmp_path / "b", DOCS, "int32")
        with pytest.raises(ValueError, match=r"differ in their dtype: <u2 in .*a\.bin, <i4 in .*b\.bin"):
            MegatronSource(tmp_path)

    def test_numbers_that_are_not_tokens(self, tmp_path: Path) -> None:
        write_megatron(tmp_path / "a", DOCS, "float32")
        with pytest.raises(ValueError, match=r"a\.bin cannot be read as megatron: it holds numbers of type float32"):
            MegatronSource(tmp_path)

    def test_another_column(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no column 'text'"):
            MegatronSource(write_megatron(tmp_path / "a", DOCS)).token_dtype("text")
