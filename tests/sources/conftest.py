"""Fixtures of tests of sources."""

import fsspec
import pytest

from rescale_data.sources import fragments
from rescale_data.sources.files import remote
from tests.sources.far import Far


@pytest.fixture(params=["", ".gz", ".zst", ".bz2"])
def packed(request):
    """The suffix of a file that is compressed as a whole, or none."""
    return str(request.param)


@pytest.fixture
def small_fragments(monkeypatch):
    """Fragments of seven rows, of formats that have none of their own."""
    monkeypatch.setattr(fragments, "MAX_FRAGMENT_ROWS", 7)


@pytest.fixture
def far(monkeypatch):
    """Local files by ``far://``, with pauses after failures that take no time."""
    fsspec.register_implementation("far", Far, clobber=True)
    monkeypatch.setattr(remote, "_FIRST_PAUSE_SECONDS", 0.001)
    remote._request_limit.cache_clear()
    Far.forget()
    yield Far
    Far.forget()
