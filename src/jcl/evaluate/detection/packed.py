"""Annotations of many images in one block of memory.

Worker processes share the memory of the process that starts them until it is written to, and Python writes to every
object it looks at, to count references. Hundreds of thousands of annotations as objects would be copied into each
worker; as text in one tensor they stay where they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from jcl.evaluate.detection.coco_data import CocoImage


class PackedImages:
    """A list of images with annotations that is unpacked one by one."""

    def __init__(self, images: Sequence[CocoImage]) -> None:
        texts = [_text(image) for image in images]
        self._block = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
        self._ends = torch.tensor([len(text) for text in texts]).cumsum(0)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: int) -> CocoImage:
        start = int(self._ends[row - 1]) if row else 0
        values = json.loads(self._block[start : int(self._ends[row])].numpy().tobytes())
        return CocoImage(
            values["id"], Path(values["path"]), values["width"], values["height"], tuple(values["annotations"])
        )


def _text(image: CocoImage) -> bytes:
    values = {
        "id": image.id,
        "path": str(image.path),
        "width": image.width,
        "height": image.height,
        "annotations": image.annotations,
    }
    return json.dumps(values).encode()
