"""Augmentation recipes."""

from dataclasses import dataclass, replace
from typing import Any, Final

from jcl.errors import SettingsError

IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
IMAGENET_STD: Final = (0.229, 0.224, 0.225)
LOCAL_SCALE: Final = (0.05, 0.25)
_OPERATIONS: Final = ("jitter", "gray", "blur", "solarize", "flip", "vertical_flip", "rotation")


@dataclass(frozen=True)
class ViewRecipe:
    """Augmentation of a view of `size` by `size` pixels.

    `min_scale`, `max_scale` and `ratio` are those of torchvision's `RandomResizedCrop`; without `random_crop` the crop
    is the largest centered square. The jitter strengths are those of `ColorJitter`. A rotation is by 90, 180 or 270
    degrees, equally likely. Operations with probability zero are skipped. With `local_size` there are also small crops
    of that size, which cover `local_scale` of an image; see `local`. `mean` and `std` have one value per channel.
    Without `color`, each channel has its own brightness, contrast and noise (`change_channels`), and nothing else.
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
    noise: float = 0.1
    color: bool = True
    jitter_probability: float = 0.8
    gray_probability: float = 0.2
    gray_first: bool = False
    blur_probability: float = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarize_probability: float = 0.0
    flip_probability: float = 0.5
    vertical_flip_probability: float = 0.0
    rotation_probability: float = 0.0
    local_size: int = 0
    local_scale: tuple[float, float] = LOCAL_SCALE
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        checks = {  # the settings check each value on its own
            "local_scale must be low <= high": self.local_scale[0] <= self.local_scale[1],
            f"local_size={self.local_size} is larger than the views, {self.size} px": self.local_size <= self.size,
            "blur_sigma must be low <= high": self.blur_sigma[0] <= self.blur_sigma[1],
            "mean and std must have one value per channel": len(self.mean) == len(self.std),
            "color needs three channels": len(self.mean) == 3 or not self.color,
        }
        for rule, holds in checks.items():
            if not holds:
                raise SettingsError(f"Invalid view recipe '{self.name}': {rule}.")

    @property
    def upright(self) -> bool:
        """Whether the top of an image is the top of every view."""
        return self.vertical_flip_probability == self.rotation_probability == 0

    def local(self) -> "ViewRecipe":
        """The recipe of small crops."""
        low, high = self.local_scale
        return replace(self, size=self.local_size, min_scale=low, max_scale=high, local_size=0)


# All eight orientations of a square are equally likely.
_ANY_ORIENTATION: Final = {"vertical_flip_probability": 0.5, "rotation_probability": 0.75}

# docs/views.md has the reasons.
_RECIPES: Final[dict[str, dict[str, Any]]] = {
    "moco-v2": {},
    "moco-v1": {"hue": 0.4, "jitter_probability": 1.0, "gray_first": True, "blur_probability": 0.0},
    # Blur would remove too much detail at 32 pixels.
    "small": {"blur_probability": 0.0},
    "no-color": {"jitter_probability": 0.0, "gray_probability": 0.0},
    "microscopy": {"saturation": 0.2, "hue": 0.05, "gray_probability": 0.0, **_ANY_ORIENTATION},
    "aerial": {"saturation": 0.2, "hue": 0.05, "gray_probability": 0.0, "blur_probability": 0.0, **_ANY_ORIENTATION},
    "none": {"random_crop": False, **{f"{name}_probability": 0.0 for name in _OPERATIONS}},
}


def view_recipe(name: str, size: int, **changes: Any) -> ViewRecipe:
    """Look up a recipe by name ("moco-v2", for example), with any of its fields changed."""
    if name not in _RECIPES:
        raise SettingsError(f"There is no view recipe '{name}'; choose one of {', '.join(_RECIPES)}.")
    return ViewRecipe(**{"name": name, "size": size, **_RECIPES[name], **changes})


def canvas_side(image_size: int, min_scale: float) -> int:
    """The longest side of decoded images: large enough that the smallest crop of a square image is not enlarged.

    It does not grow for crops of less than 8 % of an image, to save memory. It is a multiple of 4, because JPEGs are
    decoded fastest at 1/8, 1/4 or 1/2 of their size, and many have 1000, 2000 or 4000 px.
    """
    return max(32, int(image_size * max(10 / 7, max(min_scale, 0.08) ** -0.5)) // 4 * 4)
