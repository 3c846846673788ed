"""What somebody has changed under a run since its checkpoint was written: told, entered into what
the page shows, or refused where it makes no sense.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jcl.console import pluralize
from jcl.data import ImageData, ImageSource
from jcl.data.source import fingerprint_of_content, fingerprint_of_listing
from jcl.errors import RunError
from jcl.runs.checkpoint import Progress
from jcl.runs.json_object import named_differences, written
from jcl.settings.resolve import Choice
from jcl.settings.schema import Settings, setting_names
from jcl.studies.cells import values_of

_SECTIONS = ("views.", "model.", "method.", "train.")
_WITHOUT_WEIGHT = {  # what a run comes to does not rest on these
    *("train.device", "train.compile", "train.cuda_graph", "train.key_passes", "train.rank_timeout", "train.on_nan"),
    "model.bn_groups",  # which is fitted to the ranks, and said then
}

_OTHER_LIBRARY = "; another version of an image library may be the reason"


def tell_changes(progress: Progress, settings: Settings, say: Callable[[str], None]) -> None:
    """A run may be resumed with other settings than it began with, but not without a word."""
    names = [name for name in setting_names() if name.startswith(_SECTIONS) and name not in _WITHOUT_WEIGHT]
    before, now = progress.settings, values_of(settings, names)
    both = [name for name in names if name in before]  # the settings that there are may change from version to version
    if other := named_differences({name: before[name] for name in both}, {name: now[name] for name in both}):
        say(f"Settings have changed since the checkpoint was written, which had {other}.")
    progress.settings = now


def tell_other_images(progress: Progress, data: ImageData, say: Callable[[str], None]) -> None:
    """Images may be added to a run between stopping and resuming, and others may have taken their place unnoticed."""
    before, progress.images = progress.images, {}
    for images, kind in ((data.train, "train"), (data.test, "test")):
        if images is None:
            continue
        now = {f"{kind} listing": fingerprint_of_listing(images), f"{kind} content": fingerprint_of_content(images)}
        progress.images |= now
        # With other names other images are looked into, so that their content says nothing then.
        changed = next((what for what, found in now.items() if before.get(what, found) != found), None)
        if changed is not None:
            say(_about_other_images(images, listing=changed.endswith("listing")))


def _about_other_images(images: ImageSource, *, listing: bool) -> str:
    what, why = ("number, names or labels", "") if listing else ("pixels", _OTHER_LIBRARY)
    return (
        f"The {what} of {images.description} are not what they were when the checkpoint was written{why}. "
        "The run goes on with the images as they are now."
    )


def choices_after(before: Sequence[Choice], settings: Settings) -> list[Choice]:
    """What was chosen for a run, with a word where another value has taken its place by the time it is resumed.

    What settings leave to the machine, which decides anew, is not among them.
    """
    now = values_of(settings, setting_names())
    return [
        choice
        if now.get(choice.name, choice.value) == choice.value
        else replace(choice, value=now[choice.name], reason=_replaced(choice))
        for choice in before
        if now.get(choice.name) != "auto"
    ]


def _replaced(choice: Choice) -> str:
    return f"changed when the run was resumed; before that it was {written(choice.value)}"


def keep_to_schedule(progress: Progress, steps_per_epoch: int, settings: Settings, say: Callable[[str], None]) -> None:
    """Whoever edits a run's settings, or its images, changes what its steps mean: that is said, or refused."""
    before, progress.steps_per_epoch = progress.steps_per_epoch, steps_per_epoch
    now, total = progress.step / steps_per_epoch, settings.train.epochs * steps_per_epoch
    changed = ""
    if before not in (0, steps_per_epoch):
        changed = (
            f"an epoch had {pluralize(before, 'step')} and now has {steps_per_epoch:,}, "
            "because train.batch_size or the number of images has changed"
        )
    if progress.step > total:
        raise RunError(
            f"the run is at step {progress.step:,}, beyond the {total:,} steps of {settings.train.epochs:,} "
            f"epochs{f'; {changed}' if changed else ''}. Set back what was changed, or begin a new run."
        )
    if changed:
        say(
            f"{changed[0].upper()}{changed[1:]}: the run was at epoch {progress.step / before:.3g} and is at {now:.3g}."
        )
