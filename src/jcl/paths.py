"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def expand_user(path: str | Path) -> Path:
    """The path with `~` expanded; a folder whose name begins with `~` stays as it is.

    `Path.expanduser` would raise if there is no user of that name.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111
