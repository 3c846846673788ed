"""The README of a hub folder: what the backbone was trained on, how, what was measured, and how to open it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

import jcl
from jcl.core.method import METHODS
from jcl.data.opening import KNOWN_SETS
from jcl.export.backbone_file import BackboneInfo
from jcl.runs.folder import RunFolder
from jcl.runs.json_object import is_figure
from jcl.runs.metrics import read_metrics
from jcl.settings.schema import Settings

_TAGS = ["timm", "image-feature-extraction", "jcl"]
_TAGS_OF_A_RUN = ["self-supervised-learning", "contrastive-learning"]
_SETTINGS = (
    (
        "method",
        (
            "num_keys",
            "num_queries",
            "covariance_scale",
            "covariance_schedule",
            "temperature",
            "queue_size",
            "key_momentum",
        ),
    ),
    ("train", ("epochs", "batch_size", "lr", "weight_decay", "momentum", "schedule", "warmup_epochs", "seed")),
    ("views", ("recipe", "min_scale")),
    ("model", ("head", "head_width", "embedding_dim")),
)


def model_card(name: str, info: BackboneInfo, source: Path) -> str:
    """Markdown with YAML in front; figures are given only where the run at `source` measured them."""
    folder = RunFolder(source)
    settings = folder.settings() if source.is_dir() and folder.holds_run() else None
    parts = [
        _front(_TAGS + _TAGS_OF_A_RUN if settings else _TAGS),
        f"# {name}, pre-trained without labels" if settings else f"# {name}",
        _what_it_is(name, info, settings),
        *([_how_it_was_trained(settings), _what_was_measured(folder)] if settings else []),
        _how_to_open(info),
        _LICENCE,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(tags: list[str]) -> str:
    values = {"library_name": "timm", "pipeline_tag": "image-feature-extraction", "tags": tags}
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---"


def _what_it_is(name: str, info: BackboneInfo, settings: Settings | None) -> str:
    trained = (
        f" It was trained with {settings.method.name} ({METHODS[settings.method.name].summary.rstrip('.')})"
        f" on {_data_name(settings.data.location)}."
        if settings
        else " Where its weights come from is not recorded in the file it was exported from."
    )
    return (
        f"A {name} without classifier: images of {info.image_size} px to {info.feature_width} pooled features.{trained}"
        f" Written by jcl {jcl.__version__}."
    )


def _how_it_was_trained(settings: Settings) -> str:
    rows = [("data", _data_name(settings.data.location)), ("recipe", settings.recipe or "none")]
    rows.append(("method", settings.method.name))
    for section, names in _SETTINGS:
        rows += [(f"{section}.{name}", str(getattr(getattr(settings, section), name))) for name in names]
    return "## How it was trained\n\n" + _table(("setting", "value"), rows)


def _what_was_measured(folder: RunFolder) -> str:
    figures = _measured(folder)
    rows = [(name, f"{value:.2f} %") for name, value in figures.items()]
    if not rows:
        return ""
    note = "Measured on the run's own data while training; percentages are of correct answers."
    return f"## What was measured\n\n{_table(('figure', 'value'), rows)}\n\n{note}"


def _measured(folder: RunFolder) -> dict[str, float]:
    """Accuracies of a finished run, or the newest ones of a run that has not finished."""
    found: Any = {}
    summary = folder.path / "summary.json"
    try:
        if summary.exists():
            found = json.loads(summary.read_text(encoding="utf-8"))
        elif folder.metrics_file.exists():
            lines = [line for line in read_metrics(folder.metrics_file) if line.get("kind") != "train"]
            found = {name: value for line in lines for name, value in line.items()}
    except (OSError, ValueError, RecursionError):
        return {}
    figures = found if isinstance(found, dict) else {}
    accuracies = {name: value for name, value in figures.items() if name.endswith(("_top1", "_top5"))}
    return {name: float(value) for name, value in accuracies.items() if is_figure(value)}


def _how_to_open(info: BackboneInfo) -> str:
    return f"""## How to open it

```python
import timm

model = timm.create_model("local-dir:PATH_OF_THIS_FOLDER", pretrained=True)  # or "hf-hub:OWNER/NAME"
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
features = model.eval()(transform(image).unsqueeze(0))  # (1, {info.feature_width})
```

or `jcl.load_backbone("PATH_OF_THIS_FOLDER")`. Images are RGB in [0, 1], normalised with mean {list(info.mean)} and std
{list(info.std)}."""


_LICENCE = """## Licence

Not stated: it depends on the images the backbone was trained on. Whoever publishes it should add `license:` at the top
of this file, after looking at the terms of the data."""


def _data_name(location: str) -> str:
    """A data set's name, or the last part of a path: where a folder lies on someone's disk is nobody's business."""
    return location if location in KNOWN_SETS else Path(location).name or location


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *rows]
    return "\n".join(f"| {left} | {_cell(right)} |" for left, right in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
