"""Whether there is anything to see over a setting: a method may not look at it at all."""

from __future__ import annotations

from collections.abc import Sequence

from jcl.core.method import METHODS
from jcl.errors import SettingsError
from jcl.settings import Settings
from jcl.studies.cells import Axis


def refuse_ignored(axes: Sequence[Axis], base: Settings) -> None:
    """Raise where no method in the grid looks at an axis, so that its figure would show noise or nothing."""
    over = {axis.name: axis.values for axis in axes}
    methods = [METHODS[name] for name in over.get("method.name", [base.method.name]) if name in list(METHODS)]
    names = " and ".join(method.name for method in methods)
    several = len(methods) > 1
    for axis in axes:
        reason = ""
        if axis.name == "method.num_keys" and not any(method.several_keys for method in methods):
            reason = f"{names} {'make' if several else 'makes'} do with one key per image"
        elif axis.name in ("method.covariance_scale", "method.covariance_schedule"):
            keys = over.get("method.num_keys", [base.method.num_keys])
            if not any(method.uses_covariance for method in methods):
                reason = f"{names} {'do' if several else 'does'} without the keys' covariance"
            elif all(count == 1 for count in keys):
                reason = "with one key per image there is no covariance (method.num_keys is 1)"
        if methods and reason:
            raise SettingsError(
                f"{reason}, so {axis.name} changes nothing and there is nothing to see over it; "
                "choose another method, such as jcl with several keys, or another setting."
            )
