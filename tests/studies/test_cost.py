"""What a step costs: memory that is known beforehand, methods that grow with M and one that does not, and no crash."""

import gc
import os
import pickle
import signal
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from jcl.errors import SettingsError
from jcl.settings.commands import CostOptions
from jcl.studies.cost import (
    KILLED,
    OUT_OF_MEMORY,
    CostCell,
    CostReport,
    StepCost,
    measure_cost,
    measure_step,
    measure_training_step,
    run_in_subprocess,
    step_settings,
)
from small_runs import TINY_VALUES

VALUES = {name: value for name, value in TINY_VALUES.items() if name != "method.num_keys"} | {
    "views.image_size": 32,
    "train.batch_size": 16,
    "model.bn_groups": 4,
    "train.key_passes": 4,
}


@pytest.fixture(autouse=True)
def quiet_profiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also hides what other tests left from the garbage collector, which each measurement calls."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    gc.freeze()
    yield
    gc.unfreeze()


def build_known_step():
    """Matrices of 4 MB: the weight, its momentum and the images all the while, and two more at a time in between."""
    layer = nn.Linear(1000, 1000, bias=False)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(1000, 1000)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        layer(images).exp().sum().backward()
        optimiser.step()

    return step


def test_peak_of_a_known_step() -> None:
    cost = measure_step(build_known_step, torch.device("cpu"), repeats=2)
    assert 5 * 4e6 <= cost.bytes <= 5.01 * 4e6
    assert cost.milliseconds > 0 and cost.spread > 0

    def build_garbage():
        kept = [torch.randn(1000, 1000)]
        kept.append(kept)
        return build_known_step()

    def collect_garbage():
        gc.collect()
        return build_known_step()

    measure_step(build_garbage, torch.device("cpu"), repeats=1)
    again = measure_step(collect_garbage, torch.device("cpu"), repeats=1)
    assert again.bytes == cost.bytes  # whatever was measured before it


def test_memory_of_real_steps_over_the_number_of_keys() -> None:
    cells = [("moco-v2", 1), ("jcl", 4), *(("multi-key-backprop", keys) for keys in (4, 6, 8))]
    memory = {
        cell: measure_training_step(step_settings("folder", VALUES, *cell), torch.device("cpu"), 1).bytes
        for cell in cells
    }
    assert memory["jcl", 4] < 1.1 * memory["moco-v2", 1]
    steps = [memory["multi-key-backprop", keys] for keys in (4, 6, 8)]
    assert steps[2] > 1.5 * memory["moco-v2", 1]
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0], rel=0.1)  # a straight line


def test_every_method_is_measured_until_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the processes, which the tests of `run_in_subprocess` have."""
    seen: list[tuple[int, int]] = []
    asked: list[tuple[str, int]] = []
    passes: list[int] = []

    def run(work, *arguments):
        work, (settings, device, repeats) = pickle.loads(pickle.dumps((work, arguments)))
        asked.append((settings.method.name, settings.method.num_keys))
        passes.append(settings.train.key_passes)
        return KILLED if settings.method.name == "multi-key" else work(settings, device, repeats)

    monkeypatch.setattr("jcl.studies.cost.run_in_subprocess", run)
    small = {"backbone": "tiny_cnn", "image_size": 32, "batch_size": 16, "repeats": 1, "device": "cpu"}
    report = measure_cost(CostOptions(keys="2,1,2", **small), lambda *counts: seen.append(counts))
    methods = ("jcl", "multi-key", "multi-key-backprop")
    cells = [("moco-v2", 1), *((method, keys) for method in methods for keys in (1, 2))]
    assert [(cell.method, cell.keys) for cell in report.cells] == cells
    assert asked == [cell for cell in cells if cell != ("multi-key", 2)]
    assert passes[:3] == [1, 1, 2], "a pass has one batch of keys, in MoCo v2 too"
    assert seen == [(done, 7) for done in range(1, 8)]
    figures = report.metrics()
    assert figures["multi_key_backprop_m2_bytes"] > figures["jcl_m2_bytes"] > 0
    assert figures["jcl_m2_bytes_times_moco_v2"] == figures["jcl_m2_bytes"] / figures["moco_v2_m1_bytes"]
    assert figures["multi_key_m1_ms"] is figures["multi_key_m2_bytes"] is None
    assert figures["backbone"] == "tiny_cnn" and figures["device"] == "CPU"
    assert [cell.failure for cell in report.cells] == ["", "", "", KILLED, KILLED, "", ""]


def fill_memory(kind: str) -> str:
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)  # as the system does when memory runs out, but not only then
    if kind == "CPU":
        torch.empty(2**62, dtype=torch.uint8)
    if kind == "GPU":
        raise torch.OutOfMemoryError("CUDA out of memory")
    return "it fits"


@pytest.mark.parametrize(("kind", "said"), [("killed", KILLED), ("CPU", OUT_OF_MEMORY), ("GPU", OUT_OF_MEMORY)])
def test_work_that_does_not_fit_is_an_answer(kind: str, said: str) -> None:
    assert run_in_subprocess(fill_memory, kind) == said


def refuse(sentence: str) -> None:
    raise SettingsError(sentence)


def test_other_errors_come_back_as_they_are() -> None:
    with pytest.raises(SettingsError, match="not like this"):
        run_in_subprocess(refuse, "not like this")
    assert run_in_subprocess(fill_memory, "none") == "it fits"


SETTINGS = step_settings("folder", VALUES, "moco-v2", 1)


def report_of(**memory: list[int | None]) -> CostReport:
    cells = [
        CostCell(method.replace("_", "-"), 2**place, None if value is None else StepCost(value, 1.0))
        for method, values in memory.items()
        for place, value in enumerate(values)
    ]
    return CostReport(cells, SETTINGS, "CPU")


def test_growth_is_a_straight_line_through_what_fitted() -> None:
    report = report_of(moco_v2=[100], jcl=[100, 100, 100, 100], multi_key_backprop=[110, 120, 140, None])
    assert report.growth("multi-key-backprop") == pytest.approx((10, 1))
    assert report.growth("jcl") == pytest.approx((0, 1)) and report.growth("moco-v2") is None
    assert report_of(jcl=[10, 20, 0]).growth("jcl") == pytest.approx((-30 / 7, 3 / 7))
    assert report_of(jcl=[10, 20]).growth("jcl") is None
    assert report.baseline == StepCost(100, 1.0) and report_of(jcl=[100]).baseline is None


def timed(base: tuple[float, float], *jcl: tuple[int, float, float]) -> CostReport:
    """MoCo v2's and JCL's milliseconds, each with its spread."""
    found = [CostCell("jcl", keys, StepCost(100, taken, spread)) for keys, taken, spread in jcl]
    return CostReport([CostCell("moco-v2", 1, StepCost(100, *base)), *found], SETTINGS, "CPU")


def test_noisy_times_give_a_warning() -> None:
    clear = timed((10, 0.5), (1, 10, 0.5), (2, 12, 0.5), (4, 16, 0.5))
    assert clear.warning() == "" and clear.metrics()["jcl_m4_ms_spread"] == 0.5
    noisy = timed((10, 0.5), (1, 10, 3), (2, 12, 0.5), (4, 16, 0.5))
    assert "30 %" in noisy.warning()
    assert timed((10, 0), (4, 12, 0)).warning() == "" and timed((10, 0)).warning() == ""


def test_finding_and_missing_measurements() -> None:
    report = report_of(moco_v2=[100], jcl=[103, 250], multi_key_backprop=[110, None])
    assert "JCL 2.50 × with 2 keys" in report.finding() and "1.10 × with 1 key" in report.finding()
    assert "out of memory with 2 keys" in report.finding()
    assert report.metrics()["multi_key_backprop_m2_bytes"] is None
    assert "MoCo v2" in report_of(moco_v2=[None], jcl=[None]).finding()
