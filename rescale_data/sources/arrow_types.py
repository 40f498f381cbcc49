"""Type aliases for pyarrow's classes, which have no annotations: all of them are `Any`, so they document and check nothing."""

from typing import Any, TypeAlias

ArrowArray: TypeAlias = Any
ArrowBuffer: TypeAlias = Any
ArrowExpression: TypeAlias = Any
ArrowFile: TypeAlias = Any
ArrowSchema: TypeAlias = Any
ArrowTable: TypeAlias = Any
ArrowType: TypeAlias = Any
