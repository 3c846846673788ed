"""What a run leaves behind besides its checkpoints: the summary, what was chosen for it and the list of
skipped images.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jcl.console import pluralize
from jcl.errors import RunError
from jcl.runs.checkpoint import Progress
from jcl.runs.folder import RunFolder, add_skipped
from jcl.runs.json_object import read_object, write_object
from jcl.settings.resolve import Choice
from jcl.settings.schema import Settings
from jcl.train.build import step_options


def write_skipped(
    folder: RunFolder, skipped: dict[str, str], say: Callable[[str], None], *, resumed: bool = False
) -> None:
    """List the images that could not be read, with the reasons, beside those from before the run was resumed."""
    if not skipped:
        return
    try:
        listed = add_skipped(folder.skipped_file, skipped, anew=not resumed)
    except RunError as error:
        say(f"{_unreadable(len(skipped))} skipped, but {error}")
        return
    where = "lists it with the reason" if len(listed) == 1 else "lists them with the reasons"
    say(f"{_unreadable(len(listed))} skipped; {folder.skipped_file} {where}.")


def _unreadable(count: int) -> str:
    return f"{pluralize(count, 'unreadable image')} {'was' if count == 1 else 'were'}"


def write_choices(folder: RunFolder, choices: Sequence[Choice]) -> None:
    """Keep what "auto" became and why, for those who look at the run later."""
    kept = [{"name": choice.name, "value": choice.value, "reason": choice.reason} for choice in choices]
    write_object(folder.choices_file, {"choices": kept})


def read_choices(folder: RunFolder) -> list[Choice] | None:
    """What `write_choices` kept; None where nothing of it can be read."""
    kept = None
    with contextlib.suppress(RunError):
        kept = read_object(folder.choices_file).get("choices")
    if not isinstance(kept, list):
        return None
    return [
        Choice(str(entry.get("name", "")), entry.get("value"), str(entry.get("reason", "")))
        for entry in kept
        if isinstance(entry, dict)
    ]


def machine_choices(settings: Settings, device: torch.device) -> list[Choice]:
    """What the machine decides anew each time a run starts, so that the settings keep saying "auto"."""
    options = step_options(settings, device)
    where = "a GPU is there" if device.type == "cuda" else "there is no GPU to be seen"
    pays = "pays on a GPU" if device.type == "cuda" else "does not pay on a CPU"
    precision = str(options.precision).removeprefix("torch.")
    chosen = [
        Choice("train.device", str(device), where),
        Choice("train.precision", precision, "the fastest that the device computes well in"),
        Choice("train.compile", options.compiled, pays),
        Choice("train.cuda_graph", options.recorded, pays),
    ]
    return [choice for choice in chosen if getattr(settings.train, choice.name.partition(".")[2]) == "auto"]


def write_summary(
    folder: RunFolder, settings: Settings, newest: dict[str, dict[str, Any]], progress: Progress, peak_memory: int
) -> None:
    """The figures of the finished run: one flat object with plain names. `newest` has the last metrics of each kind."""
    train, measured = newest.get("train", {}), newest.get("knn", {})
    batch_size = settings.train.batch_size
    assert isinstance(batch_size, int), "settings of a run are resolved"
    summary = {
        "method": settings.method.name,
        "data": settings.data.location,
        "seed": settings.train.seed,
        "epochs": settings.train.epochs,
        "steps": progress.step,
        "ranks": progress.ranks,
        "loss": train.get("loss"),
        "contrastive_accuracy": train.get("contrastive_accuracy"),
        "images_per_second": progress.step * batch_size / progress.seconds,
        "seconds": progress.seconds,
        "peak_memory_bytes": peak_memory,
        **{name: value for name, value in measured.items() if name not in ("kind", "step", "epoch")},
    }
    if settings.train.on_nan == "skip":
        summary["skipped_steps"] = progress.skipped_steps
    write_object(folder.path / "summary.json", summary)
