"""Parts of a data set: some of its images by number, or the classes of a list such as ImageNet-100."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from jcl.data.source import ArrayImages, ImageSource
from jcl.errors import DataError
from jcl.paths import home_expanded

# The 100 ImageNet classes of the paper's ablations, as its appendix lists them.
_IMAGENET100: Final = """
    n02869837 n01749939 n02488291 n02107142 n13037406 n02091831 n04517823 n04589890 n03062245 n01773797
    n01735189 n07831146 n07753275 n03085013 n04485082 n02105505 n01983481 n02788148 n03530642 n04435653
    n02086910 n02859443 n13040303 n03594734 n02085620 n02099849 n01558993 n04493381 n02109047 n04111531
    n02877765 n04429376 n02009229 n01978455 n02106550 n01820546 n01692333 n07714571 n02974003 n02114855
    n03785016 n03764736 n03775546 n02087046 n07836838 n04099969 n04592741 n03891251 n02701002 n03379051
    n02259212 n07715103 n03947888 n04026417 n02326432 n03637318 n01980166 n02113799 n02086240 n03903868
    n02483362 n04127249 n02089973 n03017168 n02093428 n02804414 n02396427 n04418357 n02172182 n01729322
    n02113978 n03787032 n02089867 n02119022 n03777754 n04238763 n02231487 n03032252 n02138441 n02104029
    n03837869 n03494278 n04136333 n03794056 n03492542 n02018207 n04067472 n03930630 n03584829 n02123045
    n04229816 n02100583 n03642806 n04336792 n03259280 n02116738 n02108089 n03424325 n01855672 n02090622
"""
IMAGENET100: Final = tuple(_IMAGENET100.split())


def class_list(subset: str) -> tuple[str, ...]:
    """The classes of a subset: "imagenet100", or the lines of a text file (empty lines and # comments ignored)."""
    if subset == "imagenet100":
        return IMAGENET100
    file = home_expanded(subset)
    unreadable = DataError(f"The subset {subset} is neither imagenet100 nor a readable text file of class names.")
    if not file.is_file():  # reading a pipe would block
        raise unreadable
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable from error
    names = tuple(dict.fromkeys(name for line in lines if (name := line.partition("#")[0].strip())))
    if not names:
        raise DataError(f"The class list {subset} is empty; write one class name per line.")
    return names


def select_images(source: ImageSource, rows: Tensor) -> ImageSource:
    """The images `rows` (m,) of a source as a source, in that order; each image keeps its name."""
    if torch.equal(rows, torch.arange(len(source))):
        return source
    labels = None if source.labels is None else source.labels[rows]
    description = f"{len(rows):,} of {source.description}"
    if isinstance(source, ArrayImages):
        numbers = source.rows[rows] if isinstance(source, ArraySubset) else rows
        return ArraySubset(source.pixels[rows], labels, source.class_names, description, numbers)
    return SourceSubset(source, rows, labels, description)


@dataclass(frozen=True, eq=False)
class ArraySubset(ArrayImages):
    """Some images of an array. It is an array too, so a batch is one gather."""

    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def name_of(self, index: int) -> str:
        return f"number {int(self.rows[index])}"


@dataclass(frozen=True, eq=False)
class SourceSubset:
    """Some images of another source, by their index there."""

    whole: ImageSource
    rows: Tensor
    labels: Tensor | None
    description: str

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self.whole.class_names

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int, canvas: int | None = None) -> Tensor:
        return self.whole.read(int(self.rows[index]), canvas)

    def name_of(self, index: int) -> str:
        return self.whole.name_of(int(self.rows[index]))
