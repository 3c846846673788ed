"""One training step: views, Algorithm 1, backward pass, optimiser.

On a GPU the step is compiled and then recorded as one CUDA graph, because for small images the time goes into
launching kernels rather than into their work. Everything that changes from step to step (the images, the step's
number, the learning rate, the covariance scale) is therefore a tensor that the recorded kernels read.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from jcl.core.method import ContrastiveLearner, StepFigures
from jcl.data import ImageBatch
from jcl.distributed.device import autocast
from jcl.distributed.group import SharedGradients, average_statistics
from jcl.train.nonfinite import NonFiniteGuard
from jcl.views import ViewMaker, ViewRecipe

STEPS_BEFORE_RECORDING = 3  # compile, choose kernels and create the optimiser's state first


@dataclass(frozen=True)
class StepOptions:
    """How steps are carried out on a device."""

    device: torch.device
    precision: torch.dtype
    compiled: bool
    recorded: bool  # as a CUDA graph
    skip_bad: bool = False  # take steps back whose loss is not finite


class TrainingStep:
    """Moves a learner on by one batch; `figures` of the last step stay on the device until somebody asks."""

    def __init__(
        self,
        learner: ContrastiveLearner,
        optimiser: torch.optim.Optimizer,
        recipe: ViewRecipe,
        seed: int,
        options: StepOptions,
    ) -> None:
        self.learner, self.optimiser, self.options = learner, optimiser, options
        self.views = _ViewFunction(recipe, seed, options)
        self.ranks = learner.ranks
        self.shared = SharedGradients(learner.query_encoder.parameters(), self.ranks) if self.ranks.count > 1 else None
        self.step = torch.zeros((), dtype=torch.int64, device=options.device)
        self.scale = torch.zeros((), device=options.device)
        self.lr = torch.zeros((), device=options.device) if options.recorded else None
        self.batch: ImageBatch | None = None
        self.undo: NonFiniteGuard | None = None
        self.figures = torch.zeros(len(StepFigures._fields) + options.skip_bad, device=options.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0
        learner.train()
        if options.compiled:
            # The loss is taken in float32 on purpose; the compiler of torch 2.11 advises everybody against it.
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
            learner.compile_parts()

    def __call__(self, batch: ImageBatch, step: int, lr: float, covariance_scale: float) -> Tensor:
        """Do step number `step` and return its figures, in the order of `StepFigures`.

        Where bad steps are skipped, they are followed by a 1 for a step that was (its other figures are then 0) or a 0.
        """
        self.step.fill_(step)
        self.scale.fill_(covariance_scale)
        self._set_lr(lr)
        self._take(batch)
        with _convolutions_tried_out():
            if not self.options.recorded or self.done < STEPS_BEFORE_RECORDING:
                self._work()
            else:
                if self.graph is None:
                    self.graph = self._record()
                self.graph.replay()
        self.done += 1
        return self.figures

    def _work(self) -> None:
        assert self.batch is not None
        if self.options.skip_bad:
            if self.undo is None:  # only now is the state complete, that of a checkpoint included
                self.undo = NonFiniteGuard(self.learner, self.optimiser, self.ranks)
            self.undo.remember()
        views = self.views.of(self.batch, self.step)
        with autocast(self.options.device, self.options.precision):
            result = self.learner(views, self._queries(self.batch), self.step, self.scale)
        self._clear_gradients()
        self.back_propagate(result.loss)
        if self.shared is not None:
            self.shared.average()
            average_statistics(self.learner, self.ranks)
        self.optimiser.step()
        figures = result.figures(self.ranks)
        if self.undo is not None:
            skipped = self.undo.settle(result.loss)
            figures = torch.cat([torch.where(skipped > 0, 0.0, figures), skipped[None]])
        self.figures.copy_(figures)

    def skipped_in_a_row(self) -> int:
        """How many of the last steps were taken back, up to the last one; asking waits for the device."""
        return 0 if self.undo is None else int(self.undo.in_a_row)

    def back_propagate(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def _record(self) -> torch.cuda.CUDAGraph:
        """Record the work without doing it; the gradients and everything in between live in the graph's own memory."""
        self._clear_gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may be using the device
            self._work()
        return graph

    def _queries(self, batch: ImageBatch) -> int:
        """How many of the images are queries of this rank."""
        return len(batch) if batch.places is None else len(batch.places) // self.ranks.count

    def _clear_gradients(self) -> None:
        if self.shared is None:
            self.optimiser.zero_grad(set_to_none=True)
        else:
            self.shared.clear()

    def _set_lr(self, lr: float) -> None:
        if self.lr is not None:
            self.lr.fill_(lr)
        for group in self.optimiser.param_groups:
            group["lr"] = lr if self.lr is None else self.lr

    def _take(self, batch: ImageBatch) -> None:
        """Recorded kernels read their batch from one place, so it is copied there."""
        if not self.options.recorded:
            self.batch = batch
        elif self.batch is None:
            self.batch = batch.clone()
        else:
            for kept, new in zip(self.batch.tensors(), batch.tensors(), strict=True):
                kept.copy_(new)


@contextlib.contextmanager
def _convolutions_tried_out() -> Iterator[None]:
    """Have cuDNN try every kernel once: it pays for steps, whose shapes never change, but not for what else is done."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class _ViewFunction:
    """Makes views on the device in the form the encoders take fastest."""

    def __init__(self, recipe: ViewRecipe, seed: int, options: StepOptions) -> None:
        self.recipe, self.seed, self.options = recipe, seed, options
        self.make = torch.compile(self._make, dynamic=False) if options.compiled else self._make

    def of(self, batch: ImageBatch, step: Tensor) -> _BatchViews:
        return _BatchViews(self, batch, step)

    def _make(
        self, step: Tensor, pixels: Tensor, sizes: Tensor, samples: Tensor, rows: Tensor, numbers: Tensor
    ) -> Tensor:
        on_gpu = self.options.device.type == "cuda"
        return ViewMaker(
            self.recipe,
            self.seed,
            step,
            pixels,
            sizes,
            samples,
            dtype=self.options.precision,
            memory_format=torch.channels_last if on_gpu else torch.contiguous_format,
        )(rows, numbers)


@dataclass(frozen=True)
class _BatchViews:
    """The views of one batch in one step."""

    function: _ViewFunction
    batch: ImageBatch
    step: Tensor

    def __call__(self, rows: Tensor, numbers: Tensor) -> Tensor:
        batch = self.batch
        if batch.places is not None:  # rows count in the whole batch, of which this rank holds a part
            rows = batch.places[rows]
        # Keys are encoded without gradients and queries with; views have none, and are compiled once for both.
        with torch.no_grad(), torch.autocast(batch.pixels.device.type, enabled=False):
            return self.function.make(self.step, batch.pixels, batch.sizes, batch.samples, rows, numbers)
