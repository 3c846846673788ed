"""What a run leaves behind besides its checkpoints: the summary, the pictures and the list of skipped images."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jcl.errors import RunError
from jcl.settings import Settings
from jcl.train.atomic import write_atomically
from jcl.train.checkpoint import Progress
from jcl.train.folder import RunFolder


def write_skipped(folder: RunFolder, skipped: dict[str, str], say: Callable[[str], None]) -> None:
    """List the images that could not be read, with the reasons."""
    if not skipped:
        return
    lines = [f"{name}\t{reason}\n" for name, reason in sorted(skipped.items())]
    images = "1 unreadable image was" if len(skipped) == 1 else f"{len(skipped):,} unreadable images were"
    try:
        write_atomically(folder.skipped_file, "".join(lines).encode())
        say(f"{images} skipped; {folder.skipped_file} lists them with the reasons.")
    except RunError as error:
        say(f"{images} skipped, but {error}")


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
    write_atomically(folder.path / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")
