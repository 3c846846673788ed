"""Grids enumerate every combination once, names are safe, and what makes no sense is refused in a sentence."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jcl.errors import SettingsError
from jcl.runs.json_object import format_value
from jcl.settings.recipes import build_settings
from jcl.settings.schema import Settings, setting_names
from jcl.studies.cells import (
    MAX_NAME_LENGTH,
    Cell,
    base_settings,
    build_cells,
    parse_axes,
    parse_axis,
    parse_seeds,
    refuse_ignored,
    shared_values,
    short_name,
)

KEYS, TEMPERATURE = "method.num_keys", "method.temperature"
DEFAULTS = Settings()


def build(own: Mapping[str, Any]) -> Settings:
    return build_settings("cifar10", values=own)


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("num_keys=1,2,11", "method.num_keys", [1, 2, 11]),
        (" method.temperature = 0.1, 0.2", "method.temperature", [0.1, 0.2]),
        ("method=jcl,moco-v2", "method.name", ["jcl", "moco-v2"]),
        ("milestones=[60, 80],[120]", "train.milestones", [[60, 80], [120]]),
        ("strict=true,false", "data.strict", [True, False]),
        ("backbone='a,b',c", "model.backbone", ["a,b", "c"]),
    ],
)
def test_axes_are_read(text, name, values):
    assert parse_axis(text) == (name, values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_keys", "NAME=VALUE"),
        ("nonsense=1", "nonsense"),
        ("num_kyes=1", "method.num_keys"),
        ("num_keys=", "method.num_keys"),
        ("num_keys=1], [2", "num_keys=1], [2"),
        ("num_keys={1", "num_keys={1"),
        ("num_keys=!!python/object/apply:os.system ['true']", "os.system"),
        ("recipe=cifar10", "views.recipe"),
        ("seed=1,2", "--seeds"),
        ("location=/a,/b", "data.location"),
        ("device=cpu,cuda", "train.device"),
        ("record.keep=1,2", "record.keep"),
    ],
)
def test_axes_that_make_no_sense(text, said):
    with pytest.raises(SettingsError) as error:
        parse_axis(text)
    assert said in str(error.value)


def test_no_name_is_in_two_sections():
    names = [short_name(name) for name in setting_names() if name != "views.recipe"]  # `recipe` is another setting
    assert len(set(names)) == len(names)


def test_seeds():
    assert parse_seeds("3") == [0, 1, 2]
    assert parse_seeds("2", first=5) == [5, 6]
    assert parse_seeds("0, 7,42,7") == [0, 7, 42]
    assert parse_seeds("7,") == [7]
    for wrong in ("0", "-1", "1.5", "many", "", "1,,2", "100000", "1" * 30):
        with pytest.raises(SettingsError, match="--seeds takes"):
            parse_seeds(wrong)


def test_a_grid_has_every_combination_once_and_the_first_seed_first():
    cells = build_cells({KEYS: (1, 2, 5), TEMPERATURE: (0.1, "2e-1")}, (0, 7), build)
    assert [(tuple(cell.values.values()), cell.seed) for cell in cells] == [
        ((keys, temperature), seed) for seed in (0, 7) for keys in (1, 2, 5) for temperature in (0.1, 0.2)
    ]
    assert all(cell.settings.method.num_keys == cell.values["method.num_keys"] for cell in cells)
    assert all(cell.settings.train.seed == cell.seed for cell in cells)
    assert len({cell.name for cell in cells}) == 12
    assert cells[0].name.startswith("num_keys-1-temperature-0.1-seed-0-")
    assert cells[0].title == "num_keys 1, temperature 0.1, seed 0"


def test_alone_each_axis_is_varied_around_a_center_that_all_share_once():
    axes = {KEYS: (1, 2), TEMPERATURE: (0.1, "0.3", 0.5)}
    cells = build_cells(axes, (0, 7), lambda own: build({TEMPERATURE: 0.3} | dict(own)), alone=True)
    around = [(2, 0.3), (1, 0.3), (2, 0.1), (2, 0.5)]  # the center, with the recipe's 2 keys, comes first
    assert [(tuple(cell.values.values()), cell.seed) for cell in cells] == [
        (values, seed) for seed in (0, 7) for values in around
    ]
    assert all(cell.settings.method.temperature == cell.values[TEMPERATURE] for cell in cells)
    assert {cell.name for cell in cells} <= {
        cell.name for cell in build_cells({KEYS: (1, 2), TEMPERATURE: (0.1, 0.3, 0.5)}, (0, 7), build)
    }


def test_a_value_that_changes_another_axis_cannot_be_tried_alone():
    axes = {"method.name": ("jcl", "moco-v1"), "train.lr": (0.1,), TEMPERATURE: (0.1,)}
    with pytest.raises(SettingsError, match=r"method moco-v1 .*method.temperature .*0.07"):
        build_cells(axes, (0,), build, alone=True)
    del axes[TEMPERATURE]
    assert len(build_cells(axes, (0,), build, alone=True)) == 3


def test_equal_values_are_one_cell_and_the_order_of_axes_does_not_matter():
    assert len(build_cells({TEMPERATURE: (0.2, "0.20", "2e-1")}, (0,), build)) == 1
    axes = {KEYS: (2,), "train.lr": (0.1,)}
    turned = dict(reversed(axes.items()))
    assert build_cells(axes, (0,), build)[0].name == build_cells(turned, (0,), build)[0].name


def test_values_that_do_not_work_are_named():
    with pytest.raises(SettingsError, match=r"moco-v2.*method.num_keys is 2"):
        build_cells({KEYS: (1, 2)}, (0,), lambda own: build({"method.name": "moco-v2"} | dict(own)))
    for values in (("two",), (0,), (1.5,), ([1],), (None,)):
        with pytest.raises(SettingsError, match=r"method.num_keys"):
            build_cells({KEYS: values}, (0,), build)


def test_a_method_axis_brings_what_each_method_implies():
    moco, jcl = build_cells({"method.name": ("moco-v1", "jcl")}, (0,), build)
    assert (moco.settings.method.num_keys, moco.settings.model.head) == (1, "linear")
    assert (jcl.settings.method.num_keys, jcl.settings.model.head) == (2, "mlp")


@settings(max_examples=20, deadline=None)
@given(st.text(max_size=150), st.integers(0, 2**62))
def test_hostile_values_cannot_leave_the_folder(value, seed):
    cell = Cell(values={"model.backbone": value}, seed=seed, settings=DEFAULTS)
    assert Path(cell.name).name == cell.name and cell.name not in (".", "..")
    assert cell.name.isascii() and cell.name.isprintable() and not set(cell.name) & set("/\\ :*?\"'<>|$`")
    assert len(cell.name) <= MAX_NAME_LENGTH


def test_names_differ_where_values_do():
    values = ["../../etc", ".._.._etc", "a/b", "a_b", "a" * 300, "a" * 301, 0.1, 0.1 + 1e-12, 1, "1", True]
    cells = [Cell(values={"model.backbone": value}, seed=0, settings=Settings()) for value in values]
    assert len({cell.name for cell in cells}) == len(values)
    assert format_value(0.1 + 1e-12) != format_value(0.1) == "0.1"
    assert format_value(4.0) == "4" and format_value([1, 2]) == "[1, 2]"


@pytest.mark.parametrize(
    ("values", "over", "said"),
    [
        ({"method.name": "moco-v1"}, ["covariance_scale=1,2"], "moco-v1"),
        ({"method.name": "multi-key"}, ["covariance_scale=1,2"], "multi-key"),
        ({"method.num_keys": 1}, ["covariance_scale=1,2"], "num_keys=1"),
        ({}, ["covariance_scale=1,2", "method=moco-v1,moco-v2"], "moco-v1 and moco-v2"),
    ],
)
def test_methods_that_ignore_a_setting(values, over, said):
    axes = parse_axes(over, {})
    with pytest.raises(SettingsError) as error:
        refuse_ignored(axes, base_settings(axes, lambda own: build(values | dict(own))))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "over",
    [
        ["num_keys=1,2"],
        ["covariance_scale=0,4"],
        ["num_keys=1,5", "covariance_scale=0,4"],
        ["covariance_scale=0,4", "method=jcl,multi-key"],
    ],
)
def test_a_setting_that_some_method_of_the_grid_looks_at(over):
    axes = parse_axes(over, {})
    refuse_ignored(axes, build({}))  # which raises for the methods above
    assert len(build_cells(axes, [0], build)) == 2 ** len(over)


@pytest.mark.parametrize("alone", [False, True])
def test_a_setting_given_twice(alone):
    with pytest.raises(SettingsError, match=r"method.num_keys"):
        parse_axes(["num_keys=1,2", "method.num_keys=3"], {}, alone=alone)
    assert parse_axes(["num_keys=1,2"], {TEMPERATURE: 0.1}, alone=alone) == {KEYS: [1, 2]}


def test_a_value_beside_an_axis_is_the_center_or_refused():
    assert parse_axes(["num_keys=1,2"], {KEYS: 5}, alone=True) == {KEYS: [1, 2]}
    with pytest.raises(SettingsError, match=r"method.num_keys"):
        parse_axes(["num_keys=1,2"], {KEYS: 5})


def test_what_cells_share_leaves_out_axes_seeds_and_how_a_run_is_carried_out():
    base = build({"train.seed": 3, "train.device": "cpu"})
    shared = shared_values(base, ["method.num_keys"])
    assert shared == shared_values(build({"method.num_keys": 7, "record.keep": 9}), ["method.num_keys"])
    assert shared["train.epochs"] == 200 and shared["record.knn_k"] == 200 and shared["recipe"] == "cifar10"
    assert shared != shared_values(build({"train.lr": 1.0}), ["method.num_keys"])
    for groups, equal in ((2, True), ("auto", False)):  # the automatic groups follow from the micro-batches
        once, twice = (build({"model.bn_groups": groups, "train.accumulate": parts}) for parts in (1, 2))
        assert (shared_values(once, []) == shared_values(twice, [])) == equal


def test_a_base_that_only_the_axes_make_fit():
    axes = {"train.batch_size": (96, 192)}
    base = base_settings(axes, lambda own: build({"model.bn_groups": 24} | dict(own)))  # 512 is no multiple of 24
    assert base.train.batch_size == 96
