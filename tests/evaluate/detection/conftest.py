"""What tests of detectors share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jcl.settings.detection import DetectionSettings
from small_coco import small_values, write_coco


@pytest.fixture(autouse=True, scope="module")
def plain_convolutions() -> Iterator[None]:
    """Convolutions this small are faster without the library that is made for large ones.

    Put back after each file: other tests compare runs bit for bit with those of processes that know nothing of this.
    """
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.fixture
def instances(tmp_path: Path) -> Path:
    """An annotation file of eight images with squares and discs."""
    return write_coco(tmp_path / "coco")


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """An annotation file of eight images with figures that have a head and two hands."""
    return write_coco(tmp_path / "people", kind="person_keypoints")


@pytest.fixture
def make_settings():
    """Settings of a tiny transfer of a task."""

    def make(task: str = "box", **changes: Any) -> DetectionSettings:
        values = small_values(task) | {"label": "x", "coco": {}} | changes
        return DetectionSettings(**values)

    return make
