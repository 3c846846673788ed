"""The folders of runs and other trainings: the paths of their files, and protection against overwriting."""

import contextlib
import glob
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from jcl.console import escape_controls, pluralize, shell_quote
from jcl.errors import DataError, Diverged, Interrupted, JclError, RunError, SettingsError
from jcl.paths import expand_user, read_file, suggest_path
from jcl.runs.atomic import make_folder, refuse_links, write_atomically
from jcl.runs.json_object import read_object, write_object
from jcl.runs.lock import is_locked
from jcl.settings.resolved import ResolvedSettings
from jcl.settings.schema import Settings
from jcl.settings.values import read_settings, settings_text

RUN_ID = "run_id"
_MAX_ID_BYTES = 100


class TrainingFolder:
    """A settings file, `run_id`, `metrics.jsonl`, `checkpoints/`, `skipped.txt` if images could not be read, and at
    the end `summary.json`."""

    kind: ClassVar[str]  # what the folder holds, in words
    settings_name: ClassVar[str]  # the settings file, which identifies the kind of folder
    result_name: ClassVar[str]  # what every summary has
    resume_with: ClassVar[str] = ""  # the command that resumes it, without the folder

    def __init__(self, path: Path | str) -> None:
        self.path = expand_user(path)
        self.settings_file = self.path / self.settings_name
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.id_file = self.path / RUN_ID
        self.skipped_file = self.path / "skipped.txt"
        self.summary_file = self.path / "summary.json"
        # Files that only some kinds have.
        self.backbone_file = self.path / "backbone.safetensors"
        self.classifier_file = self.path / "classifier.safetensors"
        self.choices_file = self.path / "choices.json"  # what "auto" was resolved to
        self.classes_file = self.path / "classes.json"  # accuracy of each class
        self.labels_file = self.path / "labels.txt"  # images whose labels are used
        self.data_file = self.path / "data.json"  # the annotations of a detector
        self.picture_file = self.path / "detections.png"
        self.report_file = self.path / "report.html"

    @property
    def resume_command(self) -> str:
        return f"{self.resume_with} {shell_quote(self.path)}"

    @property
    def how_to_resume(self) -> str:
        """How to resume, as the end of a sentence."""
        return f"continue with `{self.resume_command}`"

    @property
    def how_to_finish(self) -> str:
        """The same for other processes: one may be training in the folder."""
        return "it is still training" if is_locked(self.path) else self.how_to_resume

    @property
    def first_files(self) -> tuple[Path, ...]:
        """The files and folders that exist before the first checkpoint."""
        return self.settings_file, self.metrics_file, self.id_file, self.skipped_file

    def refuse_occupied(self) -> None:
        """Raise if the folder already holds a training."""
        if self.settings_file.exists():
            if self.summary_file.exists():
                raise RunError(f"{self.path} already holds a {self.kind}, which has finished; choose another --out.")
            raise RunError(f"{self.path} already holds a {self.kind}; {self.how_to_resume}, or choose another --out.")
        self.refuse_other_kinds()

    def refuse_other_kinds(self) -> None:
        """Raise if the folder holds another kind of training."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; choose a folder with --out.")
        if not self.settings_file.exists() and RunFolder(self.path).holds_run():
            raise RunError(f"{self.path} already holds a run; choose another folder with --out.")
        self.refuse_links()

    def refuse_links(self) -> None:
        """Raise now if a file of the training is a link, and not only when it is written."""
        refuse_links(*(path for path in vars(self).values() if isinstance(path, Path) and path != self.path))

    def identify(self, resumed: str) -> str:
        """The id of this training; if it has none, that of the checkpoint it is `resumed` from, or a new one."""
        if not read_run_id(self.path):
            write_atomically(self.id_file, f"{resumed or secrets.token_hex(8)}\n".encode())
        return read_run_id(self.path)

    @contextlib.contextmanager
    def cleanup_unless_started(self) -> Iterator[None]:
        """Remove what was written if an error, divergence or a stop ends the block before the first checkpoint.

        The same command can then be repeated. Files that were there before stay, unless they belong to an unfinished
        training of this kind.
        """
        ours = self.settings_file.exists() and not self.summary_file.exists()
        keep = () if ours else tuple(file for file in self.first_files if file.exists())
        try:
            yield
        except (DataError, Diverged, Interrupted, SettingsError, RuntimeError, KeyboardInterrupt):
            self.remove_unless_started(keep)
            raise

    def remove_unless_started(self, keep: Collection[Path] = ()) -> None:
        """Remove the files of a training that has no checkpoint yet."""
        for path in () if self.checkpoints.exists() else self.first_files:
            if path not in keep:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def resumable(self) -> Iterator[None]:
        """Turn Ctrl-C into a message that says how to resume, if there is a checkpoint."""
        try:
            yield
        except KeyboardInterrupt:
            newest = max(self.checkpoints.glob("step-*"), default=None)
            if newest is None:
                raise
            raise Interrupted(f"Stopped at once; the newest checkpoint is {newest}; {self.how_to_resume}.") from None

    def list_skipped(self, skipped: Mapping[str, str], log: Callable[[str], None], *, overwrite: bool = False) -> None:
        """Add unreadable images to `skipped.txt` with the reasons; with `overwrite` those of before are dropped."""
        if not skipped:
            return
        try:
            listed = add_skipped(self.skipped_file, skipped, overwrite=overwrite)
        except RunError as error:
            log(f"Skipped {pluralize(len(skipped), 'unreadable image')}, but {error}")
        else:
            log(f"Skipped {pluralize(len(listed), 'unreadable image')}; the reasons are in {self.skipped_file}.")

    def stored_settings(self) -> dict[str, Any]:
        try:
            return read_object(self.settings_file)
        except RunError:
            raise RunError(f"{self.path} holds no {self.kind}: no readable {self.settings_name} in it.") from None

    def summary(self) -> dict[str, Any]:
        """The figures of a finished training, flat, with plain names."""
        summary = read_object(self.summary_file) if self.summary_file.exists() else None
        if summary is not None and self.result_name in summary:
            return summary
        if not self.settings_file.exists():
            raise RunError(f"{self.path} holds no {self.kind}: no {self.settings_name} in it.")
        if summary is None:
            raise RunError(f"The {self.kind} in {self.path} has not finished; {self.how_to_finish}.")
        raise RunError(f"{self.summary_file} is not the summary of a {self.kind}; remove it and {self.how_to_resume}.")

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_object(self.summary_file, summary)


Folder = TypeVar("Folder", bound=TrainingFolder)


class RunFolder(TrainingFolder):
    """The folder of a pre-training run, with `settings.yaml`."""

    kind = "run"
    settings_name = "settings.yaml"
    result_name = "method"
    resume_with = "jcl resume"

    @property
    def first_files(self) -> tuple[Path, ...]:
        return *super().first_files, self.choices_file, self.path / "tensorboard", self.path / "wandb"

    def create(self, settings: Settings) -> None:
        """Start a run here, unless the folder already holds one."""
        self.refuse_occupied()
        make_folder(self.path)
        write_atomically(self.settings_file, settings_text(settings).encode())

    def holds_run(self) -> bool:
        """Whether a run, or another training, was started here."""
        return self.settings_file.exists() or self.metrics_file.exists() or self.checkpoints.exists()

    def settings(self) -> ResolvedSettings:
        if not self.settings_file.is_file():
            if not self.path.exists():
                raise RunError(f"There is no run folder {self.path}{suggest_path(self.path)}")
            raise RunError(f"{self.path} is not a run folder: no settings.yaml. Give one that `jcl pretrain` wrote.")
        return read_settings(self.settings_file, ResolvedSettings)


def read_run_id(folder: Path) -> str:
    """The id of the training in a folder, which is also in its checkpoints; empty if there is none."""
    with contextlib.suppress(RunError):
        return read_file(folder / RUN_ID, RunError)[:_MAX_ID_BYTES].decode(errors="replace").strip()
    return ""


def numbered_folders(parent: Path, name: str) -> list[Path]:
    """The existing folders `name-001`, `name-002`, ... under `parent`, highest number first."""
    numbers = [
        int(match[1])
        for path in parent.glob(f"{glob.escape(name)}-*")
        if (match := re.fullmatch(r"-(\d{3}|[1-9]\d{3,8})", path.name.removeprefix(name)))
    ]
    return [parent / f"{name}-{number:03d}" for number in sorted(numbers, reverse=True)]


def unfinished_folder(wanted: Folder, started_with: Callable[[Folder], bool]) -> Folder | None:
    """The newest unfinished, unlocked one of `wanted-001`, `wanted-002`, ... for which `started_with` is true."""
    for path in numbered_folders(wanted.path.parent, wanted.path.name):
        folder = type(wanted)(path)
        with contextlib.suppress(JclError):  # not a folder of this kind
            if not is_locked(path) and not folder.summary_file.exists() and started_with(folder):
                return folder
    return None


@contextlib.contextmanager
def new_folder(wanted: Path, *, numbered: bool = False) -> Iterator[Path]:
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
            path = wanted.with_name(f"{wanted.name}-{number:03d}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
            number += 1
    except OSError as error:
        raise RunError(f"The folder {path} cannot be written: {error.strerror}.") from None


def read_skipped(file: Path, max_chars: int | None = None) -> dict[str, str]:
    """The images in `skipped.txt` with the reasons, from its first `max_chars` characters; {} without the file."""
    text = ""
    with contextlib.suppress(RunError):
        text = read_file(file, RunError).decode(errors="replace")[:max_chars]
    pairs = (line.rpartition("\t") for line in text.split("\n"))
    return {name: reason for name, _, reason in pairs if name}


def add_skipped(file: Path, skipped: Mapping[str, str], *, overwrite: bool = False) -> dict[str, str]:
    """Add images to `skipped.txt` and return all; with `overwrite` the entries of an earlier training are dropped."""
    listed = read_skipped(file)
    added = {_one_line(name): _one_line(reason) for name, reason in skipped.items()}
    together = added if overwrite else listed | added
    if together != listed:
        write_atomically(file, "".join(f"{name}\t{reason}\n" for name, reason in sorted(together.items())).encode())
    return together


def _one_line(text: str) -> str:
    return escape_controls(text).replace("\n", "\\n")
