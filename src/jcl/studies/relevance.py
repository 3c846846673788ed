"""Whether there is anything to see over a setting: a method may not look at it at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jcl.core.method import METHODS
from jcl.errors import SettingsError
from jcl.settings.schema import Settings
from jcl.studies.cells import Axis

_OTHER_METHOD = "choose another method, such as jcl with several keys"


def refuse_ignored(axes: Sequence[Axis], base: Settings) -> None:
    """Raise where no method in the grid looks at an axis, so that its figure would show noise or nothing."""
    over = {axis.name: list(axis.values) for axis in axes}
    for axis in axes:
        reason, way_out = _ignored(axis.name, over, base)
        if reason:
            raise SettingsError(
                f"{reason}, so {axis.name} changes nothing and there is nothing to see over it; "
                f"{way_out}, or another setting."
            )


def _ignored(name: str, over: Mapping[str, list[Any]], base: Settings) -> tuple[str, str]:
    """Why nothing in the grid looks at a setting, and what to do about it; nothing where something does."""
    methods = [METHODS[method] for method in over.get("method.name", [base.method.name]) if method in list(METHODS)]
    names, several = " and ".join(method.name for method in methods), len(methods) > 1
    if not methods:
        return "", ""
    if name == "method.num_keys" and not any(method.several_keys for method in methods):
        return f"{names} {'make' if several else 'makes'} do with one key per image", _OTHER_METHOD
    if name in ("method.covariance_scale", "method.covariance_schedule"):
        if not any(method.uses_covariance for method in methods):
            return f"{names} {'do' if several else 'does'} without the keys' covariance", _OTHER_METHOD
        if all(count == 1 for count in over.get("method.num_keys", [base.method.num_keys])):
            return "with one key per image there is no covariance (method.num_keys is 1)", _OTHER_METHOD
    if name == "model.head_width" and set(over.get("model.head", [base.model.head])) == {"linear"}:
        return "a linear head has no hidden layer", "choose another model.head, such as mlp"
    return "", ""
