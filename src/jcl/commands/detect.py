"""Transfer to COCO from settings to a finished folder: the parts put together.

`detect`, `resume_detection` and `evaluate_detector` are what the command calls and what Python users call.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from jcl.commands.context import console_of
from jcl.commands.detect_start import open_start
from jcl.commands.detect_work import (
    DetectionContext,
    Work,
    announce,
    draw,
    judge,
    prepare,
    summary,
    whole_paths,
    whole_settings,
)
from jcl.console import pluralize
from jcl.cores import usual_workers
from jcl.distributed.group import Ranks, fail_together, joined_ranks
from jcl.distributed.launch import launch_environment
from jcl.errors import Interrupted, JclError, RunError
from jcl.evaluate.detection.batching import training_batches
from jcl.evaluate.detection.folder import DetectionFolder
from jcl.evaluate.detection.library import coco_module
from jcl.evaluate.detection.model import build_optimiser
from jcl.evaluate.detection.settings import RANK_TIMEOUT, DetectionSettings
from jcl.evaluate.detection.training import KEPT_CHECKPOINTS, LOG_ITERATIONS, DetectionTask
from jcl.runs.checkpoint import Progress, checkpoint_to_resume, load_checkpoint, newest_checkpoint
from jcl.runs.folder import numbered_folders
from jcl.runs.lock import held
from jcl.runs.metrics import NullRecord, Record
from jcl.runs.saver import CheckpointSaver, NullSaver
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

    `values` are those of `DetectionSettings` that differ from the paper's; `task`, `init` and `coco` must be among
    them. The learning rate is 0.02 for 16 images, in proportion to the batch, unless given.
    """
    given = dict(values)
    with joined_ranks(str(given.get("device", "auto")), _rank_timeout(given)) as (ranks, device):
        context = _context(ranks, device, console, workers)
        again = ranks.any(launch_environment().restarts > 0)  # a launcher that joined anew does not know of it
        begun = _interrupted(given) if again and ranks.first and out is None else None
        known = ranks.from_first(str(out or begun or "").encode()).decode()
        if ranks.any(again and known != "" and DetectionFolder(known).settings_file.exists()):
            return _resume(DetectionFolder(known), context, pictures)

        def ready() -> tuple[DetectionSettings, Work]:
            coco_module("cocoeval")
            if known:
                DetectionFolder(known).refuse_occupied()
            start = open_start(given["init"], given.get("backbone"), int(given.get("seed", 0)))
            settings = whole_settings(given, start)
            return settings, prepare(settings, context, start)

        settings, work = fail_together(ranks, ready)
        wanted = Path(known or Path("runs") / _usual_name(given))
        with context.starting(wanted, numbered=not known) as path, context.locked(path):
            folder = DetectionFolder(path)
            cleanup = folder.removed_unless_begun() if ranks.first else contextlib.nullcontext()
            with cleanup, folder.resumable():
                fail_together(ranks, lambda: folder.create(settings) if ranks.first else None)
                return _train(settings, folder, work, context, pictures)


def resume_detection(
    path: Path, *, pictures: int = 6, workers: int | None = None, console: Console | None = None
) -> DetectionFolder:
    """Continue a stopped training from its newest readable checkpoint, exactly as if it had never stopped."""
    folder = DetectionFolder(path)
    settings = folder.settings()
    with joined_ranks(settings.device, settings.rank_timeout) as (ranks, device):
        context = _context(ranks, device, console, workers)
        return _resume(folder, context, pictures)


def evaluate_detector(
    path: Path,
    *,
    coco: dict[str, str] | None = None,
    out: Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """COCO's metrics of a checkpoint, or of the newest one of a folder, on its own test images or on those of `coco`.

    With `out` the results are written there, in COCO's submission format, and `summary.json` for `jcl detect-table`.
    """
    checkpoint = path if path.is_file() else newest_checkpoint(DetectionFolder(path).checkpoints)
    folder = DetectionFolder(path.parent.parent if path.is_file() else path)
    settings = folder.settings()
    if checkpoint is None:
        raise RunError(f"the detector in {folder.path} has no checkpoint yet; let it train for a while first.")
    kept = None if out is None else DetectionFolder(out)
    if coco is not None:
        settings = settings.model_copy(update={"coco": whole_paths(coco), "overfit": None})
    with joined_ranks(device, settings.rank_timeout) as (ranks, own_device):
        context = _context(ranks, own_device, console, workers)

        def ready() -> tuple[Work, Progress]:
            coco_module("cocoeval")
            if kept is not None:
                kept.refuse_occupied()
            work = prepare(settings, context, None)
            return work, load_checkpoint(
                checkpoint, work.detector, build_optimiser(work.detector, settings), own_device
            )

        work, progress = fail_together(ranks, ready)
        results, figures = judge(settings, work, context)
        if kept is not None and ranks.first:
            kept.write_results(results)
            found = summary(settings, work, figures, progress)
            del found["train_images"]  # of the data that it is tested on, which may be other data
            kept.write_summary(found)
        return {"task": settings.task, "label": settings.label, "iterations": progress.step, **figures}


def _usual_name(given: dict[str, Any]) -> str:
    return f"detect-{given['task']}"


def _rank_timeout(given: dict[str, Any]) -> float:
    """As it was given; what is no number of seconds is refused with the other settings, once the ranks have met."""
    seconds = given.get("rank_timeout")
    return seconds if isinstance(seconds, int | float) and 0 < seconds < math.inf else RANK_TIMEOUT


def _interrupted(given: dict[str, Any]) -> Path | None:
    """The newest unfinished folder under a name of our choice that was begun with these settings and is no other's."""
    found = [path for path in numbered_folders(Path("runs"), _usual_name(given)) if not held(path)]
    if not found:
        return None
    try:
        start = open_start(given["init"], given.get("backbone"), int(given.get("seed", 0)))
        asked = whole_settings(given, start)
    except JclError:  # what is wrong with the settings is said later
        return None
    return next((path for path in found if _begun_with(asked, DetectionFolder(path))), None)


def _begun_with(asked: DetectionSettings, folder: DetectionFolder) -> bool:
    try:
        return not folder.summary_file.exists() and folder.settings() == asked
    except JclError:  # whatever is there is not ours
        return False


def _resume(folder: DetectionFolder, context: DetectionContext, pictures: int) -> DetectionFolder:
    ranks = context.ranks
    settings = fail_together(ranks, folder.settings)
    if ranks.any(folder.summary_file.exists()):
        context.say(f"The detector in {folder.path} has finished; there is nothing to resume.")
        return folder
    with context.locked(folder.path), folder.resumable():
        checkpoint = fail_together(ranks, lambda: checkpoint_to_resume(folder.checkpoints, context.say))
        start = (
            None
            if checkpoint
            else fail_together(ranks, lambda: open_start(settings.init, settings.backbone, settings.seed))
        )
        work = fail_together(ranks, lambda: prepare(settings, context, start))
        return _train(settings, folder, work, context, pictures, checkpoint)


def _train(
    settings: DetectionSettings,
    folder: DetectionFolder,
    work: Work,
    context: DetectionContext,
    pictures: int,
    checkpoint: Path | None = None,
) -> DetectionFolder:
    ranks, device = context.ranks, context.device
    optimiser = build_optimiser(work.detector, settings)
    progress = Progress(ranks=ranks.count)
    if checkpoint is not None:
        progress = fail_together(ranks, lambda: load_checkpoint(checkpoint, work.detector, optimiser, device))
        if progress.ranks != ranks.count:
            context.say(
                f"Begun on {pluralize(progress.ranks, 'rank')} and continued on {ranks.count}: other regions "
                "will be drawn."
            )
        progress.ranks = ranks.count
    announce(settings, folder, work, context)
    record: Record | NullRecord = NullRecord()
    saver: CheckpointSaver | NullSaver = NullSaver()
    if ranks.first:
        record = Record(folder.path, resumed_at=progress.step, tensorboard=False, warn=context.say)
        saver = CheckpointSaver(folder.checkpoints, KEPT_CHECKPOINTS, context.say)
    batches = training_batches(work.train, settings, progress.step, workers=context.workers, device=device, ranks=ranks)
    with record, saver, contextlib.closing(batches):
        Trainer(
            DetectionTask(work.detector, optimiser, batches, settings, device, work.precision, ranks),
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
        results, figures = judge(settings, work, context)
    except KeyboardInterrupt:
        raise Interrupted(f"Stopped: training is done and saved, but not tested yet; {folder.how_to_resume}.") from None
    if ranks.first:
        folder.write_results(results)
        draw(settings, folder, work, results, pictures)
        folder.write_summary(summary(settings, work, figures, progress))  # last, because it marks the work as finished
    return folder


def _context(ranks: Ranks, device: torch.device, console: Console | None, workers: int | None) -> DetectionContext:
    return DetectionContext(ranks, device, console_of(ranks, console), usual_workers() if workers is None else workers)
