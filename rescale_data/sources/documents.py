"""Arrow files in which a record batch is one document: many small batches at once, as lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds

from rescale_data.sources import ipc
from rescale_data.sources.arrow_types import ArrowArray, ArrowBuffer, ArrowSchema, ArrowTable
from rescale_data.state import Ints


def one_row_each(schema: ArrowSchema) -> ArrowSchema:
    """The schema of such a file as its documents are read: lists of what the columns hold."""
    return pa.schema([pa.field(field.name, pa.large_list(field.type)) for field in schema])


def document_table(data: ArrowBuffer, schema: ArrowSchema, blocks: ipc.Blocks, columns: Sequence[str]) -> ArrowTable:
    """One row for each batch; ``data`` begins with the first of them.

    Plain numbers are cut out of the bytes: to decode a batch takes pyarrow some 15 us, more than to copy what is in it.
    """
    start = int(blocks.offset[0])
    raw = np.frombuffer(data, dtype=np.uint8)
    offset = blocks.offset - start
    batches = ipc.record_batches(raw, offset)
    if _is_plain(schema) and not ipc.is_compressed(raw, batches) and not _has_nulls(raw, batches, schema):
        body, rows = offset + blocks.metadata, ipc.row_counts(raw, batches)
        arrays = [_cut(raw, batches, body, rows, schema, name) for name in columns]
    else:
        places = zip(offset.tolist(), (blocks.stop - start).tolist(), strict=True)
        read = [pa.ipc.read_record_batch(pa.ipc.read_message(data.slice(a, b - a)), schema) for a, b in places]
        arrays = [_lists([batch.column(name) for batch in read]) for name in columns]
    return pa.table(dict(zip(columns, arrays, strict=True)))


def _cut(raw: ipc.Bytes, batches: Ints, body: Ints, rows: Ints, schema: ArrowSchema, name: str) -> ArrowArray:
    field = schema.get_field_index(name)
    kind = schema.field(field).type
    starts = body + ipc.buffers(raw, batches, 2 * field + 1)
    stops = starts + rows * (kind.bit_width // 8)
    view = raw.data
    values = b"".join([view[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)])
    flat = pa.Array.from_buffers(kind, int(rows.sum()), [None, pa.py_buffer(values)])
    return pa.LargeListArray.from_arrays(_offsets(rows), flat)


def _lists(arrays: Sequence[ArrowArray]) -> ArrowArray:
    lengths = np.array([len(array) for array in arrays], dtype=np.int64)
    return pa.LargeListArray.from_arrays(_offsets(lengths), pa.concat_arrays(arrays))


def _offsets(lengths: Ints) -> ArrowArray:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def _is_plain(schema: ArrowSchema) -> bool:
    """Two buffers a column: validity, and numbers of whole bytes."""
    return all(kinds.is_integer(field.type) or kinds.is_floating(field.type) for field in schema)


def _has_nulls(raw: ipc.Bytes, batches: Ints, schema: ArrowSchema) -> bool:
    return any(ipc.null_counts(raw, batches, i).any() for i in range(len(schema)))
