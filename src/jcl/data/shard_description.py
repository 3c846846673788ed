"""The small `index.json` beside shards written here: which they are, how many images each has, what the classes are."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jcl.errors import DataError

DESCRIPTION_FILE: Final = "index.json"
_FORMAT: Final = "jcl-shards"
_VERSION: Final = 1
_BYTES_LIMIT: Final = 1 << 28


@dataclass(frozen=True)
class ShardSet:
    """A folder of shards: the images in each file by split, and what the labels in them index."""

    name: str
    class_names: tuple[str, ...] | None
    splits: Mapping[str, Mapping[str, int]]

    @property
    def counts(self) -> dict[str, int]:
        """Images by file name, of all splits."""
        return {name: count for files in self.splits.values() for name, count in files.items()}


def write_description(folder: Path, described: ShardSet) -> None:
    """Write what `read_description` reads."""
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "name": described.name,
        "class_names": described.class_names,
        "splits": {split: dict(files) for split, files in described.splits.items()},
    }
    (folder / DESCRIPTION_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")


def read_description(folder: Path) -> ShardSet | None:
    """Read the description in a folder; None where there is none or it is some other program's file of that name."""
    file = folder / DESCRIPTION_FILE
    try:
        if file.stat().st_size > _BYTES_LIMIT:
            return None
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return None
    if content.get("version") != _VERSION:
        raise DataError(
            f"The shards in {folder} are of version {content.get('version')}, and this program reads version "
            f"{_VERSION}; install a newer one or write the shards anew."
        )
    try:
        return _checked(content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"The description {file} is damaged; write the shards anew.") from error


def _checked(content: dict[str, Any]) -> ShardSet:
    """Take the values over where they are what they should be: a file name, for one, must not lead elsewhere."""
    names = content["class_names"]
    splits = {str(split): dict(files) for split, files in content["splits"].items()}
    described = ShardSet(str(content["name"]), None if names is None else tuple(map(str, names)), splits)
    for file, count in described.counts.items():
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", file) or type(count) is not int:
            raise ValueError(f"{file}: {count}")
    return described
