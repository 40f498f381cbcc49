"""`RowFilter`: finds the rows of a table that match an expression of ``pyarrow.compute``."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import dataset

from rescale_data.sources.arrow_types import ArrowExpression, ArrowSchema, ArrowTable
from rescale_data.sources.fragments import Footer
from rescale_data.state import Ints

_MATCH_COLUMN = "match"


class RowFilter:
    """A filter on the rows of a table: an expression of ``pyarrow.compute``.

    Raises:
        TypeError: It is no expression.
        ValueError: It cannot be serialized because it refers to columns by number: only some columns are read, so that numbers
            would refer to other ones.
    """

    def __init__(self, expression: ArrowExpression) -> None:
        if not isinstance(expression, pc.Expression):
            raise TypeError(f"filter={expression!r}: give an expression such as pyarrow.compute.field('lang') == 'de'.")
        try:
            serialized = pickle.dumps(expression, protocol=5)
        except pa.ArrowNotImplementedError as error:
            raise ValueError(f"filter={expression} cannot be serialized ({error}): name the columns.") from None
        self.expression = expression
        self.identity = f"{expression} [{hashlib.blake2b(serialized, digest_size=8).hexdigest()}]"
        """Text that identifies the filter: the expression, which Arrow may shorten, and a digest of its serialized form."""

    def columns(self, schema: ArrowSchema) -> list[str]:
        """Return the names of the columns that the expression uses; ``ValueError`` if one is missing or of the wrong type."""
        try:
            result_type = self._evaluate(schema.empty_table()).type
        except pa.ArrowException as error:
            reason = str(error).partition("\n")[0]
            reason = reason.rpartition(" in ")[0] if reason.startswith("No match") else reason  # columns follow
            raise ValueError(
                f"filter={self.expression} cannot be asked of the columns {schema.names}: {reason}. Ask for columns that are "
                f"there, and compare each with values of its type."
            ) from None
        if result_type != pa.bool_():
            raise ValueError(f"filter={self.expression} is of type {result_type}, not true or false: compare it.")
        unique_names = [name for name in schema.names if schema.names.count(name) == 1]
        return [name for name in unique_names if self._uses_column(name, schema)]

    def matches(self, table: ArrowTable) -> Ints:
        """Return ``int64[M]``, the numbers of the rows of a table for which the expression is true."""
        return np.flatnonzero(self._evaluate(table).fill_null(False).to_numpy())

    def _uses_column(self, name: str, schema: ArrowSchema) -> bool:
        """True if the expression uses a column: it is evaluated without that column, since Arrow has no call for this."""
        try:
            self._evaluate(schema.remove(schema.get_field_index(name)).empty_table())
        except pa.ArrowInvalid:
            return True
        return False

    def _evaluate(self, table: ArrowTable) -> ArrowTable:
        scanner = dataset.InMemoryDataset(table).scanner(columns={_MATCH_COLUMN: self.expression}, use_threads=False)
        return scanner.to_table().column(_MATCH_COLUMN)


def filtered_footer(footer: Footer, matching_rows: dict[int, Ints]) -> Footer:
    """Return the footer of a file, reduced to the rows that match a filter.

    Args:
        footer: Footer with all rows of the file.
        matching_rows: Rows of each fragment that match, by fragment; a fragment that is missing here has none.
    """
    fragments = [fragment for fragment, rows in sorted(matching_rows.items()) if len(rows)]
    match_counts = np.array([len(matching_rows[fragment]) for fragment in fragments], dtype=np.int64)
    first_rows = np.cumsum(footer.row_counts) - footer.row_counts
    return Footer(
        match_counts,
        footer.nbytes[fragments] * match_counts // np.maximum(1, footer.row_counts[fragments]),
        {**{name: values[fragments] for name, values in footer.locations.items()}, "base": first_rows[fragments]},
        footer.format_facts,
        np.concatenate([np.zeros(0, np.int64), *(matching_rows[fragment] for fragment in fragments)]).astype(np.uint32),
        unfiltered_rows=int(footer.row_counts.sum()),
    )
