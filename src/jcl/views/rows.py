"""Tensors that belong together, with one row a view."""

import dataclasses
from typing import Self

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ViewRows:
    """Base of frozen dataclasses whose fields are tensors, or such dataclasses again, with one row a view."""

    def __getitem__(self, rows: slice | Tensor) -> Self:
        """Take the rows of some of the views."""
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)})
