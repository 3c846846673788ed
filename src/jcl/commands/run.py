"""A run: `jcl.Run`, the files that describe a run, its learner, and the ranks and device it trains on."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from rich.console import Console
from torch import Tensor, nn

from jcl.console import STDERR, print_line
from jcl.core.method import ContrastiveLearner
from jcl.distributed.group import Ranks, fail_together, process_group
from jcl.distributed.launch import launch_environment
from jcl.errors import RunError
from jcl.evaluate.classification import Scores
from jcl.export import load_backbone
from jcl.export.backbone_file import BackboneInfo
from jcl.export.loading import checkpoint_run, read_moco_checkpoint
from jcl.paths import expand_user, suggest_path
from jcl.runs.checkpoint import list_checkpoints, load_weights, read_learner
from jcl.runs.folder import Folder, RunFolder, TrainingFolder, new_folder
from jcl.runs.json_object import is_number, read_object, write_object
from jcl.runs.lock import lock_folder
from jcl.runs.metrics import read_metrics
from jcl.settings.recipes import build_settings
from jcl.settings.resolve import resolve
from jcl.settings.resolved import Choice, DataFacts, ResolvedSettings
from jcl.settings.schema import setting_names
from jcl.settings.values import values_of
from jcl.train.build import build_learner

Result = TypeVar("Result")


@dataclass(frozen=True, init=False)
class Run:
    """A run folder and its contents; `jcl.Run("runs/photos")` opens one."""

    path: Path

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", expand_user(path))

    @property
    def settings(self) -> ResolvedSettings:
        """The settings, with the values that "auto" was resolved to."""
        return RunFolder(self.path).settings()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every line of `metrics.jsonl`."""
        return read_metrics(RunFolder(self.path).metrics_file)

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of a finished run, flat, with plain names."""
        return RunFolder(self.path).summary()

    def backbone(self) -> nn.Module:
        """The pre-trained backbone, giving pooled features."""
        return load_backbone(self.path)


def write_choices(folder: RunFolder, choices: Sequence[Choice]) -> None:
    """Keep what each "auto" was resolved to, and why."""
    write_object(folder.choices_file, {"choices": [asdict(choice) for choice in choices]})


def read_choices(folder: RunFolder, settings: ResolvedSettings) -> list[Choice] | None:
    """What `write_choices` wrote, without settings that were edited since; None if it cannot be read."""
    now = values_of(settings, setting_names())
    with contextlib.suppress(RunError, KeyError, TypeError):
        choices = [Choice(**entry) for entry in read_object(folder.choices_file)["choices"]]
        return [choice for choice in choices if now.get(choice.name) in ("auto", choice.value)]
    return None


def class_accuracies(scores: Scores, names: Iterable[str]) -> dict[str, tuple[int, float]]:
    """Number of test images and accuracy of each class that has any."""
    table = zip(names, scores.class_images, scores.class_top1, strict=True)
    return {name: (images, top1) for name, images, top1 in table if top1 is not None}


def write_classes(folder: TrainingFolder, classes: Mapping[str, tuple[int, float]]) -> None:
    rows = [{"name": name, "images": images, "top1": top1} for name, (images, top1) in classes.items()]
    write_object(folder.classes_file, {"classes": rows})


def read_classes(folder: TrainingFolder) -> dict[str, tuple[int, float]]:
    """What `write_classes` wrote; empty if it cannot be read."""
    with contextlib.suppress(RunError, KeyError, TypeError):
        rows = read_object(folder.classes_file)["classes"]
        values = {str(row["name"]): (row["images"], row["top1"]) for row in rows}
        return {name: row for name, row in values.items() if all(map(is_number, row))}
    return {}


@dataclass(frozen=True)
class TrainedRun:
    """A run with at least one checkpoint, or one checkpoint of a run."""

    path: Path
    settings: ResolvedSettings
    checkpoints: tuple[Path, ...]  # oldest first
    imported: Mapping[str, Tensor] | None = None  # the state of a learner that another program trained

    def learner(self, checkpoint: Path, device: torch.device) -> tuple[ContrastiveLearner, int]:
        """The learner at a checkpoint, in evaluation mode, and its step."""
        state, step = read_learner(checkpoint) if self.imported is None else (self.imported, 0)
        learner, _ = build_learner(self.settings, device)
        load_weights(learner, state, checkpoint)
        return learner.eval(), step


def open_trained(path: Path) -> TrainedRun:
    """Open a run folder, one checkpoint file in it, or a checkpoint of MoCo's or JCL's authors."""
    if not path.exists():
        raise RunError(f"There is no run or checkpoint at {path}{suggest_path(path)}")
    run = checkpoint_run(path) or path
    if run.is_dir():
        settings, checkpoints = RunFolder(run).settings(), list_checkpoints(RunFolder(run).checkpoints)
        if not checkpoints:
            raise RunError(f"The run in {path} has no checkpoint yet; let it train longer first.")
        return TrainedRun(path, settings, (path,) if run != path else tuple(checkpoints))
    found = read_moco_checkpoint(path)
    if found is None:
        raise RunError(f"{path} has no projection head, key encoder or queue; give a run or a checkpoint of MoCo.")
    return TrainedRun(path, _settings_of_import(*found), (path,), found[1])


def _settings_of_import(info: BackboneInfo, state: Mapping[str, Tensor]) -> ResolvedSettings:
    """The paper's settings with the sizes of a checkpoint; one with a linear head is MoCo v1's."""
    queue, width = state["queue.rows"].shape
    inner = state.get("query_encoder.head.0.weight")
    values = {
        "model.backbone": info.backbone,
        "model.stem": info.stem,
        "model.embedding_dim": width,
        "model.bn_groups": 1,
        "views.image_size": info.image_size,
        "method.queue_size": queue,
    }
    if inner is not None:
        values["model.head_width"] = len(inner)
    settings = build_settings("imagenet-paper", method="moco-v1" if inner is None else "moco-v2", values=values)
    return resolve(settings, DataFacts(images=1_281_167, short_side=375, decoded=False))[0]  # ImageNet's


@dataclass(frozen=True)
class RunContext:
    """The ranks, the device of this rank, and the console to print to."""

    ranks: Ranks
    device: torch.device
    console: Console

    def log(self, text: str) -> None:
        print_line(self.console, text)

    def on_first(self, work: Callable[[], Result]) -> Result | None:
        """Call `work` on the first rank; if it fails, all ranks end."""
        with fail_together(self.ranks):
            return work() if self.ranks.first else None

    def from_first(self, work: Callable[[], Result]) -> Result:
        """The result of `work` on the first rank, on every rank."""
        return self.ranks.broadcast(cast("Result", self.on_first(work)))

    @contextlib.contextmanager
    def starting(self, wanted: Folder, *, numbered: bool) -> Iterator[Folder]:
        """Create the folder of a training as `new_folder` does, lock it, and clean it up if nothing is trained."""
        with contextlib.ExitStack() as stack:
            path = self.from_first(lambda: stack.enter_context(new_folder(wanted.path, numbered=numbered)))
            folder = type(wanted)(path)
            stack.enter_context(self.locked(folder))
            if self.ranks.first:
                stack.enter_context(folder.cleanup_unless_started())
            yield folder

    def folder_to_continue(self, find: Callable[[], TrainingFolder | None], asked: bool = False) -> Path | None:
        """The folder to resume, if `asked` or if a launcher has restarted the ranks; the first rank looks for it."""
        # A launcher that was itself restarted counts no restarts, but another machine's may.
        restarted = self.ranks.any(launch_environment().restarts > 0)
        folder = self.from_first(find) if asked or restarted else None
        begun = folder is not None and self.from_first(folder.settings_file.exists)
        return folder.path if folder is not None and begun else None

    @contextlib.contextmanager
    def locked(self, folder: TrainingFolder) -> Iterator[None]:
        """Keep other processes out of the folder, and let Ctrl-C end with a message that says how to resume.

        The first rank holds the lock for all.
        """
        with contextlib.ExitStack() as stack, folder.resumable():
            self.on_first(lambda: stack.enter_context(lock_folder(folder.path, warn=self.log)))
            yield


@contextlib.contextmanager
def run_context(device: str, rank_timeout: float, console: Console | None) -> Iterator[RunContext]:
    """The context of this rank. Only the first one prints: to the given console, or to standard error."""
    with process_group(device, rank_timeout) as (ranks, own_device):
        yield RunContext(ranks, own_device, (console or STDERR) if ranks.first else Console(quiet=True))
