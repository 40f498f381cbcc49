"""The C extension, made of `kernel.c` and `draws.c`, in the version that this package calls."""

from __future__ import annotations

_VERSION = 6
_REMEDY = "Install the package again; in a clone, where there is a C compiler: pip install -e ."

try:
    from rescale_data.nodes.reading import kernel as kernel
except ImportError as error:
    raise ImportError(f"rescale_data lacks its C extension ({error}). {_REMEDY}") from error
if kernel.VERSION != _VERSION:
    raise ImportError(f"rescale_data has version {kernel.VERSION} of its C extension and needs {_VERSION}. {_REMEDY}")
