"""Ablations end to end: finished cells stay, stopped cells continue, failed cells are reported."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from ablation_tools import QUIET, ablated, results, run_faked, small_plan
from fault_tools import at_steps
from jcl.commands.ablate import plan_ablation
from jcl.commands.pretrain import pretrain
from jcl.commands.probes import LinearReport, measure_linear
from jcl.commands.run import Run
from jcl.errors import DataError, Interrupted, JclError, RunError, SettingsError
from jcl.runs.json_object import read_object, write_object
from jcl.settings.commands import AblateOptions, LinearOptions
from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts
from jcl.studies.ablation import CellFolder
from jcl.studies.cells import full_name
from small_runs import drawn_pixels, tiny_settings


def moments(out: Path) -> dict[Path, int]:
    """When each file of the cells was last written."""
    return {path: path.stat().st_mtime_ns for path in (out / "cells").rglob("*") if path.is_file()}


def run_nothing(folders, stop):
    return iter(())


@pytest.fixture(scope="module")
def two_cells(npz, tmp_path_factory) -> Path:
    """An ablation over two numbers of keys, one seed."""
    out = tmp_path_factory.mktemp("ablation") / "keys"
    ablated(small_plan(npz, "num_keys=1,3"), out).raise_if_incomplete()
    return out


def test_the_paper_s_probe_stands_beside_the_fast_one(npz, tmp_path, two_cells, monkeypatch):
    asked = []

    def measure(options: LinearOptions, **given: object) -> LinearReport:
        asked.append((options.lr, options.weight_decay, options.epochs))
        return measure_linear(options.model_copy(update={"epochs": 2}), **given)

    monkeypatch.setattr("jcl.commands.ablate.measure_linear", measure)
    flat = ablated(small_plan(npz, "num_keys=1", protocol="paper"), tmp_path / "out").results
    (cell,) = (tmp_path / "out/cells").iterdir()
    found, fast = json.loads((cell / "result.json").read_text()), results(two_cells)[cell.name]
    assert asked == [((10.0,), (), None)]  # that is, 100 epochs without weight decay
    assert (found["linear_lr"], found["linear_weight_decay"]) == (10.0, 0.0)
    assert found["fast_linear_top1"] == fast["linear_top1"] and found["knn_top1"] == fast["knn_top1"]
    probe = json.loads((cell / "linear/summary.json").read_text())
    assert probe["protocol"] == "paper" and probe["linear_top1"] == found["linear_top1"]
    assert flat["protocol"] == "paper" and flat["linear_top1_num_keys_1"] == found["linear_top1"]
    with pytest.raises(RunError, match="protocol"):
        ablated(small_plan(npz, "num_keys=1"), tmp_path / "out")


def test_cells_are_runs_with_figures_and_the_study_has_table_and_picture(two_cells, npz):
    assert {path.name for path in two_cells.iterdir()} == {
        *("study.json", "cells", "ablation.csv", "ablation.json", "ablation.png")
    }
    for folder, keys in zip(sorted((two_cells / "cells").iterdir()), (1, 3), strict=True):
        run = Run(folder)
        assert run.settings.method.num_keys == keys and run.summary["steps"] == 4
        figures = json.loads((folder / "result.json").read_text())
        assert figures["knn_top1"] == pytest.approx(run.summary["knn_top1"])  # the same protocol
        assert figures["test_images"] == 10 and figures["validation_top1"] is not None
    flat = json.loads((two_cells / "ablation.json").read_text())
    assert flat["cells_done"] == flat["cells"] == 2 and flat["classes"] == 3 and flat["data"] == str(npz)
    assert flat["linear_top1_num_keys_3"] == figures["linear_top1"]


def test_the_same_again_and_more_values_and_seeds_leave_done_cells_untouched(npz, tmp_path):
    out = tmp_path / "out"
    ablated(small_plan(npz, "num_keys=1,3"), out, run_faked)
    before = moments(out)
    found = ablated(small_plan(npz, "num_keys=3,1.0"), out, run_faked)
    assert moments(out) == before and found.failed == {} and found.unfinished == 0
    study = read_object(out / "study.json")
    assert study["settings"].pop("record.knn_images")  # as an ablation from before this setting existed
    write_object(out / "study.json", study)
    found = ablated(small_plan(npz, "num_keys=2"), out, run_faked)
    after = moments(out)
    assert {path: when for path, when in after.items() if path in before} == before and len(after) > len(before)
    assert [point.values["method.num_keys"] for point in found.points] == [1, 2, 3]
    found = ablated(small_plan(npz, "num_keys=1", seeds=(0, 9)), out, run_faked)
    assert [len(point.results) for point in found.points] == [2, 1, 1]
    assert {path: when for path, when in moments(out).items() if path in after} == after
    assert [result["seed"] for result in found.points[0].results] == [0, 9]


def test_stopped_in_the_middle_equals_unbroken(npz, tmp_path, monkeypatch, two_cells):
    plan, out = small_plan(npz, "num_keys=1"), tmp_path / "broken"
    with monkeypatch.context() as patched:
        at_steps(patched, {3: lambda: os.kill(os.getpid(), signal.SIGINT)})
        found = ablated(plan, out)
    assert found.unfinished == 1 and found.failed == {} and results(out) == {}
    with pytest.raises(Interrupted, match="1 cell"):
        found.raise_if_incomplete()
    assert len(list((out / "cells").glob("*/checkpoints/step-000000003.*"))) == 1
    ablated(plan, out).raise_if_incomplete()
    assert results(out) == {plan.cells[0].name: results(two_cells)[plan.cells[0].name]}


def test_a_cell_that_fails_is_recorded_and_the_others_go_on(npz, tmp_path):
    plan, out = small_plan(npz, "lr=1e30,0.05", "backbone=tiny_cnn"), tmp_path / "out"
    found = ablated(plan, out)
    assert len(results(out)) == 1 and found.unfinished == 0
    assert list(found.failed) == ["lr 1e+30, backbone tiny_cnn, seed 0"]
    with pytest.raises(RunError, match=r"^1 cell failed \(lr 1e\+30.*[Tt]he loss is not finite") as error:
        found.raise_if_incomplete()
    assert error.value.exit_code == 1
    assert "The loss is not finite" in (out / "ablation.csv").read_text()
    assert [point.failed for point in found.points] == [0, 1]
    before = moments(out)
    again = ablated(plan, out)  # tries the failed one anew
    assert list(again.failed) == list(found.failed)
    failed = next((out / "cells").glob("*lr-1e+30*"))
    kept = {path for path, when in moments(out).items() if before.get(path) == when}
    assert all(path in kept for path in before if failed not in path.parents)


def test_a_cell_that_has_not_begun_is_planned_anew(npz, tmp_path):
    """On another device, say, because there was no such one: that changes no figure, so it is the same study."""
    out = tmp_path / "out"
    found = ablated(small_plan(npz, "num_keys=1,2", train__device="cuda:77"), out)
    assert len(found.failed) == 2 and "cuda:77" in next(iter(found.failed.values()))
    assert not ablated(small_plan(npz, "num_keys=1,2"), out, run_faked).failed
    assert {CellFolder(path).cell().settings.train.device for path in (out / "cells").iterdir()} == {"cpu"}


def test_cells_that_all_fail_for_one_reason_are_said_once(npz, tmp_path):
    data = Path(shutil.copy(npz, tmp_path / "lost.npz"))
    plan = small_plan(data, "num_keys=1,2")
    data.unlink()
    found = ablated(plan, tmp_path / "out")
    with pytest.raises(RunError, match=r"2 cells failed .*lost\.npz"):
        found.raise_if_incomplete()
    assert not (tmp_path / "out/ablation.png").exists()


def test_a_failed_cell_that_is_no_longer_asked_for_is_no_longer_shown(npz, tmp_path):
    out = tmp_path / "out"
    assert len(ablated(small_plan(npz, "lr=0.02,1e30"), out, run_faked).failed) == 1
    stopped = ablated(small_plan(npz, "lr=0.03"), out, run_nothing)
    assert stopped.unfinished == 1 and [point.values["train.lr"] for point in stopped.points] == [0.02, 0.03]
    found = ablated(small_plan(npz, "lr=0.05"), out, run_faked)
    found.raise_if_incomplete()
    assert [(point.values["train.lr"], point.failed) for point in found.points] == [(0.02, 0), (0.05, 0)]
    lines = (out / "ablation.csv").read_text().splitlines()
    assert [line.split(",")[:3] for line in lines[1:]] == [["0.05", "0", "done"], ["0.02", "0", "done"]]
    flat = json.loads((out / "ablation.json").read_text())
    assert (flat["cells"], flat["cells_done"], flat["cells_failed"]) == (2, 2, 0)
    assert len(list((out / "cells").iterdir())) == 4  # and asked for again, they go on
    again = ablated(small_plan(npz, "lr=1e30"), out, run_nothing)
    assert [point.failed for point in again.points] == [0, 0, 1]


@pytest.mark.parametrize(
    ("over", "changes", "said"),
    [
        ("num_keys=1,3", {"train__epochs": 4}, "train.epochs"),
        ("num_keys=1,3", {"method__name": "multi-key"}, "method.name"),
        ("num_keys=1,3", {"record__knn_k": 7}, "record.knn_k"),
        ("temperature=0.1", {}, "method.num_keys"),
    ],
)
def test_another_study_in_the_same_folder_is_refused(two_cells, npz, over, changes, said):
    before = moments(two_cells)
    with pytest.raises(RunError) as error:
        ablated(small_plan(npz, over, **changes), two_cells)
    assert said in str(error.value) and "--out" in str(error.value)
    assert moments(two_cells) == before


def test_other_images_are_refused(two_cells, npz, tmp_path):
    other = tmp_path / "other.npz"
    other.write_bytes(npz.read_bytes())
    with pytest.raises(RunError, match=r"data.location"):
        ablated(small_plan(other, "num_keys=1,3"), two_cells)


def test_images_that_have_changed_are_refused(tmp_path):
    def save(count: int, seed: int = 0) -> Path:
        np.savez(tmp_path / "a.npz", x_train=drawn_pixels(count, seed=seed), y_train=np.arange(count) % 3)
        return tmp_path / "a.npz"

    ablated(small_plan(save(40), "num_keys=1"), tmp_path / "out", run_nothing)
    with pytest.raises(RunError, match="train_images"):
        ablated(small_plan(save(41), "num_keys=1"), tmp_path / "out", run_nothing)
    with pytest.raises(RunError, match="train_content"):
        ablated(small_plan(save(40, seed=1), "num_keys=1"), tmp_path / "out", run_nothing)


def test_folders_that_hold_something_else(npz, tmp_path):
    plan = small_plan(npz, "num_keys=1")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="mine"):
        ablated(plan, tmp_path / "mine")
    with pytest.raises(RunError, match=r"thesis.txt"):
        ablated(plan, tmp_path / "mine/thesis.txt")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_damaged_files_are_named(two_cells, npz, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(two_cells, out)
    result = next((out / "cells").glob("num_keys-1-seed-0*/result.json"))
    result.write_text('{"half')
    with pytest.raises(RunError, match=r"result.json"):
        ablated(small_plan(npz, "num_keys=1,3"), out)
    result.unlink()
    ablated(small_plan(npz, "num_keys=1,3"), out).raise_if_incomplete()  # the run is done, so this only measures
    assert results(out) == results(two_cells)


def test_what_cannot_be_measured_is_refused_before_anything_is_trained(tmp_path, image_folder, npz, monkeypatch):
    np.savez(tmp_path / "bare.npz", x_train=drawn_pixels(40))
    with pytest.raises(DataError, match="labels"):
        small_plan(tmp_path / "bare.npz", "num_keys=1")
    with pytest.raises(RunError, match="out"):
        ablated(small_plan(image_folder, "num_keys=1"), image_folder / "out")
    with pytest.raises(SettingsError, match="--over"):
        small_plan(npz)
    with pytest.raises(SettingsError, match="num_keys"):
        small_plan(npz, "num_keys=1,2", method="moco-v2", method__num_keys=1)


@pytest.mark.parametrize(
    ("over", "changes"),
    [
        ("backbone=tiny_cnn,resnet5", {}),
        ("batch_size=8,64", {}),
        ("bn_groups=2,3", {"train__batch_size": "auto"}),
        ("image_size=32,8", {"model__backbone": "timm/vit_tiny_patch16_224"}),
    ],
)
def test_a_cell_that_could_not_start_says_so_before_anything_is_trained(npz, tmp_path, over, changes):
    """With the error of the run itself."""
    with pytest.raises(JclError) as planned:
        small_plan(npz, over, **changes)
    name, _, values = over.partition("=")
    changes = changes | {full_name(name).replace(".", "__"): yaml.safe_load(values.split(",")[1])}
    with pytest.raises(type(planned.value)) as run:
        pretrain(tiny_settings(npz, **changes), tmp_path / "run", console=Console(quiet=True))
    assert str(run.value) == str(planned.value)


def test_each_setting_alone_shares_the_center(npz, tmp_path):
    over = ("num_keys=2,3", "temperature=0.1")
    plan = small_plan(npz, *over, alone=True, method__temperature=0.3)
    assert plan.center == {"method.num_keys": 2, "method.temperature": 0.3}
    found = ablated(plan, tmp_path / "out", run_faked)
    found.raise_if_incomplete()
    assert [tuple(point.values.values()) for point in found.points] == [(2, 0.1), (2, 0.3), (3, 0.3)]
    assert len(results(tmp_path / "out")) == 3
    before = moments(tmp_path / "out")
    ablated(small_plan(npz, over[0], "temperature=0.1,0.3"), tmp_path / "out", run_nothing)
    assert {path: when for path, when in moments(tmp_path / "out").items() if path in before} == before


def test_a_center_that_is_automatic_gets_a_place_among_the_values(npz):
    plan = small_plan(npz, "queue_size=64", "temperature=0.1", alone=True, method__queue_size="auto")
    assert plan.center == {"method.queue_size": 256, "method.temperature": 0.2}
    assert [cell.settings.method.queue_size for cell in plan.cells] == [256, 64, 256]


def test_the_center_of_a_number_of_keys_has_one_query_as_its_other_values_have(npz):
    automatic = {"method__num_keys": "auto", "method__num_queries": "auto"}
    plan = small_plan(npz, "num_keys=1,2", alone=True, **automatic)
    assert plan.center == {"method.num_keys": 5}  # with two queries it would be 3
    facts = DataFacts(images=5_000, short_side=32, decoded=True)
    assert {resolve(cell.settings, facts)[0].method.num_queries for cell in plan.cells} == {1}


def test_what_auto_becomes_is_trained_once(npz):
    plan = small_plan(npz, "queue_size=auto,64", "temperature=0.1,0.2", alone=True, method__queue_size="auto")
    assert plan.center is not None
    center = plan.center["method.queue_size"]
    sizes = [cell.values["method.queue_size"] for cell in plan.cells]
    assert sorted(set(sizes)) == sorted({center, 64}) and sizes.count(64) == 1


def test_a_seed_for_settings_that_are_valid_only_with_values_of_an_axis(npz):
    """The recipe's batch of 128 does not consist of three groups."""
    assignments, over = ("model.bn_groups=3", "views.image_size=16", "train.key_passes=1"), ("batch_size=6,12",)
    options = AblateOptions(data=str(npz), recipe="demo", assignments=assignments, over=over, seed=7)
    assert [cell.seed for cell in plan_ablation(options, QUIET).cells] == [7, 7]


def test_alone_a_setting_is_judged_by_the_center(npz):
    """One key at the center: there is no covariance to see, though another panel has more keys."""
    over = ("num_keys=1,5", "covariance_scale=0,4")
    small_plan(npz, *over, method__num_keys=1)
    small_plan(npz, *over, method__num_keys=2, alone=True)
    with pytest.raises(SettingsError, match=r"num_keys=1"):
        small_plan(npz, *over, method__num_keys=1, alone=True)


def test_two_at_once_in_one_folder_are_refused(npz, tmp_path):
    def meddle(folders, stop):
        with pytest.raises(JclError, match=str(os.getpid())):
            ablated(plan, tmp_path / "out")
        return iter(())

    plan = small_plan(npz, "num_keys=1")
    assert ablated(plan, tmp_path / "out", meddle).unfinished == 1
