"""Training progress: a bar in a terminal, occasional lines in a log, and a line about the state of training."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from jcl.console import format_duration, pluralize, print_line
from jcl.train.step import STEPS_BEFORE_RECORDING

LOG_SECONDS = 30.0  # between lines where there is no terminal
MAX_LOG_SECONDS = 600.0
# The first steps after a start compile, choose kernels and are recorded; the estimate of the time left ignores them.
WARMUP_STEPS, WARMUP_STEPS_ON_CPU = STEPS_BEFORE_RECORDING + 3, 1
ESTIMATE_SECONDS = 5.0  # of timed steps before the estimate is printed; the first ones find their images loaded
LONG_SECONDS = 3600.0  # of a training for which faster options are printed too
COLLAPSED, NARROW = 0.1, 0.4  # shares of the maximum spread; below, features have collapsed or nearly so
_TELLS_APART = 50.0  # % contrastive accuracy; a collapsed network cannot tell images apart


def format_speed(images_per_second: float) -> str:
    """`1,234 images/s`, with a decimal below ten."""
    return f"{images_per_second:,.{0 if images_per_second >= 10 else 1}f} images/s"


class Display:
    """Shows step, metrics, speed and time left for the duration of a `with` block.

    `describe` summarizes the newest metrics for log lines; `faster_options` names options that make a long training
    shorter. A task of one epoch (detection) is shown by its steps.
    """

    def __init__(
        self,
        console: Console,
        label: str,
        describe: Callable[[Mapping[str, Any]], str] = lambda metrics: _loss(metrics["loss"], ".3f"),
        faster_options: str = "",
    ) -> None:
        self.console, self.label = console, label
        self.newest: dict[str, Any] = {}
        self._describe, self._faster_options = describe, faster_options
        self._started = self._last_line = time.monotonic()
        self._beside, self._stopping = {"metrics": ""}, False  # text beside the bar
        self._bar = Progress(  # on one line, in terminals only; in a narrow terminal the bar shrinks first
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.fields[beside][metrics]}", table_column=Column(no_wrap=True), markup=False),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            expand=True,
        )
        self._task = self._bar.add_task(label, total=None, beside=self._beside)
        self._first, self._total, self._steps_per_epoch = 0, 0, 1
        self._timed_from, self._timed_since = WARMUP_STEPS, time.monotonic()
        self._estimated = False

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def start(self, step: int, total: int, steps_per_epoch: int, warmup: int = WARMUP_STEPS) -> None:
        """Training starts, or resumes, after `step` of `total` steps; the first `warmup` steps are not timed."""
        self._first, self._total, self._steps_per_epoch = step, total, steps_per_epoch
        self._timed_from, self._timed_since = step + warmup, time.monotonic()
        self._bar.reset(self._task, completed=step, total=total)

    def advance(self, step: int) -> None:
        if self._total == self._steps_per_epoch:
            description = f"{self.label} {step:,}/{self._total:,}"
        else:
            epochs = self._total // self._steps_per_epoch
            description = f"{self.label} epoch {min(step // self._steps_per_epoch + 1, epochs)}/{epochs}"
        seconds, timed = time.monotonic() - self._timed_since, step - self._timed_from
        if timed > 0:
            self._bar.update(self._task, completed=step, description=description)
        else:
            self._timed_since = time.monotonic()
            self._bar.reset(self._task, completed=step, description=description)
        if not self._estimated and timed > 0 and seconds >= ESTIMATE_SECONDS:
            self._print_estimate(step, seconds / timed)
        if self._line_due():
            self._print_progress(step)

    def show(self, line: Mapping[str, Any]) -> None:
        self.newest.update(line)
        loss = self.newest.get("loss")
        self._show_beside("" if loss is None else f"loss {loss:.3f}  {format_speed(self.newest['images_per_second'])}")
        if line["kind"] == "knn":
            self._print(line["step"], self._describe_knn(line))
        elif line["kind"] == "train" and self._line_due():
            self._print_progress(line["step"])

    def _show_beside(self, text: str) -> None:
        if not self._stopping:
            self._beside["metrics"] = text

    def _describe_knn(self, line: Mapping[str, Any]) -> str:
        start, state = line.get("start_knn_top1"), self._describe(self.newest)
        if not line["step"]:
            state, start = "the untrained network" if start is None else "the weights at the start", None
        baselines = {"chance": line.get("chance_top1"), "at the start": start}
        beside = ", ".join(f"{name} {value:.1f} %" for name, value in baselines.items() if value is not None)
        return f"kNN top-1 {line['knn_top1']:.1f} %{f' ({beside})' if beside else ''}; {state}"

    def report(self, step: int) -> None:
        """Print a summary of the newest metrics of a run without kNN, if there are any."""
        state = self._describe(self.newest) if step else "before training"
        rank = self.newest.get("rankme")
        if rank is not None:
            state = f"RankMe {rank:.1f}; {state}"
        if rank is not None or "loss" in self.newest:
            self._print(step, state)

    def evaluating(self, step: int) -> None:
        """An evaluation starts, which may take minutes on a CPU; without a bar only the first one is printed."""
        self._show_beside("evaluating")
        if not step and not self.console.is_terminal:
            self._print(step, "evaluating before the first step")

    def warn(self, text: str) -> None:
        """Print a problem that does not end training."""
        print_line(self.console, text)

    def stopping(self) -> None:
        """Show that a stop was requested, since the current step may take long; safe in a signal handler."""
        self._stopping = True
        self._beside["metrics"] = "stopping; press Ctrl-C again to stop at once"

    def seconds_left(self, step: int) -> float | None:
        """The estimated duration of the steps after `step`, once enough steps have been timed."""
        timed = step - self._timed_from
        return (time.monotonic() - self._timed_since) / timed * (self._total - step) if timed > 0 else None

    def _print_estimate(self, step: int, seconds: float) -> None:
        """Print once how long training takes, with this many seconds a step; runs of seconds need no estimate."""
        if step == self._total:
            return
        self._estimated = True
        steps = self._total - self._first
        duration = seconds * steps
        time_left = f"about {format_duration(duration)}{' more' if self._first else ''}"
        long = self._faster_options and duration > LONG_SECONDS
        advice = f". Faster, for a first try: {self._faster_options}" if long else ""
        self._print(step, f"training takes {time_left} ({pluralize(steps, 'step')} of {seconds:.2g} s){advice}")

    def _print_progress(self, step: int) -> None:
        seconds = self.seconds_left(step)
        left = f", about {format_duration(seconds)} left" if seconds is not None and step < self._total else ""
        parts = [f"step {step:,} of {self._total:,}{left}"]
        if "loss" in self.newest:
            parts += [format_speed(self.newest["images_per_second"]), self._describe(self.newest)]
        self._print(step, "; ".join(parts))

    def _line_due(self) -> bool:
        """Whether to write a line to a log: often at first, rarely in runs of days, never if there is a bar."""
        now = time.monotonic()
        wait = min(MAX_LOG_SECONDS, max(LOG_SECONDS, (now - self._started) / 20))
        return not self.console.is_terminal and now - self._last_line > wait

    def _print(self, step: int, text: str) -> None:
        self._last_line = time.monotonic()
        epoch = "" if self._total == self._steps_per_epoch else f" epoch {step / self._steps_per_epoch:.3g}"
        print_line(self.console, f"{self.label}{epoch}: {text}")


def health(metrics: Mapping[str, float | None], *, queue_size: int, embedding_dim: int) -> str:
    """One line on the state of training, from its newest metrics."""
    parts = []
    filled, spread = metrics.get("queue_filled"), metrics.get("feature_std")
    accuracy = metrics.get("contrastive_accuracy")
    if filling := filled is not None and filled < 1.0:
        spread = accuracy = None  # they mean nothing yet
        parts.append(f"queue still filling ({filled:.0%} real keys, the loss is not comparable yet)")
    if "loss" in metrics:
        loss, guess = metrics["loss"], uniform_guess_loss(queue_size)
        judged = ""
        if loss is not None and not filling:
            judged = f", {'below' if loss < guess else 'above'} a uniform guess ({guess:.2f})"
        parts.append(_loss(loss, ".2f") + judged)
    if spread is not None:
        # Unit vectors spread evenly over the sphere have a standard deviation of 1/sqrt(d) in every coordinate.
        share = spread * math.sqrt(embedding_dim)
        if has_collapsed(share, accuracy):
            advice = "lower --lr or use more BN groups"
            parts.append(f"features have COLLAPSED (spread {share:.0%} of the maximum): {advice}")
        elif share < NARROW:
            parts.append(f"features are spread narrowly ({share:.0%} of the maximum), watch for collapse")
        else:
            parts.append(f"features well spread ({share:.0%})")
    if accuracy is not None:
        parts.append(f"contrastive accuracy {accuracy:.0f} %")
    if skipped := metrics.get("skipped_steps"):
        parts.append(f"{pluralize(int(skipped), 'step')} skipped so far because the loss was not finite")
    return "; ".join(parts)


def _loss(value: float | None, digits: str) -> str:
    return "the loss is not finite" if value is None else f"loss {value:{digits}}"


def has_collapsed(spread: float, accuracy: float | None) -> bool:
    """Whether all images have nearly the same features; `spread` is a share of the maximum, `accuracy` in percent."""
    return spread < COLLAPSED and (accuracy is None or accuracy < _TELLS_APART)


def collapse_warning(metrics: Mapping[str, float | None], embedding_dim: int) -> str | None:
    """A sentence about collapsed features, from the newest metrics; None if they have not collapsed."""
    std = metrics.get("feature_std")
    if std is None or not has_collapsed(share := std * math.sqrt(embedding_dim), metrics.get("contrastive_accuracy")):
        return None
    spread = f"their standard deviation is {share:.0%} of the possible one"
    return f"The features have collapsed: {spread}. Lower the learning rate, or use more BN groups."


def uniform_guess_loss(queue_size: int) -> float:
    """The loss of a network that cannot tell the positive from the negatives: log(K + 1)."""
    return math.log(queue_size + 1)
