"""Experiment trackers: the metrics of `metrics.jsonl`, the settings and the page of a run, by their own libraries."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jcl.errors import SettingsError, first_line
from jcl.runs.atomic import append_to, make_folder, refuse_links
from jcl.settings.schema import Settings, setting_names
from jcl.settings.values import values_of

_PROJECT = "jcl"


def open_tracker(
    name: str, folder: Path, run_id: str, settings: Settings, *, resumed: bool, warn: Callable[[str], None]
) -> Tracker | None:
    """The run in a tracker, continued if the tracker knows it. If it does not start, only a new run raises."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # trackio prints there
            tracker = _TRACKERS[name](folder, run_id, settings)
    except Exception as error:  # of any kind, such as one about the network
        install = f"it is not installed. Run: pip install 'joint-contrastive-learning[{name}]'"
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        problem = f"{name} could not be started: {install if missing else first_line(error)}."
        if not resumed:
            raise SettingsError(f"{problem} To train without it, leave out --track.") from None
        warn(f"{problem} Training continues without it.")
        return None
    tracker.name, tracker.warn = name, warn
    return tracker


class Tracker(contextlib.AbstractContextManager["Tracker"]):
    """A run in an experiment tracker; if the tracker fails, training continues without it."""

    name: str
    warn: Callable[[str], None]
    _failed = False

    def write(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        finite = {f"{kind}/{name}": value for name, value in metrics.items() if math.isfinite(value)}
        self._try(lambda: self._log(step, finite | {"epoch": epoch}))

    def add_page(self, page: Path) -> None:
        """Add an HTML page, if it exists."""
        if page.is_file():
            self._try(lambda: self._add_page(page))

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._try(lambda: self._finish(kind is None))

    def _try(self, action: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            with contextlib.redirect_stdout(sys.stderr):
                action()
        except Exception as error:
            self._failed = True
            reason = f"{self.name} has failed: {first_line(error)}."
            self.warn(f"{reason} Training continues without it; metrics.jsonl is complete.")

    @abstractmethod
    def _log(self, step: int, metrics: dict[str, float]) -> None: ...

    def _add_page(self, page: Path) -> None: ...

    def _finish(self, complete: bool) -> None: ...


class TensorBoard(Tracker):
    """The TensorBoard events of a run. TensorBoard's own writer would print a trace when the disk is full."""

    def __init__(self, run: Path, resumed_at: int, warn: Callable[[str], None]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self.name, self.warn = "TensorBoard", warn
        self._file = run / "tensorboard" / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        # Readers drop events from this step on that earlier files hold.
        start = Event(step=resumed_at + 1, session_log=SessionLog(status=SessionLog.START), wall_time=time.time())
        self._waiting = [Event(file_version="brain.Event:2", wall_time=time.time()), start]

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._waiting.append(Event(step=step, summary=Summary(value=values), wall_time=time.time()))
        refuse_links(self._file.parent)
        make_folder(self._file.parent, parents=False)
        with append_to(self._file) as file:
            while self._waiting:
                RecordWriter(file).write(self._waiting.pop(0).SerializeToString())


class _Wandb(Tracker):
    def __init__(self, folder: Path, run_id: str, settings: Settings) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=run_id,
            name=os.environ.get("WANDB_NAME", folder.name),
            resume="allow",
            dir=os.environ.get("WANDB_DIR", str(folder)),
            config=settings.model_dump(mode="json"),
            reinit="create_new",  # leave a run of the caller alone
            settings=wandb.Settings(console="off"),
        )
        # The library's own step cannot go back, but a resumed run repeats those since its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics | {"step": step})

    def _add_page(self, page: Path) -> None:
        import wandb

        self._run.log({"report": wandb.Html(page.read_text(encoding="utf-8"), inject=False)})

    def _finish(self, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)


class _Mlflow(Tracker):
    """MLflow chooses its ids itself; a tag has ours. Metrics are sent in the background, one line at a time."""

    def __init__(self, folder: Path, run_id: str, settings: Settings) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        self._sent: Any = None
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        if found := self._client.search_runs([experiment], f"tags.`jcl.run_id` = '{run_id}'", max_results=1):
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(experiment, run_name=folder.name, tags={"jcl.run_id": run_id}).info.run_id
        params = values_of(settings, setting_names())
        self._client.log_batch(self._id, params=[Param(name, str(value)) for name, value in params.items()])

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        self._wait()
        batch = [Metric(name, value, int(1000 * time.time()), step) for name, value in metrics.items()]
        self._sent = self._client.log_batch(self._id, batch, synchronous=False)

    def _add_page(self, page: Path) -> None:
        self._client.log_artifact(self._id, str(page))

    def _finish(self, complete: bool) -> None:
        self._wait()
        self._client.set_terminated(self._id, "FINISHED" if complete else "FAILED")

    def _wait(self) -> None:
        """Until the last line has arrived; raises if it could not be sent."""
        if self._sent is not None:
            self._sent.wait()


class _Trackio(Tracker):
    """Trackio finds a run to continue by its name, which therefore contains the id."""

    _step = 0

    def __init__(self, folder: Path, run_id: str, settings: Settings) -> None:
        import trackio

        name, config = f"{folder.name}-{run_id}", settings.model_dump(mode="json")
        self._run = trackio.init(_PROJECT, name, config=config, resume="allow", embed=False)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self._step = step
        self._run.log(metrics, step=step)

    def _add_page(self, page: Path) -> None:
        import trackio

        self._run.log({"report": trackio.Html(page, inject=False)}, step=self._step)

    def _finish(self, complete: bool) -> None:
        import trackio

        trackio.finish()


_TRACKERS: dict[str, Callable[..., Tracker]] = {"wandb": _Wandb, "mlflow": _Mlflow, "trackio": _Trackio}
