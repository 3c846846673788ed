"""The folder of a run: which file is where, and that no run is ever overwritten."""

from __future__ import annotations

import contextlib
import glob
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from jcl.console import typed
from jcl.errors import RunError
from jcl.paths import home_expanded
from jcl.runs.atomic import write_atomically
from jcl.settings.schema import Settings, read_settings, settings_text


class RunFolder:
    """`settings.yaml`, `metrics.jsonl`, `checkpoints/`, `backbone.safetensors`, `tensorboard/`, `report.html`."""

    def __init__(self, path: Path | str) -> None:
        self.path = home_expanded(path)
        self.settings_file = self.path / "settings.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.backbone_file = self.path / "backbone.safetensors"
        self.skipped_file = self.path / "skipped.txt"
        self.choices_file = self.path / "choices.json"
        self.report_file = self.path / "report.html"

    @property
    def how_to_resume(self) -> str:
        return f"jcl resume {typed(self.path)}"

    def refuse_occupied(self) -> None:
        """Raise if something is here already."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; give the run a folder of its own with --out.")
        if self.settings_file.exists():
            raise RunError(
                f"{self.path} already holds a run and is left as it is; "
                f"continue it with `{self.how_to_resume}` or choose another folder with --out."
            )
        if self.holds_run():
            raise RunError(
                f"{self.path} already holds what another command trained and is left as it is; "
                "choose another folder with --out."
            )

    def create(self, settings: Settings) -> None:
        """Start a run here, unless one is here already."""
        self.refuse_occupied()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"the run folder {self.path} cannot be written: {error.strerror}.") from None
        # Half of the settings would read as other settings.
        write_atomically(self.settings_file, settings_text(settings).encode())

    def forget_unless_begun(self) -> None:
        """Take back what `create` and a first look at the data left, unless training has got to a checkpoint."""
        if self.checkpoints.exists():
            return
        self.settings_file.unlink(missing_ok=True)
        self.metrics_file.unlink(missing_ok=True)
        self.choices_file.unlink(missing_ok=True)
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)

    def holds_run(self) -> bool:
        return self.settings_file.exists() or self.metrics_file.exists() or self.checkpoints.exists()

    def settings(self) -> Settings:
        if not self.settings_file.is_file():
            why = "there is no settings.yaml in it" if self.path.exists() else "there is no such folder"
            raise RunError(f"{self.path} holds no run: {why}.")
        return read_settings(self.settings_file)


def numbered_folders(parent: Path, name: str) -> list[Path]:
    """Those of `name-001`, `name-002`, ... under `parent` that exist, last first; `name-2024-001` has another name."""
    numbers = [
        int(match[1])
        for path in parent.glob(f"{glob.escape(name)}-*")
        if (match := re.fullmatch(r"-(\d{3}|[1-9]\d{3,8})", path.name.removeprefix(name)))
    ]
    return [_numbered(parent, name, number) for number in sorted(numbers, reverse=True)]


@contextlib.contextmanager
def starting_folder(wanted: Path, *, numbered: bool = False) -> Iterator[Path]:
    """The folder of work that starts now: `wanted`, or with a number the first of `wanted-001`, ... that is free.

    One with a number is made at once, since of commands that start at the same moment only one can make it, and the
    others go on to the next number. Whatever ends the block, a folder that was not there before does not stay empty.
    """
    path, was_there = (_made_anew(wanted), False) if numbered else (wanted, wanted.exists())
    try:
        yield path
    finally:
        if not was_there:
            with contextlib.suppress(OSError):  # not empty, or never made
                path.rmdir()


def _made_anew(wanted: Path) -> Path:
    number, path = 1, wanted.parent
    try:
        path.mkdir(parents=True, exist_ok=True)  # by itself: a link to nowhere in its place exists for every number
        while True:
            path = _numbered(wanted.parent, wanted.name, number)
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
            number += 1
    except OSError as error:
        raise RunError(f"the folder {path} cannot be written: {error.strerror}.") from None


def _numbered(parent: Path, name: str, number: int) -> Path:
    return parent / f"{name}-{number:03d}"
