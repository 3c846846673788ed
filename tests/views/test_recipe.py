"""Recipes by name, and what a wrong one says."""

import dataclasses
from typing import Any

import pytest

from jcl.errors import SettingsError
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


def test_fields_can_be_changed() -> None:
    recipe = view_recipe("small", 32, min_scale=0.5, hue=0.2)
    assert (recipe.size, recipe.min_scale, recipe.hue, recipe.name) == (32, 0.5, 0.2, "small")


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("moco-v3", {}, "choose one of moco-v2, moco-v1, small, none"),
        ("small", {"size": 0}, "size"),
        ("small", {"min_scale": 0.0}, "min_scale"),
        ("small", {"min_scale": 0.9, "max_scale": 0.5}, "max_scale"),
        ("small", {"ratio": (2.0, 1.0)}, "ratio"),
        ("small", {"contrast": -0.1}, "contrast"),
        ("small", {"hue": 0.6}, "hue"),
        ("small", {"flip_probability": 1.5}, "probabilities"),
        ("moco-v2", {"blur_sigma": (0.0, 1.0)}, "blur_sigma"),
        ("small", {"std": (0.2, 0.0, 0.2)}, "std"),
    ],
)
def test_a_wrong_recipe_is_explained(name: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        view_recipe(name, **{"size": 32, **changes})
