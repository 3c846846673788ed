"""A run whose settings and images are known: its parts, the loop with them, and what is left in its folder."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from jcl.commands.context import RunContext
from jcl.commands.edited_run import choices_after, keep_to_schedule, tell_changes, tell_other_images
from jcl.commands.report import write_run_report
from jcl.commands.run import Run
from jcl.commands.run_results import machine_choices, read_choices, write_choices, write_skipped, write_summary
from jcl.console import pluralize, typed
from jcl.core.method import ContrastiveLearner
from jcl.data import BatchLoader, ImageData
from jcl.distributed.device import PeakMemory
from jcl.distributed.group import Ranks, fail_together
from jcl.distributed.heartbeat import Heartbeat
from jcl.errors import Interrupted, RunError
from jcl.evaluate.knn import online_knn
from jcl.export import backbone_info, save_backbone
from jcl.runs.checkpoint import Progress, checkpoint_to_resume, load_checkpoint
from jcl.runs.folder import RunFolder
from jcl.runs.metrics import NullRecord, Record
from jcl.runs.saver import CheckpointSaver, NullSaver
from jcl.settings.schema import Settings, known
from jcl.train.build import build_learner, build_optimiser, run_view_recipe, step_options
from jcl.train.display import RunDisplay
from jcl.train.loop import Training
from jcl.train.step import TrainingStep


@dataclass
class RunParts:
    """What takes part in a run's steps."""

    learner: ContrastiveLearner
    feature_width: int
    optimiser: torch.optim.Optimizer
    loader: BatchLoader
    step: TrainingStep
    device: torch.device


def build_parts(settings: Settings, data: ImageData, context: RunContext) -> RunParts:
    """The parts of a run; whatever cannot be built from its settings raises here, before anything is written."""
    train, device = settings.train, context.device
    learner, width = build_learner(settings, device, context.ranks)
    loader = BatchLoader(
        data.train,
        batch_size=known(train.batch_size),
        canvas=known(settings.data.canvas),
        seed=train.seed,
        workers=known(settings.data.workers),
        device=device,
        strict=settings.data.strict,
        ranks=context.ranks,
        num_keys=learner.num_keys,
    )
    optimiser = build_optimiser(settings, learner, device)
    step = TrainingStep(learner, optimiser, run_view_recipe(settings), train.seed, step_options(settings, device))
    return RunParts(learner, width, optimiser, loader, step, device)


def train_run(
    settings: Settings,
    folder: RunFolder,
    data: ImageData,
    parts: RunParts,
    context: RunContext,
    label: str | None,
    resumed: bool = False,
) -> Run:
    """Run the loop, then write the backbone and the summary."""
    ranks, memory = context.ranks, PeakMemory(parts.device)
    progress = _restored(folder, parts, context) if resumed else Progress(ranks=ranks.count)
    tell_changes(progress, settings, context.say)
    # Only the first rank writes checkpoints, and speaks.
    fail_together(ranks, lambda: tell_other_images(progress, data, context.say) if ranks.first else None)
    fail_together(ranks, lambda: keep_to_schedule(progress, parts.loader.steps_per_epoch, settings, context.say))
    if resumed:
        fail_together(ranks, lambda: _renew_choices(folder, settings, context.device) if ranks.first else None)
    display = RunDisplay(context.console, settings, label or settings.method.name)
    backbone = parts.learner.query_encoder.backbone
    record, saver = _writers(settings, folder, ranks, progress, display)
    not_measured: dict[str, str] = {}  # images that kNN met, among them those to test with, which nothing else reads
    try:
        with record, display, saver, Heartbeat(ranks) as heartbeat:
            Training(
                settings=settings,
                folder=folder,
                learner=parts.learner,
                optimiser=parts.optimiser,
                loader=parts.loader,
                step=parts.step,
                saver=saver,
                record=record,
                display=display,
                heartbeat=heartbeat,
                measure=online_knn(data, backbone, settings, parts.device, ranks, not_measured),
                progress=progress,
            ).run()
    finally:
        parts.loader.close()
        if ranks.first:
            write_skipped(folder, not_measured | parts.loader.skipped, context.say, resumed=resumed)

    def write_results() -> None:
        save_backbone(backbone, backbone_info(settings, parts.feature_width), folder.backbone_file)
        # Last, because it marks the run as finished.
        write_summary(folder, settings, record.newest, progress, memory.read())

    try:
        fail_together(ranks, lambda: write_results() if ranks.first else None)
    except KeyboardInterrupt:
        raise Interrupted(
            f"Ctrl-C received: the run is trained and saved, but its results are not written yet; "
            f"have that done with `{folder.how_to_resume}`."
        ) from None
    if ranks.first and settings.record.report:
        _write_page(folder, data, context)
    return Run(folder.path)


def _restored(folder: RunFolder, parts: RunParts, context: RunContext) -> Progress:
    """The state of the newest good checkpoint, which the first rank reads and hands to the others."""
    ranks = context.ranks
    path = fail_together(ranks, lambda: checkpoint_to_resume(folder.checkpoints, context.say) if ranks.first else None)
    content = ranks.from_first(
        fail_together(ranks, lambda: b"" if path is None or ranks.count == 1 else _content(path))
    )
    if ranks.first:
        progress = Progress() if path is None else _loaded(path, parts)
    elif not content:
        progress = Progress()
    else:
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as received:
            received.write(content)
            received.flush()
            progress = _loaded(Path(received.name), parts)
    if path is not None and progress.ranks != ranks.count:
        context.say(
            f"The run was on {pluralize(progress.ranks, 'rank')} and goes on on {pluralize(ranks.count, 'rank')}: "
            "batches, views and shuffles stay as they were, and results differ by rounding only."
        )
    progress.ranks = ranks.count
    return progress


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:  # as a sentence, for which the other ranks wait
        raise RunError(f"the checkpoint {path} cannot be read: {error.strerror}.") from None


def _loaded(path: Path, parts: RunParts) -> Progress:
    return load_checkpoint(path, parts.learner, parts.optimiser, parts.device)


def _renew_choices(folder: RunFolder, settings: Settings, device: torch.device) -> None:
    """The page is to show what was chosen for the run as it goes on: its settings and the machine may be others."""
    before = read_choices(folder)
    if before is not None:
        write_choices(folder, [*choices_after(before, settings), *machine_choices(settings, device)])


def _writers(
    settings: Settings, folder: RunFolder, ranks: Ranks, progress: Progress, display: RunDisplay
) -> tuple[Record | NullRecord, CheckpointSaver | NullSaver]:
    if not ranks.first:
        return NullRecord(), NullSaver()
    tensorboard = settings.record.tensorboard
    return (
        Record(folder.path, resumed_at=progress.step, tensorboard=tensorboard, warn=display.warn),
        CheckpointSaver(folder.checkpoints, settings.record.keep, display.warn),
    )


def _write_page(folder: RunFolder, data: ImageData, context: RunContext) -> None:
    """The page is an extra: whatever goes wrong with it, the run has finished and all else is written."""
    try:
        write_run_report(folder.path, data, context.device)
    except KeyboardInterrupt:
        raise Interrupted(
            f"Ctrl-C received: the run has finished and only its page is missing; "
            f"have it made with `jcl report {typed(folder.path)}`."
        ) from None
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        context.say(f"The page {folder.report_file} could not be made: {reason}")
