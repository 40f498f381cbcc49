"""`Condition`: which rows of a table match an expression of ``pyarrow.compute``."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from pyarrow import dataset

from rescale_data.sources.arrow_types import ArrowExpression, ArrowSchema, ArrowTable, ArrowType
from rescale_data.sources.fragments import Footer
from rescale_data.state import Ints

_MATCH = "match"


class Condition:
    """An expression; ``TypeError`` where it is none, ``ValueError`` where it numbers columns, some of which are not read."""

    def __init__(self, expression: ArrowExpression) -> None:
        if not isinstance(expression, pc.Expression):
            raise TypeError(
                f"filter={expression!r}: give an expression, such as pyarrow.compute.field('lang') == 'de'."
            )
        try:
            serialized = pickle.dumps(expression, protocol=5)
        except pa.ArrowNotImplementedError as error:
            raise ValueError(
                f"filter={expression} cannot be serialized ({error}): name the columns that it asks for, do not number them."
            ) from None
        self.expression = expression
        self._digest = hashlib.blake2b(serialized, digest_size=8).hexdigest()

    def __str__(self) -> str:
        return str(self.expression)

    @property
    def identity(self) -> str:
        """The expression as text, which Arrow shortens, with a digest of all of it as Arrow serializes it."""
        return f"{self} [{self._digest}]"

    def columns(self, schema: ArrowSchema) -> list[str]:
        """Return the columns that the expression names; ``ValueError`` where one is missing, or of a type that does not fit."""
        try:
            kind = self._evaluate(schema.empty_table()).type
        except pa.ArrowException as error:
            why = str(error).partition("\n")[0]
            why = why.rpartition(" in ")[0] if why.startswith("No match") else why  # a list of the columns follows
            raise ValueError(
                f"filter={self} cannot be asked of the columns {schema.names}: {why}. Ask for columns that are there, and "
                f"compare each with values of its type."
            ) from None
        if kind != pa.bool_():
            raise ValueError(f"filter={self} is of type {kind}, not true or false: compare it with something.")
        return [name for name in schema.names if self._asks_for(name, schema)]

    def matches(self, table: ArrowTable) -> Ints:
        """``int64[M]``, the rows for which it is true."""
        return np.flatnonzero(self._evaluate(table).fill_null(False).to_numpy())

    def _asks_for(self, name: str, schema: ArrowSchema) -> bool:
        """Expressions do not tell. Without the column it cannot be bound."""
        try:
            self._evaluate(schema.remove(schema.get_field_index(name)).empty_table())
        except pa.ArrowInvalid:
            return True
        return False

    def _evaluate(self, table: ArrowTable) -> ArrowTable:
        scanned = dataset.InMemoryDataset(table).scanner(columns={_MATCH: self.expression}, use_threads=False)
        return scanned.to_table().column(_MATCH)


def has_floats(kind: ArrowType) -> bool:
    """True if values of a type are or hold floats."""
    if kinds.is_dictionary(kind):
        return has_floats(kind.value_type)
    return kinds.is_floating(kind) or any(has_floats(kind.field(i).type) for i in range(kind.num_fields))


def chosen(footer: Footer, matches: dict[int, Ints]) -> Footer:
    """Return the footer of a file without the rows that do not match.

    Args:
        matches: Fragment -> which of its rows; none for those that are not there.
    """
    kept = [fragment for fragment, rows in sorted(matches.items()) if len(rows)]
    counts = np.array([len(matches[fragment]) for fragment in kept], dtype=np.int64)
    base = np.cumsum(footer.rows) - footer.rows
    return Footer(
        counts,
        footer.nbytes[kept] * counts // np.maximum(1, footer.rows[kept]),
        {**{name: values[kept] for name, values in footer.places.items()}, "base": base[kept]},
        footer.kind,
        np.concatenate([np.zeros(0, np.int64), *(matches[fragment] for fragment in kept)]).astype(np.uint32),
    )
