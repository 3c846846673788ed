"""Paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path


def home_expanded(path: str | Path) -> Path:
    """The path with `~` as the home folder; a folder that is only called so, as `~old`, is meant as it stands.

    `Path.expanduser` raises where there is no user of that name.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111
