"""What differs between two JSON documents, in words."""

from __future__ import annotations

import json
from typing import Any

_SHOWN = 5


def differences(saved: str, now: str) -> list[str]:
    """The first few differences, ``"source.files.b.parquet: saved 3, now 4"``; empty where the documents are equal."""
    if saved == now:
        return []
    found = _compare("", json.loads(saved), json.loads(now))
    return found[:_SHOWN] + ([f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])


def _compare(path: str, saved: Any, now: Any) -> list[str]:
    saved, now = _by_name(saved), _by_name(now)
    if isinstance(saved, dict) and isinstance(now, dict):
        found: list[str] = []
        for key in sorted({*saved, *now}):
            here = f"{path}: {key}" if path else key
            if key not in now:
                found.append(f"{here} was saved and is not there now")
            elif key not in saved:
                found.append(f"{here} is new")
            else:
                found += _compare(here, saved[key], now[key])
        return found
    return [] if saved == now else [f"{path}: saved {_short(saved)}, now {_short(now)}"]


def _by_name(value: Any) -> Any:
    """A list of ``[name, ...]``, as manifests have of files, as a dict of the names."""
    named = isinstance(value, list) and all(
        isinstance(item, list) and item and isinstance(item[0], str) for item in value
    )
    return {item[0]: item[1:] for item in value} if named and value else value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
