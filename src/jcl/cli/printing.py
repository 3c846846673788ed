"""What commands print and write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jcl.cli.app import out, rank
from jcl.errors import JclError


def write_json(figures: dict[str, Any], path: Path | None) -> None:
    if path is None or rank > 0:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise JclError(f"the figures could not be written to {path}: {error.strerror}.") from None


def say(text: str) -> None:
    """Plain text; what a file's name may hold to steer a terminal is shown, not sent."""
    shown = "".join(sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in text)
    out.print(shown, highlight=False, markup=False, soft_wrap=True)
