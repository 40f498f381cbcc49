"""Whether a checkpoint's data state fits a loader, in our words and before anything is loaded.

A plain ``dcp.load`` finds another number of logical shards ("Size mismatch between saved ... and current ...") and a field
that was added ("Missing key in checkpoint state_dict: ...") by itself, before our code runs, and in words that
tell nobody what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rescale_data.engine.load import require_fit
from rescale_data.engine.recipe import STAMP
from rescale_data.engine.stream import HasStream
from rescale_data.engine.table import stored, version_of
from rescale_data.errors import DataStateError, require


def check(saved: Mapping[str, Any], head: Mapping[str, Any], loader: HasStream) -> None:
    """``DataStateError`` where a data state does not fit the loader, or ``dcp.load`` refuses what `load_changed` takes.

    Args:
        saved: DCP's metadata of each tensor of the table.
        head: The state without its table.
    """
    require(HasStream, "the loader that is to load it", loader=loader)
    schema, n = loader.stream.schema, loader.stream.layout.num_logical_shards
    fitted = require_fit(loader.stream, head)
    found = {
        key: (tuple(entry.size), entry.properties.dtype)
        for key, entry in saved.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    wanted = (STAMP, *stored(version_of(schema), schema.fields))
    if all(found.get(field.key) == ((n, *(field.shape or ())), field.dtype) for field in wanted):
        return
    added, removed = ([child.name for child in children] for children in (fitted.added, fitted.removed))
    differs = f"{added} are new and {removed} gone" if added or removed else "it was saved by an older rescale_data"
    raise DataStateError(
        f"The checkpoint keeps the table of the sources in another shape than the loader does: {differs}. dcp.load refuses "
        f'that ("Missing key in checkpoint state_dict" or "Size mismatch"). Leave the loader out of the dict that dcp.load is '
        f"given, and call rescale_data.load_changed(path, loader): new sources begin with their first row, the others go on."
    )
