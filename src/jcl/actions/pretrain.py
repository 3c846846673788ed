"""Pre-training from settings to a finished run folder: the parts put together.

`pretrain` and `resume` are what the commands call and what Python users call.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from jcl.actions.building import build_learner, build_optimiser, run_view_recipe, step_options
from jcl.actions.edited_run import choices_after, keep_to_schedule, tell_changes
from jcl.actions.other_work import refuse_other_work
from jcl.actions.place import Place, console_of
from jcl.actions.report import write_run_report
from jcl.actions.run_data import data_facts, keep_apart, open_run_data, with_whole_path
from jcl.actions.run_results import machine_choices, read_choices, write_choices, write_skipped, write_summary
from jcl.automatic import Choice, choose, fit_to_ranks, undecided
from jcl.core.method import ContrastiveLearner
from jcl.data import BatchLoader, ImageData
from jcl.errors import DataError, Interrupted, JclError, RunError
from jcl.evaluate.online import online_knn
from jcl.exchange import backbone_info, load_backbone, save_backbone
from jcl.ranks import ALONE, Ranks
from jcl.report.run_pictures import draw_run
from jcl.settings import Settings, TrainSettings, known, settings_from, views_in_words, with_values
from jcl.speech import counted, typed
from jcl.train.checkpoint import Progress, checkpoint_to_resume, load_checkpoint
from jcl.train.display import RunDisplay
from jcl.train.folder import RunFolder, free_folder, newest_folder
from jcl.train.heartbeat import Heartbeat
from jcl.train.json_object import read_object
from jcl.train.loop import Training
from jcl.train.profile import StepProfile, profile_steps
from jcl.train.quiet import QuietRecord, QuietSaver
from jcl.train.rank_group import agreed, joined_ranks, ranks_on_this_machine, restarted
from jcl.train.record import Record, read_metrics
from jcl.train.runtime import PeakMemory, choose_device
from jcl.train.saver import CheckpointSaver
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
            raise RunError(
                f"the run in {self.path} has not finished; continue it with `{RunFolder(self.path).how_to_resume}`."
            )
        return read_object(file)

    def backbone(self) -> nn.Module:
        """The pre-trained backbone, giving pooled features."""
        return load_backbone(self.path)


def pretrain(
    settings: Settings, out: str | Path | None = None, *, console: Console | None = None, label: str | None = None
) -> Run:
    """Train by `settings` into the folder `out`, which must not hold a run yet (default: a new one under `runs/`).

    Progress goes to `console` (default: standard error; `Console(quiet=True)` for none). Started as several ranks by
    a launcher, all of them train one model, and only the first writes and speaks.
    """
    with joined_ranks(settings.train.device, settings.train.rank_timeout) as (ranks, device):
        place = Place(ranks, device, console_of(ranks, console))
        data = _open_data(settings, place)
        parent, name = Path("runs"), f"{settings.method.name}-{data.name}"
        begun = _begun_before(RunFolder(out) if out is not None else _newest_of(settings, parent, name), ranks)
        if begun is not None:
            return _resume(begun, place)
        folder = RunFolder(out if out is not None else free_folder(parent, name))
        return _begin(settings, data, folder, place, label)


def resume(path: str | Path, *, console: Console | None = None) -> Run:
    """Continue the run in a folder from its newest readable checkpoint, exactly as if it had never stopped."""
    folder = RunFolder(path)
    # Only the first rank needs to see the folder; the others do with the usual values until they know better.
    train = folder.settings().train if folder.settings_file.is_file() else TrainSettings()
    with joined_ranks(train.device, train.rank_timeout) as (ranks, device):
        return _resume(folder.path, Place(ranks, device, console_of(ranks, console)))


def profile(settings: Settings, *, console: Console | None = None) -> StepProfile:
    """Train for a few steps only, with a clock at every part of a step; no run folder is written."""
    place = Place(ALONE, choose_device(settings.train.device), console or Console(stderr=True))
    data = open_run_data(settings, place.console)
    settings, _ = choose(settings, data_facts(data.train))
    # The replay of a recorded step has no parts to be seen.
    parts = _build(with_values(settings, {"train.cuda_graph": False}), data, place)
    with parts.loader:
        return profile_steps(parts.step, parts.loader)


def _begun_before(folder: RunFolder | None, ranks: Ranks) -> Path | None:
    """The run that the launcher interrupted by starting all ranks again, as the first rank sees it."""
    again = ranks.any(restarted())  # a launcher that joined anew does not know of it
    begun = again and folder is not None and folder.holds_run()
    path = ranks.from_first(str(folder.path).encode() if folder is not None and begun else b"")
    return Path(path.decode()) if path else None


def _newest_of(settings: Settings, parent: Path, name: str) -> RunFolder | None:
    """The newest run under a name of our choice, if it is unfinished and was begun with these settings."""
    folder = newest_folder(parent, name)
    if folder is None or (folder.path / "summary.json").exists():
        return None
    try:
        asked, found = with_whole_path(settings).model_dump(), folder.settings().model_dump()
    except JclError:  # whatever is there is not ours
        return None
    asked["model"]["bn_groups"] = "auto"  # may have been fitted to the ranks
    sections = {section: values for section, values in asked.items() if isinstance(values, dict)}
    same = all(
        value in ("auto", found[section][setting])
        for section, values in sections.items()
        for setting, value in values.items()
    )
    return folder if same else None


def _open_data(settings: Settings, place: Place) -> ImageData:
    """The first rank lists a folder, and the others find the list in the cache where they share it."""
    opened = agreed(place.ranks, lambda: open_run_data(settings, place.console) if place.ranks.first else None)
    return agreed(place.ranks, lambda: opened or open_run_data(settings, place.console))


def _begin(settings: Settings, data: ImageData, folder: RunFolder, place: Place, label: str | None) -> Run:
    ranks = place.ranks
    settings, choices = agreed(ranks, lambda: _chosen(settings, data, ranks))
    settings = _of_first(settings, ranks)  # the machines of others may have suggested other values
    folder = RunFolder(ranks.from_first(str(folder.path).encode()).decode())

    def ready() -> _Parts:
        keep_apart(folder.path, settings.data.location)
        if ranks.first:
            folder.refuse_occupied()
        # Everything that can be wrong with the settings shows while building, before the folder is touched.
        return _build(settings, data, place)

    def create() -> None:
        folder.create(settings)
        write_choices(folder, [*choices, *machine_choices(settings, place.device)])

    parts = agreed(ranks, ready)
    try:
        with place.locked(folder.path):
            try:
                agreed(ranks, lambda: create() if ranks.first else None)
                _announce(place, settings, data, choices, folder)
                return _train(settings, folder, data, parts, place, label)
            except (DataError, KeyboardInterrupt):
                if ranks.first:
                    folder.forget_unless_begun()  # so that the command can be given again
                raise
    except (JclError, KeyboardInterrupt):
        if ranks.first:
            folder.remove_if_empty()
        raise


def _chosen(settings: Settings, data: ImageData, ranks: Ranks) -> tuple[Settings, list[Choice]]:
    """The settings with every "auto" replaced, and what was chosen."""
    facts = replace(data_facts(data.train), ranks_on_machine=ranks_on_this_machine())
    settings, choices = choose(with_whole_path(settings), facts)
    settings, changes = fit_to_ranks(settings, ranks.count)
    return settings, [*choices, *changes]


def _of_first(settings: Settings | None, ranks: Ranks) -> Settings:
    """The settings that the first rank has, on every rank."""
    text = "" if settings is None else settings.model_dump_json()
    return settings_from(json.loads(ranks.from_first(text.encode())), "the first rank's settings")


def _settled(folder: RunFolder) -> Settings:
    """The settings of a run that has begun, all of them chosen; "auto" could only come from somebody's editing."""
    if not folder.settings_file.exists():  # beside it a finetune.json may hold figures, for the page
        refuse_other_work(folder.path)
    settings = folder.settings()
    names = undecided(settings)
    if names:
        raise RunError(
            f"{folder.settings_file} has auto for {names[0]}, but a run that has begun keeps its values; "
            f"write down the one it began with (what was chosen is in {folder.choices_file})."
        )
    return settings


def _resume(path: Path, place: Place) -> Run:
    ranks, folder = place.ranks, RunFolder(path)
    settings = _of_first(agreed(ranks, lambda: _settled(folder) if ranks.first else None), ranks)
    settings, changes = agreed(ranks, lambda: fit_to_ranks(settings, ranks.count))
    if ranks.any(ranks.first and (folder.path / "summary.json").exists()):
        place.say(
            f"The run in {folder.path} has finished; there is nothing to resume. To train longer, begin another run "
            "with more --epochs, over all of which its learning rate falls."
        )
        return Run(folder.path)
    with place.locked(folder.path):
        data = _open_data(settings, place)
        parts = agreed(ranks, lambda: _build(settings, data, place))
        for change in changes:
            place.say(f"  {change.name} = {change.value}: {change.reason}")
        return _train(settings, folder, data, parts, place, None, resumed=True)


def _renew_choices(folder: RunFolder, settings: Settings, device: torch.device) -> None:
    """The page is to show what was chosen for the run as it goes on: its settings and the machine may be others."""
    before = read_choices(folder)
    if before is not None:
        write_choices(folder, [*choices_after(before, settings), *machine_choices(settings, device)])


def _restored(folder: RunFolder, parts: _Parts, place: Place) -> Progress:
    """The state of the newest good checkpoint, which the first rank reads and hands to the others."""
    ranks = place.ranks
    path = agreed(ranks, lambda: checkpoint_to_resume(folder.checkpoints, place.say) if ranks.first else None)
    content = ranks.from_first(path.read_bytes() if path is not None and ranks.count > 1 else b"")
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
        place.say(
            f"The run was on {counted(progress.ranks, 'rank')} and goes on on {counted(ranks.count, 'rank')}: "
            "batches, views and shuffles stay as they were, and results differ by rounding only."
        )
    progress.ranks = ranks.count
    return progress


def _loaded(path: Path, parts: _Parts) -> Progress:
    return load_checkpoint(path, parts.learner, parts.optimiser, parts.device)


@dataclass
class _Parts:
    learner: ContrastiveLearner
    feature_width: int
    optimiser: torch.optim.Optimizer
    loader: BatchLoader
    step: TrainingStep
    device: torch.device


def _build(settings: Settings, data: ImageData, place: Place) -> _Parts:
    train, device = settings.train, place.device
    learner, width = build_learner(settings, device, place.ranks)
    loader = BatchLoader(
        data.train,
        batch_size=known(train.batch_size),
        canvas=known(settings.data.canvas),
        seed=train.seed,
        workers=known(settings.data.workers),
        device=device,
        strict=settings.data.strict,
        ranks=place.ranks,
        num_keys=learner.num_keys,
    )
    optimiser = build_optimiser(settings, learner, device)
    step = TrainingStep(learner, optimiser, run_view_recipe(settings), train.seed, step_options(settings, device))
    return _Parts(learner, width, optimiser, loader, step, device)


def _train(
    settings: Settings,
    folder: RunFolder,
    data: ImageData,
    parts: _Parts,
    place: Place,
    label: str | None,
    resumed: bool = False,
) -> Run:
    """Run the loop, then write the backbone, the pictures and the summary."""
    ranks, memory = place.ranks, PeakMemory(parts.device)
    progress = _restored(folder, parts, place) if resumed else Progress(ranks=ranks.count)
    tell_changes(progress, settings, place.say)
    agreed(ranks, lambda: keep_to_schedule(progress, parts.loader.steps_per_epoch, settings, place.say))
    if resumed:
        agreed(ranks, lambda: _renew_choices(folder, settings, place.device) if ranks.first else None)
    display = RunDisplay(place.console, settings, label or settings.method.name)
    backbone = parts.learner.query_encoder.backbone
    record, saver = _writers(settings, folder, ranks, progress, display)
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
                measure=online_knn(data, backbone, settings, parts.device, ranks),
                progress=progress,
            ).run()
    finally:
        parts.loader.close()
        if ranks.first:
            write_skipped(folder, parts.loader.skipped, place.say, resumed=resumed)

    def write_results() -> None:
        save_backbone(backbone, backbone_info(settings, parts.feature_width), folder.backbone_file)
        try:
            draw_run(Run(folder.path).metrics, settings, data.train, run_view_recipe(settings), folder.figures)
        except (OSError, JclError) as error:
            place.say(f"The pictures in {folder.figures} could not be drawn: {error}")
        # Last, because it marks the run as finished.
        write_summary(folder, settings, record.newest, progress, memory.read())

    try:
        agreed(ranks, lambda: write_results() if ranks.first else None)
    except KeyboardInterrupt:
        raise Interrupted(
            f"Ctrl-C received: the run is trained and saved, but its results are not written yet; "
            f"have that done with `{folder.how_to_resume}`."
        ) from None
    if ranks.first and settings.record.report:
        _write_page(folder, data, place)
    return Run(folder.path)


def _write_page(folder: RunFolder, data: ImageData, place: Place) -> None:
    """The page is an extra: whatever goes wrong with it, the run has finished and all else is written."""
    try:
        write_run_report(folder.path, data, place.device)
    except KeyboardInterrupt:
        raise Interrupted(
            f"Ctrl-C received: the run has finished and only its page is missing; "
            f"have it made with `jcl report {typed(folder.path)}`."
        ) from None
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        place.say(f"The page {folder.report_file} could not be made: {reason}")


def _writers(
    settings: Settings, folder: RunFolder, ranks: Ranks, progress: Progress, display: RunDisplay
) -> tuple[Record | QuietRecord, CheckpointSaver | QuietSaver]:
    if not ranks.first:
        return QuietRecord(), QuietSaver()
    tensorboard = settings.record.tensorboard
    return (
        Record(folder.path, resumed_at=progress.step, tensorboard=tensorboard, warn=display.warn),
        CheckpointSaver(folder.checkpoints, settings.record.keep, display.warn),
    )


def _announce(place: Place, settings: Settings, data: ImageData, choices: list[Choice], folder: RunFolder) -> None:
    """What is about to happen, and every value that was chosen for the user with the reason."""
    ranks = f", {place.ranks.count} ranks" if place.ranks.count > 1 else ""
    place.say(
        f"Pre-training {settings.model.backbone} with {settings.method.name}{views_in_words(settings)} "
        f"on {data.train.description} ({place.device.type}{ranks}), "
        f"{counted(settings.train.epochs, 'epoch')}, into {folder.path}",
    )
    for choice in choices:
        place.say(f"  {choice.name} = {choice.value}: {choice.reason}")
    if (warmup := float(settings.train.warmup_epochs)) >= settings.train.epochs:
        place.say(
            f"  the learning rate will not get to train.lr: it would rise for {warmup:g} epochs, "
            f"and the run has {settings.train.epochs}; a short run wants --set train.warmup_epochs=auto"
        )
