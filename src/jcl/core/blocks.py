"""Residual blocks of backbones: stochastic depth."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from jcl.errors import SettingsError
from jcl.random import RANDOM_LAYERS, uniforms


class DropPath(nn.Module):
    """Stochastic depth: leaves out a residual branch for some rows of a batch, chosen by `draw_drop_paths`.

    Without a draw for a batch of this size it does nothing, as in the key encoder.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.factors: dict[int, Tensor] = {}  # by the number of rows: 0 or 1/(1 - rate) for each of them

    def forward(self, branch: Tensor) -> Tensor:
        factors = self.factors.get(branch.shape[0]) if self.training else None
        return branch if factors is None else branch * factors.to(branch.dtype).view(-1, *[1] * (branch.dim() - 1))


def replace_drop_path(network: nn.Module, name: str, rate: float) -> None:
    """Replace the stochastic depth of torchvision or timm by our own, at most `rate` in the last block."""
    found = []
    for parent in list(network.modules()):
        for key, child in parent.named_children():
            if type(child).__name__ in ("DropPath", "StochasticDepth"):  # timm's and torchvision's
                found.append((parent, key, float(getattr(child, "drop_prob", getattr(child, "p", 0.0)))))
    largest = max((own for *_, own in found), default=0.0)
    if rate and not largest:
        raise SettingsError(f"The backbone {name} has no stochastic depth; set model.drop_path=0.")
    for parent, key, own in found:
        setattr(parent, key, DropPath(own / largest * rate) if rate and own else nn.Identity())


def draw_drop_paths(
    network: nn.Module, seed: int, step: int | Tensor, batches: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """Draw which views each `DropPath` leaves out; a batch is the images (n,) and the numbers (n,) of its views.

    Batches of the same size share the draws of the first: activation checkpointing repeats them in any order.
    """
    layers = [module for module in network.modules() if isinstance(module, DropPath)]
    sizes = {len(rows): (rows, numbers) for rows, numbers in reversed(list(batches))} if layers else {}
    for size, views in sizes.items():
        draws = uniforms(seed, RANDOM_LAYERS, step, *views, len(layers))
        for layer, drawn in zip(layers, draws.unbind(1), strict=True):
            layer.factors[size] = (drawn >= layer.rate) / (1.0 - layer.rate)
