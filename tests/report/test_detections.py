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
    images = read_coco(file, file.parent / "images", "box")
    bare = {
        task: count(
            detections_picture(tmp_path / f"{task}.png", images, {kind: [] for kind in KINDS[task]}, [0], task), SQUARE
        )
        for task in ("box", "mask")
    }
    assert bare["mask"] > 1000, "nothing was found, so the right side is left as it is"
    assert bare["box"] == pytest.approx(2 * bare["mask"], rel=0.15)  # a frame and a name cover a little
