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


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
