"""Pre-training from settings to a finished run folder: the parts put together.

`pretrain` and `resume` are what the commands call and what Python users call.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from jcl.automatic import Choice, DataFacts, choose
from jcl.building import build_learner, build_optimiser, known, run_view_recipe, step_options
from jcl.core.method import METHODS, ContrastiveLearner
from jcl.data import ArrayImages, BatchLoader, ImageData, ImageSource, UnreadableImage, open_data
from jcl.data.opening import KNOWN_SETS
from jcl.data.subset import class_list
from jcl.errors import DataError, RunError, SettingsError
from jcl.evaluate.online import online_knn
from jcl.exchange import backbone_info, load_backbone, save_backbone
from jcl.report.run_pictures import draw_run
from jcl.settings import Settings, with_values
from jcl.train.checkpoint import Progress, load_checkpoint, newest_checkpoint, write_atomically
from jcl.train.display import RunDisplay
from jcl.train.folder import RunFolder, free_folder
from jcl.train.loop import Training
from jcl.train.profile import StepProfile, profile_steps
from jcl.train.record import Record, read_metrics
from jcl.train.runtime import PeakMemory, choose_device
from jcl.train.step import TrainingStep


@dataclass(frozen=True)
class Run:
    """A run folder and what it holds."""

    path: Path

    @property
    def settings(self) -> Settings:
        return RunFolder(self.path).settings()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every line of `metrics.jsonl`."""
        return read_metrics(RunFolder(self.path).metrics_file)

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of a finished run, flat, with plain names."""
        file = self.path / "summary.json"
        if not file.exists():
            raise RunError(f"the run in {self.path} has not finished; continue it with `jcl resume {self.path}`.")
        summary: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return summary

    def backbone(self) -> nn.Module:
        """The pre-trained backbone, giving pooled features."""
        return load_backbone(self.path)


def pretrain(
    settings: Settings, out: str | Path | None = None, *, console: Console | None = None, label: str | None = None
) -> Run:
    """Train by `settings` into the folder `out`, which must not hold a run yet (default: a new one under `runs/`).

    Progress goes to `console` (default: standard error; `Console(quiet=True)` for none).
    """
    console = console or Console(stderr=True)
    settings = _with_whole_path(settings)
    data = open_run_data(settings, console)
    settings, choices = choose(settings, data_facts(data.train))
    device = choose_device(settings.train.device)
    folder = RunFolder(out if out is not None else free_folder(Path("runs"), f"{settings.method.name}-{data.name}"))
    _keep_apart(folder, settings)
    # Everything that can be wrong with the settings shows while building, before the folder is touched.
    parts = _build(settings, data, device)
    folder.create(settings)
    _announce(console, settings, data, device, choices, folder)
    try:
        return _train(settings, folder, data, parts, console, label)
    except DataError:
        folder.forget_unless_begun()  # so that the same command can be given again once the data is mended
        raise


def profile(settings: Settings, *, console: Console | None = None) -> StepProfile:
    """Train for a few steps only, with a clock at every part of a step; no run folder is written."""
    console = console or Console(stderr=True)
    data = open_run_data(settings, console)
    settings, _ = choose(settings, data_facts(data.train))
    # The replay of a recorded step has no parts to be seen.
    parts = _build(with_values(settings, {"train.cuda_graph": False}), data, choose_device(settings.train.device))
    with parts.loader:
        return profile_steps(parts.step, parts.loader)


def open_run_data(settings: Settings, console: Console) -> ImageData:
    """The images that the settings name."""
    data = settings.data
    if not data.location:
        raise SettingsError("say which images to train on, for example: jcl pretrain photos/.")
    return open_data(
        data.location,
        root=Path(data.root) if data.root else None,
        download=data.download,
        classes=class_list(data.subset) if data.subset else None,
        progress=lambda message: _say(console, message),
    )


def resume(path: str | Path, *, console: Console | None = None) -> Run:
    """Continue the run in a folder from its newest readable checkpoint, exactly as if it had never stopped."""
    console = console or Console(stderr=True)
    folder = RunFolder(path)
    settings = folder.settings()
    if (folder.path / "summary.json").exists():
        _say(console, f"The run in {folder.path} has finished; there is nothing to resume.")
        return Run(folder.path)
    data = open_run_data(settings, console)
    device = choose_device(settings.train.device)
    parts = _build(settings, data, device)
    checkpoint = newest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        _say(console, f"No checkpoint in {folder.checkpoints} yet: starting from the first step.")
    else:
        _say(console, f"Resuming from {checkpoint}.")
    return _train(settings, folder, data, parts, console, None, checkpoint)


def _with_whole_path(settings: Settings) -> Settings:
    """A folder or file by its whole path, so that a run can be resumed from anywhere; a data set's name stays one."""
    location = settings.data.location
    path = Path(location).expanduser()
    if not location or location in KNOWN_SETS or not path.exists():
        return settings
    return with_values(settings, {"data.location": str(path.resolve())})


def _keep_apart(folder: RunFolder, settings: Settings) -> None:
    """A run inside the images' folder would train on its own pictures when it is resumed."""
    data = Path(settings.data.location)
    if data.is_dir() and folder.path.resolve().is_relative_to(data):
        raise RunError(f"the run folder {folder.path} lies inside the images' folder {data}; choose another --out.")


def data_facts(source: ImageSource) -> DataFacts:
    """What automatic settings need to know; of a large folder a few images tell the typical size."""
    if isinstance(source, ArrayImages):
        return DataFacts(images=len(source), short_side=min(source.pixels.shape[2:]), decoded=True)
    return DataFacts(images=len(source), short_side=_typical_short_side(source), decoded=False)


def _typical_short_side(source: ImageSource, probes: int = 32) -> int:
    """The median short side in pixels of a few images spread over the source."""
    sides = []
    for probe in range(min(probes, len(source))):
        with contextlib.suppress(UnreadableImage):
            sides.append(min(source.read(probe * len(source) // min(probes, len(source))).shape[1:]))
    if not sides:
        raise DataError(f"none of the images tried can be read ({source.description}); `jcl check` lists the reasons.")
    return sorted(sides)[len(sides) // 2]


@dataclass
class _Parts:
    learner: ContrastiveLearner
    feature_width: int
    optimiser: torch.optim.Optimizer
    loader: BatchLoader
    step: TrainingStep
    device: torch.device


def _build(settings: Settings, data: ImageData, device: torch.device) -> _Parts:
    train = settings.train
    loader = BatchLoader(
        data.train,
        batch_size=known(train.batch_size),
        canvas=known(settings.data.canvas),
        seed=train.seed,
        workers=known(settings.data.workers),
        device=device,
        strict=settings.data.strict,
    )
    learner, width = build_learner(settings, device)
    optimiser = build_optimiser(settings, learner, device)
    step = TrainingStep(learner, optimiser, run_view_recipe(settings), train.seed, step_options(settings, device))
    return _Parts(learner, width, optimiser, loader, step, device)


def _train(
    settings: Settings,
    folder: RunFolder,
    data: ImageData,
    parts: _Parts,
    console: Console,
    label: str | None,
    checkpoint: Path | None = None,
) -> Run:
    """Run the loop, then write the backbone, the summary and the pictures."""
    memory = PeakMemory(parts.device)
    progress = Progress()
    if checkpoint is not None:
        progress = load_checkpoint(checkpoint, parts.learner, parts.optimiser, parts.device)
    display = RunDisplay(console, settings, label or settings.method.name)
    backbone = parts.learner.query_encoder.backbone
    try:
        with Record(folder.path, resumed_at=progress.step, tensorboard=settings.record.tensorboard) as record, display:
            Training(
                settings=settings,
                folder=folder,
                learner=parts.learner,
                optimiser=parts.optimiser,
                loader=parts.loader,
                step=parts.step,
                record=record,
                display=display,
                measure=online_knn(data, backbone, settings, parts.device),
                progress=progress,
            ).run()
    finally:
        parts.loader.close()
        _write_skipped(folder, parts.loader.skipped, console)
    save_backbone(backbone, backbone_info(settings, parts.feature_width), folder.backbone_file)
    run = Run(folder.path)
    draw_run(run.metrics, settings, data.train, run_view_recipe(settings), folder.figures)
    _write_summary(run, progress, memory)  # last, because it marks the run as finished
    return run


def _write_skipped(folder: RunFolder, skipped: dict[str, str], console: Console) -> None:
    if not skipped:
        return
    lines = [f"{name}\t{reason}\n" for name, reason in sorted(skipped.items())]
    folder.skipped_file.write_text("".join(lines), encoding="utf-8")
    images = "1 unreadable image was" if len(skipped) == 1 else f"{len(skipped):,} unreadable images were"
    _say(console, f"{images} skipped; {folder.skipped_file} lists them with the reasons.")


def _write_summary(run: Run, progress: Progress, memory: PeakMemory) -> None:
    """The figures of the finished run: one flat object with plain names."""
    train = [line for line in run.metrics if line["kind"] == "train"]
    measured = [line for line in run.metrics if line["kind"] == "knn"]
    newest = {name: value for name, value in (measured or [{}])[-1].items() if name not in ("kind", "step", "epoch")}
    settings = run.settings
    summary = {
        "method": settings.method.name,
        "data": settings.data.location,
        "seed": settings.train.seed,
        "epochs": settings.train.epochs,
        "steps": progress.step,
        "loss": train[-1]["loss"],
        "contrastive_accuracy": train[-1]["contrastive_accuracy"],
        "images_per_second": progress.step * known(settings.train.batch_size) / progress.seconds,
        "seconds": progress.seconds,
        "peak_memory_bytes": memory.read(),
        **newest,
    }
    write_atomically(run.path / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")


def _announce(
    console: Console,
    settings: Settings,
    data: ImageData,
    device: torch.device,
    choices: list[Choice],
    folder: RunFolder,
) -> None:
    """What is about to happen, and every value that was chosen for the user with the reason."""
    keys = f", {settings.method.num_keys} keys per image" if METHODS[settings.method.name].several_keys else ""
    _say(
        console,
        f"Pre-training {settings.model.backbone} with {settings.method.name}{keys} on {data.train.description} "
        f"({device}), {settings.train.epochs} epochs, into {folder.path}",
    )
    for choice in choices:
        _say(console, f"  {choice.name} = {choice.value}: {choice.reason}")


def _say(console: Console, text: str) -> None:
    """A plain line: paths may hold brackets, which are no markup, and are copied best unbroken."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
