"""Batched augmentation on any device, with random parameters for each view."""

from jcl.views.colour import as_rgb, denormalise
from jcl.views.pipeline import ViewMaker, centre_views
from jcl.views.recipe import IMAGENET_MEAN, IMAGENET_STD, ViewRecipe, view_recipe

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "ViewMaker", "ViewRecipe", "as_rgb", "centre_views", "denormalise"]
__all__ += ["view_recipe"]
