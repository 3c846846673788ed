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
from jcl.core.encoder import Encoder, build_backbone
from jcl.core.method import METHODS, ContrastiveLearner
from jcl.data import ArrayImages, BatchLoader, ImageData, ImageSource, UnreadableImage, open_data
from jcl.errors import DataError, RunError
from jcl.evaluate.online import online_knn
from jcl.export import backbone_info, load_backbone, save_backbone
from jcl.report.run_pictures import draw_run
from jcl.settings import Settings
from jcl.train.checkpoint import Progress, load_checkpoint, newest_checkpoint, write_atomically
from jcl.train.display import RunDisplay
from jcl.train.folder import RunFolder, free_folder
from jcl.train.loop import Training
from jcl.train.record import Record, read_metrics
from jcl.train.runtime import PeakMemory, choose_device, choose_precision
from jcl.views import ViewRecipe, view_recipe


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
    data = open_data(settings.data.location, root=Path(settings.data.root), download=settings.data.download)
    settings, choices = choose(settings, data_facts(data.train))
    device = choose_device(settings.train.device)
    folder = RunFolder(out if out is not None else free_folder(Path("runs"), f"{settings.method.name}-{data.name}"))
    # Everything that can be wrong with the settings shows while building, before the folder is touched.
    parts = _build(settings, data, device)
    folder.create(settings)
    _announce(console, settings, data, device, choices, folder)
    return _train(settings, folder, data, parts, console, label)


def resume(path: str | Path, *, console: Console | None = None) -> Run:
    """Continue the run in a folder from its newest readable checkpoint, exactly as if it had never stopped."""
    console = console or Console(stderr=True)
    folder = RunFolder(path)
    settings = folder.settings()
    if (folder.path / "summary.json").exists():
        console.print(f"The run in {folder.path} has finished; there is nothing to resume.", highlight=False)
        return Run(folder.path)
    data = open_data(settings.data.location, root=Path(settings.data.root), download=settings.data.download)
    device = choose_device(settings.train.device)
    parts = _build(settings, data, device)
    checkpoint = newest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        console.print(f"No checkpoint in {folder.checkpoints} yet: starting from the first step.", highlight=False)
    else:
        console.print(f"Resuming from {checkpoint}.", highlight=False)
    return _train(settings, folder, data, parts, console, None, checkpoint)


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
    device: torch.device
    precision: torch.dtype


def _build(settings: Settings, data: ImageData, device: torch.device) -> _Parts:
    method, model, train = settings.method, settings.model, settings.train
    loader = BatchLoader(
        data.train,
        batch_size=_number(train.batch_size),
        canvas=_number(settings.data.canvas),
        seed=train.seed,
        workers=_number(settings.data.workers),
        device=device,
        strict=settings.data.strict,
    )
    torch.manual_seed(train.seed)
    assert model.stem != "auto"
    backbone, width = build_backbone(model.backbone, stem=model.stem, image_size=_number(settings.views.image_size))
    learner = ContrastiveLearner(
        Encoder(backbone, width, head=model.head, embedding_dim=model.embedding_dim),
        METHODS[method.name],
        num_keys=method.num_keys,
        temperature=method.temperature,
        queue_size=_number(method.queue_size),
        embedding_dim=model.embedding_dim,
        key_momentum=float(method.key_momentum),
        bn_groups=_number(model.bn_groups),
        key_passes=_number(train.key_passes),
        seed=train.seed,
    ).to(device)
    optimiser = torch.optim.SGD(
        learner.query_encoder.parameters(),
        lr=float(train.lr),
        momentum=train.momentum,
        weight_decay=train.weight_decay,
        fused=device.type == "cuda",
    )
    if train.compile is True or (train.compile == "auto" and device.type == "cuda"):
        learner.query_encoder.compile()
        learner.key_encoder.compile()
    return _Parts(learner, width, optimiser, loader, device, choose_precision(settings, device))


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
                view_recipe=run_view_recipe(settings),
                device=parts.device,
                precision=parts.precision,
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
    _write_summary(run, progress, memory)
    draw_run(run.metrics, settings, data.train, run_view_recipe(settings), folder.figures)
    return run


def run_view_recipe(settings: Settings) -> ViewRecipe:
    """The views of a run, complete."""
    views = settings.views
    return view_recipe(
        views.recipe, _number(views.image_size), min_scale=views.min_scale, mean=views.mean, std=views.std
    )


def _write_skipped(folder: RunFolder, skipped: dict[str, str], console: Console) -> None:
    if not skipped:
        return
    lines = [f"{name}\t{reason}\n" for name, reason in sorted(skipped.items())]
    folder.skipped_file.write_text("".join(lines), encoding="utf-8")
    images = "1 image" if len(skipped) == 1 else f"{len(skipped):,} images"
    console.print(f"{images} could not be read and were skipped; {folder.skipped_file} lists them.", highlight=False)


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
        "images_per_second": progress.step * _number(settings.train.batch_size) / progress.seconds,
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
    console.print(
        f"Pre-training {settings.model.backbone} with {settings.method.name}{keys} on {data.train.description} "
        f"({device}), {settings.train.epochs} epochs, into {folder.path}",
        highlight=False,
    )
    for choice in choices:
        console.print(f"  {choice.name} = {choice.value}: {choice.reason}", highlight=False, markup=False)


def _number(value: int | str) -> int:
    assert isinstance(value, int), "automatic values are chosen before anything is built"
    return value
