"""The metrics of a run: `metrics.jsonl`, one JSON object per line; the same in TensorBoard and experiment trackers."""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jcl.console import pluralize
from jcl.errors import RunError
from jcl.paths import read_file
from jcl.runs.atomic import append_to, write_atomically
from jcl.runs.json_object import is_number
from jcl.runs.trackers import TensorBoard, Tracker


class MetricsLog:
    """The first and the last line of metrics of each kind. It writes no file; ranks other than the first use it."""

    def __init__(self) -> None:
        self.first: dict[str, dict[str, Any]] = {}
        self.newest: dict[str, dict[str, Any]] = {}

    def write(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> dict[str, Any]:
        """Add a line; metrics that are not finite become null, since JSON has no such number."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = {"kind": kind, "step": step, "epoch": round(epoch, 6), **finite}
        self.first.setdefault(kind, line)
        self.newest[kind] = line
        return line

    def sync(self) -> None:
        """Flush the lines to the disk, if possible."""


class MetricsWriter(MetricsLog, contextlib.AbstractContextManager["MetricsWriter"]):
    """Appends metrics to a run's files, and passes them to an experiment tracker.

    Each line is written at once and completely. If that fails (a full disk), `warn` is called once and the lines are
    kept and written later. When a run resumes at a step, lines of later steps are dropped. If lines are damaged, `warn`
    is called and the file is kept under another name.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resumed_at: int = 0,
        tensorboard: bool = True,
        tracker: Tracker | None = None,
        warn: Callable[[str], None] = print,
    ) -> None:
        self.path = folder / "metrics.jsonl"
        self._warn = warn
        self._pending: list[str] = []
        self._failing = False
        before = read_file(self.path, RunError) if self.path.exists() else b""
        found = read_metrics(self.path) if before else []
        whole = before[: before.rfind(b"\n") + 1].splitlines()  # a process that was killed may leave part of a line
        if (damaged := sum(bool(line.strip()) for line in whole) - len(found)) > 0:
            copy = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
            write_atomically(copy, before)
            warn(f"{self.path} has {pluralize(damaged, 'damaged line')}; the file is kept as {copy.name}.")
        kept = [line for line in found if line["step"] <= resumed_at]
        self.first = {line["kind"]: line for line in reversed(kept)}
        self.newest = {line["kind"]: line for line in kept}
        content = "".join(json.dumps(line) + "\n" for line in kept).encode()
        write_atomically(self.path, content)
        self._end = len(content)  # of the complete lines
        self._trackers: list[Tracker] = [TensorBoard(folder, resumed_at, warn)] if tensorboard else []
        self._trackers += [tracker] if tracker else []

    def write(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> dict[str, Any]:
        line = super().write(kind, step, epoch, metrics)
        self._pending.append(json.dumps(line) + "\n")
        self._write_pending()
        for tracker in self._trackers:
            tracker.write(kind, step, epoch, metrics)
        return line

    def __exit__(self, *exception: object) -> None:
        self._write_pending()

    def sync(self) -> None:
        self._write_pending()
        with contextlib.suppress(OSError), append_to(self.path) as file:
            os.fsync(file.fileno())

    def _write_pending(self) -> None:
        try:
            self._append("".join(self._pending).encode())
        except OSError as error:
            if not self._failing:
                problem = f"{self.path} could not be written: {error.strerror}"
                self._warn(f"{problem}. Training continues; the lines are kept and written later.")
            self._failing = True
        else:
            self._pending.clear()
            self._failing = False

    def _append(self, content: bytes) -> None:
        """Write after the complete lines; a partial line of a failed attempt is cut off."""
        if not content:
            return
        with append_to(self.path) as file:
            self._end = min(self._end, os.fstat(file.fileno()).st_size)
            file.truncate(self._end)
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) :]
            self._end += len(content)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The valid lines of a `metrics.jsonl`; torn or damaged lines are skipped."""
    lines = []
    for line in read_file(path, RunError).decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            lines.append(json.loads(line))
    return [line for line in lines if _is_valid(line)]


def _is_valid(line: Any) -> bool:
    """Whether it has a kind, a step and an epoch, and otherwise only numbers and nulls."""
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return False
    metrics = [value for name, value in line.items() if name != "kind" and value is not None]
    return all(map(is_number, [line.get("step"), line.get("epoch"), *metrics]))
