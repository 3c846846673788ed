"""Train, resume and evaluate COCO detectors on a pre-trained backbone."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from jcl.commands.context import RunContext, console_of
from jcl.commands.detection_job import DetectionJob, absolute_paths, open_initial_backbone, resolve_settings
from jcl.console import pluralize
from jcl.cores import usual_workers
from jcl.distributed.group import Ranks, fail_together, joined_ranks
from jcl.distributed.launch import launch_environment
from jcl.errors import Interrupted, JclError, RunError
from jcl.evaluate.detection.batches import training_batches
from jcl.evaluate.detection.data import coco_module
from jcl.evaluate.detection.folder import DetectionFolder
from jcl.evaluate.detection.model import build_optimizer
from jcl.evaluate.detection.training import KEPT_CHECKPOINTS, LOG_ITERATIONS, DetectionTask
from jcl.runs.checkpoint import Progress, checkpoint_to_resume, load_checkpoint, newest_checkpoint
from jcl.runs.folder import numbered_folders
from jcl.runs.lock import held
from jcl.runs.metrics import NullRecord, Record
from jcl.runs.saver import CheckpointSaver, NullSaver
from jcl.settings.detection import RANK_TIMEOUT, DetectionSettings
from jcl.train.display import Display
from jcl.train.trainer import Trainer


def detect(
    values: dict[str, Any],
    *,
    out: Path | None = None,
    pictures: int = 6,
    workers: int | None = None,
    console: Console | None = None,
) -> DetectionFolder:
    """Train and evaluate a detector into the folder `out` (default: a new one under `runs/`).

    `values` are those of `DetectionSettings` that differ from the paper's; `task`, `init` and `coco` are required. The
    default learning rate is 0.02 for a batch of 16, in proportion to the batch.
    """
    with joined_ranks(str(values.get("device", "auto")), _rank_timeout(values)) as (ranks, device):
        context = _context(ranks, device, console)
        workers = usual_workers() if workers is None else workers
        again = ranks.any(launch_environment().restarts > 0)
        begun = _unfinished_folder(values) if again and ranks.first and out is None else None
        known = ranks.from_first(str(out or begun or "").encode()).decode()
        if ranks.any(again and known != "" and DetectionFolder(known).settings_file.exists()):
            return _resume(DetectionFolder(known), context, workers, pictures)

        def prepare() -> DetectionJob:
            coco_module("cocoeval")
            if known:
                DetectionFolder(known).refuse_occupied()
            start = open_initial_backbone(values["init"], values.get("backbone"), int(values.get("seed", 0)))
            return DetectionJob.prepare(resolve_settings(values, start), context, workers, start)

        job = fail_together(ranks, prepare)
        wanted = Path(known or Path("runs") / _default_name(values))
        with context.starting(wanted, numbered=not known) as path, context.locked(path):
            folder = DetectionFolder(path)
            undo = folder.removed_unless_begun() if ranks.first else contextlib.nullcontext()
            with undo, folder.resumable():
                fail_together(ranks, lambda: folder.create(job.settings) if ranks.first else None)
                return _train(job, folder, pictures)


def resume_detection(
    path: Path, *, pictures: int = 6, workers: int | None = None, console: Console | None = None
) -> DetectionFolder:
    """Continue interrupted training from its newest readable checkpoint, exactly as if it had not been interrupted."""
    folder = DetectionFolder(path)
    settings = folder.settings()
    with joined_ranks(settings.device, settings.rank_timeout) as (ranks, device):
        context = _context(ranks, device, console)
        return _resume(folder, context, usual_workers() if workers is None else workers, pictures)


def evaluate_detector(
    path: Path,
    *,
    coco: dict[str, str] | None = None,
    out: Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """COCO's metrics of a checkpoint, or of the newest one of a folder, on its test images or on those of `coco`.

    With `out`, writes the results in COCO's format and `summary.json` there.
    """
    checkpoint = path if path.is_file() else newest_checkpoint(DetectionFolder(path).checkpoints)
    folder = DetectionFolder(path.parent.parent if path.is_file() else path)
    settings = folder.settings()
    if checkpoint is None:
        raise RunError(f"the detector in {folder.path} has no checkpoint yet. Train it for longer first.")
    output = None if out is None else DetectionFolder(out)
    if coco is not None:
        settings = settings.model_copy(update={"coco": absolute_paths(coco), "overfit": None})
    with joined_ranks(device, settings.rank_timeout) as (ranks, own_device):
        context = _context(ranks, own_device, console)

        def prepare() -> tuple[DetectionJob, Progress]:
            coco_module("cocoeval")
            if output is not None:
                output.refuse_occupied()
            job = DetectionJob.prepare(settings, context, usual_workers() if workers is None else workers, None)
            return job, load_checkpoint(checkpoint, job.detector, build_optimizer(job.detector, settings), own_device)

        job, progress = fail_together(ranks, prepare)
        results, figures = job.evaluate()
        if output is not None and ranks.first:
            output.write_results(results)
            summary = job.summary(figures, progress)
            del summary["train_images"]  # belongs to the test data, which may be another dataset
            output.write_summary(summary)
        return {"task": settings.task, "label": settings.label, "iterations": progress.step, **figures}


def _default_name(values: dict[str, Any]) -> str:
    return f"detect-{values['task']}"


def _rank_timeout(values: dict[str, Any]) -> float:
    """Invalid values are reported with the other settings, once the ranks are connected."""
    seconds = values.get("rank_timeout")
    return seconds if isinstance(seconds, int | float) and 0 < seconds < math.inf else RANK_TIMEOUT


def _unfinished_folder(values: dict[str, Any]) -> Path | None:
    """The newest unfinished folder with a default name and these settings that no other process uses."""
    found = [path for path in numbered_folders(Path("runs"), _default_name(values)) if not held(path)]
    if not found:
        return None
    try:
        start = open_initial_backbone(values["init"], values.get("backbone"), int(values.get("seed", 0)))
        settings = resolve_settings(values, start)
    except JclError:  # reported later
        return None
    return next((path for path in found if _begun_with(settings, DetectionFolder(path))), None)


def _begun_with(settings: DetectionSettings, folder: DetectionFolder) -> bool:
    try:
        return not folder.summary_file.exists() and folder.settings() == settings
    except JclError:
        return False


def _resume(folder: DetectionFolder, context: RunContext, workers: int, pictures: int) -> DetectionFolder:
    ranks = context.ranks
    settings = fail_together(ranks, folder.settings)
    if ranks.any(folder.summary_file.exists()):
        context.say(f"The detector in {folder.path} has finished; nothing to resume.")
        return folder

    def prepare() -> tuple[DetectionJob, Path | None]:
        checkpoint = checkpoint_to_resume(folder.checkpoints, context.say)
        start = None
        if checkpoint is None:
            start = open_initial_backbone(settings.init, settings.backbone, settings.seed)
        return DetectionJob.prepare(settings, context, workers, start), checkpoint

    with context.locked(folder.path), folder.resumable():
        job, checkpoint = fail_together(ranks, prepare)
        return _train(job, folder, pictures, checkpoint)


def _train(
    job: DetectionJob, folder: DetectionFolder, pictures: int, checkpoint: Path | None = None
) -> DetectionFolder:
    settings, context = job.settings, job.context
    ranks, device = context.ranks, context.device
    optimizer = build_optimizer(job.detector, settings)
    progress = Progress(ranks=ranks.count)
    if checkpoint is not None:
        progress = fail_together(ranks, lambda: load_checkpoint(checkpoint, job.detector, optimizer, device))
        if progress.ranks != ranks.count:
            context.say(
                f"Started on {pluralize(progress.ranks, 'rank')}, resumed on {ranks.count}: the sampled regions differ."
            )
        progress.ranks = ranks.count
    job.announce(folder.path)
    record: Record | NullRecord = NullRecord()
    saver: CheckpointSaver | NullSaver = NullSaver()
    if ranks.first:
        record = Record(folder.path, resumed_at=progress.step, tensorboard=False, warn=context.say)
        saver = CheckpointSaver(folder.checkpoints, KEPT_CHECKPOINTS, context.say)
    batches = training_batches(job.train, settings, progress.step, workers=job.workers, device=device, ranks=ranks)
    with record, saver, contextlib.closing(batches):
        Trainer(
            DetectionTask(job.detector, optimizer, batches, settings, device, job.precision, ranks),
            Display(context.console, settings.task),
            progress,
            ranks,
            record,
            saver,
            checkpoints=folder.checkpoints,
            resume_hint=folder.how_to_resume,
            log_every=LOG_ITERATIONS,
            save_every=settings.checkpoint_every,
        ).run()
    try:
        results, figures = job.evaluate()
    except KeyboardInterrupt:
        raise Interrupted(f"Stopped: training is done and saved, but not tested yet; {folder.how_to_resume}.") from None
    if ranks.first:
        folder.write_results(results)
        job.draw(folder, results, pictures)
        folder.write_summary(job.summary(figures, progress))  # last, because it marks the detector as finished
    return folder


def _context(ranks: Ranks, device: torch.device, console: Console | None) -> RunContext:
    return RunContext(ranks, device, console_of(ranks, console))
