"""Merge each batch norm of a network with the addition and ReLU after it, for the kernels of `fused_norm`."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from jcl.core.batchnorm import GroupedBatchNorm
from jcl.core.blocks import DropPath

_RELUS: tuple[Any, ...] = (F.relu, torch.relu, "relu", "relu_")
_ADDITIONS: tuple[Any, ...] = (operator.add, torch.add)  # `+=` is traced as operator.add
# The other operations of a network that is fused; torch.compile is faster for networks with more kinds.
_LAYERS = (nn.Conv2d, nn.Linear, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten)
_FUNCTIONS: tuple[Any, ...] = (torch.flatten, "flatten", *_ADDITIONS)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # A trace through `DropPath` would leave it out: its draws are not there yet.
        return isinstance(m, (GroupedBatchNorm, DropPath)) or super().is_leaf_module(m, module_qualified_name)


def fuse_batch_norm(network: nn.Module) -> Callable[..., Any] | None:
    """The same network with fused calls, sharing its layers; None if it has other operations than a ResNet."""
    try:
        graph = _Tracer().trace(network)
    except Exception:  # networks with branches that depend on the input cannot be traced, for many reasons
        return None
    layers = dict(network.named_modules())
    for node in list(graph.nodes):
        if isinstance(_layer(node, layers), nn.Identity):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    for node in list(graph.nodes):
        if isinstance(_layer(node, layers), GroupedBatchNorm):
            _fuse(node, layers)
    if not all(_is_plain(node, layers) for node in graph.nodes):
        return None
    graph.lint()
    return fx.GraphModule(network, graph)


def _layer(node: fx.Node, layers: dict[str, nn.Module]) -> nn.Module | None:
    return layers.get(str(node.target)) if node.op == "call_module" else None


def _is_relu(node: fx.Node, layers: dict[str, nn.Module]) -> bool:
    # A layer's target is its name, which may be "relu" without being one.
    return isinstance(_layer(node, layers), nn.ReLU) if node.op == "call_module" else node.target in _RELUS


def _is_plain(node: fx.Node, layers: dict[str, nn.Module]) -> bool:
    layer = _layer(node, layers)
    if layer is not None:
        return isinstance(layer, (GroupedBatchNorm, *_LAYERS))
    return node.op in ("placeholder", "output") or node.target in _FUNCTIONS


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _fuse(node: fx.Node, layers: dict[str, nn.Module]) -> None:
    """Merge the addition and the ReLU that follow a batch norm into its call."""
    user = _only_user(node)
    if user is not None and user.target in _ADDITIONS and len(user.args) == 2 and not user.kwargs:
        relu = _only_user(user)
        other = user.args[1] if user.args[0] is node else user.args[0]
        # The other summand must be computed earlier; if it is a later batch norm, the addition is merged into that one.
        if relu is None or not _is_relu(relu, layers) or not isinstance(other, fx.Node) or node <= other:
            return
        _replace([relu, user], node, {"residual": other, "relu": True})
    elif user is not None and _is_relu(user, layers):
        _replace([user], node, {"relu": True})


def _replace(old: list[fx.Node], batch_norm: fx.Node, options: dict[str, Any]) -> None:
    """Replace the nodes `old`, the last one first, by the batch norm with these options."""
    old[0].replace_all_uses_with(batch_norm)
    for node in old:
        batch_norm.graph.erase_node(node)
    batch_norm.kwargs = {**batch_norm.kwargs, **options}
