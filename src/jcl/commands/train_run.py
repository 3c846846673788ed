"""A run with resolved settings and opened data: build its parts, train, and write its results."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from jcl.commands.run import Run, RunContext, read_choices, write_choices, write_classes, write_summary
from jcl.console import pluralize, shell_quote
from jcl.core.encoder import backbone_traits
from jcl.core.method import METHODS, ContrastiveLearner
from jcl.data import BatchLoader, ImageData
from jcl.data.shards.fetch import without_secrets
from jcl.data.source import fingerprint
from jcl.distributed.device import PeakMemory
from jcl.distributed.group import fail_together
from jcl.errors import Interrupted, OutOfMemory, RunError, first_line
from jcl.evaluate.baselines import baseline_warning
from jcl.evaluate.knn import KnnResult, online_knn
from jcl.export import backbone_info, save_backbone
from jcl.export.loading import initial_tensors, read_initial
from jcl.export.reading import WeightsFile
from jcl.runs.checkpoint import Progress, checkpoint_to_resume, load_checkpoint
from jcl.runs.folder import RunFolder
from jcl.runs.json_object import describe_differences, format_value
from jcl.runs.trackers import Tracker, open_tracker
from jcl.settings.resolved import Choice, ResolvedSettings
from jcl.settings.schema import affects_results, setting_names, values_of, with_values
from jcl.studies.distribution import online_quality
from jcl.train.build import build_learner, build_optimizer, run_view_recipe, step_options
from jcl.train.display import Display, health
from jcl.train.pretrain import PretrainTask
from jcl.train.profile import faster_options
from jcl.train.step import TrainingStep
from jcl.train.trainer import Trainer

_SECTIONS = ("views.", "model.", "method.", "train.")


@dataclass
class RunParts:
    """The objects that the training steps of a run use."""

    learner: ContrastiveLearner
    feature_width: int
    optimizer: torch.optim.Optimizer
    loader: BatchLoader
    step: TrainingStep


def build_parts(settings: ResolvedSettings, data: ImageData, context: RunContext) -> RunParts:
    """Build the parts of a run. Invalid settings raise here, before anything is written."""
    train, device = settings.train, context.device
    learner, width = build_learner(settings, device, context.ranks)
    loader = BatchLoader(
        data.train,
        batch_size=train.batch_size,
        canvas=settings.data.canvas,
        windows=settings.data.windows,
        seed=train.seed,
        workers=settings.data.workers,
        device=device,
        strict=settings.data.strict,
        max_failed_share=settings.data.max_failed_share,
        ranks=context.ranks,
        num_keys=learner.num_keys,
    )
    optimizer = build_optimizer(settings, learner, device)
    step = TrainingStep(learner, optimizer, run_view_recipe(settings), train.seed, step_options(settings, device))
    return RunParts(learner, width, optimizer, loader, step)


def train_run(
    settings: ResolvedSettings,
    folder: RunFolder,
    data: ImageData,
    parts: RunParts,
    context: RunContext,
    label: str | None,
    resumed: bool = False,
) -> Run:
    """Train, then write the backbone, the summary and the page."""
    ranks = context.ranks
    progress = _restore(settings, folder, parts, context) if resumed else Progress(ranks=ranks.count)
    _compare_with_checkpoint(progress, settings, data, parts, context)
    if resumed:
        fail_together(ranks, lambda: _update_choices(folder, settings, context.device) if ranks.first else None)

    def track() -> Tracker | None:
        if not ranks.first or settings.record.track == "none":
            return None
        name, run_id = settings.record.track, folder.identify(progress.run)
        public = with_values(settings, {"data.location": without_secrets(settings.data.location)})
        tracker = open_tracker(name, folder.path.resolve(), run_id, public, resumed=resumed, warn=context.log)
        return opened.enter_context(tracker) if tracker else None

    with contextlib.ExitStack() as opened:
        tracker = fail_together(ranks, track)
        _train(settings, folder, data, parts, context, progress, label or settings.method.name, tracker, resumed)
        if ranks.first and settings.record.report:
            _write_page(folder, data, context)
        if tracker is not None:
            tracker.add_page(folder.report_file)
    return Run(folder.path)


def _train(
    settings: ResolvedSettings,
    folder: RunFolder,
    data: ImageData,
    parts: RunParts,
    context: RunContext,
    progress: Progress,
    label: str,
    tracker: Tracker | None,
    resumed: bool,
) -> None:
    """Train, then write the backbone and the summary."""
    ranks, memory = context.ranks, PeakMemory(context.device)
    describe = partial(health, queue_size=settings.method.queue_size, embedding_dim=settings.model.embedding_dim)
    faster = partial(faster_options, settings, context.device)
    display = Display(context.console, label, describe, faster)
    backbone = parts.learner.query_encoder.backbone
    unreadable: dict[str, str] = {}  # images that only kNN reads
    measured: list[KnnResult] = []
    knn = online_knn(data, backbone, settings, context.device, ranks, unreadable, measured.append)
    evaluate = {} if knn is None else {"knn": knn}
    evaluate["quality"] = online_quality(data.train, backbone, settings, context.device, unreadable)
    trainer = Trainer(
        PretrainTask(settings, parts.step, parts.loader, evaluate),
        display,
        progress,
        ranks,
        log_every=settings.record.log_every,
        save_every=settings.record.checkpoint_every * parts.loader.steps_per_epoch,
        save_seconds=60 * settings.record.checkpoint_minutes,
    )
    record, recorders = settings.record, [] if tracker is None else [tracker]
    try:
        with trainer.writing_to(folder, record.keep, tensorboard=record.tensorboard, recorders=recorders):
            trainer.run()
    except torch.OutOfMemoryError as error:
        raise out_of_memory(settings, folder, error) from None
    finally:
        parts.loader.close()
        if ranks.first and folder.checkpoints.exists():  # otherwise unusable data has left nothing behind
            folder.list_skipped(unreadable | parts.loader.skipped, context.log, overwrite=not resumed)

    def write_results() -> None:
        save_backbone(backbone, backbone_info(settings, parts.feature_width), folder.backbone_file)
        if measured:
            write_classes(folder, data.train, measured[-1])
        # Last: the summary marks the run as finished.
        summary = write_summary(folder, settings, trainer.record, progress, memory.read())
        if warning := baseline_warning("knn_top1", summary, "Train longer or on more images."):
            context.log(f"Warning: {warning}")

    saved = f"The run is trained and saved; write its results with `{folder.resume_command}`."
    try:
        fail_together(ranks, lambda: write_results() if ranks.first else None)
    except KeyboardInterrupt:
        raise Interrupted(f"Stopped: the results are not written yet. {saved}") from None
    except RunError as error:
        raise type(error)(f"{error} {saved}") from None


def load_initial(
    settings: ResolvedSettings, learner: ContrastiveLearner, context: RunContext, weights: WeightsFile | None = None
) -> list[str]:
    """Load `model.init` into both encoders: the first rank reads it, unless it has, and sends it to the others.

    Returns what was loaded and what was not, on the first rank.
    """
    ranks = context.ranks

    def read() -> tuple[dict[str, Tensor], list[str]]:
        found = (weights or read_initial(settings)) if ranks.first else None
        return initial_tensors(found, settings, learner.query_encoder.backbone) if found else ({}, [])

    tensors, lines = fail_together(ranks, read)
    if ranks.any(bool(tensors)):
        tensors = safetensors.torch.load(ranks.broadcast_bytes(safetensors.torch.save(tensors)))
        for encoder in (learner.query_encoder, learner.key_encoder):
            encoder.get_submodule("backbone").load_state_dict(tensors, strict=False)
    return lines


def out_of_memory(settings: ResolvedSettings, folder: RunFolder, error: torch.OutOfMemoryError) -> OutOfMemory:
    """An error that names the option to use: one that gives the same results if possible."""
    batch, accumulate = settings.train.batch_size, 2 * settings.train.accumulate
    groups = settings.model.bn_groups if backbone_traits(settings.model.backbone).batch_norm else batch
    advice = f"use --accumulate {accumulate}, which gives the same results"
    if METHODS[settings.method.name].gradient_through_keys or batch % accumulate or batch < 2 * accumulate:
        advice = f"use --batch-size {max(2, batch // 2)}"
    elif groups % accumulate:
        advice = f"use --accumulate {accumulate} --set model.bn_groups={accumulate}"
    elif folder.checkpoints.exists():
        advice = f"set train.accumulate to {accumulate} in {folder.settings_file}, then {folder.how_to_resume}"
    problem = ". ".join(str(error).split(". ")[:2]).rstrip(".")
    return OutOfMemory(f"{problem}; {advice}, or free memory that other programs hold.")


def _restore(settings: ResolvedSettings, folder: RunFolder, parts: RunParts, context: RunContext) -> Progress:
    """Load the newest good checkpoint; the first rank reads it and sends it to the others."""
    ranks = context.ranks

    def content() -> bytes:
        try:
            return path.read_bytes() if path and ranks.count > 1 else b""
        except OSError as error:
            raise RunError(f"The checkpoint {path} cannot be read: {error.strerror}.") from None

    path = fail_together(ranks, lambda: checkpoint_to_resume(folder.checkpoints, context.log) if ranks.first else None)
    received = ranks.broadcast_bytes(fail_together(ranks, content))
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as copy:
        if received and not ranks.first:
            copy.write(received)
            copy.flush()
            path = Path(copy.name)
        if path is None:  # the run stopped before its first checkpoint
            load_initial(settings, parts.learner, context)
            return Progress(ranks=ranks.count)
        progress = load_checkpoint(path, parts.learner, parts.optimizer, context.device)
    if progress.ranks != ranks.count:
        context.log(
            f"Resuming on {pluralize(ranks.count, 'rank')} a run started on {progress.ranks}: batches, views and "
            "shuffles stay the same; results differ by rounding only."
        )
    progress.ranks = ranks.count
    return progress


def _compare_with_checkpoint(
    progress: Progress, settings: ResolvedSettings, data: ImageData, parts: RunParts, context: RunContext
) -> None:
    """Print what has changed since the checkpoint was written, and raise if the run cannot continue with it."""
    ranks, log = context.ranks, context.log
    names = [name for name in setting_names() if name.startswith(_SECTIONS) and affects_results(name)]
    names.remove("model.bn_groups")  # adapted to the number of ranks
    before, now = progress.settings, values_of(settings, names)
    both = [name for name in names if name in before]  # versions may differ in the settings they have
    progress.settings = now
    if other := describe_differences({name: before[name] for name in both}, {name: now[name] for name in both}):
        log(f"Settings have changed since the checkpoint was written: {other}.")
    # Only the first rank writes checkpoints, so only it needs the fingerprints.
    fail_together(ranks, lambda: _report_changed_images(progress, data, log) if ranks.first else None)
    fail_together(ranks, lambda: _check_schedule(progress, parts.loader.steps_per_epoch, settings, log))


def _report_changed_images(progress: Progress, data: ImageData, log: Callable[[str], None]) -> None:
    before, progress.images = progress.images, {}
    for images, kind in ((data.train, "train"), (data.test, "test")):
        if images is None:
            continue
        now = {
            f"{kind} listing": ("number, names or labels", fingerprint(images, "listing")),
            f"{kind} files": ("file sizes", fingerprint(images, "files")),
            f"{kind} content": ("pixels (or their decoder)", fingerprint(images, "content")),
        }
        progress.images |= {what: found for what, (_, found) in now.items()}
        changed = [words for what, (words, found) in now.items() if before.get(what, found) != found]
        if changed:  # with another listing other images are sampled, so only the first difference is one
            log(
                f"The {changed[0]} of {images.description} have changed since the checkpoint was written. "
                "The run continues with the current images."
            )


def _check_schedule(
    progress: Progress, steps_per_epoch: int, settings: ResolvedSettings, log: Callable[[str], None]
) -> None:
    before, progress.steps_per_epoch = progress.steps_per_epoch, steps_per_epoch
    total, changed = settings.train.epochs * steps_per_epoch, ""
    if before not in (0, steps_per_epoch):
        changed = (
            f"An epoch had {pluralize(before, 'step')} and now has {steps_per_epoch:,}, "
            "because train.batch_size or the number of images has changed."
        )
    if progress.step > total:
        raise RunError(
            f"The run is at step {progress.step:,}, beyond the {total:,} steps of {settings.train.epochs:,} epochs. "
            f"{changed + ' ' if changed else ''}Undo the change, or start a new run."
        )
    if changed:
        now = progress.step / steps_per_epoch
        log(f"{changed} The run was at epoch {progress.step / before:.3g} and is at {now:.3g}.")


def machine_choices(settings: ResolvedSettings, device: torch.device) -> list[Choice]:
    """What "auto" means for settings that depend on the machine, and are resolved again whenever a run starts."""
    options = step_options(settings, device)
    on_gpu = device.type == "cuda"
    choices = [
        Choice("train.device", str(device), "a GPU is available" if on_gpu else "no GPU is available"),
        Choice("train.precision", str(options.precision).removeprefix("torch."), "fastest safe choice on this device"),
        Choice("train.compile", options.compiled, "faster on a GPU" if on_gpu else "not worth it on a CPU"),
        Choice("train.cuda_graph", options.recorded, "faster on a GPU" if on_gpu else "needs a GPU"),
    ]
    return [choice for choice in choices if getattr(settings.train, choice.name.partition(".")[2]) == "auto"]


def _update_choices(folder: RunFolder, settings: ResolvedSettings, device: torch.device) -> None:
    """Bring `choices.json`, which the page shows, up to date with edited settings and this machine."""
    before, now, choices = read_choices(folder), values_of(settings, setting_names()), []
    if before is None:
        return
    for choice in before:
        value = now.get(choice.name, choice.value)
        if value != choice.value:
            choice = replace(choice, value=value, reason=f"was {format_value(choice.value)} before the run was resumed")
        if value != "auto":
            choices.append(choice)
    write_choices(folder, [*choices, *machine_choices(settings, device)])


def _write_page(folder: RunFolder, data: ImageData, context: RunContext) -> None:
    """Write the page; if that fails, the run is finished nevertheless."""
    try:
        from jcl.commands.report import write_report  # Matplotlib would make every command start a second later

        write_report([folder.path], folder.report_file, device=str(context.device), data=data, force=True)
    except KeyboardInterrupt:
        raise Interrupted(
            f"Stopped: the run is finished, only its page is missing; "
            f"write it with `jcl report {shell_quote(folder.path)}`."
        ) from None
    except Exception as error:
        context.log(f"Could not write the page {folder.report_file}: {first_line(error)}.")
