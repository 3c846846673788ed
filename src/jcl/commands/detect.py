"""Train, resume and evaluate COCO detectors on a pre-trained backbone."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

from rich.console import Console

from jcl.commands.detection_job import DetectionJob, InitialBackbone, open_initial_backbone
from jcl.commands.run import RunContext, run_context
from jcl.console import pluralize
from jcl.distributed.group import fail_together
from jcl.errors import RunError
from jcl.evaluate.detection.batches import training_batches
from jcl.evaluate.detection.data import coco_module
from jcl.evaluate.detection.model import DetectionTask
from jcl.evaluate.folders import DetectionFolder
from jcl.runs.atomic import make_folder
from jcl.runs.checkpoint import Progress, checkpoint_to_resume, newest_checkpoint
from jcl.runs.folder import unfinished_folder
from jcl.settings.detection import RANK_TIMEOUT, DetectionSettings, DetectOptions
from jcl.train.display import Display
from jcl.train.trainer import Trainer


def detect(options: DetectOptions, *, console: Console | None = None) -> DetectionFolder:
    """Train and evaluate a detector into the folder `out` (default: a new one under `runs/`)."""
    numbered = options.out is None
    wanted = DetectionFolder(options.out or Path("runs") / f"detect-{options.values['task']}")
    with run_context(options.device, RANK_TIMEOUT, console) as context:
        ranks = context.ranks

        def find() -> DetectionFolder | None:
            asked = functools.cache(lambda: _settings(options, open_initial_backbone(**options.values)))
            return unfinished_folder(wanted, lambda found: found.settings() == asked()) if numbered else wanted

        if (begun := context.folder_to_continue(find)) is not None:
            return _resume(DetectionFolder(begun), options, context)

        def prepare() -> DetectionJob:
            coco_module("cocoeval")
            if ranks.first and not numbered:
                wanted.refuse_occupied()
            start = open_initial_backbone(**options.values)
            return DetectionJob(_settings(options, start), context, options.workers, start)

        job = fail_together(ranks, prepare)
        with context.new_folder(wanted.path, numbered=numbered) as path, context.locked(path):
            folder = DetectionFolder(path)
            cleanup = folder.cleanup_unless_started() if ranks.first else contextlib.nullcontext()
            with cleanup, folder.resumable():
                fail_together(ranks, lambda: folder.create(job.settings) if ranks.first else None)
                return _train(job, folder, options.pictures)


def _settings(options: DetectOptions, start: InitialBackbone) -> DetectionSettings:
    return options.settings(backbone=start.name, mean=start.mean, std=start.std, label=start.label)


def resume_detection(path: Path, options: DetectOptions, *, console: Console | None = None) -> DetectionFolder:
    """Continue the training in a folder, exactly as if it had not been interrupted."""
    folder = DetectionFolder(path)
    settings = folder.settings()
    with run_context(settings.device, settings.rank_timeout, console) as context:
        return _resume(folder, options, context)


def evaluate_detector(path: Path, options: DetectOptions, *, console: Console | None = None) -> dict[str, Any]:
    """COCO's metrics of a checkpoint, or of the newest one of a folder.

    The test images are those of the training or, if given, of the options. With `out`, writes the results in COCO's
    format and `summary.json` there.
    """
    checkpoint = path if path.is_file() else newest_checkpoint(DetectionFolder(path).checkpoints)
    folder = DetectionFolder(path.parent.parent if path.is_file() else path)
    settings = folder.settings()
    if checkpoint is None:
        raise RunError(f"The detector in {folder.path} has no checkpoint yet. Train it for longer first.")
    output = None if options.out is None else DetectionFolder(options.out)
    if (coco := options.coco()) is not None:
        settings = settings.model_copy(update={"coco": coco, "overfit": None})
    with run_context(options.device, settings.rank_timeout, console) as context:
        ranks = context.ranks

        def prepare() -> tuple[DetectionJob, Progress]:
            coco_module("cocoeval")
            if output is not None:
                output.refuse_occupied()
            job = DetectionJob(settings, context, options.workers, None)
            return job, job.load(checkpoint)

        job, progress = fail_together(ranks, prepare)
        results, figures = job.evaluate()
        if output is not None and ranks.first:
            with make_folder(output.path):
                output.write_results(results)
            summary = job.summary(figures, progress)
            del summary["train_images"]  # belongs to the test data, which may be another dataset
            output.write_summary(summary)
        return {"task": settings.task, "label": settings.label, "iterations": progress.step, **figures}


def _resume(folder: DetectionFolder, options: DetectOptions, context: RunContext) -> DetectionFolder:
    ranks = context.ranks
    settings = fail_together(ranks, folder.settings)
    if ranks.any(folder.summary_file.exists()):
        context.log(f"The detector in {folder.path} has finished; nothing to resume.")
        return folder

    def prepare() -> tuple[DetectionJob, Path | None]:
        folder.refuse_links()
        checkpoint = checkpoint_to_resume(folder.checkpoints, context.log)
        start = None if checkpoint else open_initial_backbone(settings.init, settings.backbone, settings.seed)
        return DetectionJob(settings, context, options.workers, start), checkpoint

    with context.locked(folder.path), folder.resumable():
        job, checkpoint = fail_together(ranks, prepare)
        return _train(job, folder, options.pictures, checkpoint)


def _train(
    job: DetectionJob, folder: DetectionFolder, pictures: int, checkpoint: Path | None = None
) -> DetectionFolder:
    settings, context, ranks = job.settings, job.context, job.context.ranks
    progress = Progress(ranks=ranks.count)
    if checkpoint is not None:
        progress = fail_together(ranks, lambda: job.load(checkpoint))
        if progress.ranks != ranks.count:
            context.log(
                f"Started on {pluralize(progress.ranks, 'rank')}, resumed on {ranks.count}: the sampled regions differ."
            )
        progress.ranks = ranks.count
    job.announce(folder.path)
    batches = training_batches(job.train, settings, progress.step, job.hardware)
    task = DetectionTask(job.detector, job.optimizer, batches, settings, job.hardware)
    display = Display(context.console, settings.task)
    trainer = Trainer(task, display, progress, ranks, save_every=settings.checkpoint_every)
    with contextlib.closing(batches), trainer.writing_to(folder):
        trainer.run()
    results, figures = job.evaluate()
    if ranks.first:
        folder.write_results(results)
        job.draw(folder, results, pictures)
        folder.write_summary(job.summary(figures, progress))  # last, because it marks the detector as finished
    return folder
