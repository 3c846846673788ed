"""The folder of a run: where its files are, and that no run is overwritten."""

from __future__ import annotations

import contextlib
import glob
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from jcl.console import typed, visible
from jcl.errors import RunError
from jcl.paths import home_expanded
from jcl.runs.atomic import write_atomically
from jcl.settings.schema import Settings, read_settings, settings_text


class RunFolder:
    """The files of a pre-training run."""

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
        """Raise if the folder already holds a run."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; choose a folder with --out.")
        if self.settings_file.exists():
            raise RunError(
                f"{self.path} already holds a run; continue it with `{self.how_to_resume}`, "
                "or choose another folder with --out."
            )
        if self.holds_run():
            raise RunError(
                f"{self.path} already holds the results of another command; choose another folder with --out."
            )

    def create(self, settings: Settings) -> None:
        """Start a run here, unless the folder already holds one."""
        self.refuse_occupied()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"the run folder {self.path} cannot be written: {error.strerror}.") from None
        write_atomically(self.settings_file, settings_text(settings).encode())

    def forget_unless_begun(self) -> None:
        """Remove what a run has written before its first checkpoint, if it has none."""
        if self.checkpoints.exists():
            return
        for file in (self.settings_file, self.metrics_file, self.choices_file):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)

    def holds_run(self) -> bool:
        return self.settings_file.exists() or self.metrics_file.exists() or self.checkpoints.exists()

    def settings(self) -> Settings:
        if not self.settings_file.is_file():
            reason = "it has no settings.yaml" if self.path.exists() else "no such folder"
            raise RunError(f"{self.path} is not a run folder: {reason}.")
        return read_settings(self.settings_file)


def numbered_folders(parent: Path, name: str) -> list[Path]:
    """The existing folders `name-001`, `name-002`, ... under `parent`, highest number first."""
    numbers = [
        int(match[1])
        for path in parent.glob(f"{glob.escape(name)}-*")
        if (match := re.fullmatch(r"-(\d{3}|[1-9]\d{3,8})", path.name.removeprefix(name)))
    ]
    return [_numbered(parent, name, number) for number in sorted(numbers, reverse=True)]


@contextlib.contextmanager
def starting_folder(wanted: Path, *, numbered: bool = False) -> Iterator[Path]:
    """The folder of a command: `wanted`, or with `numbered` the first free one of `wanted-001`, `wanted-002`, ...

    A numbered folder is created at once, so that commands which start at the same moment get different ones. A new
    folder that is still empty when the block ends is removed.
    """
    path, existed = (_create_numbered(wanted), False) if numbered else (wanted, wanted.exists())
    try:
        yield path
    finally:
        if not existed:
            with contextlib.suppress(OSError):  # not empty, or never created
                path.rmdir()


def _create_numbered(wanted: Path) -> Path:
    number, path = 1, wanted.parent
    try:
        path.mkdir(parents=True, exist_ok=True)  # separately: below a dangling link every number seems to exist
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


def read_skipped(file: Path, most: int = -1) -> dict[str, str]:
    """The unreadable images listed in `skipped.txt` and why, from its first `most` characters; {} without the file."""
    try:
        with file.open(encoding="utf-8", errors="replace", newline="\n") as stream:
            lines = stream.read(most).split("\n")
    except OSError:
        return {}
    pairs = (line.rpartition("\t") for line in lines)
    return {name: reason for name, _, reason in pairs if name}


def add_skipped(file: Path, skipped: Mapping[str, str], *, anew: bool = False) -> dict[str, str]:
    """Add images to `skipped.txt` and return all; with `anew` the entries of an earlier training are dropped."""
    listed = read_skipped(file)
    added = {_one_line(name): _one_line(reason) for name, reason in skipped.items()}
    together = added if anew else listed | added
    if together != listed:
        write_atomically(file, "".join(f"{name}\t{reason}\n" for name, reason in sorted(together.items())).encode())
    return together


def _one_line(text: str) -> str:
    return visible(text).replace("\n", "\\n")
