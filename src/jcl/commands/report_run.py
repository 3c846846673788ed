"""What a run folder says about its run, read for the page."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from jcl.commands.run import read_choices
from jcl.commands.run_data import open_run_data
from jcl.data import ImageData
from jcl.data.named import KNOWN_SETS
from jcl.data.shards.fetch import is_shard_location
from jcl.errors import DataError
from jcl.paths import home_expanded
from jcl.report.contents import Measured, RunContents
from jcl.report.page_tables import MEASURED_NAMES
from jcl.runs.folder import RunFolder, read_skipped
from jcl.runs.json_object import is_figure
from jcl.runs.metrics import read_metrics
from jcl.settings.schema import Settings, with_values

_MOST_SKIPPED = 1_000_000  # letters of skipped.txt that are read


def read_run(path: Path, name: str) -> RunContents:
    """Everything but what has to be worked out from images; files that are missing or torn leave gaps."""
    folder = RunFolder(path)
    return RunContents(
        name=name,
        path=home_expanded(path).resolve(),
        settings=folder.settings(),
        metrics=_metrics(folder),
        summary=_object(path / "summary.json"),
        choices=read_choices(folder),
        skipped=read_skipped(folder.skipped_file, _MOST_SKIPPED),
        measured=_measured(path),
    )


def open_again(settings: Settings) -> ImageData:
    """The images a run was trained on, where they still are; nothing is fetched and no command is run for them."""
    location = settings.data.location
    if location not in KNOWN_SETS and not Path(location).is_absolute():
        raise DataError(f"They are from {location}, which is not fetched again.")
    if location not in KNOWN_SETS and not is_shard_location(location) and not Path(location).exists():
        raise DataError(f"They are no longer at {location}.")
    return open_run_data(with_values(settings, {"data.download": False, "data.strict": False}), Console(quiet=True))


def _metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """A run that was killed early may have none."""
    return read_metrics(folder.metrics_file) if folder.metrics_file.exists() else []


def _object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None where there is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else None
    return None


def _measured(path: Path) -> dict[Measured, float]:
    """Figures that commands wrote into the folder with --json, by their plain names; they go before the run's own."""
    found: dict[Measured, float] = {}
    for file in sorted(path.glob("*.json"), key=lambda file: (file.name != "summary.json", file.name)):
        figures = _object(file) or {}
        found |= {
            Measured(name, _how(name, figures)): figures[name]
            for name in MEASURED_NAMES
            if is_figure(figures.get(name))
        }
    return found


def _how(name: str, figures: Mapping[str, Any]) -> str:
    """What keeps a figure from being compared with those of the same name, in words; nothing where it was as usual."""
    if name.startswith("linear_"):
        return "the paper's protocol" if figures.get("protocol") == "paper" else ""
    if name.startswith("finetune_"):
        labels, parts = figures.get("labels"), []
        if isinstance(labels, str) and labels != "100%":
            parts.append(f"{labels} of the labels" if labels.endswith("%") else f"{labels} labels")
        if figures.get("from_scratch") is True:
            parts.append("from scratch")
        return ", ".join(parts)
    return ""
