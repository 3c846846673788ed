"""How a step has kernels made and chosen: parts are compiled once, and what is set for steps is set for them alone."""

import sys
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from rich.console import Console
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from jcl.commands.inputs import data_facts, open_run_data
from jcl.core.method import ContrastiveLearner
from jcl.data import BatchLoader
from jcl.errors import SettingsError
from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts
from jcl.settings.schema import Settings
from jcl.train.build import build_learner, build_optimizer, run_view_recipe, step_options
from jcl.train.step import StepOptions, TrainingStep, explain_compiler_errors, view_function
from jcl.views import view_recipe
from small_runs import tiny_settings


@pytest.fixture
def prepared(monkeypatch) -> list[list[Any]]:
    """The inputs of every graph that the compiler is given, in turn."""
    torch._dynamo.reset()  # what other tests compiled would count against the limit of forms that a function may have
    found: list[list[Any]] = []

    def note(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(inputs)
        return module.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=note))
    return found


@pytest.mark.parametrize(("passes", "writable"), [(1, True), (2, False)])
def test_every_part_of_a_step_is_compiled_once(passes, writable, npz, prepared, tmp_path, monkeypatch):
    """Keys, queries and loss; what layers of an encoder leave behind for the host must not undo it.

    The compiled code is kept in the cache folder, and the compiler's advice to be less exact does not reach users.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    if not writable:
        (tmp_path / "jcl").touch()
    more = {"train__key_passes": passes, "method__num_keys": 4, "method__num_queries": 2}
    with warnings.catch_warnings(record=True) as told:
        steps = train(tiny_settings(npz, "jcl", train__compile=True, **more))
        for words in ("TensorFloat32 tensor cores available but not enabled.", "Something else."):
            warnings.warn(words, UserWarning, stacklevel=1)
    assert steps > 1 and len(prepared) == 3
    assert [str(warning.message) for warning in told] == ["Something else."]
    assert (default_cache_dir() != cache_dir()) == writable
    assert (cache_dir() == str(tmp_path / "jcl" / "compiled")) == writable


def test_a_resnet_is_compiled_on_a_cpu(npz):
    settings, _ = resolve(
        tiny_settings(npz, model__backbone="test_resnet"), DataFacts(images=34, short_side=16, decoded=True)
    )
    learner, _ = build_learner(settings, torch.device("cpu"))
    learner.compile_parts()
    for encoder in (learner.query_encoder, learner.key_encoder):
        assert encoder.fused is None and encoder._compiled_call_impl is not None
    assert learner.fused_contrast is None


@pytest.mark.slow
def test_micro_batches_with_activation_checkpointing_are_compiled_once(npz, prepared):
    """Both encoders and the loss; blocks that are computed twice break no graph."""
    small = {"model__backbone": "test_resnet", "views__image_size": 32, "method__num_keys": 4}
    more = {"train__accumulate": 2, "train__checkpoint_activations": True}
    steps = train(tiny_settings(npz, "jcl", train__compile=True, **small, **more))
    assert steps > 1 and len(prepared) == 3


def train(settings: Settings) -> int:
    """Train for an epoch and say how many steps it had."""
    data = open_run_data(settings, Console(quiet=True)).train
    settings, _ = resolve(settings, data_facts(data))
    device = torch.device("cpu")
    learner, _ = build_learner(settings, device)
    optimiser = build_optimizer(settings, learner, device)
    step = TrainingStep(learner, optimiser, run_view_recipe(settings), 0, step_options(settings, device))
    with BatchLoader(data, batch_size=8, canvas=16, seed=0, num_keys=learner.num_keys) as loader:
        for number, batch in enumerate(loader.epoch(0)):
            step(batch, number, 0.05, 1.0)
    return step.done


@pytest.mark.parametrize("before", [False, True])
def test_steps_try_kernels_out_and_leave_that_choice_to_others_as_it_was(npz, monkeypatch, before):
    during = []
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    monkeypatch.setattr(TrainingStep, "backward", lambda *_: during.append(torch.backends.cudnn.benchmark))
    train(tiny_settings(npz, "jcl"))
    assert all(during) and during
    assert torch.backends.cudnn.benchmark is before


def test_a_missing_compiler_is_named_with_the_way_to_train_without_it(npz, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(ContrastiveLearner, "update_key_encoder", torch.compile(lambda self, _: self.queue.rows.sin()))
    options = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
    with torch._inductor.config.patch(options), pytest.raises(SettingsError, match=r"no-such-compiler.*train\.compile"):
        train(tiny_settings(npz, "jcl", train__epochs=1))


def test_other_errors_stay_as_they_are():
    with pytest.raises(torch.OutOfMemoryError), explain_compiler_errors():
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(ZeroDivisionError), explain_compiler_errors():
        torch.compile(lambda: 1 / 0, backend="eager")()


def test_missing_triton_is_named_with_the_way_to_train_without_it(monkeypatch):
    for name in ("jcl.views.kernels", "jcl.views.draw_kernel"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    options = StepOptions(torch.device("cuda"), torch.float32, compiled=True, recorded=False)
    with pytest.raises(SettingsError, match=r"triton.*train\.compile=false"):
        view_function(view_recipe("none", 8), 0, options)
