"""Residual blocks of backbones: stochastic depth and activation checkpointing."""

from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jcl.errors import SettingsError
from jcl.random import RANDOM_LAYERS, uniforms


class DropPath(nn.Module):
    """Stochastic depth: drops a residual branch for some rows of a batch, chosen by `draw_drop_paths`.

    It does nothing if no rows were drawn for a batch of this size, as in the key encoder.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.factors: dict[int, Tensor] = {}  # by the number of rows: 0 or 1/(1 - rate) for each of them

    def forward(self, branch: Tensor) -> Tensor:
        factors = self.factors.get(branch.shape[0]) if self.training else None
        return branch if factors is None else branch * factors.to(branch.dtype).view(-1, *[1] * (branch.dim() - 1))


def replace_drop_path(network: nn.Module, name: str, rate: float) -> None:
    """Replace the stochastic depth of torchvision or timm by our own, at most `rate` in the last block.

    Dropout, which draws from the state of the generator, is switched off: a resumed run would draw something else.
    """
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "drop_rate", None), float):  # timm's GhostNets have no layer for it
            module.drop_rate = 0.0  # type: ignore[assignment]
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


Batches = list[tuple[Tensor, Tensor]]  # for each batch of n views: the images (n,) and the view numbers (n,)


def draw_drop_paths(network: nn.Module, seed: int, step: int | Tensor, batches: Batches) -> None:
    """Draw the views that each `DropPath` drops. Batches of equal size, and a repeated pass, share the draws."""
    layers = [module for module in network.modules() if isinstance(module, DropPath)]
    for size, views in {len(batch[0]): batch for batch in reversed(batches) if layers}.items():
        draws = uniforms(seed, RANDOM_LAYERS, step, *views, len(layers))
        for layer, drawn in zip(layers, draws.unbind(1), strict=True):
            layer.factors[size] = (drawn >= layer.rate) / (1.0 - layer.rate)


def checkpoint_blocks(network: nn.Module) -> None:
    """Activation checkpointing: keep only the inputs of residual blocks and recompute the rest in the backward pass."""
    containers = (nn.Sequential, nn.ModuleList)
    found: list[nn.Module] = []
    for module in network.modules():
        children = list(module.children()) if isinstance(module, containers) else []
        alike = len({type(child) for child in children}) == 1 and not isinstance(children[0], containers)
        found += children if alike and list(children[0].children()) else []
    if not found:
        raise SettingsError("The backbone has no repeated blocks; set train.checkpoint_activations=false.")
    import torch._dynamo  # takes seconds to import

    # Batch norm keeps its statistics in the forward pass only.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for block in found:  # nothing in it is random: `replace_drop_path` has switched off dropout
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
