"""Nested states and the flat names that DCP gives to their leaves, which make every key a string.

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

Lost: TypeAlias = Sequence[tuple[Sequence[str | int], Any]]
"""What flat names do not tell: a path with its last key, which is a number, or with ``{}`` for a mapping without content."""


def tree_of(paths: Mapping[str, tuple[Any, ...]], leaves: Mapping[str, Any], lost: Lost = ()) -> dict[str, Any]:
    """Return leaves by flattened name as the nested state they came from; integers in a path are places in a list."""
    root: dict[str, Any] = {}
    for name, leaf in leaves.items():
        _put(root, paths[name], leaf)
    for path, _ in (entry for entry in lost if entry[1] == {}):
        _put(root, tuple(path), {})
    for path, key in sorted((entry for entry in lost if entry[1] != {}), key=lambda entry: -len(entry[0])):
        _rename(root, path, key)
    return root


def lost_in_names(tree: Any, path: tuple[str | int, ...] = ()) -> list[tuple[list[str | int], Any]]:
    """Return the parts of a nested state that its flat names do not hold."""
    if isinstance(tree, Mapping):
        entries: list[tuple[list[str | int], Any]] = [([*path], {})] if path and not tree else []
        for key, inner in cast(Mapping[Any, Any], tree).items():
            here = (*path, str(key))
            entries += [([*here], key)] if isinstance(key, int | float | None) else []
            entries += lost_in_names(inner, here)
        return entries
    items = cast("list[Any]", tree) if isinstance(tree, list) else []
    return [lost for place, inner in enumerate(items) for lost in lost_in_names(inner, (*path, place))]


def mapped(value: Any, work: Callable[[tuple[Any, ...], Any], Any], path: tuple[Any, ...] = ()) -> Any:
    """Return a nested value with ``work(path, leaf)`` in place of each leaf in its dicts, lists and tuples, in their order."""
    if isinstance(value, Mapping):
        return {key: mapped(inner, work, (*path, key)) for key, inner in cast(Mapping[Any, Any], value).items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(inner, work, (*path, place)) for place, inner in enumerate(value))
    return work(path, value)


def leaves(
    value: Any, whole: Callable[[list[Any]], bool] = lambda _: False, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield values by path in the containers that DCP looks into: mappings and lists.

    Args:
        whole: Which lists are taken for values.
    """
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
    elif isinstance(value, list) and not whole(cast("list[Any]", value)):
        items = enumerate(cast("list[Any]", value))
    else:
        yield path, value
        return
    for key, inner in items:
        yield from leaves(inner, whole, (*path, str(key)))


def with_loaded(live: Any, loaded: Mapping[str, Any], name: str) -> Any:
    """Return ``live``, which is under this flattened name, with the plain values that were loaded; tensors are in place."""
    if name in loaded:
        return live if isinstance(loaded[name], torch.Tensor) else loaded[name]
    if isinstance(live, Mapping):
        items = cast(Mapping[Any, Any], live).items()
        return _like(cast(Mapping[Any, Any], live), {k: with_loaded(v, loaded, f"{name}.{k}") for k, v in items})
    if type(live) is list:
        return [with_loaded(inner, loaded, f"{name}.{n}") for n, inner in enumerate(cast("list[Any]", live))]
    return live


def keys_of(live: Any, loaded: Any) -> Any:
    """Return ``loaded`` with the keys and the types of mappings that ``live`` has in the same places."""
    if isinstance(live, Mapping) and isinstance(loaded, Mapping):
        known = cast(Mapping[Any, Any], live)
        keys = {str(key): key for key in known}
        items = cast(Mapping[Any, Any], loaded).items()
        return _like(known, {(key := keys.get(name, name)): keys_of(known.get(key), value) for name, value in items})
    if type(live) is list and type(loaded) is list:
        known = cast("list[Any]", live)[: len(cast("list[Any]", loaded))]
        rest = cast("list[Any]", loaded)[len(known) :]
        return [*(keys_of(old, new) for old, new in zip(known, cast("list[Any]", loaded), strict=False)), *rest]
    return loaded


def _like(live: Mapping[Any, Any], content: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return the content in a mapping of the same type."""
    if type(live) is dict or not isinstance(live, MutableMapping):
        return content
    like = copy.copy(live)
    like.clear()
    like.update(content)
    return like


def _put(root: dict[str, Any], path: tuple[Any, ...], leaf: Any) -> None:
    inner: Any = root
    for key, following in itertools.pairwise(path):
        inner = _enter(inner, key, [] if isinstance(following, int) else {})
    _enter(inner, path[-1], leaf)


def _rename(root: dict[str, Any], path: Sequence[str | int], key: Any) -> None:
    """Give the last key of a path its type, where there is one."""
    with contextlib.suppress(KeyError, IndexError, TypeError):
        inner: Any = functools.reduce(operator.getitem, path[:-1], cast(Any, root))
        inner[key] = inner.pop(path[-1])


def _enter(container: Any, key: Any, value: Any) -> Any:
    """Return the content at ``key``, which is ``value`` if there was nothing."""
    if isinstance(container, dict):
        return container.setdefault(key, value)
    container.extend([None] * (key + 1 - len(container)))
    if container[key] is None:
        container[key] = value
    return container[key]
