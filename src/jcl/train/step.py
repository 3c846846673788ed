"""One training step: views, Algorithm 1, backward pass, optimizer.

On a GPU the step is compiled and then recorded as one CUDA graph, because with small images most time would go into
kernel launches. Everything that changes from step to step (images, step number, learning rate, covariance scale, key
momentum) is therefore a tensor that the recorded kernels read.
"""

from __future__ import annotations

import contextlib
import os
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jcl.core.method import ContrastiveLearner, StepMetrics
from jcl.data import ImageBatch
from jcl.distributed.device import autocast
from jcl.distributed.group import GradientBuffer, Ranks, average_statistics
from jcl.errors import SettingsError, first_line
from jcl.paths import keep_compiled_code
from jcl.views import ViewMaker, ViewRecipe

STEPS_BEFORE_RECORDING = 3  # to compile, choose kernels and create the optimizer's state
MAX_SKIPPED_IN_A_ROW = 100
_COMPILERS = ("triton", "torch._dynamo", "torch._inductor", "subprocess")  # where their errors come from

# (step, pixels, sizes, samples, rows, numbers) -> views
MakeViews = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class StepOptions:
    """How steps are executed on a device."""

    device: torch.device
    precision: torch.dtype
    compiled: bool
    recorded: bool  # as a CUDA graph
    skip_nonfinite: bool = False  # undo steps whose loss is not finite
    clip_grad: float = 0.0  # largest norm of the gradient; 0: any

    def __post_init__(self) -> None:
        # PyTorch 2.15 leaves a part of the weights' gradient uninitialized on CPUs, in 3×3 convolutions of stride 2
        # whose input has one pixel.
        if self.device.type == "cpu" and self.precision == torch.bfloat16:
            raise SettingsError("train.precision=bfloat16 needs a GPU: on a CPU some gradients of PyTorch are wrong.")


@contextlib.contextmanager
def explain_compiler_errors() -> Iterator[None]:
    """Turn errors of Triton and PyTorch's compiler, which need a C compiler, into a message."""
    try:
        yield
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        origins = (type(error).__module__, str(frame.f_globals.get("__name__")))
        compiler = any(name.startswith(_COMPILERS) for name in origins)
        missing = getattr(error, "name", None) == "triton"
        if not (compiler or missing) or origins[0] == "torch":  # such as running out of memory in compiled code
            raise
        remedy = "train without compiling: --set train.compile=false (`jcl linear`, `jcl finetune`: omit --compile)"
        raise SettingsError(f"The compiled training step failed: {first_line(error)}; {remedy}.") from error


@explain_compiler_errors()
def view_function(recipe: ViewRecipe, seed: int, options: StepOptions) -> MakeViews:
    """A function that makes views of a batch on the device."""
    if options.compiled and options.device.type == "cuda":
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns if it is not set
        from jcl.views.kernels import FusedViews  # Triton is only there for GPUs

        return FusedViews(recipe, seed, options.device, options.precision)

    def make_views(step: Tensor, pixels: Tensor, sizes: Tensor, samples: Tensor, *views: Tensor) -> Tensor:
        return ViewMaker(recipe, seed, step, pixels, sizes, samples, options.precision)(*views)

    return make_views


class TrainingStep:
    """Trains a learner by one batch per call. The metrics of a step stay on the device."""

    def __init__(
        self,
        learner: ContrastiveLearner,
        optimizer: torch.optim.Optimizer,
        recipe: ViewRecipe,
        seed: int,
        options: StepOptions,
    ) -> None:
        self.learner, self.optimizer, self.options = learner, optimizer, options
        self.make_views = view_function(recipe, seed, options)
        self.make_local_views = view_function(recipe.local(), seed, options) if recipe.local_size else None
        self.ranks = learner.ranks
        parameters = learner.query_encoder.parameters()
        self.gradients = GradientBuffer(parameters, self.ranks) if self.ranks.count > 1 else None
        self.step = torch.zeros((), dtype=torch.int64, device=options.device)
        self.scale = torch.zeros((), device=options.device)
        self.key_momentum: Tensor | None = None  # only if it is scheduled
        self.lrs = [torch.zeros((), device=options.device) for _ in optimizer.param_groups] if options.recorded else []
        self.batch: ImageBatch | None = None
        self.guard: NonFiniteGuard | None = None
        self.metrics = torch.zeros(len(StepMetrics._fields) + options.skip_nonfinite, device=options.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0
        learner.train()
        if options.compiled:
            # The loss is computed in full float32 on purpose.
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
            keep_compiled_code()
            learner.compile_parts()

    @explain_compiler_errors()
    def __call__(
        self,
        batch: ImageBatch,
        step: int,
        lr: float,
        covariance_scale: float,
        key_momentum: float | None = None,
        backbone_share: float = 1.0,
    ) -> Tensor:
        """Do step number `step` and return its metrics, in the order of `StepMetrics`.

        A `key_momentum` that changes from step to step is given from the first step on. The optimizer's groups
        use `lr` times their `lr_scale`, and those of the backbone `backbone_share` of that.
        With `skip_nonfinite` a last metric is 1 if the step was undone (its other metrics are 0), else 0.
        """
        self.step.fill_(step)
        self.scale.fill_(covariance_scale)
        if key_momentum is not None:
            if self.key_momentum is None:
                self.key_momentum = torch.zeros_like(self.scale)
            self.key_momentum.fill_(key_momentum)
        self._set_lr(lr, backbone_share)
        self._set_batch(batch)
        with cudnn_benchmark():
            if not self.options.recorded or self.done < STEPS_BEFORE_RECORDING:
                self._run()
            else:
                if self.graph is None:
                    self.graph = self._record()
                self.graph.replay()
        self.done += 1
        return self.metrics

    def _run(self) -> None:
        assert self.batch is not None
        if self.options.skip_nonfinite:
            if self.guard is None:  # not earlier, since a checkpoint may be loaded after __init__
                self.guard = NonFiniteGuard(self.learner, self.optimizer, self.ranks)
            self.guard.save_state()
        # On several ranks `local_rows` has one entry per image of the whole batch, which the ranks share equally.
        queries = len(self.batch) if self.batch.local_rows is None else len(self.batch.local_rows) // self.ranks.count
        self._clear_gradients()
        with autocast(self.options.device, self.options.precision):
            result = self.learner(self._views, queries, self.step, self.scale, self.key_momentum, self.backward)
        if self.gradients is not None:
            self.gradients.average()
            average_statistics(self.learner, self.ranks)
        if self.options.clip_grad:
            nn.utils.clip_grad_norm_(self.learner.query_encoder.parameters(), self.options.clip_grad)
        self.optimizer.step()
        metrics = result.metrics(self.ranks)
        if self.guard is not None:
            skipped = self.guard.undo_if_nonfinite(result.loss)
            metrics = torch.cat([torch.where(skipped > 0, 0.0, metrics), skipped[None]])
        self.metrics.copy_(metrics)

    def _views(self, rows: Tensor, numbers: Tensor, local: bool = False) -> Tensor:
        """Views `numbers` of the images `rows` of the batch; the learner asks for them."""
        batch = self.batch
        assert batch is not None
        if batch.local_rows is not None:  # `rows` index the whole batch
            rows = batch.local_rows[rows]
        with torch.no_grad(), torch.autocast(batch.pixels.device.type, enabled=False):
            make_views = self.make_local_views if local else self.make_views
            assert make_views is not None
            return make_views(self.step, batch.pixels, batch.sizes, batch.samples, rows, numbers)

    def skipped_in_a_row(self) -> int:
        """The number of steps undone since the last good one; reading it waits for the device."""
        return 0 if self.guard is None else int(self.guard.in_a_row)

    def backward(self, loss: Tensor) -> None:
        with torch.autocast(loss.device.type, enabled=False):
            torch.autograd.backward(loss)

    def _record(self) -> torch.cuda.CUDAGraph:
        """Record a step without executing it; gradients and intermediate results live in the graph's own memory."""
        self._clear_gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may be using the device
            self._run()
        return graph

    def _clear_gradients(self) -> None:
        if self.gradients is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.gradients.clear()

    def _set_lr(self, lr: float, backbone_share: float) -> None:
        for index, group in enumerate(self.optimizer.param_groups):
            rate = lr * group.get("lr_scale", 1.0) * (backbone_share if group.get("backbone") else 1.0)
            group["lr"] = self.lrs[index].fill_(rate) if self.lrs else rate

    def _set_batch(self, batch: ImageBatch) -> None:
        """Recorded kernels read their batch from fixed memory, so it is copied there."""
        if not self.options.recorded:
            self.batch = batch
        elif self.batch is None:
            self.batch = batch.clone()
        else:
            for kept, new in zip(self.batch.tensors(), batch.tensors(), strict=True):
                kept.copy_(new)


@contextlib.contextmanager
def cudnn_benchmark() -> Iterator[None]:
    """Let cuDNN benchmark its kernels, which pays off because the shapes of training steps never change."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class NonFiniteGuard:
    """Undoes a step if its loss, or anything in the state after it, is not finite.

    The weights of both encoders, their running statistics, the queue and the optimizer's momentum are then what they
    were before the step, bit for bit. The step still counts: its batch is used up, and the schedules move on.

    The state is copied before each step and selected after it on the device (`torch.where`), so that a step has no
    branch and can be recorded as a CUDA graph. This takes one more copy of the state in memory, and another two during
    the selection. All ranks decide alike.
    """

    def __init__(self, learner: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
        self._ranks = ranks
        _create_state(optimizer)
        state = list(learner.state_dict().values())
        state += [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
        blocks = defaultdict(list)
        for tensor in state:
            row = tensor.detach().as_strided((tensor.numel(),), (1,))  # in memory order, channels-last or not
            blocks[tensor.device, tensor.dtype].append(row)
        self._blocks = [(rows, torch.cat(rows)) for rows in blocks.values()]  # the state and its copy
        self.in_a_row = torch.zeros((), device=state[0].device)  # steps undone since the last good one

    @torch.no_grad()
    def save_state(self) -> None:
        """Copy the state before a step."""
        for rows, kept in self._blocks:
            torch.cat(rows, out=kept)

    @torch.no_grad()
    def undo_if_nonfinite(self, loss: Tensor) -> Tensor:
        """Undo the step if necessary; return whether it was undone, as a scalar 0 or 1."""
        good = torch.isfinite(loss.detach())
        for rows, kept in self._blocks:
            if kept.is_floating_point():  # a norm is finite only if every number is (and none overflows when squared)
                good = good & torch.isfinite(nn.utils.get_total_norm(rows))
        skipped = self._ranks.average((~good).float()).ceil()  # if any rank must, all do
        for rows, kept in self._blocks:
            chosen = torch.where(skipped == 0, torch.cat(rows), kept)
            torch._foreach_copy_(rows, list(torch.split(chosen, [len(row) for row in rows])))
        self.in_a_row.add_(1.0).mul_(skipped)
        return skipped


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that an optimizer would create in its first step; zeros give the same result."""
    for group in optimizer.param_groups:
        names = ["exp_avg", "exp_avg_sq"] if "betas" in group else ["momentum_buffer"] if group.get("momentum") else []
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for name in names:
                state.setdefault(name, torch.zeros_like(parameter))
            if "betas" in group:
                state.setdefault("step", torch.zeros((), device=parameter.device))
