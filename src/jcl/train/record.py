"""What a run writes down: `metrics.jsonl`, one object a line, and the same figures as TensorBoard events."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jcl.errors import RunError
from jcl.train.checkpoint import write_atomically


class Record:
    """Appends figures to a run's files.

    A line is written and flushed whole. On resuming at a step, lines beyond that step are dropped first, since the
    steps they speak of are about to be done again.
    """

    def __init__(self, folder: Path, *, resumed_at: int = 0, tensorboard: bool = True) -> None:
        self.path = folder / "metrics.jsonl"
        if self.path.exists():
            kept = [line for line in read_metrics(self.path) if line["step"] <= resumed_at]
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = self.path.open("a", encoding="utf-8")
        self._events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_at + 1)

    def write(self, kind: str, step: int, epoch: float, figures: dict[str, float]) -> dict[str, Any]:
        """One line; figures that are not finite are written as null, since JSON has no such number."""
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        line = {"kind": kind, "step": step, "epoch": round(epoch, 6), **finite}
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise RunError(f"{self.path} could not be written: {error.strerror}.") from None
        if self._events is not None:
            for name, value in figures.items():
                self._events.add_scalar(f"{kind}/{name}", value, step)
            self._events.flush()
        return line

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a line that could not be written was reported when it was
            self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; a last line torn by a crash is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
