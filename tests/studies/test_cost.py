"""What a step costs: memory that is known beforehand, methods that grow with M and one that does not, and no crash."""

import os
import signal

import pytest
import torch
from torch import nn

from jcl.commands.cost import CostPlan, CostReport, measure_cell, measure_cost
from jcl.errors import SettingsError
from jcl.settings.studies import CostOptions
from jcl.studies.cost import Cell, StepCost, baseline, growth, measure_step, most_keys, run_in_subprocess
from small_runs import TINY_VALUES

VALUES = {name: value for name, value in TINY_VALUES.items() if name != "method.num_keys"} | {
    "views.image_size": 32,
    "train.batch_size": 16,
    "model.bn_groups": 4,
    "train.key_passes": 4,
}


@pytest.fixture(autouse=True)
def quiet_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")


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
    again = measure_step(build_known_step, torch.device("cpu"), repeats=1)
    assert again.bytes == cost.bytes  # whatever was measured before it


def test_memory_of_real_steps_over_the_number_of_keys() -> None:
    plan = CostPlan("folder", VALUES, "cpu", 1)
    cells = [("moco-v2", 1), ("jcl", 4), *(("multi-key-backprop", keys) for keys in (1, 2, 4))]
    memory = {cell: measure_cell((plan, *cell)).bytes for cell in cells}
    assert memory["jcl", 4] < 1.1 * memory["moco-v2", 1]
    steps = [memory["multi-key-backprop", keys] for keys in (1, 2, 4)]
    assert steps[2] > 1.5 * memory["moco-v2", 1]
    assert (steps[2] - steps[1]) / 2 == pytest.approx(steps[1] - steps[0], rel=0.1)  # a straight line


def test_every_cell_in_a_process_of_its_own() -> None:
    seen: list[tuple[int, int]] = []
    small = {"backbone": "tiny_cnn", "image_size": 32, "batch_size": 16, "repeats": 1, "device": "cpu"}
    report = measure_cost(CostOptions(keys="2,2", **small), lambda *counts: seen.append(counts))
    assert [(cell.method, cell.keys) for cell in report.cells] == [
        ("moco-v2", 1), ("jcl", 2), ("multi-key", 2), ("multi-key-backprop", 2),
    ]  # fmt: skip
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    figures = report.metrics()
    assert figures["multi_key_backprop_m2_bytes"] > figures["jcl_m2_bytes"] > 0
    assert figures["jcl_m2_bytes_times_moco_v2"] == figures["jcl_m2_bytes"] / figures["moco_v2_m1_bytes"]
    assert figures["backbone"] == "tiny_cnn" and figures["device"] == "CPU"


def fill_memory(kind: str) -> str:
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)  # what the system does to a process when memory runs out
    if kind == "CPU":
        torch.empty(2**62, dtype=torch.uint8)
    if kind == "GPU":
        raise torch.OutOfMemoryError("CUDA out of memory")
    return "it fits"


@pytest.mark.parametrize("kind", ["killed", "CPU", "GPU"])
def test_work_that_does_not_fit_is_an_answer(kind: str) -> None:
    assert run_in_subprocess(fill_memory, kind) is None


def refuse(sentence: str) -> None:
    raise SettingsError(sentence)


def test_other_errors_come_back_as_they_are() -> None:
    with pytest.raises(SettingsError, match="not like this"):
        run_in_subprocess(refuse, "not like this")
    assert run_in_subprocess(fill_memory, "none") == "it fits"
    with pytest.raises(SettingsError, match="--keys"):
        measure_cost(CostOptions(keys="0,2"))


def cells(**memory: list[int | None]) -> list[Cell]:
    return [
        Cell(method.replace("_", "-"), 2**place, None if value is None else StepCost(value, 1.0))
        for method, values in memory.items()
        for place, value in enumerate(values)
    ]


def test_growth_is_a_straight_line_through_what_fitted() -> None:
    found = cells(moco_v2=[100], jcl=[100, 100, 100, 100], multi_key_backprop=[110, 120, 140, None])
    line = growth(found, "multi-key-backprop")
    assert line is not None and line.bytes_per_key == pytest.approx(10) and line.fit == pytest.approx(1)
    flat = growth(found, "jcl")
    assert flat is not None and flat.bytes_per_key == pytest.approx(0, abs=1e-9)
    assert growth(found, "moco-v2") is None
    assert most_keys(found, "multi-key-backprop").keys == 4
    assert baseline(found) == StepCost(100, 1.0) and baseline(found[1:]) is None


def timed(base: tuple[float, float], *jcl: tuple[int, float, float]) -> CostReport:
    """MoCo v2's and JCL's milliseconds, each with its spread."""
    settings = CostPlan("folder", VALUES, "cpu", 1).settings("moco-v2", 1)
    found = [Cell("jcl", keys, StepCost(100, taken, spread)) for keys, taken, spread in jcl]
    return CostReport((Cell("moco-v2", 1, StepCost(100, *base)), *found), settings, "CPU")


def test_noisy_times_give_a_warning() -> None:
    clear = timed((10, 0.5), (1, 10, 0.5), (2, 12, 0.5), (4, 16, 0.5))
    assert clear.warning() == "" and clear.metrics()["jcl_m4_ms_spread"] == 0.5
    noisy = timed((10, 0.5), (1, 10, 3), (2, 12, 0.5), (4, 16, 0.5))
    assert "1 of 2" in noisy.warning()
    assert "1 of 1" in timed((10, 0), (4, 9, 0)).warning()  # more keys cannot take less time
    assert timed((10, 0), (4, 12, 0)).warning() == "" and timed((10, 0)).warning() == ""


def test_finding_and_missing_measurements() -> None:
    settings = CostPlan("folder", VALUES, "cpu", 1).settings("moco-v2", 1)
    report = CostReport(tuple(cells(moco_v2=[100], jcl=[103, 250], multi_key_backprop=[110, None])), settings, "CPU")
    assert "JCL 2.50 × with 2 keys" in report.finding() and "1.10 × with 1 key" in report.finding()
    assert report.metrics()["multi_key_backprop_m2_bytes"] is None
    nothing = CostReport(tuple(cells(moco_v2=[None], jcl=[None])), settings, "CPU")
    assert "MoCo v2" in nothing.finding()
