"""A run folder as Python users see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from jcl.errors import RunError
from jcl.export import load_backbone
from jcl.paths import home_expanded
from jcl.runs.folder import RunFolder
from jcl.runs.json_object import read_object
from jcl.runs.metrics import read_metrics
from jcl.settings.schema import Settings


@dataclass(frozen=True)
class Run:
    """A run folder and what it holds."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", home_expanded(self.path))  # people write it as text

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
