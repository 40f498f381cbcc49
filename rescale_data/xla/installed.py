"""Whether torch_xla is there and fits torch: found from what is installed, since an import that fails tells neither."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def require_torch_xla() -> None:
    """``ImportError`` with the cure where torch_xla is missing, or was built for another torch."""
    torch, xla = _version("torch"), _version("torch_xla")
    if xla is None:
        raise ImportError(
            "rescale_data.xla needs torch_xla, which is not installed. Run `pip install 'rescale_data[xla]'` "
            "(torch_xla has releases up to 2.9 only, so this may install an older torch)."
        )
    if torch is not None and _release(torch) != _release(xla):
        raise ImportError(
            f"torch {torch} and torch_xla {xla} do not match: torch_xla is built for one release of torch. Run "
            f"`pip install torch=={_release(xla)}.* torch_xla=={_release(xla)}.*`."
        )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _release(version: str) -> str:
    """ "2.9" of "2.9.0+cpu"."""
    return ".".join(version.split(".")[:2])
