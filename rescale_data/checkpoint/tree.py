"""Convert between nested states and DCP's flattened names, which turn every key into a string.

{"milestones": {2: 1}}  ──►  "milestones.2"  ──►  into a live state, which has the keys: {"milestones": {2: 1}}
                                             ──►  without one, by what the manifest tells of them: ``tree_of``
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias, cast

import torch

UnflattenHints: TypeAlias = Sequence[tuple[Sequence[str | int], Any]]
"""Structure that flattened names lose: a path and its last key, if no string, or a path and ``{}``, an empty mapping."""


def tree_of(
    paths: Mapping[str, tuple[Any, ...]], leaves_by_name: Mapping[str, Any], unflatten_hints: UnflattenHints = ()
) -> dict[str, Any]:
    """Return the nested state of values given by flattened name; an integer in a path is an index into a list."""
    root: dict[str, Any] = {}
    for name, leaf in leaves_by_name.items():
        _insert_leaf(root, paths[name], leaf)
    for path, _ in (entry for entry in unflatten_hints if entry[1] == {}):
        _insert_leaf(root, tuple(path), {})
    for path, key in sorted((entry for entry in unflatten_hints if entry[1] != {}), key=lambda entry: -len(entry[0])):
        _restore_key(root, path, key)
    return root


def unflatten_hints_of(tree: Any, path: tuple[str | int, ...] = ()) -> list[tuple[list[str | int], Any]]:
    """Return the structure that flattened names lose: keys that are not strings, and empty mappings."""
    if isinstance(tree, Mapping):
        hints: list[tuple[list[str | int], Any]] = [([*path], {})] if path and not tree else []
        for key, inner in cast(Mapping[Any, Any], tree).items():
            inner_path = (*path, str(key))
            hints += [([*inner_path], key)] if isinstance(key, int | float | None) else []
            hints += unflatten_hints_of(inner, inner_path)
        return hints
    list_items = cast("list[Any]", tree) if isinstance(tree, list) else []
    return [hint for index, inner in enumerate(list_items) for hint in unflatten_hints_of(inner, (*path, index))]


def map_leaves(value: Any, function: Callable[[tuple[Any, ...], Any], Any], path: tuple[Any, ...] = ()) -> Any:
    """Return a nested value (mappings, lists, tuples) with ``function(path, leaf)`` in place of each leaf."""
    if isinstance(value, Mapping):
        live = cast(Mapping[Any, Any], value)
        return _with_type_of(live, {key: map_leaves(inner, function, (*path, key)) for key, inner in live.items()})
    if type(value) in (list, tuple):
        return type(value)(map_leaves(inner, function, (*path, index)) for index, inner in enumerate(value))
    return function(path, value)


def iterate_leaves(
    value: Any, is_leaf_list: Callable[[list[Any]], bool] = lambda _: False, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield ``(path, value)`` for each value in nested mappings and lists, the containers that DCP looks into.

    Args:
        is_leaf_list: Returns True for a list that counts as one value.
    """
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
    elif isinstance(value, list) and not is_leaf_list(cast("list[Any]", value)):
        items = enumerate(cast("list[Any]", value))
    else:
        yield path, value
        return
    for key, inner in items:
        yield from iterate_leaves(inner, is_leaf_list, (*path, str(key)))


def with_loaded(live: Any, loaded: Mapping[tuple[str | int, ...], Any], path: tuple[str | int, ...]) -> Any:
    """Return ``live`` with its plain values replaced by the loaded ones, given by path; tensors were loaded in place."""
    if path in loaded:
        return live if isinstance(loaded[path], torch.Tensor) else loaded[path]
    if isinstance(live, Mapping):
        items = cast(Mapping[Any, Any], live).items()
        return _with_type_of(
            cast(Mapping[Any, Any], live), {key: with_loaded(value, loaded, (*path, str(key))) for key, value in items}
        )
    if type(live) is list:
        return [with_loaded(inner, loaded, (*path, index)) for index, inner in enumerate(cast("list[Any]", live))]
    return live


def with_keys_of(live: Any, loaded: Any) -> Any:
    """Return ``loaded`` with the original keys and mapping types of ``live``; in ``loaded`` every key is a string."""
    if isinstance(live, Mapping) and isinstance(loaded, Mapping):
        content = cast(Mapping[Any, Any], live)
        keys = {str(key): key for key in content}
        items = cast(Mapping[Any, Any], loaded).items()
        return _with_type_of(
            content, {(key := keys.get(name, name)): with_keys_of(content.get(key), value) for name, value in items}
        )
    if type(live) is list and type(loaded) is list:
        content = cast("list[Any]", live)[: len(cast("list[Any]", loaded))]
        added = cast("list[Any]", loaded)[len(content) :]
        return [*(with_keys_of(old, new) for old, new in zip(content, cast("list[Any]", loaded), strict=False)), *added]
    return loaded


def _with_type_of(live: Mapping[Any, Any], content: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return ``content`` in a mapping of the same type as ``live``."""
    if type(live) is dict or not isinstance(live, MutableMapping):
        return content
    # A shallow copy of a class without a copy of its own may share its content with the original, which would be cleared
    can_copy_shallow = isinstance(live, dict) or hasattr(live, "__copy__")
    copied_mapping = copy.copy(live) if can_copy_shallow else copy.deepcopy(live)
    copied_mapping.clear()
    copied_mapping.update(content)
    return copied_mapping


def _insert_leaf(root: dict[str, Any], path: tuple[Any, ...], leaf: Any) -> None:
    inner: Any = root
    for key, next_key in itertools.pairwise(path):
        inner = _get_or_insert(inner, key, [] if isinstance(next_key, int) else {})
    _get_or_insert(inner, path[-1], leaf)


def _restore_key(root: dict[str, Any], path: Sequence[str | int], key: Any) -> None:
    """Replace the last key of a path, a string, by its original key, if the path exists."""
    with contextlib.suppress(KeyError, IndexError, TypeError):
        inner: Any = functools.reduce(operator.getitem, path[:-1], cast(Any, root))
        inner[key] = inner.pop(path[-1])


def _get_or_insert(container: Any, key: Any, value: Any) -> Any:
    """Return the item of a dict or list at ``key``; if it is missing, insert ``value`` first."""
    if isinstance(container, dict):
        return container.setdefault(key, value)
    container.extend([None] * (key + 1 - len(container)))
    if container[key] is None:
        container[key] = value
    return container[key]
