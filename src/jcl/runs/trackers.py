"""Experiment trackers: the figures of `metrics.jsonl`, the settings and the page of a run, by their own libraries."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, Self

from jcl.errors import SettingsError
from jcl.runs.metrics import print_warning
from jcl.settings.schema import Settings, setting_names, values_of

_PROJECT = "jcl"


class Tracker:
    """A run in an experiment tracker, with the settings as its configuration.

    A stopped run continues under the same id. If the tracker fails, training goes on without it, except before the
    first step of a new run.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        run_id: str,
        settings: Settings,
        *,
        resumed: bool = False,
        warn: Callable[[str], None] = print_warning,
    ) -> None:
        self._name, self._warn = name, warn
        self._run: _TrackedRun | None = None
        try:
            with contextlib.redirect_stdout(sys.stderr):  # trackio prints there
                self._run = _TRACKERS[name](folder, run_id, settings)
        except Exception as error:  # of any kind, such as one about the network
            install = f"it is not installed. Run: pip install 'joint-contrastive-learning[{name}]'"
            reason = install if isinstance(error, ModuleNotFoundError) and error.name == name else _first_line(error)
            problem = f"{name} could not be started: {reason}."
            if not resumed:
                raise SettingsError(f"{problem} To train without it, leave out --track.") from None
            warn(f"{problem} Training continues without it.")

    def write(self, kind: str, step: int, epoch: float, figures: dict[str, float]) -> None:
        finite = {f"{kind}/{name}": value for name, value in figures.items() if math.isfinite(value)}
        self._call(lambda run: run.log(step, finite | {"epoch": epoch}))

    def add_page(self, page: Path) -> None:
        """Add an HTML page, if it exists."""
        if page.is_file():
            self._call(lambda run: run.add_page(page))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._call(lambda run: run.finish(complete=kind is None))

    def _call(self, action: Callable[[_TrackedRun], None]) -> None:
        if self._run is None:
            return
        try:
            with contextlib.redirect_stdout(sys.stderr):
                action(self._run)
        except Exception as error:
            self._run = None
            self._warn(
                f"{self._name} has failed: {_first_line(error)}. Training continues without it; "
                "metrics.jsonl has all figures."
            )


class _TrackedRun(Protocol):
    """A run as the library of a tracker has it."""

    def log(self, step: int, figures: dict[str, float]) -> None: ...

    def add_page(self, page: Path) -> None: ...

    def finish(self, *, complete: bool) -> None: ...


class _WandbRun:
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

    def log(self, step: int, figures: dict[str, float]) -> None:
        self._run.log(figures | {"step": step})

    def add_page(self, page: Path) -> None:
        import wandb

        self._run.log({"report": wandb.Html(page.read_text(encoding="utf-8"), inject=False)})

    def finish(self, *, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)


class _MlflowRun:
    """MLflow chooses its ids itself; a tag has ours. Figures are sent in the background, one line at a time."""

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

    def log(self, step: int, figures: dict[str, float]) -> None:
        from mlflow.entities import Metric

        self._wait()
        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in figures.items()]
        self._sent = self._client.log_batch(self._id, metrics, synchronous=False)

    def add_page(self, page: Path) -> None:
        self._client.log_artifact(self._id, str(page))

    def finish(self, *, complete: bool) -> None:
        self._wait()
        self._client.set_terminated(self._id, "FINISHED" if complete else "FAILED")

    def _wait(self) -> None:
        """Until the last line has arrived; raises if it could not be sent."""
        if self._sent is not None:
            self._sent.wait()


class _TrackioRun:
    """Trackio finds a run to continue by its name, which therefore contains the id."""

    def __init__(self, folder: Path, run_id: str, settings: Settings) -> None:
        import trackio

        self._step = 0
        self._run = trackio.init(
            _PROJECT, f"{folder.name}-{run_id}", config=settings.model_dump(mode="json"), resume="allow", embed=False
        )

    def log(self, step: int, figures: dict[str, float]) -> None:
        self._step = step
        self._run.log(figures, step=step)

    def add_page(self, page: Path) -> None:
        import trackio

        self._run.log({"report": trackio.Html(page, inject=False)}, step=self._step)

    def finish(self, *, complete: bool) -> None:
        import trackio

        trackio.finish()


_TRACKERS: dict[str, Callable[[Path, str, Settings], _TrackedRun]] = {
    "wandb": _WandbRun,
    "mlflow": _MlflowRun,
    "trackio": _TrackioRun,
}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
