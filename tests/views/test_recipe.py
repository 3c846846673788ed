"""Recipes by name, and what a wrong one says."""

import dataclasses
from typing import Any

import pytest

from jcl.errors import SettingsError
from jcl.settings.recipes import build_settings
from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts
from jcl.settings.schema import ViewSettings
from jcl.train.build import run_view_recipe
from jcl.views import view_recipe


def test_moco_v2_is_as_published() -> None:
    recipe = view_recipe("moco-v2", 224)
    assert (recipe.min_scale, recipe.max_scale) == (0.2, 1.0)
    assert (recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue) == (0.4, 0.4, 0.4, 0.1)
    assert (recipe.jitter_probability, recipe.gray_probability, recipe.flip_probability) == (0.8, 0.2, 0.5)
    assert (recipe.blur_probability, recipe.blur_sigma) == (0.5, (0.1, 2.0))
    assert not recipe.gray_first


def test_moco_v1_is_as_published() -> None:
    recipe = view_recipe("moco-v1", 224)
    assert (recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue) == (0.4, 0.4, 0.4, 0.4)
    assert (recipe.jitter_probability, recipe.gray_probability, recipe.blur_probability) == (1.0, 0.2, 0.0)
    assert recipe.gray_first


def test_small_is_moco_v2_without_blur() -> None:
    small = view_recipe("small", 32)
    assert small.blur_probability == 0
    assert dataclasses.replace(small, name="moco-v2", blur_probability=0.5) == view_recipe("moco-v2", 32)


def test_only_images_without_a_top_are_turned() -> None:
    assert all(view_recipe(name, 32).upright for name in ("moco-v2", "moco-v1", "small", "no-color", "none"))
    for name in ("microscopy", "aerial"):
        recipe = view_recipe(name, 32)
        assert (recipe.vertical_flip_probability, recipe.rotation_probability) == (0.5, 0.75)
        assert not view_recipe(name, 32, local_size=16).local().upright
        assert recipe.gray_probability == 0 and recipe.hue < 0.1


def test_fields_can_be_changed() -> None:
    recipe = view_recipe("small", 32, min_scale=0.5, hue=0.2)
    assert (recipe.size, recipe.min_scale, recipe.hue, recipe.name) == (32, 0.5, 0.2, "small")


def test_every_setting_of_the_views_reaches_the_recipe() -> None:
    values = {
        **dict.fromkeys(("min_scale", "brightness", "contrast", "saturation", "hue", "noise"), 0.35),
        **{f"{name}_probability": 0.35 for name in ("jitter", "gray", "blur", "solarize", "flip")},
        "vertical_flip_probability": 0.35,
        "rotation_probability": 0.35,
        "blur_sigma": (0.35, 0.4),
        "color": False,
        "mean": (0.1, 0.2, 0.3),
        "std": (0.3, 0.2, 0.1),
        "local_scale": (0.1, 0.35),
        "local_size": 12,
    }
    assert set(values) == set(ViewSettings.model_fields) - {"recipe", "image_size"}
    given = {f"views.{name}": value for name, value in values.items()}
    for queries in (0, 2):
        settings = build_settings("demo", values=given | {"method.num_local_queries": queries})
        recipe = run_view_recipe(resolve(settings, DataFacts(100, 32, decoded=True))[0])
        reached = {name: value for name, value in values.items() if queries or "local" not in name}
        assert {name: getattr(recipe, name) for name in reached} == reached and (recipe.local_size > 0) == (queries > 0)
    plain, _ = resolve(build_settings("demo"), DataFacts(100, 32, decoded=True))
    assert run_view_recipe(plain) == view_recipe("small", 32, min_scale=0.8)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("moco-v3", {}, "choose one of moco-v2, moco-v1, small, no-color, microscopy, aerial, none"),
        ("small", {"local_size": 33}, "local_size=33"),
        ("small", {"local_scale": (0.5, 0.1)}, "local_scale"),
        ("moco-v2", {"blur_sigma": (2.0, 1.0)}, "blur_sigma"),
        ("small", {"std": (0.2, 0.2)}, "std"),
    ],
)
def test_a_wrong_recipe_is_explained(name: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        view_recipe(name, **{"size": 32, **changes})
