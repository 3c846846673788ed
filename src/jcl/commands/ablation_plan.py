"""What an ablation is to compare: its cells, with all that can be checked before the first of them is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from jcl.commands.run_data import data_facts, open_run_data, with_absolute_location
from jcl.console import print_line
from jcl.data import ImageData, ImageSource
from jcl.data.loader import refuse_large_batch
from jcl.data.source import fingerprint
from jcl.distributed.launch import launch_environment
from jcl.errors import SettingsError
from jcl.evaluate.classification import classification_task
from jcl.settings.resolve import DataFacts, resolve
from jcl.settings.schema import Settings, values_of, with_values
from jcl.studies.cells import (
    Axis,
    Build,
    Cell,
    base_settings,
    described,
    each_alone,
    grid,
    shared_values,
    short_name,
)
from jcl.studies.relevance import refuse_ignored
from jcl.train.build import build_learner, run_view_recipe


@dataclass(frozen=True)
class Plan:
    """What is to be compared: the cells, what they share, and by which settings they differ."""

    names: tuple[str, ...]
    cells: tuple[Cell, ...]
    study: Mapping[str, Any]
    usual_folder: Path
    centre: Mapping[str, Any] | None = None  # where every setting is while another is varied, if each is alone


def plan_ablation(
    axes: Sequence[Axis], seeds: Sequence[int], build: Build, console: Console, *, alone: bool = False
) -> Plan:
    """The cells with every value checked, and the data looked at; nothing is written.

    They are all combinations of the axes' values, or, where each is to be varied alone, one axis at a time.
    """
    if launch_environment().world_size > 1:
        raise SettingsError(
            "`jcl ablate` starts its cells by itself; start it once, without a launcher such as torchrun."
        )
    if not axes:
        raise SettingsError("say what to vary, for example: jcl ablate photos/ --over num_keys=1,2,3,5.")
    names = tuple(axis.name for axis in axes)
    base = with_absolute_location(build({}) if alone else base_settings(axes, build))
    for together in [[axis] for axis in axes] if alone else [axes]:
        refuse_ignored(together, base)
    arrange = each_alone if alone else grid
    cells = arrange(axes, seeds, build)  # says what is wrong with a value before the data is opened
    data = open_run_data(base, console)
    facts = data_facts(data.train)
    if alone and (chosen := _chosen_centre(base, names, facts)):
        base = with_absolute_location(build(chosen))
        named = [replace(axis, values=_named(axis.values, chosen.get(axis.name))) for axis in axes]
        cells = arrange(named, seeds, lambda own: build(chosen | dict(own)))
    cells = _told_apart(
        [replace(cell, settings=with_absolute_location(cell.settings)) for cell in cells], facts, console
    )
    study = {"over": list(names), "settings": shared_values(base, names), "data": _about(data)}
    check_cells(cells, data.train, facts)
    usual = Path("runs") / f"ablate-{'-'.join(map(short_name, names))}-{data.name}"
    return Plan(names, tuple(cells), study, usual, values_of(base, names) if alone else None)


def _chosen_centre(base: Settings, names: Sequence[str], facts: DataFacts) -> dict[str, Any]:
    """What "auto" becomes of the settings to be varied, so that the centre has a place among their other values."""
    if "method.num_keys" in names and base.method.num_queries == "auto":
        base = with_values(base, {"method.num_queries": 1})  # as all cells have it, of which each says how many keys
    chosen = values_of(resolve(base, facts)[0], names)
    return {name: chosen[name] for name, value in values_of(base, names).items() if value == "auto"}


def _named(values: Sequence[Any], chosen: Any) -> tuple[Any, ...]:
    """The values of an axis with what "auto" becomes at the centre in its place: they would be the same cell."""
    return tuple(chosen if value == "auto" and chosen is not None else value for value in values)


def _told_apart(cells: Sequence[Cell], facts: DataFacts, console: Console) -> list[Cell]:
    """The cells without those that "auto" makes equal to another one; of equal cells the one that says most stays."""
    kept: dict[str, Cell] = {}
    said = set()
    for cell in sorted(cells, key=lambda cell: list(cell.values.values()).count("auto")):
        same = kept.setdefault(resolve(cell.settings, facts)[0].model_dump_json(), cell)
        if same is not cell and described(cell.values) not in said:
            said.add(described(cell.values))
            print_line(console, f"Not trained apart: {described(cell.values)}, which is {described(same.values)} here.")
    return [cell for cell in cells if any(cell is each for each in kept.values())]


def _about(data: ImageData) -> dict[str, Any]:
    """By what the data is known again."""
    task = classification_task(data)  # says so where there are no labels to measure with
    return {
        "train_images": len(data.train),
        "test_images": len(task.test),
        "classes": len(task.classes),
        "train_content": fingerprint(data.train),
        "test_content": fingerprint(task.test),
    }


def check_cells(cells: Sequence[Cell], images: ImageSource, facts: DataFacts) -> None:
    """Raise what the first cell that could not even start would end with.

    As a run does, this replaces "auto", looks whether a batch fits the images, and builds the network, though each
    kind of network only once and not on the device.
    """
    built = set()
    for cell in cells:
        settings, _ = resolve(cell.settings, facts)
        refuse_large_batch(images, settings.train.batch_size)
        run_view_recipe(settings)
        network = (settings.model, settings.views.image_size)
        if network not in built:
            build_learner(settings, torch.device("cpu"))
            built.add(network)
