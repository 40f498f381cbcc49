"""Names for pyarrow's classes, which have no type annotations. The names document what is meant and check nothing."""

from typing import Any, TypeAlias

ArrowArray: TypeAlias = Any
ArrowBuffer: TypeAlias = Any
ArrowExpression: TypeAlias = Any
ArrowFile: TypeAlias = Any
ArrowSchema: TypeAlias = Any
ArrowTable: TypeAlias = Any
ArrowType: TypeAlias = Any
