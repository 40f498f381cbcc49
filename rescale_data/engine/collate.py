"""Collates samples into a batch, and applies functions to the tensors of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from rescale_data.errors import require_type
from rescale_data.nodes.packing.columns import PerDocValues

Samples = Sequence[Any]


def collate(samples: Samples) -> Any:
    """Stack samples into a batch as torch's `default_collate` does; an error names the column that cannot be stacked."""
    if not isinstance(samples[0], Mapping):
        return _stack_column(None, list(samples))
    _require_same_columns(samples)
    return {column: _stack_column(column, [sample[column] for sample in samples]) for column in samples[0]}


def pad_collate(pad: Mapping[str, float]) -> Callable[[Samples], dict[str, Any]]:
    """Return a ``collate_fn`` that pads the values of ragged columns at their end, to the longest value of the batch.

    Args:
        pad: The padding value of each column: ``{"tokens": 0, "labels": -100}``. Other columns are stacked.

    Returns:
        A callable that takes b samples and returns ``{column: Tensor[b, longest, ...]}``. Empty values do not affect
        the dtype. The callable pickles.

    Example:
        >>> import rescale_data as rd
        >>> rd.pad_collate({"tokens": 0})([{"tokens": [1, 2, 3]}, {"tokens": [4]}])
        {'tokens': tensor([[1, 2, 3],
                [4, 0, 0]])}
    """
    require_type(Mapping, "a dict of columns and values", pad=pad)
    return partial(_collate_padded, dict(pad))


def _collate_padded(pad: Mapping[str, float], samples: Samples) -> dict[str, Any]:
    missing_columns = sorted(set(pad) - set(samples[0]))
    if missing_columns:
        raise ValueError(
            f"pad_collate was given the columns {missing_columns}, which samples lack; they have {list(samples[0])}."
        )
    _require_same_columns(samples)
    return {column: _pad_all(column, [sample[column] for sample in samples], pad.get(column)) for column in samples[0]}


def _pad_all(column: str, values: list[Any], padding_value: float | None) -> Any:
    """Return the values of a column as one tensor, padded at their end; stacked if there is no padding value."""
    if padding_value is None:
        return _stack_column(column, values)
    try:
        tensors = _promote_to_one_dtype([_to_tensor(value, padding_value) for value in values])
        if _can_hold(tensors[0].dtype, padding_value):
            return pad_sequence(tensors, batch_first=True, padding_value=padding_value)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"pad_collate cannot pad the column {column!r}: {_shapes(values)}. It pads sequences of numbers whose shapes "
            f"differ in the first dim alone; leave other columns out of pad=."
        ) from error
    raise ValueError(
        f"pad_collate was given pad={padding_value!r} for the column {column!r}, whose values are {tensors[0].dtype}: give a "
        f"number that this dtype holds, or make the values another dtype in the pipeline."
    )


def _to_tensor(value: Any, pad: float) -> Tensor:
    """Return a value of a sample as a tensor; an empty list gets the dtype of the padding value."""
    is_empty = isinstance(value, list | tuple) and not value
    if isinstance(value, Tensor):
        return value
    return torch.as_tensor(value, dtype=torch.as_tensor(pad, device="cpu").dtype if is_empty else None, device="cpu")


def _promote_to_one_dtype(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors in one dtype, to which the dtypes of all non-empty tensors are promoted."""
    dtype = reduce(torch.promote_types, [tensor.dtype for tensor in tensors if tensor.numel()] or [tensors[0].dtype])
    return [tensor.to(dtype) for tensor in tensors]


def _can_hold(dtype: torch.dtype, number: float) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return True
    dtype_min, dtype_max = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return float(number).is_integer() and dtype_min <= number <= dtype_max


def _require_same_columns(samples: Samples) -> None:
    """Raise ``ValueError`` unless all samples have the same columns, and nested mappings the same keys.

    Without this check, the batch would silently lack these columns.
    """
    first_sample = samples[0]
    for sample in samples:
        if not isinstance(sample, Mapping) or sample.keys() != first_sample.keys():
            description = f"{sorted(map(str, sample))}" if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
            raise ValueError(
                f"The samples of a batch have different columns, {sorted(map(str, first_sample))} and {description}. Give all "
                f"samples the same ones in the pipeline, or your own collate_fn."
            )
    for column, value in first_sample.items():
        if isinstance(value, Mapping):
            _require_same_columns([sample[column] for sample in samples])


def _stack_column(column: str | None, values: list[Any]) -> Any:
    """Return the values of a column, or samples without columns, as one value; tensors that are made for it lie on the CPU."""
    if isinstance(values[0], PerDocValues):
        return values
    try:
        if isinstance(values[0], torch.Tensor):
            return torch.stack(values)
        if _makes_cpu_tensors():
            return default_collate(values)
        with torch.device("cpu"):  # which takes as long as to stack 32 numbers: only against another default device
            return default_collate(values)
    except (RuntimeError, TypeError, ValueError) as error:
        subject, advice = "The samples", "Make numbers, arrays or tensors of one shape of them in the pipeline"
        if column is not None:
            subject, padding = f"The column {column!r}", f"rd.pad_collate(pad={{{column!r}: 0}})"
            advice = f"For sequences of different lengths give collate_fn={padding}, pack them with rd.TokenPacker"
        raise ValueError(
            f"{subject} cannot be stacked into a batch: {_shapes(values)}. {advice}, or give your own collate_fn."
        ) from error


def _makes_cpu_tensors() -> bool:
    """True if the default device is the CPU."""
    try:
        return torch.empty(0).is_cpu
    except Exception:  # a device of the trainer that a forked worker may not use
        return False


def _shapes(values: list[Any]) -> str:
    if all(isinstance(value, torch.Tensor | np.ndarray) for value in values):
        return f"its samples have the shapes {[tuple(value.shape) for value in values]}"
    return f"its samples are of the types {sorted({type(value).__name__ for value in values})}"


def pin(batch: Any) -> Any:
    """Return the batch in page-locked (pinned) memory: its tensors, and all values that have a method ``pin_memory``."""
    # `pin_memory` cannot copy an expanded tensor, whose elements share memory.
    return map_tensors(
        batch, "pin_memory", lambda value: (value.contiguous() if isinstance(value, Tensor) else value).pin_memory()
    )


def map_tensors(batch: Any, method: str, function: Callable[[Any], Any]) -> Any:
    """Return the batch with `function` applied to each tensor and each value that has the method `method`, also in containers.

    Containers are mappings, lists, tuples and named tuples.
    """
    if isinstance(batch, Tensor) or hasattr(batch, method):
        return function(batch)
    map_inner = partial(map_tensors, method=method, function=function)
    if isinstance(batch, Mapping):
        return {key: map_inner(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(map_inner, batch))
    return type(batch)([map_inner(value) for value in batch]) if type(batch) in (list, tuple, PerDocValues) else batch


def with_valid_mask(batch: Any, num_real: int, num_samples: int) -> Any:
    """Return a dict batch with ``"valid"`` added, a mask ``Bool[num_samples]`` of real samples; other batches unchanged."""
    if not isinstance(batch, dict):
        return batch
    if "valid" in batch:
        raise ValueError("tail='pad' adds batch['valid'], but samples have a column 'valid': rename theirs.")
    return {**batch, "valid": torch.arange(num_samples, device="cpu") < num_real}
