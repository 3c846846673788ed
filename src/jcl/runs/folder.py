"""The folders of runs and other trainings: the paths of their files, and protection against overwriting."""

import contextlib
import glob
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from jcl.console import escape_controls, pluralize, shell_quote
from jcl.errors import DataError, Diverged, Interrupted, JclError, RunError, SettingsError
from jcl.paths import expand_user, read_file, suggest_path
from jcl.runs.atomic import make_folder, refuse_links, write_atomically
from jcl.runs.json_object import read_object, write_object
from jcl.runs.lock import is_locked
from jcl.settings.resolved import ResolvedSettings
from jcl.settings.schema import Settings, read_settings, settings_text


class TrainingFolder:
    """A settings file, `metrics.jsonl`, `checkpoints/`, `skipped.txt` if images could not be read, and at the end
    `summary.json`."""

    kind: ClassVar[str]  # what the folder holds, in words
    settings_name: ClassVar[str]  # the settings file, which identifies the kind of folder
    result_name: ClassVar[str]  # what every summary has
    resume_with: ClassVar[str] = ""  # the command that resumes it, without the folder

    def __init__(self, path: Path | str) -> None:
        self.path = expand_user(path)
        self.settings_file = self.path / self.settings_name
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.id_file = self.path / "run_id"  # for experiment trackers
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
            resume = "" if self.summary_file.exists() else f"{self.how_to_resume}, or "
            raise RunError(f"{self.path} already holds a {self.kind}; {resume}choose another --out.")
        self.refuse_other_kinds()

    def refuse_other_kinds(self) -> None:
        """Raise if the folder holds another kind of training."""
        if not self.settings_file.exists() and RunFolder(self.path).holds_run():
            raise RunError(f"{self.path} already holds a run; choose another folder with --out.")
        self.refuse_links()

    def refuse_links(self) -> None:
        """Raise if a folder in it is a link, through which files would be written elsewhere."""
        refuse_links(self.checkpoints, self.path / "tensorboard", self.path / "wandb")

    def run_id(self) -> str:
        """The id of this training in experiment trackers."""
        if not self.id_file.exists():
            write_atomically(self.id_file, f"{secrets.token_hex(8)}\n".encode())
        return read_file(self.id_file, RunError).decode(errors="replace").strip()

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
            for path in () if self.checkpoints.exists() else self.first_files:
                if path not in keep:
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            raise

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
        listed = {} if overwrite else read_skipped(self.skipped_file)
        listed |= {_one_line(name): _one_line(reason) for name, reason in skipped.items()}
        lines = [f"{name}\t{reason}\n" for name, reason in sorted(listed.items())]
        try:
            write_atomically(self.skipped_file, "".join(lines).encode())
        except RunError as error:
            log(f"Skipped {pluralize(len(skipped), 'unreadable image')}, but {error}")
        else:
            log(f"Skipped {pluralize(len(listed), 'unreadable image')}; the reasons are in {self.skipped_file}.")

    def stored_settings(self) -> dict[str, Any]:
        return read_object(self.settings_file)

    def summary(self) -> dict[str, Any]:
        """The figures of a finished training, flat, with plain names."""
        summary = read_object(self.summary_file) if self.summary_file.exists() else {}
        if self.result_name in summary:
            return summary
        if not self.settings_file.exists():
            raise RunError(f"{self.path} holds no {self.kind}: no {self.settings_name} in it.")
        raise RunError(f"The {self.kind} in {self.path} has not finished; {self.how_to_finish}.")

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


def unfinished_folder(wanted: Folder, started_with: Callable[[Folder], bool]) -> Folder | None:
    """The newest unfinished, unlocked one of `wanted-001`, `wanted-002`, ... for which `started_with` is true."""
    numbered = wanted.path.parent.glob(f"{glob.escape(wanted.path.name)}-[0-9][0-9][0-9]")
    for path in sorted(numbered, reverse=True):
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
    make_folder(wanted.parent)
    number = 0
    while True:
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number:03d}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"The folder {path} could not be written: {error.strerror}.") from None


def read_skipped(file: Path) -> dict[str, str]:
    """The images in `skipped.txt` with the reasons; {} without the file."""
    text = ""
    with contextlib.suppress(RunError):
        text = read_file(file, RunError).decode(errors="replace")
    return {name: reason for name, _, reason in (line.rpartition("\t") for line in text.split("\n")) if name}


def _one_line(text: str) -> str:
    return escape_controls(text).replace("\n", "\\n")
