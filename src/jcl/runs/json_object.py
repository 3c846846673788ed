"""Plain facts kept in a folder as a JSON object: written in one step, read back with a sentence where that fails."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jcl.errors import RunError
from jcl.runs.atomic import write_atomically

_NAMED_DIFFERENCES = 3


def write_object(file: Path, content: Mapping[str, Any]) -> None:
    """Write an object in one step; figures that are not finite, which JSON has no word for, are null as in metrics."""
    write_atomically(file, json.dumps(_finite(content), indent=2, allow_nan=False).encode() + b"\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file of ours."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise RunError(f"{file} is damaged: it holds no JSON object; remove it to have it made again.")
    return content


def is_figure(value: Any) -> bool:
    """Whether something read from JSON is a number to calculate with: it may be NaN there, or too large for a float."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def may_hold_figures(file: Path) -> bool:
    """Whether a file looks like figures, which are one flat object of plain names; an empty one has nothing to lose."""
    try:
        content = json.loads(file.read_bytes() or b"{}")
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and all(map(_flat, content.values()))


def _flat(value: Any) -> bool:
    entries = value if isinstance(value, list) else [value]
    return not any(isinstance(entry, dict | list) for entry in entries)


def written(value: Any) -> str:
    """A value as briefly as it can be written without becoming another."""
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def named_differences(begun: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What was otherwise in `begun`, as in "lr = 30 instead of 10 and 2 more"; nothing where the two are equal."""
    names = [name for name in {**begun, **now} if begun.get(name) != now.get(name)]
    told = [f"{name} = {_shown(begun, name)} instead of {_shown(now, name)}" for name in names[:_NAMED_DIFFERENCES]]
    more = len(names) - len(told)
    return ", ".join(told) + (f" and {more} more" if more else "")


def _shown(values: Mapping[str, Any], name: str) -> str:
    return written(values[name]) if name in values else "nothing"
