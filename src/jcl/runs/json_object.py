"""Reading, writing and comparing JSON objects."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jcl.console import list_some
from jcl.errors import RunError
from jcl.paths import read_file
from jcl.runs.atomic import write_atomically

_MAX_DIFFERENCES = 3


def write_object(file: Path, content: Mapping[str, Any], *, follow_links: bool = False) -> None:
    """Write an object as `write_atomically` does; numbers that are not finite become null, as in metrics."""
    text = json.dumps(_finite(content), indent=2, allow_nan=False) + "\n"
    write_atomically(file, text.encode(), follow_links=follow_links)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_object(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file that this tool wrote."""
    try:
        content = json.loads(read_file(file, RunError))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise RunError(f"{file} is damaged: it is not a JSON object. Restore it or remove it.")
    return content


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a finite number; integers may be too large for a float."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def holds_results(file: Path) -> bool:
    """Whether a file is empty or one flat JSON object, as `--json` writes it."""
    try:
        content = read_object(file) if file.stat().st_size else {}
    except (OSError, RunError):
        return False
    entries = [entry for value in content.values() for entry in (value if isinstance(value, list) else [value])]
    return not any(isinstance(entry, dict | list) for entry in entries)


def format_value(value: Any) -> str:
    """A value in its shortest exact notation."""
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def describe_differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """How `found` differs from `expected`, as in "lr = 30 instead of 10 and 2 more"; empty if they are equal."""
    names = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
    different = (f"{name} = {_value(found, name)} instead of {_value(expected, name)}" for name in names)
    return list_some(different, _MAX_DIFFERENCES)


def _value(values: Mapping[str, Any], name: str) -> str:
    return format_value(values[name]) if name in values else "nothing"
