"""The training loop of pre-training, the paper's linear probe, fine-tuning and detection.

`Trainer` owns what they share: metric windows, finite checks, checkpoints, signals, ranks and the progress display.
A `TrainingTask` owns what differs: its batches, one optimization step, and the names of its metrics.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jcl.distributed.group import ALONE, LostContact, Ranks, RollCall, SilentRank, fail_together
from jcl.errors import CollectiveDataError, DataError, Diverged, Interrupted, JclError, OtherRankFailed, RunError
from jcl.runs.checkpoint import Progress, newest_checkpoint
from jcl.runs.folder import TrainingFolder
from jcl.runs.metrics import MetricsLog, MetricsWriter
from jcl.runs.saver import CheckpointSaver, NullSaver
from jcl.runs.trackers import Tracker
from jcl.signals import StopRequest
from jcl.train.display import WARMUP_STEPS, WARMUP_STEPS_ON_CPU, Display

_MAX_WINDOW = 20  # steps per line of metrics
_MIN_LINES = 50  # in runs with as many steps
STEPS_BETWEEN_STOP_CHECKS = 10  # on several GPUs, where the check makes the host wait


class TrainingTask(ABC):
    """What is trained and how one step changes it."""

    module: nn.Module  # its state goes into checkpoints, with the optimizer's
    optimizer: torch.optim.Optimizer
    epochs: int
    steps_per_epoch: int
    batch_size: int  # images per step, over all ranks
    advice = "A lower --lr usually helps."  # when the loss is not finite

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Iterable[Any]:
        """The batches of an epoch from its step `start` on."""

    @abstractmethod
    def learning_rate(self, step: int) -> float: ...

    @abstractmethod
    def step(self, batch: Any, step: int, lr: float) -> Tensor:
        """Do one optimization step; return its metrics on the device, the loss first. Must not synchronize."""

    @abstractmethod
    def metrics(self, progress: Progress) -> dict[str, float]:
        """Metrics by name, from the sums in `progress.window` over `progress.window_steps` steps."""

    def problem(self) -> str | None:
        """Why training must stop, apart from a non-finite loss; called after each metric window."""
        return None

    def between_epochs(self, trainer: "Trainer") -> None:  # noqa: B027
        """Called before the first step and after each epoch, and again when training resumes there."""

    def warning(self) -> str | None:
        """A problem that does not end training; called after each step."""
        return None

    def before_stop(self) -> None:  # noqa: B027
        """Called before training stops on request."""

    def epoch_at(self, step: int) -> float:
        return step / self.steps_per_epoch


class StopEvaluation(Exception):
    """Ends an evaluation because a stop was requested."""


@dataclass
class Trainer:
    """Trains a task from `progress` to its last step.

    Without a folder (see `writing_to`) nothing is saved and signals keep their default handlers. A line of metrics is
    written every `log_every` steps; by default more often in the first steps and in short runs. A checkpoint is
    written every `save_every` steps and every `save_seconds` (0: never), and at the end.
    """

    task: TrainingTask
    display: Display
    progress: Progress = field(default_factory=Progress)
    ranks: Ranks = ALONE
    log_every: int | Literal["auto"] = "auto"
    save_every: int = 0
    save_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.folder: TrainingFolder | None = None
        self.stop_request = StopRequest(self.display.stopping)
        self.record = MetricsLog()
        self.saver: CheckpointSaver | NullSaver = NullSaver()
        self.clock = TrainingClock(self.progress)
        self.total_steps = self.task.epochs * self.task.steps_per_epoch
        self._saved_at = time.perf_counter()

    @contextlib.contextmanager
    def writing_to(
        self, folder: TrainingFolder, keep: int = 2, *, tensorboard: bool = False, tracker: Tracker | None = None
    ) -> Iterator[None]:
        """Write metrics and checkpoints to a folder, on the first rank, and keep the newest `keep` checkpoints."""
        self.folder = folder
        with contextlib.ExitStack() as opened:
            if self.ranks.first:
                progress, warn = self.progress, self.display.warn
                progress.run = folder.identify(progress.run)
                record = MetricsWriter(
                    folder.path, resumed_at=progress.step, tensorboard=tensorboard, tracker=tracker, warn=warn
                )
                self.record = opened.enter_context(record)
                self.saver = opened.enter_context(CheckpointSaver(folder.checkpoints, keep, warn))
                self.saver.warn_of_full_disk(self.task.module, self.task.optimizer)
            yield

    def run(self) -> None:
        """Train to the last epoch. Whatever ends training early raises, after saving what can be saved."""
        roll_call = RollCall(self.ranks)
        with self.display:
            try:
                with contextlib.nullcontext() if self.folder is None else self.stop_request:
                    try:
                        self._train()
                    except StopEvaluation:
                        self.clock.restart()
                        self._stop()
            except LostContact as error:
                raise self._lost_contact(error, roll_call) from error
            except DataError as error:
                raise self._save_before(error) from None
            except (RunError, Interrupted) as error:
                if self.ranks.first:
                    raise
                raise OtherRankFailed(error.exit_code) from None  # raised on all ranks; the first one reports it

    def _train(self) -> None:
        task, progress, steps = self.task, self.progress, self.task.steps_per_epoch
        on_cpu = next(task.module.parameters()).device.type == "cpu"
        warmup = WARMUP_STEPS_ON_CPU if on_cpu else WARMUP_STEPS
        self.display.start(progress.step, self.total_steps, steps, warmup)
        self._saved_at = time.perf_counter()
        self.clock.restart()
        if progress.step % steps == 0:
            task.between_epochs(self)  # training may have stopped between an epoch's last step and this
        self.display.start(progress.step, self.total_steps, steps, warmup)  # again, without the time of an evaluation
        for epoch in range(progress.step // steps, task.epochs):
            for batch in task.batches(epoch, progress.step % steps):
                self._step(batch)
                self.saver.report()
                if warning := task.warning():
                    self.display.warn(warning)
                if progress.step % steps == 0:
                    task.between_epochs(self)
                if progress.step == self.total_steps:
                    self.save_and_wait()
                elif self._stop_requested():
                    self._stop()
                elif self._save_due():
                    self._save()

    def _step(self, batch: Any) -> None:
        """One step; its metrics are summed on the device and fetched only for lines of metrics."""
        progress = self.progress
        lr = self.task.learning_rate(progress.step)
        metrics = self.task.step(batch, progress.step, lr)
        if progress.window_steps == 0:
            progress.window = metrics.clone()
        else:
            if missing := len(metrics) - len(progress.window):  # `train.on_nan` was changed before resuming
                progress.window = F.pad(progress.window, (0, missing))
            progress.window.add_(metrics)
        progress.window_steps += 1
        progress.step += 1
        if progress.step == self.total_steps or self._line_due():
            self._write_window(lr)
        self.display.advance(progress.step)

    def _line_due(self) -> bool:
        step = self.progress.step
        if self.log_every != "auto":
            return self.progress.window_steps >= self.log_every
        window = max(1, min(_MAX_WINDOW, self.total_steps // _MIN_LINES))
        return step % window == 0 or (step < window and step.bit_count() == 1)  # at 1, 2, 4, 8, ... first

    def _write_window(self, lr: float) -> None:
        progress = self.progress
        speed = self.clock.steps_per_second() * self.task.batch_size
        metrics = self.task.metrics(progress) | {"lr": lr, "images_per_second": speed, "seconds": progress.seconds}
        progress.window_steps = 0
        self.display.show(self.record.write("train", progress.step, self.task.epoch_at(progress.step), metrics))
        self._check_finite()
        if problem := self.task.problem():
            raise self._diverged(problem)

    def _check_finite(self) -> None:
        """Raise if the loss is not finite. The sum of a window is enough: it is finite only if all its losses are."""
        if not bool(torch.isfinite(self.progress.window[0])):
            raise self._diverged(f"The loss is not finite after step {self.progress.step:,}")

    def _diverged(self, problem: str) -> Diverged:
        return Diverged(f"{problem}; {self._last_checkpoint()}. {self.task.advice}")

    def stop_evaluation(self) -> None:
        """Raise `StopEvaluation` if a stop was requested, unless other ranks would wait for the result."""
        if self.stop_request.requested and self.ranks.count == 1:
            raise StopEvaluation

    def _stop_requested(self) -> bool:
        """Whether any rank was asked to stop, or the run folder was moved; all ranks get the same answer."""
        requested = self.stop_request.requested or self.saver.moved
        if self.ranks.count == 1:
            return requested
        step, on_cpu = self.progress.step, self.progress.window.device.type == "cpu"
        ask = on_cpu or step % STEPS_BETWEEN_STOP_CHECKS == 0 or step % self.task.steps_per_epoch == 0
        return ask and self.ranks.any(requested)

    def _save_due(self) -> bool:
        if self.save_every and self.progress.step % self.save_every == 0:
            return True
        late = self.save_seconds > 0 and time.perf_counter() - self._saved_at >= self.save_seconds
        return late and not self.saver.busy

    def _save(self) -> None:
        """Start writing a checkpoint in the background."""
        self._check_finite()
        self._saved_at = time.perf_counter()
        self.clock.lap()
        self.record.sync()
        self.saver.start(self.task.module, self.task.optimizer, self.progress)

    def save_and_wait(self) -> None:
        """Write a checkpoint; no rank goes on before it is written."""
        with fail_together(self.ranks):
            self._finish_saving()

    def _finish_saving(self) -> None:
        self._check_finite()
        self.clock.lap()
        self.record.sync()
        try:
            self.saver.finish(self.task.module, self.task.optimizer, self.progress)
        except Diverged as error:
            raise self._diverged(str(error).rstrip(".")) from None
        except RunError as error:
            if self.saver.moved:
                raise
            raise RunError(f"{error} {self._where_stopped()}") from None

    def _stop(self) -> None:
        signal_name = self.stop_request.signal_name
        if self.progress.step == 0:
            if signal_name == "SIGINT":
                raise KeyboardInterrupt
            raise Interrupted(f"{signal_name} received: stopped before the first step; repeat the command.")
        self.task.before_stop()
        self.save_and_wait()
        stopped = f"{signal_name or 'Stop signal'} received: stopped after step {self.progress.step:,}"
        raise Interrupted(f"{stopped}. The state is saved; {self._how_to_resume}.")

    def _save_before(self, error: DataError) -> JclError:
        """Save before an unreadable image ends training, and return the error to raise.

        If only one rank has the error, the others may be waiting for it in the next step: then only the first rank
        can save, without them.
        """
        everywhere = isinstance(error, CollectiveDataError)
        if self.folder is not None and self.progress.step > 0 and (everywhere or self.ranks.first):
            self.save_and_wait() if everywhere else self._finish_saving()
            error = DataError(f"{error} {self._where_stopped()}")
        return OtherRankFailed() if everywhere and not self.ranks.first else error

    def _lost_contact(self, error: LostContact, roll_call: RollCall) -> LostContact:
        silent, others = "timed out" in str(error).lower(), "Another rank has ended."
        if silent:
            others = roll_call.describe_other_ranks()
        else:
            roll_call.report()
        return (SilentRank if silent else LostContact)(f"{error} {others} {self._where_stopped()}")

    def _where_stopped(self) -> str:
        stopped = f"Training stopped after step {self.progress.step:,}; {self._last_checkpoint()}"
        return f"{stopped}. Once that is fixed, {self._how_to_resume}."

    @property
    def _how_to_resume(self) -> str:
        return "start again" if self.folder is None else self.folder.how_to_resume

    def _last_checkpoint(self) -> str:
        self.saver.wait()
        found = None if self.folder is None else newest_checkpoint(self.folder.checkpoints)
        return f"the newest checkpoint is {found}" if found else "there is no checkpoint yet"


class TrainingClock:
    """Adds the time spent training to `progress`, and measures the speed between lines of metrics.

    The first line after resuming may cover steps from before the stop, whose duration is unknown. Its speed is that of
    the steps since.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._last = time.perf_counter()
        self._counted = progress.step, progress.seconds  # at the last line of metrics

    def restart(self) -> None:
        """Do not count the time since the last lap."""
        self._last = time.perf_counter()

    def lap(self) -> None:
        now = time.perf_counter()
        self._progress.seconds += now - self._last
        self._last = now

    def steps_per_second(self) -> float:
        """The speed since the last call."""
        self.lap()
        (step, seconds), self._counted = self._counted, (self._progress.step, self._progress.seconds)
        return (self._progress.step - step) / max(self._progress.seconds - seconds, 1e-9)
