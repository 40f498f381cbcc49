"""Reads offsets and row counts of the record batches of an Arrow IPC file from its metadata, without their data.

pyarrow has no call for either. A footer holds the offsets of the batches but not their row counts, and a reader reads and
decompresses a whole batch to count its rows. So this module reads the metadata itself, which is in the format of FlatBuffers:
https://arrow.apache.org/docs/format/Columnar.html (File.fbs, Message.fbs). It reads all messages of a file at once, with
arrays of offsets.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rescale_data.sources.arrow_types import ArrowSchema
from rescale_data.sources.files.ranges import RangeReader
from rescale_data.state import Ints

Bytes: TypeAlias = npt.NDArray[np.uint8]
Blocks: TypeAlias = npt.NDArray[np.void]
"""The record batches of a file, with the fields of `_BLOCK_DTYPE`: offset of each message, bytes of its metadata and body."""

MAGIC = b"ARROW1"
_FOOTER_BATCHES_FIELD = 3
_MESSAGE_TYPE, _MESSAGE_HEADER_FIELD, _MESSAGE_BODY_FIELD = 1, 2, 3
_BATCH_ROWS_FIELD, _BATCH_COMPRESSION_FIELD = 0, 3
_RECORD_BATCH = 3
_BLOCK_DTYPE = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])


def stops_of(blocks: Blocks) -> Ints:
    """Return the byte at which each record batch ends."""
    return blocks["offset"] + blocks["metadata"] + blocks["body"]


def is_file_format(file: RangeReader) -> bool:
    """True if a file is in the file format, which has a footer; False if it is in the stream format."""
    return file.read(0, len(MAGIC)).to_pybytes() == MAGIC


def read_blocks(file: RangeReader) -> Blocks:
    """Return offsets and sizes of the record batches of a file in either format; ``ValueError`` if it was cut off."""
    blocks = _footer_blocks(file) if is_file_format(file) else _stream_blocks(file)
    if len(blocks) and int(stops_of(blocks).max()) > file.size:
        raise ValueError(f"it ends before its record batches do, at byte {file.size} of {int(stops_of(blocks).max())}")
    return blocks


def read_schema(file: RangeReader, blocks: Blocks) -> ArrowSchema:
    """Return the schema of a file, which is stored before the first record batch."""
    start = 8 if is_file_format(file) else 0
    stop = int(blocks["offset"][0]) if len(blocks) else file.size
    return pa.ipc.read_schema(file.read(start, stop - start))


def read_batch_headers(file: RangeReader, blocks: Blocks) -> tuple[Ints, bool]:
    """Return ``int64[B]``, the number of rows of each record batch, and True if a batch is compressed; reads no data."""
    headers = file.read_many(list(zip(blocks["offset"].tolist(), blocks["metadata"].tolist(), strict=True)))
    data = np.frombuffer(b"".join(headers), dtype=np.uint8)
    starts = np.cumsum(blocks["metadata"]) - blocks["metadata"]
    positions = _record_batch_positions(data, starts)
    row_counts = _read_fields(data, _field_positions(data, positions, _BATCH_ROWS_FIELD), "<i8")
    return row_counts, bool(_field_positions(data, positions, _BATCH_COMPRESSION_FIELD).any())


def _record_batch_positions(data: Bytes, starts: Ints) -> Ints:
    """Return the position of the RecordBatch table, which describes a batch, in each of the messages at ``starts``."""
    has_mark = _read_numbers(data, starts, "<i4") == -1  # messages from before Arrow 0.15 have no continuation mark
    root_offsets = starts + np.where(has_mark, 8, 4)
    message_positions = root_offsets + _read_numbers(data, root_offsets, "<i4")
    if (_read_fields(data, _field_positions(data, message_positions, _MESSAGE_TYPE), "<u1") != _RECORD_BATCH).any():
        raise ValueError("a block of its footer is not a record batch")
    return _dereference(data, _field_positions(data, message_positions, _MESSAGE_HEADER_FIELD))


def _footer_blocks(file: RangeReader) -> Blocks:
    """Return the record batches as the footer of the file format lists them."""
    file_size = file.size
    footer_length, magic = struct.unpack("<i6s", file.read(max(0, file_size - 10), 10).to_pybytes().rjust(10, b"\0"))
    if magic != MAGIC or not 0 < footer_length < file_size:
        raise ValueError("it has no footer at its end")
    footer_bytes = np.frombuffer(file.read(file_size - 10 - footer_length, footer_length), dtype=np.uint8)
    table_position = _read_numbers(footer_bytes, np.zeros(1, np.int64), "<i4")
    blocks_vector = _dereference(footer_bytes, _field_positions(footer_bytes, table_position, _FOOTER_BATCHES_FIELD))
    blocks_offset, num_blocks = int(blocks_vector[0]) + 4, int(_read_numbers(footer_bytes, blocks_vector, "<i4")[0])
    return np.frombuffer(footer_bytes, dtype=_BLOCK_DTYPE, count=num_blocks, offset=blocks_offset)


def _stream_blocks(file: RangeReader) -> Blocks:
    """Return the record batches of a file in the stream format, which has a message after the other."""
    offset, file_size = 0, file.size
    blocks: list[tuple[int, int, int, int]] = []
    while offset + 8 <= file_size:
        mark, length = struct.unpack("<ii", file.read(offset, 8))
        prefix_length, metadata_length = (8, length) if mark == -1 else (4, mark)
        if metadata_length == 0:
            break
        metadata = np.frombuffer(file.read(offset + prefix_length, max(0, metadata_length)), dtype=np.uint8)
        if not 0 < metadata_length <= len(metadata):
            raise ValueError(f"it ends in the middle of a message, or is no Arrow IPC stream, at byte {offset}")
        message_position = _dereference(metadata, np.zeros(1, np.int64))
        message_type = _read_fields(metadata, _field_positions(metadata, message_position, _MESSAGE_TYPE), "<u1")
        body_field = _field_positions(metadata, message_position, _MESSAGE_BODY_FIELD)
        body_length = int(_read_fields(metadata, body_field, "<i8")[0])
        if body_length < 0:
            raise ValueError(f"it has a message of {body_length} bytes, at byte {offset}")
        if message_type == _RECORD_BATCH:
            blocks.append((offset, prefix_length + metadata_length, 0, body_length))
        offset += prefix_length + metadata_length + body_length
    return np.array(blocks, dtype=_BLOCK_DTYPE)


def _read_numbers(data: Bytes, position: Ints, dtype_name: str) -> Ints:
    """Return the numbers of dtype ``dtype_name`` that begin at given bytes of ``data``, as int64."""
    number_width = np.dtype(dtype_name).itemsize
    number_bytes = data[np.minimum(position[:, None] + np.arange(number_width), len(data) - 1)]
    return np.ascontiguousarray(number_bytes).view(dtype_name)[:, 0].astype(np.int64)


def _read_fields(data: Bytes, field_positions: Ints, dtype_name: str) -> Ints:
    """Return the numbers in fields of FlatBuffers tables; 0 for a field that was left out."""
    return np.where(field_positions > 0, _read_numbers(data, field_positions, dtype_name), 0)


def _field_positions(data: Bytes, table_positions: Ints, field_index: int) -> Ints:
    """Return the position of a field in each FlatBuffers table; 0 if the table leaves the field out."""
    vtable_positions = table_positions - _read_numbers(data, table_positions, "<i4")
    in_vtable = 4 + 2 * field_index < _read_numbers(data, vtable_positions, "<u2")
    offset = np.where(in_vtable, _read_numbers(data, vtable_positions + 4 + 2 * field_index, "<u2"), 0)
    return np.where(offset > 0, table_positions + offset, 0)


def _dereference(data: Bytes, position: Ints) -> Ints:
    return position + _read_numbers(data, position, "<i4")
