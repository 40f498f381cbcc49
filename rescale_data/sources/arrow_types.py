"""Type aliases for pyarrow's classes, which have no annotations: all of them are `Any`, so they document and check nothing."""

from typing import Any, TypeAlias

ArrowArray: TypeAlias = Any
ArrowExpression: TypeAlias = Any
ArrowSchema: TypeAlias = Any
ArrowTable: TypeAlias = Any
ArrowType: TypeAlias = Any
