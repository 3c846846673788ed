"""Pre-training from settings to a finished run folder: `jcl.pretrain` and `jcl.resume`."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from jcl.commands.inputs import data_facts, open_run_data, refuse_inside_data, require_data, with_absolute_paths
from jcl.commands.run import Run, RunContext, run_context, write_choices
from jcl.commands.train_run import RunTraining
from jcl.console import STDERR, ProgressCallback, no_progress, pluralize
from jcl.data import ImageData
from jcl.data.check import survey_headers
from jcl.data.source import fingerprint
from jcl.distributed.device import choose_device
from jcl.distributed.group import ALONE, fail_together
from jcl.distributed.launch import launch_environment
from jcl.errors import DataError, RunError
from jcl.evaluate.folders import DetectionFolder, FinetuneFolder, ProbeFolder
from jcl.export.loading import read_initial
from jcl.runs.folder import RunFolder, unfinished_folder
from jcl.runs.json_object import describe_differences
from jcl.settings.resolve import FITTED_TO_RANKS, fit_to_ranks, resolve
from jcl.settings.resolved import Choice, ResolvedSettings, describe_views
from jcl.settings.schema import Settings, TrainSettings, setting_names
from jcl.settings.values import values_of, with_values
from jcl.studies.ablation import AblationFolder
from jcl.train.profile import StepProfile, profile_steps


def pretrain(
    settings: Settings,
    out: str | Path | None = None,
    *,
    resume: Literal["never", "auto"] = "never",
    console: Console | None = None,
    label: str | None = None,
) -> Run:
    """Pre-train into the folder `out`, which must not hold a run yet (default: a new folder in `runs/`).

    `settings` come from `build_settings` or `Run.settings`. Settings that are "auto" are resolved for the images.
    With `resume="auto"` an unfinished run with the same settings is continued, and a finished one in `out` is returned.

    Progress goes to `console` (default: standard error; `Console(quiet=True)` for none). If a launcher started several
    ranks, they train one model, and only the first writes files and prints.
    """
    if not isinstance(settings, Settings):
        raise TypeError(f"pretrain takes Settings of jcl.build_settings, got {settings!r:.80}.")
    with run_context(settings.train.device, settings.train.rank_timeout, console) as context:
        data = _open_data(settings, context)
        wanted = RunFolder(Path("runs") / f"{settings.method.name}-{data.name}" if out is None else out)

        def find() -> RunFolder | None:
            if out is None:
                return unfinished_folder(wanted, lambda folder: not _differences(settings, folder))
            if resume == "auto" and wanted.settings_file.exists() and (other := _differences(settings, wanted)):
                raise RunError(f"{wanted.path} holds a run with other settings ({other}); choose another --out.")
            return wanted

        if (begun := context.folder_to_continue(find, resume == "auto")) is not None:
            return _resume(begun, context)
        return _begin(settings, data, wanted, context, label, numbered=out is None)


def resume(path: str | Path, *, console: Console | None = None, device: str | None = None) -> Run:
    """Continue a run from its newest good checkpoint as if it had never stopped, on its own device or on `device`."""
    folder = RunFolder(path)
    # Only the first rank needs to see the folder; the others use the defaults until it has sent its settings.
    train = folder.settings().train if folder.settings_file.is_file() else TrainSettings()
    with run_context(device or train.device, train.rank_timeout, console) as context:
        return _resume(folder.path, context, device)


def profile(settings: Settings, *, progress: ProgressCallback = no_progress) -> StepProfile:
    """Time the parts of a training step over a few steps; no run folder is written."""
    context = RunContext(ALONE, choose_device(settings.train.device), STDERR)
    data = open_run_data(settings, context.console)
    resolved, _ = resolve(settings, data_facts(data.train, read_initial(settings)))
    # A recorded step is replayed as a whole.
    training = RunTraining(with_values(resolved, {"train.cuda_graph": False}), data, context)
    with training.loader:
        return profile_steps(training.step, training.loader, progress)


def _differences(settings: Settings, folder: RunFolder) -> str:
    """How these settings differ from those the run was started with; empty if they do not."""
    names = [name for name in setting_names() if "." in name and name not in FITTED_TO_RANKS]
    asked, found = values_of(with_absolute_paths(settings), names), values_of(folder.settings(), names)
    given = {name: value for name, value in asked.items() if value != "auto"}
    return describe_differences({name: found[name] for name in given}, given)


def _open_data(settings: Settings, context: RunContext) -> ImageData:
    """Open the images on every rank and compare them. The first rank opens them first and fills caches for others."""
    ranks, console = context.ranks, context.console
    opened = context.on_first(lambda: open_run_data(settings, console))
    with fail_together(ranks):
        data = opened or open_run_data(settings, console)
    own = fingerprint(data.train, content=False)
    first = ranks.broadcast(own)
    with fail_together(ranks):
        if own != first:
            where = f"{socket.gethostname()} ({data.train.description})"
            raise DataError(f"The images on {where} have another number, names or labels than the first rank's.")
    return data


def _begin(
    asked: Settings, data: ImageData, wanted: RunFolder, context: RunContext, label: str | None, *, numbered: bool
) -> Run:
    """Start a run in the wanted folder, or in a new one with that name and a number."""
    ranks, asked = context.ranks, with_absolute_paths(asked)
    init = context.on_first(lambda: read_initial(asked))
    with fail_together(ranks):
        facts = replace(data_facts(data.train, init), ranks_on_machine=launch_environment().local_world_size)
        settings, choices = resolve(asked, facts)
        settings, changes = fit_to_ranks(settings, ranks.count)
        choices += changes
    settings = ranks.broadcast(settings)  # other machines may resolve "auto" differently
    with fail_together(ranks):
        if ranks.first:
            refuse_inside_data(wanted.path.parent if numbered else wanted.path, settings.data.location)
        if ranks.first and not numbered:
            wanted.refuse_occupied()
        training = RunTraining(settings, data, context)
    loaded = training.load_initial(init)
    with context.starting(wanted, numbered=numbered) as folder:
        with fail_together(ranks):
            if ranks.first:
                folder.create(settings)
                write_choices(folder, [*choices, *training.machine_choices()])
        _announce(context, settings, data, choices, folder)
        for line in loaded:
            context.log(f"  {line}")
        return training.run(folder, label)


def _stored_settings(folder: RunFolder) -> ResolvedSettings:
    """The settings of a started run. For another kind of training, raise an error that says how to continue it."""
    path = folder.path
    if not folder.settings_file.exists():  # a run folder may hold a finetune.json for its page
        for other in (FinetuneFolder(path), ProbeFolder(path), DetectionFolder(path)):
            if other.settings_file.exists():
                raise RunError(f"{path} holds a {other.kind}, not a run; {other.how_to_resume}.")
        if AblationFolder(path).study_file.exists():
            raise RunError(f"{path} holds an ablation, not a run; repeat its `jcl ablate` command to continue.")
    return folder.settings()


def _resume(path: Path, context: RunContext, device: str | None = None) -> Run:
    ranks, folder = context.ranks, RunFolder(path)
    settings = context.from_first(lambda: _stored_settings(folder))
    if device is not None:
        settings = with_values(settings, {"train.device": device})
    with fail_together(ranks):
        settings, changes = fit_to_ranks(settings, ranks.count)
    if context.from_first(folder.summary_file.exists):
        context.log(f"The run in {folder.path} has finished; nothing to resume. To train longer, start a new run.")
        return Run(folder.path)
    with context.locked(folder):
        with fail_together(ranks):
            folder.refuse_links()
            moved = f"set data.location in {folder.settings_file} to their new path and resume again"
            require_data(settings, moved, context.console)
        data = _open_data(settings, context)
        with fail_together(ranks):
            training = RunTraining(settings, data, context)
        for change in changes:
            context.log(f"  {change.name} = {change.value}: {change.reason}")
        return training.run(folder, resumed=True)


def _announce(
    context: RunContext, settings: ResolvedSettings, data: ImageData, choices: list[Choice], folder: RunFolder
) -> None:
    """Print what is trained, and every automatic choice with its reason."""
    ranks = f", {context.ranks.count} ranks" if context.ranks.count > 1 else ""
    what = f"{settings.model.backbone} with {settings.method.name}{describe_views(settings)}"
    images = f"{data.train.description} ({context.device.type}{ranks})"
    context.log(f"Pre-training {what} on {images}, {pluralize(settings.train.epochs, 'epoch')}, into {folder.path}")
    labels = data.train.labels
    if labels is not None and data.labeled_test is not None:
        context.log(f"  test images: {data.labeled_test.description}")
    elif labels is not None and (labels >= 0).any() and not data.why_untested:
        context.log("  no labeled test images: accuracy is measured on some of the training images")
    for line in survey_headers(data.train, settings.data.windows) if context.ranks.first else ():
        context.log(f"  {line}")
    for choice in choices:
        context.log(f"  {choice.name} = {choice.value}: {choice.reason}")
