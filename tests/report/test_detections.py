"""What a detector finds beside what is there: both sides show what the task has."""

from pathlib import Path

import pytest
from picture_tools import count

from jcl.evaluate.detection.data import read_coco
from jcl.evaluate.detection.predict import KINDS
from jcl.report.detections import detections_picture
from small_coco import write_coco

SQUARE = (240, 200, 40)  # as `small_coco` draws them


def test_annotated_masks_are_filled_for_a_detector_of_masks_only(tmp_path: Path) -> None:
    file = write_coco(tmp_path / "coco", count=1)
    bare = {}
    for task in ("box", "mask"):
        dataset, nothing = read_coco(file, file.parent / "images", task), {kind: [] for kind in KINDS[task]}
        bare[task] = count(detections_picture(tmp_path / f"{task}.png", dataset, nothing, [0], task), SQUARE)
    assert bare["mask"] > 1000, "nothing was found, so the right side is left as it is"
    assert bare["box"] == pytest.approx(2 * bare["mask"], rel=0.15)  # a frame and a name cover a little
