"""Folders that hold other work than a run, and how that goes on."""

from __future__ import annotations

from pathlib import Path

from jcl.errors import RunError
from jcl.evaluate.detection.folder import DetectionFolder
from jcl.evaluate.finetune_folder import FinetuneFolder
from jcl.evaluate.probe_folder import ProbeFolder
from jcl.studies.ablation_folder import AblationFolder


def refuse_other_work(path: Path) -> None:
    """Raise if a folder holds what `jcl resume` does not go on with, and name the command that does."""
    for other in (FinetuneFolder(path), ProbeFolder(path), DetectionFolder(path)):
        if other.settings_file.exists():
            raise RunError(f"{path} holds no run but a {other.kind}; {other.how_to_resume}.")
    if AblationFolder(path).study_file.exists():
        raise RunError(f"{path} holds no run but an ablation; give its `jcl ablate` command again to go on.")
