"""Batched augmentation on any device, with random parameters for each view."""

from jcl.views.color import as_rgb as as_rgb
from jcl.views.color import denormalize as denormalize
from jcl.views.pipeline import ViewMaker as ViewMaker
from jcl.views.pipeline import center_views as center_views
from jcl.views.recipe import IMAGENET_MEAN as IMAGENET_MEAN
from jcl.views.recipe import IMAGENET_STD as IMAGENET_STD
from jcl.views.recipe import ViewRecipe as ViewRecipe
from jcl.views.recipe import view_recipe as view_recipe
