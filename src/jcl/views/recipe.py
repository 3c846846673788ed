"""The recipes by which views are drawn: which changes, how strong and how often."""

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any, Final

from jcl.errors import SettingsError

IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
IMAGENET_STD: Final = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ViewRecipe:
    """How a view is drawn from an image.

    `size` is the side of the square view in pixels; `min_scale` and `max_scale` bound the area of the crop as a part
    of the image's, `ratio` its width over its height. A recipe whose `random_crop` is false takes the largest centred
    square instead. The four jitter strengths mean what torchvision's `ColorJitter` means by them. A probability of
    zero takes the operation out of the computation.
    """

    name: str
    size: int
    random_crop: bool = True
    min_scale: float = 0.2
    max_scale: float = 1.0
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    jitter_probability: float = 0.8
    gray_probability: float = 0.2
    gray_first: bool = False
    blur_probability: float = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    flip_probability: float = 0.5
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        for problem, holds in _problems(self):
            if holds:
                raise SettingsError(f"The view recipe '{self.name}' {problem}.")


def _problems(recipe: ViewRecipe) -> list[tuple[str, bool]]:
    """Each thing that can be wrong with a recipe, and whether it is."""
    probabilities = (
        recipe.jitter_probability,
        recipe.gray_probability,
        recipe.blur_probability,
        recipe.flip_probability,
    )
    return [
        (f"has size {recipe.size}; a view has at least 1 pixel", recipe.size < 1),
        (
            f"crops between {recipe.min_scale} and {recipe.max_scale} of an image's area; "
            "choose 0 < min_scale <= max_scale <= 1",
            not 0 < recipe.min_scale <= recipe.max_scale <= 1,
        ),
        (
            f"has aspect ratios {recipe.ratio}; choose 0 < lowest <= highest",
            not 0 < recipe.ratio[0] <= recipe.ratio[1],
        ),
        (
            "has a negative jitter strength; brightness, contrast and saturation are at least 0",
            min(recipe.brightness, recipe.contrast, recipe.saturation) < 0,
        ),
        (f"has hue {recipe.hue}; choose a value from 0 to 0.5", not 0 <= recipe.hue <= 0.5),
        ("has a probability outside 0 to 1", not all(0 <= value <= 1 for value in probabilities)),
        (
            f"blurs with sigma {recipe.blur_sigma}; choose 0 < lowest <= highest",
            not 0 < recipe.blur_sigma[0] <= recipe.blur_sigma[1],
        ),
        ("has a standard deviation that is not positive", min(recipe.std) <= 0),
    ]


_RECIPES: Final[dict[str, dict[str, Any]]] = {
    "moco-v2": {},
    "moco-v1": {"hue": 0.4, "jitter_probability": 1.0, "gray_first": True, "blur_probability": 0.0},
    # Blur at 32 pixels removes what little detail there is, so the small recipe goes without.
    "small": {"blur_probability": 0.0},
    "none": {
        "random_crop": False,
        "jitter_probability": 0.0,
        "gray_probability": 0.0,
        "blur_probability": 0.0,
        "flip_probability": 0.0,
    },
}


def view_recipe(name: str, size: int, **changes: Any) -> ViewRecipe:
    """Look up a recipe by name ("moco-v1", "moco-v2", "small" or "none"), with any of its fields changed."""
    if name not in _RECIPES:
        raise SettingsError(f"There is no view recipe '{name}'; {_suggestion(name, list(_RECIPES))}")
    fields = [field.name for field in dataclasses.fields(ViewRecipe)]
    for key in changes:
        if key not in fields:
            raise SettingsError(f"A view recipe has no field '{key}'; {_suggestion(key, fields)}")
    return ViewRecipe(**{"name": name, "size": size, **_RECIPES[name], **changes})


def _suggestion(word: str, known: list[str]) -> str:
    """Say which known word was probably meant, or which there are."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"choose one of {', '.join(known)}."
