"""Pre-training from settings to a finished run folder: the parts put together.

`pretrain` and `resume` are what the commands call and what Python users call.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from jcl.commands.context import RunContext, console_of
from jcl.commands.other_work import refuse_other_work
from jcl.commands.run import Run
from jcl.commands.run_data import data_facts, demand_in_place, keep_apart, open_run_data, with_whole_path
from jcl.commands.run_results import machine_choices, write_choices
from jcl.commands.train_run import RunParts, build_parts, train_run
from jcl.console import StderrConsole, pluralize
from jcl.data import ImageData, ImageSource
from jcl.data.source import fingerprint_of_listing
from jcl.distributed.device import choose_device
from jcl.distributed.group import ALONE, Ranks, fail_together, joined_ranks
from jcl.distributed.launch import launch_environment
from jcl.errors import DataError, JclError, RunError, SettingsError
from jcl.runs.folder import RunFolder, numbered_folders
from jcl.runs.lock import held
from jcl.settings.resolve import Choice, choose, fit_to_ranks, undecided
from jcl.settings.schema import Settings, TrainSettings, settings_from, views_in_words, with_values
from jcl.train.profile import StepProfile, profile_steps


def pretrain(
    settings: Settings, out: str | Path | None = None, *, console: Console | None = None, label: str | None = None
) -> Run:
    """Train by `settings` into the folder `out`, which must not hold a run yet (default: a new one under `runs/`).

    Progress goes to `console` (default: standard error; `Console(quiet=True)` for none). Started as several ranks by
    a launcher, all of them train one model, and only the first writes and speaks.
    """
    if not isinstance(settings, Settings):
        raise TypeError(
            f"pretrain takes Settings, not {settings!r:.80}; make them with "
            'jcl.build_settings("folder", values={"data.location": "photos/"}).'
        )
    if out == "":  # as a path it would be the current folder
        raise SettingsError("give the run a folder, or None for a new one under runs/; an empty name is no folder.")
    with joined_ranks(settings.train.device, settings.train.rank_timeout) as (ranks, device):
        context = RunContext(ranks, device, console_of(ranks, console))
        data = _open_data(settings, context)
        parent, name = Path("runs"), f"{settings.method.name}-{data.name}"
        begun = _begun_before(ranks, lambda: _interrupted(settings, parent, name) if out is None else RunFolder(out))
        if begun is not None:
            return _resume(begun, context)
        wanted = RunFolder(parent / name if out is None else out)
        return _begin(settings, data, wanted, context, label, numbered=out is None)


def resume(path: str | Path, *, console: Console | None = None) -> Run:
    """Continue the run in a folder from its newest readable checkpoint, exactly as if it had never stopped."""
    folder = RunFolder(path)
    # Only the first rank needs to see the folder; the others do with the usual values until they know better.
    train = folder.settings().train if folder.settings_file.is_file() else TrainSettings()
    with joined_ranks(train.device, train.rank_timeout) as (ranks, device):
        return _resume(folder.path, RunContext(ranks, device, console_of(ranks, console)))


def profile(settings: Settings, *, console: Console | None = None) -> StepProfile:
    """Train for a few steps only, with a clock at every part of a step; no run folder is written."""
    context = RunContext(ALONE, choose_device(settings.train.device), console or StderrConsole())
    data = open_run_data(settings, context.console)
    settings, _ = choose(settings, data_facts(data.train))
    # The replay of a recorded step has no parts to be seen.
    parts = build_parts(with_values(settings, {"train.cuda_graph": False}), data, context)
    with parts.loader:
        return profile_steps(parts.step, parts.loader)


def _begun_before(ranks: Ranks, find: Callable[[], RunFolder | None]) -> Path | None:
    """The run that the launcher interrupted by starting all ranks again, as the first rank sees it."""
    again = ranks.any(launch_environment().restarts > 0)  # a launcher that joined anew does not know of it
    folder = find() if again and ranks.first else None
    path = ranks.from_first(str(folder.path).encode() if folder is not None and folder.holds_run() else b"")
    return Path(path.decode()) if path else None


def _interrupted(settings: Settings, parent: Path, name: str) -> RunFolder | None:
    """The newest unfinished run under a name of our choice that was begun with these settings and is no other's."""
    found = (RunFolder(path) for path in numbered_folders(parent, name) if not held(path))
    return next((folder for folder in found if _begun_with(settings, folder)), None)


def _begun_with(settings: Settings, folder: RunFolder) -> bool:
    if (folder.path / "summary.json").exists():
        return False
    try:
        asked, found = with_whole_path(settings).model_dump(), folder.settings().model_dump()
    except JclError:  # whatever is there is not ours
        return False
    asked["model"]["bn_groups"] = "auto"  # may have been fitted to the ranks
    sections = {section: values for section, values in asked.items() if isinstance(values, dict)}
    return all(
        value in ("auto", found[section][setting])
        for section, values in sections.items()
        for setting, value in values.items()
    )


def _open_data(settings: Settings, context: RunContext) -> ImageData:
    """The first rank lists a folder, and the others find the list in the cache where they share it."""
    opened = fail_together(
        context.ranks, lambda: open_run_data(settings, context.console) if context.ranks.first else None
    )
    data = fail_together(context.ranks, lambda: opened or open_run_data(settings, context.console))
    _demand_same_images(data.train, context.ranks)
    return data


def _demand_same_images(images: ImageSource, ranks: Ranks) -> None:
    """Every rank works out by itself which images make a batch, so a machine with others would spoil it unseen."""
    if ranks.count == 1:
        return
    own = int(fingerprint_of_listing(images)[:15], 16)  # what an int64 holds
    first = int(ranks.gather(torch.tensor([own]))[0])

    def compare() -> None:
        if own != first:
            raise DataError(
                f"the images on {socket.gethostname()} ({images.description}) are not those that the first rank has: "
                "their number, names or labels differ. Every machine needs the same images under the same path."
            )

    fail_together(ranks, compare)


def _begin(
    settings: Settings, data: ImageData, wanted: RunFolder, context: RunContext, label: str | None, *, numbered: bool
) -> Run:
    """Begin a run in the folder that is wanted, or in a new one of that name and a number."""
    ranks = context.ranks
    settings, choices = fail_together(ranks, lambda: _chosen(settings, data, ranks))
    settings = _of_first(settings, ranks)  # the machines of others may have suggested other values
    wanted = RunFolder(ranks.from_first(str(wanted.path).encode()).decode())

    def ready() -> RunParts:
        keep_apart(wanted.path.parent if numbered else wanted.path, settings.data.location)
        if ranks.first and not numbered:
            wanted.refuse_occupied()
        # Everything that can be wrong with the settings shows while building, before the folder is touched.
        return build_parts(settings, data, context)

    def create(folder: RunFolder) -> None:
        folder.create(settings)
        write_choices(folder, [*choices, *machine_choices(settings, context.device)])

    parts = fail_together(ranks, ready)
    with context.starting(wanted.path, numbered=numbered) as path, context.locked(path):
        folder = RunFolder(path)
        try:
            fail_together(ranks, lambda: create(folder) if ranks.first else None)
            _announce(context, settings, data, choices, folder)
            return train_run(settings, folder, data, parts, context, label)
        except (DataError, KeyboardInterrupt):
            if ranks.first:
                folder.forget_unless_begun()  # so that the command can be given again
            raise


def _chosen(settings: Settings, data: ImageData, ranks: Ranks) -> tuple[Settings, list[Choice]]:
    """The settings with every "auto" replaced, and what was chosen."""
    facts = replace(data_facts(data.train), ranks_on_machine=launch_environment().local_world_size)
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


def _resume(path: Path, context: RunContext) -> Run:
    ranks, folder = context.ranks, RunFolder(path)
    settings = _of_first(fail_together(ranks, lambda: _settled(folder) if ranks.first else None), ranks)
    settings, changes = fail_together(ranks, lambda: fit_to_ranks(settings, ranks.count))
    if ranks.any(ranks.first and (folder.path / "summary.json").exists()):
        context.say(
            f"The run in {folder.path} has finished; there is nothing to resume. To train longer, begin another run "
            "with more --epochs, over all of which its learning rate falls."
        )
        return Run(folder.path)
    with context.locked(folder.path):
        moved = f"write their new place into {folder.settings_file}, as data.location, and resume again"
        fail_together(ranks, lambda: demand_in_place(settings, moved))
        data = _open_data(settings, context)
        parts = fail_together(ranks, lambda: build_parts(settings, data, context))
        for change in changes:
            context.say(f"  {change.name} = {change.value}: {change.reason}")
        return train_run(settings, folder, data, parts, context, None, resumed=True)


def _announce(
    context: RunContext, settings: Settings, data: ImageData, choices: list[Choice], folder: RunFolder
) -> None:
    """What is about to happen, and every value that was chosen for the user with the reason."""
    ranks = f", {context.ranks.count} ranks" if context.ranks.count > 1 else ""
    context.say(
        f"Pre-training {settings.model.backbone} with {settings.method.name}{views_in_words(settings)} "
        f"on {data.train.description} ({context.device.type}{ranks}), "
        f"{pluralize(settings.train.epochs, 'epoch')}, into {folder.path}",
    )
    for choice in choices:
        context.say(f"  {choice.name} = {choice.value}: {choice.reason}")
    if (warmup := float(settings.train.warmup_epochs)) >= settings.train.epochs:
        context.say(
            f"  the learning rate will not get to train.lr: it would rise for {warmup:g} epochs, "
            f"and the run has {settings.train.epochs}; a short run wants --set train.warmup_epochs=auto"
        )
