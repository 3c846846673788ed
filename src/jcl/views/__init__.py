"""Batched augmentation on any device: every view of a batch at once, each with its own random draw."""

from jcl.views.colour import denormalise, normalise
from jcl.views.parameters import ViewParameters, draw_parameters
from jcl.views.pipeline import ViewMaker, apply_views, centre_views
from jcl.views.recipe import IMAGENET_MEAN, IMAGENET_STD, ViewRecipe, view_recipe

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "ViewMaker",
    "ViewParameters",
    "ViewRecipe",
    "apply_views",
    "centre_views",
    "denormalise",
    "draw_parameters",
    "normalise",
    "view_recipe",
]
