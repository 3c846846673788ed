"""What ranks beside the first have in place of files: they train along and write nothing."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from jcl.runs.checkpoint import Progress


class NullRecord:
    """Takes figures and keeps none."""

    def __init__(self) -> None:
        self.newest: dict[str, dict[str, Any]] = {}

    def write(self, kind: str, step: int, epoch: float, figures: dict[str, float]) -> dict[str, Any]:
        return {"kind": kind, "step": step, "epoch": epoch, **figures}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class NullSaver:
    """Leaves checkpoints to the first rank, whose state is the same."""

    busy = False

    def start(self, learner: nn.Module, optimiser: torch.optim.Optimizer, progress: Progress) -> None: ...

    def finish(self, learner: nn.Module, optimiser: torch.optim.Optimizer, progress: Progress) -> None: ...

    def wait(self) -> None: ...

    def report(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
