"""Build the learner, optimizer, step options and view recipe of a run from its settings."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from jcl.console import pluralize
from jcl.core.batchnorm import has_batch_norm
from jcl.core.encoder import Encoder, backbone_parts, build_backbone, patch_embedding
from jcl.core.method import ContrastiveLearner
from jcl.core.registry import METHODS
from jcl.distributed.device import choose_precision, to_device
from jcl.distributed.group import ALONE, Ranks
from jcl.errors import SettingsError
from jcl.settings.resolved import ResolvedSettings, ResolvedViewSettings
from jcl.train.step import StepOptions
from jcl.views import ViewRecipe, view_recipe


def build_learner(
    settings: ResolvedSettings, device: torch.device, ranks: Ranks = ALONE
) -> tuple[ContrastiveLearner, int]:
    """The learner, initialized from the seed, and the width of its features."""
    method, model, train, views = settings.method, settings.model, settings.train, settings.views
    torch.manual_seed(train.seed)
    local_size = views.local_size if method.num_local_queries else None
    backbone, width = build_backbone(
        model.backbone,
        stem=model.stem,
        image_size=views.image_size,
        local_size=local_size,
        drop_path=model.drop_path,
        channels=settings.data.channels,
    )
    if model.freeze_patch_embed is True:
        patches = patch_embedding(backbone, settings.data.channels)
        if patches is None:
            raise SettingsError(f"{model.backbone} has no patch embedding; set model.freeze_patch_embed=false.")
        patches.requires_grad_(False)
    encoder = Encoder(
        backbone,
        width,
        head=model.head,
        head_width=None if model.head_width == "features" else model.head_width,
        embedding_dim=model.embedding_dim,
    )
    parts = _smallest_parts(settings, has_batch_norm(encoder)) // ranks.count
    learner = ContrastiveLearner(
        encoder,
        METHODS[method.name],
        num_keys=method.num_keys,
        num_queries=method.num_queries,
        num_local_queries=method.num_local_queries,
        temperature=float(method.temperature),
        queue_size=method.queue_size,
        embedding_dim=model.embedding_dim,
        key_momentum=float(method.key_momentum),
        bn_groups=model.bn_groups,
        key_passes=math.gcd(train.key_passes, parts),
        micro_batches=math.gcd(train.accumulate, parts),
        checkpoint_activations=train.checkpoint_activations,
        seed=train.seed,
        ranks=ranks,
    )
    if model.freeze:
        if not model.init:
            raise SettingsError("model.freeze would keep random weights; give --init, or set model.freeze=0.")
        learner.freeze(model.freeze)
    return to_device(learner, device), width


def _smallest_parts(settings: ResolvedSettings, batch_norm: bool) -> int:
    """The number of parts of a batch that cannot be split: BN groups, or images without batch norm.

    Passes and micro-batches consist of whole parts, so their number does not change the result.
    """
    train, groups = settings.train, settings.model.bn_groups
    if train.accumulate > 1 and METHODS[settings.method.name].gradient_through_keys:
        raise SettingsError(f"{settings.method.name} needs all keys at once; set train.accumulate=1.")
    parts = {"train.batch_size": train.batch_size} | ({"model.bn_groups": groups} if batch_norm else {})
    for name, count in (("train.key_passes", train.key_passes), ("train.accumulate", train.accumulate)):
        for whole, number in parts.items():
            if number % count:
                raise SettingsError(f"{name}={count} does not divide {whole}={number}; change one of the two.")
    return min(parts.values())


def build_optimizer(
    settings: ResolvedSettings, learner: ContrastiveLearner, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer of the query encoder: SGD with weight decay on all parameters, as in MoCo, or AdamW.

    Each group's `lr_scale` multiplies the learning rate: 1 for the head, `train.layer_decay` for the last part of the
    backbone, its square for the part before that, and so on.
    """
    train, on_gpu = settings.train, device.type == "cuda"
    adamw = train.optimizer == "adamw"
    parts = reversed(backbone_parts(learner.query_encoder.backbone).values())
    scales = {value: train.layer_decay**distance for distance, part in enumerate(parts, start=1) for value in part}
    groups: dict[tuple[float, bool, bool], dict[str, Any]] = {}
    for name, value in learner.query_encoder.named_parameters():
        if value.requires_grad:
            plain = adamw and is_undecayed(name, value)
            backbone = bool(train.head_epochs) and value in scales  # starts later than the head
            group = {"params": [], "weight_decay": 0.0 if plain else train.weight_decay, "backbone": backbone}
            group["lr_scale"] = scale = scales.get(value, 1.0)
            groups.setdefault((scale, backbone, plain), group)["params"].append(value)
    ordered = [groups[key] for key in sorted(groups)]
    if adamw:  # capturable: a CUDA graph counts the steps on the device
        options = {"betas": train.betas, "capturable": on_gpu}
        return without_compiler(torch.optim.AdamW)(ordered, lr=train.lr, fused=on_gpu, **options)
    return without_compiler(torch.optim.SGD)(ordered, lr=train.lr, momentum=train.momentum, fused=on_gpu)


def without_compiler(optimizer: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """The class without the wrappers of its methods for `torch.compile`, whose import takes seconds."""
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    methods["step"] = torch.no_grad()(inspect.unwrap(optimizer.step))
    return type(optimizer.__name__, (optimizer,), methods)


_UNDECAYED = ("pos_embed", "position", "token", "layer_scale")


def is_undecayed(name: str, parameter: Tensor) -> bool:
    """Whether AdamW applies no weight decay: to norms, biases, position embeddings and class tokens."""
    return parameter.ndim <= 1 or any(part in name.rpartition(".")[2] for part in _UNDECAYED)


def step_options(settings: ResolvedSettings, device: torch.device) -> StepOptions:
    """How steps run: by default compiled (with Triton) and recorded as a CUDA graph on a GPU, neither on a CPU."""
    compiled, recorded = settings.train.compile, settings.train.cuda_graph
    on_gpu = device.type == "cuda"
    return StepOptions(
        device=device,
        precision=choose_precision(settings.train.precision, device),
        compiled=on_gpu and find_spec("triton") is not None if compiled == "auto" else compiled,
        recorded=on_gpu if recorded == "auto" else recorded and on_gpu,
        skip_nonfinite=settings.train.on_nan == "skip",
        clip_grad=settings.train.clip_grad,
    )


def run_view_recipe(settings: ResolvedSettings) -> ViewRecipe:
    """The recipe of the views of a run, with the settings that replace values of the named one."""
    views, channels = settings.views, settings.data.channels
    if not len(views.mean) == len(views.std) == channels:
        raise SettingsError(f"views.mean and views.std need {pluralize(channels, 'value')}, one per channel.")
    local = {"local_size": views.local_size, "local_scale": views.local_scale}
    changes = recipe_changes(views) | (local if settings.method.num_local_queries else {})
    return view_recipe(views.recipe, views.image_size, mean=views.mean, std=views.std, **changes)


def recipe_changes(views: ResolvedViewSettings) -> dict[str, Any]:
    """The settings that replace values of the named recipe: crops, strengths and probabilities."""
    names = {field.name for field in dataclasses.fields(ViewRecipe)} - {"local_size", "local_scale", "mean", "std"}
    return {name: value for name, value in views.model_dump(exclude_none=True).items() if name in names}
