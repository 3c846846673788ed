"""Registry of the contrastive methods. To add one:

    from jcl.core.registry import Method, register

    register(Method("mean-key", "Mean key", "InfoNCE with the mean key", loss=my_loss))

It is then a valid value of `method.name` in this process. This module does not import PyTorch, so that `--help` is
fast; losses are imported when a learner needs them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Method:
    """A contrastive method.

    `loss(query, keys, negatives, temperature=...)` takes tensors (N, d), (N, M, d) and (K, d) and returns the mean
    loss; with `uses_covariance` it also takes `covariance_scale`. `recipe` maps dotted names of settings to the values
    that the method implies; values given by the user take precedence.
    """

    name: str
    title: str  # in tables and figures
    summary: str
    loss: str | Callable[..., Tensor]  # a function or its name, such as "package.module:function"
    color: str | None = None  # in charts; None: the next unused one
    several_keys: bool = True
    gradient_through_keys: bool = False
    symmetric: bool = False  # two views of an image: each is a query, and the key of the other is its positive
    uses_covariance: bool = False
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def loss_function(self) -> Callable[..., Tensor]:
        found: Callable[..., Tensor] = pkgutil.resolve_name(self.loss) if isinstance(self.loss, str) else self.loss
        return found


METHODS: dict[str, Method] = {}


def register(method: Method) -> Method:
    METHODS[method.name] = method
    return method


_ONE_KEY = {"method.num_keys": 1, "method.num_queries": 1}
_TWO_VIEWS = {"method.num_keys": 2, "method.num_queries": 2, "method.num_local_queries": 0}

for _method in (
    Method(
        "jcl",
        "JCL",
        "Joint Contrastive Learning: mean and covariance of M' keys, Eq. 8",
        loss="jcl.core.loss:joint_contrastive_loss",
        color="#0072b2",
        uses_covariance=True,
    ),
    Method(
        "moco-v2",
        "MoCo v2",
        "MoCo v2: one key, MLP head, strong views",
        loss="jcl.core.loss:multi_key_loss",
        color="#e69f00",
        several_keys=False,
        recipe=_ONE_KEY | {"model.head": "mlp"},
    ),
    Method(
        "moco-v2-symmetric",
        "Symmetric MoCo v2",
        "MoCo v2 with two views, each the query for the other's key",
        loss="jcl.core.loss:multi_key_loss",
        color="#56b4e9",
        several_keys=False,
        symmetric=True,
        recipe=_TWO_VIEWS | {"model.head": "mlp"},
    ),
    Method(
        "moco-v1",
        "MoCo v1",
        "MoCo v1: one key, linear head, the first paper's views",
        loss="jcl.core.loss:multi_key_loss",
        color="#cc79a7",
        several_keys=False,
        recipe=_ONE_KEY | {"method.temperature": 0.07, "model.head": "linear", "views.recipe": "moco-v1"},
    ),
    Method(
        "multi-key",
        "Multi-key",
        "InfoNCE averaged over M' keys, Eq. 3, keys without gradient",
        loss="jcl.core.loss:multi_key_loss",
        color="#009e73",
    ),
    Method(
        "multi-key-backprop",
        "Multi-key backprop",
        "the paper's vanilla method: Eq. 3 with gradients through the keys, which need memory for each key",
        loss="jcl.core.loss:multi_key_loss",
        color="#d55e00",
        gradient_through_keys=True,
    ),
):
    register(_method)
