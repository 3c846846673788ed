"""Load a backbone from a run folder or a weights file; its network is found by the names and shapes of the tensors.

Also reads the weights that pre-training starts from, which may be torchvision's or timm's.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jcl.console import STDERR, list_some, pluralize, print_line
from jcl.core.encoder import OWN_BACKBONES, Stem, build_backbone, fit_channels, torchvision_networks
from jcl.errors import RunError, SettingsError, import_extra
from jcl.export import layouts
from jcl.export.backbone_file import BackboneInfo, backbone_info, weights_of
from jcl.export.hub import CONFIG, download_repository, library_errors
from jcl.export.reading import WeightsFile, read_weights
from jcl.paths import expand_user, hub_name, suggest_path
from jcl.runs.checkpoint import list_checkpoints, load_tensors, read_tensors, search_checkpoints, select_prefix
from jcl.runs.folder import RunFolder
from jcl.settings.resolved import InitialWeights, ResolvedSettings
from jcl.settings.schema import Settings

_HEADS = ("fc", "head", "heads", "classifier", "linear")
_HALF_NORMALIZED = ("googlenet", "inception_v3")


@dataclass(frozen=True, eq=False)
class LoadedBackbone:
    """A network with the weights of a file, and what became of the tensors in that file."""

    network: nn.Module
    info: BackboneInfo
    source: str  # the kind of file, its layout and the prefix of the network
    loaded: int
    unused: dict[str, int]  # number of tensors in each part of the file that was not loaded
    notes: tuple[str, ...]
    epoch: float | None  # of a checkpoint

    @property
    def unused_parts(self) -> str:
        return ", ".join(f"{part} ({count:,})" for part, count in self.unused.items()) or "nothing"


def load_backbone(path: str | Path, backbone: str | None = None) -> nn.Module:
    """The backbone of a run folder, one of its checkpoints or a weights file, in evaluation mode.

    It maps normalized images (n, channels, h, w) to pooled features (n, width), which are not unit rows.

    Opens what this package writes, except ONNX and detectron2 exports, and what `jcl import` reads: torch.save and
    safetensors files of torchvision, timm, detectron2, lightly, solo-learn, and the released MoCo and JCL checkpoints.
    `hf:USER/NAME` is a model repository of Hugging Face in timm's format, downloaded into its cache.
    A run that has not finished gives the backbone of its newest checkpoint. `backbone` names the network if neither the
    file nor its shapes do. The network has an attribute `info`, a `BackboneInfo` with its image size and normalization,
    ImageNet's if the file does not state them. Nothing in a file is ever executed.
    """
    return open_backbone(Path(path), backbone).network


def open_backbone(path: Path, backbone: str | None = None, image_size: int | None = None) -> LoadedBackbone:
    """As `load_backbone`, with details of what the file held."""
    return load_network(open_weights(path), backbone, image_size)


def open_weights(path: Path) -> WeightsFile:
    """The tensors of a run folder, a weights file, or a model repository of Hugging Face, `hf:USER/NAME`."""
    if name := hub_name(path):
        return replace(read_weights(download_repository(name)), path=path)
    path = expand_user(path)
    if not path.exists():
        raise RunError(f"There is no run or weights file at {path}{suggest_path(path)}")
    is_run = path.is_dir() and (RunFolder(path).holds_run() or not (path / CONFIG).is_file())
    if (run := checkpoint_run(path)) is not None:
        return _read_checkpoint(path, RunFolder(run))
    return _read_run(RunFolder(path)) if is_run else read_weights(path)


def checkpoint_run(path: Path) -> Path | None:
    """The folder of the run that a file is a checkpoint of, if it is one."""
    path = expand_user(path).resolve()
    run = path.parent.parent
    known = path in list_checkpoints(RunFolder(run).checkpoints) and RunFolder(run).settings_file.is_file()
    return run if known else None


def _read_checkpoint(path: Path, folder: RunFolder) -> WeightsFile:
    tensors, metadata = read_tensors(path)
    if "step" not in metadata:
        raise RunError(f"{path} is not a checkpoint of this tool; give the run folder or another file.")
    tensors = select_prefix(tensors, "model.query_encoder.backbone.")
    # The feature width is measured when the network is built.
    info = backbone_info(folder.settings(), feature_width=0)
    epoch = int(metadata["step"]) / max(1, int(metadata.get("steps_per_epoch", 1)))
    return WeightsFile(path, "checkpoint of a run", tensors, info=info, epoch=epoch)


def read_moco_checkpoint(path: Path) -> tuple[BackboneInfo, dict[str, Tensor]] | None:
    """The state of a `ContrastiveLearner` in a checkpoint of MoCo's or JCL's authors, or None if it is not one.

    Such a file holds `encoder_q` and `encoder_k`, ResNets with the projection head as `fc`, and `queue` (d, K).
    """
    weights = read_weights(path)
    queues = [name for name, value in weights.tensors.items() if f".{name}".endswith(".queue") and value.ndim == 2]
    prefix = queues[0].removesuffix("queue") if queues else ""
    state: dict[str, Tensor] = {}
    for encoder, place in (("query_encoder", f"{prefix}encoder_q."), ("key_encoder", f"{prefix}encoder_k.")):
        own = select_prefix(weights.tensors, place)
        head = select_prefix(own, "fc.")
        if not (queues and head):
            return None
        loaded = load_network(replace(weights, tensors=own), None, None)
        state |= {f"{encoder}.backbone.{name}": value for name, value in loaded.network.state_dict().items()}
        state |= {f"{encoder}.head.{name}": value for name, value in head.items()}
    rows = weights.tensors[queues[0]].T.contiguous()
    if not all(value.isfinite().all() for value in (rows, *state.values())):
        raise RunError(f"{path} has NaN or infinite values in a projection head or the queue; give another checkpoint.")
    return loaded.info, state | {"queue.rows": rows, "queue.enqueued": torch.tensor(len(rows))}


def _read_run(folder: RunFolder) -> WeightsFile:
    if folder.backbone_file.is_file() and not folder.settings_file.is_file():  # of a fine-tuning
        raise RunError(f"{folder.path} is not a run folder; give the backbone in it: {folder.backbone_file}.")
    settings = folder.settings()
    if folder.backbone_file.exists():
        return read_weights(folder.backbone_file)
    newest, damaged = search_checkpoints(folder.checkpoints)
    if newest is None:
        waiting = f"The run in {folder.path} has no checkpoint yet; let it train longer first."
        raise RunError(damaged[0] if damaged else waiting)
    weights = _read_checkpoint(newest, folder)
    if os.environ.get("RANK", "0") == "0":  # of several ranks one prints
        state = f"{folder.path} has not finished: it is at epoch {weights.epoch:.3g} of {settings.train.epochs}"
        print_line(STDERR, f"{state}. Using its newest checkpoint; {folder.how_to_finish}.")
    return weights


def load_network(weights: WeightsFile, backbone: str | None, image_size: int | None) -> LoadedBackbone:
    """Load the network given as `backbone`, the one named in the file, or the ResNet of these shapes."""
    tensors, layout = layouts.torchvision_names(weights.tensors)
    name = backbone or network_name(weights)
    weights = _with_normalization(weights, name)
    described, stem = weights.info or weights, stem_of(weights)
    size = image_size or described.image_size or _default_size(name, stem)
    network, width = build_backbone(name, stem=stem, image_size=size, channels=len(described.mean))
    expected = network.state_dict()
    prefix = _prefix(weights, tensors, expected, name)
    found = select_prefix(tensors, prefix)
    _check_match(weights, found, expected, name, size)
    loaded = {part: found[part] for part in expected if part in found}
    load_tensors(network, loaded)
    info = BackboneInfo(name, stem, size, width, described.mean, described.std)
    network.info = info  # type: ignore[assignment]
    dtypes = {value.dtype for part, value in loaded.items() if value.dtype != expected[part].dtype}
    unused = [part for part in tensors if not (part.startswith(prefix) and part.removeprefix(prefix) in loaded)]
    return LoadedBackbone(
        network=network.eval(),
        info=info,
        source=f"{weights.kind}, {layout}" + (f", under {prefix.removesuffix('.')}" if prefix else ""),
        loaded=len(loaded),
        unused=dict(Counter(_part_of_file(part, prefix) for part in unused)),
        notes=tuple(_notes(weights, layout, stem, dtypes)),
        epoch=weights.epoch,
    )


def stem_of(weights: WeightsFile) -> Stem:
    """The stem of the network in a file: "imagenet" unless it is a ResNet with a small stem, or `info` states it."""
    if weights.info:
        return weights.info.stem
    return "small" if layouts.has_small_stem(layouts.torchvision_names(weights.tensors)[0]) else "imagenet"


def network_name(weights: WeightsFile) -> str:
    """The network that is named in a file, or the ResNet that its shapes belong to."""
    if weights.info:
        return weights.info.backbone
    named = weights.architecture
    if named and (named in OWN_BACKBONES or named in torchvision_networks() or _timm_image_size(named)):
        return named
    tensors, _ = layouts.torchvision_names(weights.tensors)
    prefixes = layouts.resnet_prefixes(tensors)
    names = {name for prefix in prefixes if (name := layouts.resnet_name(tensors, prefix))}
    if len(names) == 1:
        return names.pop()
    problem = f"The network in {weights.path} is unknown{f' (arch {named!r})' if named else ''}"
    remedy = "Name it with --backbone of `jcl import` or `jcl export`, or `load_backbone(path, backbone=NAME)`"
    raise RunError(f"{problem}. {remedy}.")


def _timm_image_size(name: str) -> int | None:
    """The image size of a network of timm, None if timm is not installed or does not have it."""
    with contextlib.suppress(ImportError, RuntimeError):  # RuntimeError: a tag that timm does not have
        import timm

        if timm.is_model(name := name.removeprefix("timm/")):
            known = timm.get_pretrained_cfg(name)
            return int(known.input_size[-1]) if known else 224
    return None


def _default_size(name: str, stem: str) -> int:
    if stem == "small" or name in OWN_BACKBONES:
        return 32
    if name not in torchvision_networks():
        return _timm_image_size(name) or 224
    from torchvision import models

    return int(models.get_model_weights(name).DEFAULT.transforms().crop_size[0])


def _prefix(weights: WeightsFile, tensors: Iterable[str], expected: Mapping[str, Tensor], name: str) -> str:
    prefixes = layouts.network_prefixes(tensors, expected)
    if not prefixes:
        missing = f"{len(expected.keys() - set(tensors)):,} of its {len(expected):,} tensors are missing"
        found = f"the file has {list_some(tensors, 3) or 'none'}"
        remedy = "If it holds another network, name it with --backbone (in a run: model.backbone in settings.yaml)"
        raise RunError(f"{weights.path} does not hold a {name}: {missing}; {found}. {remedy}.")
    if len(prefixes) > 1:
        found = " and ".join(prefix or "no prefix" for prefix in prefixes)
        raise RunError(f"{weights.path} holds {len(prefixes)} networks, under {found}; save the tensors of one alone.")
    return prefixes[0]


def _check_match(
    weights: WeightsFile, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], name: str, size: int
) -> None:
    """Raise unless the tensors are exactly those of the network, apart from its classifier.

    Old files lack `num_batches_tracked`, which evaluation does not need.
    """
    both = {part: (found[part], value) for part, value in expected.items() if part in found}
    shapes = [part for part, (own, wanted) in both.items() if own.shape != wanted.shape]
    values = {part: own.to(wanted.dtype) for part, (own, wanted) in both.items()}  # float8 has no comparisons
    tops = {part.partition(".")[0] for part in expected} - set(_HEADS)
    kinds = {
        "missing": [part for part in expected if part not in found and not part.endswith("num_batches_tracked")],
        "of another shape": shapes,
        "unexpected": [part for part in found if part not in expected and part.partition(".")[0] in tops],
        "of integers": [
            part for part, (own, wanted) in both.items() if wanted.is_floating_point() > own.is_floating_point()
        ],
        "NaN or infinite": [part for part, value in values.items() if not value.isfinite().all()],
        "negative": [part for part, value in values.items() if part.endswith("running_var") and (value < 0).any()],
    }
    problems = [f"{len(parts):,} {kind} ({list_some(parts, 3)})" for kind, parts in kinds.items() if parts]
    for part in shapes[:1]:
        problems.append(f"{part} is {(*found[part].shape,)} in the file and {(*expected[part].shape,)} in the network")
    if problems:
        problem = f"The tensors in {weights.path} do not match {name} at {size} px: {'; '.join(problems)}"
        raise RunError(f"{problem}. For another network give --backbone, for another image size --image-size.")


def _part_of_file(name: str, prefix: str) -> str:
    """The part of the file that a tensor belongs to: `module.encoder_k`, `module.encoder_q.fc`."""
    depth = prefix.count(".") + name.startswith(prefix)
    return ".".join(name.split(".")[: max(depth, 1)])


def _notes(weights: WeightsFile, layout: str, stem: str, dtypes: set[torch.dtype]) -> Iterable[str]:
    """What had to be assumed, and what else was in the file."""
    if weights.info is None and layout == layouts.DETECTRON2:
        yield "assumed RGB images and strides in the 3×3 convolutions, unlike in detectron2's MSRA weights"
    if weights.info is None and stem == "small":
        yield "assumed stride 1, padding 1 and no max-pool for the 3×3 stem; solo-learn pads by 2"
    if dtypes:
        yield f"converted {' and '.join(sorted(map(str, dtypes))).replace('torch.', '')} values to float32"
    if weights.ignored:
        yield f"ignored other entries of the file: {list_some(weights.ignored, 8)}"


def read_initial(settings: Settings) -> WeightsFile | None:
    """The weights that `model.init` names, or None if it is empty; torchvision and timm download theirs."""
    return initial_weights(settings.model.init, settings.model.backbone) if settings.model.init else None


def initial_weights(init: str, name: str) -> WeightsFile:
    """The weights in a file, or those of torchvision ("imagenet") or timm for the network `name`."""
    if init == "timm":
        return _timm_weights(name)
    return _with_normalization(_torchvision_weights(name) if init == "imagenet" else open_weights(Path(init)), name)


def initial_facts(weights: WeightsFile) -> InitialWeights:
    """What automatic settings depend on."""
    described = weights.info or weights
    return InitialWeights(stem_of(weights), described.image_size, described.mean, described.std)


def initial_tensors(
    weights: WeightsFile, settings: ResolvedSettings, backbone: nn.Module
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors that the backbone of a run takes from a file, and lines on what was loaded and what was not."""
    name, stem = settings.model.backbone, settings.model.stem
    try:
        loaded = load_network(weights, name, settings.views.image_size)
    except (RunError, SettingsError):
        with contextlib.suppress(RunError):  # other networks cannot be told from their shapes
            if _plain(found := network_name(weights)) != _plain(name):
                problem = f"{weights.path} holds a {found}, but the backbone is {name}; use --backbone {found}."
                raise SettingsError(problem) from None
        raise
    tensors, expected = weights_of(loaded.network), backbone.state_dict()
    had, channels = loaded.info.channels, settings.data.channels
    differing = (part for part, value in expected.items() if tensors[part].shape != value.shape)
    fitted = next(differing) if had != channels else ""  # the first layer
    if fitted:
        tensors[fitted] = fit_channels(tensors[fitted], channels)
    fresh = {part for part, value in expected.items() if tensors[part].shape != value.shape}
    if fresh and settings.model.freeze:  # they would stay random
        raise SettingsError(f"model.freeze needs the stem of the weights; set model.stem={loaded.info.stem}.")
    kept = {part: value for part, value in tensors.items() if part not in fresh}
    lines = [
        f"model.init = {settings.model.init}: loaded {pluralize(loaded.loaded - len(fresh), 'tensor')} of {name} "
        f"({loaded.source})"
    ]
    new = ["the projection head"]
    if fresh:
        new.append(f"{', '.join(sorted(fresh))}, because the weights have the {loaded.info.stem} stem, not {stem}")
    if fitted and fitted not in fresh:
        lines.append(f"fitted: {fitted} from {had} to {pluralize(channels, 'channel')}, by the mean over them")
    lines.append(f"new: {' and '.join(new)}; not used from the weights: {loaded.unused_parts}")
    return kept, lines + [f"note: {note}" for note in loaded.notes if not note.startswith("ignored")]


def _plain(name: str) -> str:
    """The name of an architecture without its library and the tag of its weights."""
    return name.removeprefix("timm/").partition(".")[0]


def _torchvision_weights(name: str) -> WeightsFile:
    from torchvision import models

    if name not in torchvision_networks():
        raise SettingsError(f"torchvision has no {name}; use --init timm or a weights file, or another --backbone.")
    weights = models.get_model_weights(name).DEFAULT
    with library_errors(f"torchvision's weights {weights} could not be downloaded; offline, give --init a file"):
        tensors = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    transforms = weights.transforms()
    size = transforms.crop_size[0] if name.startswith("vit_") else None
    mean, std = map(tuple, (transforms.mean, transforms.std))
    return WeightsFile(Path(str(weights)), "torchvision", tensors, None, name, size, mean, std)


def _with_normalization(weights: WeightsFile, name: str) -> WeightsFile:
    """Mean and std 0.5 for two networks of torchvision, which convert ImageNet's to these if it loads their weights."""
    if weights.info or name not in _HALF_NORMALIZED:
        return weights
    return replace(weights, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def _timm_weights(name: str) -> WeightsFile:
    timm = import_extra("timm", "timm", "--init timm")
    plain = name.removeprefix("timm/")
    if not timm.is_model(plain) or not timm.is_model_pretrained(plain):
        raise SettingsError(f"timm has no weights of {name}; use a weights file or another --backbone.")
    repository = timm.get_pretrained_cfg(plain).hf_hub_id
    with library_errors(f"timm's weights of {plain} could not be downloaded; offline, give --init a file"):
        if repository:  # fails at once without a network; `create_model` would try for almost a minute
            import huggingface_hub  # which comes with timm

            huggingface_hub.snapshot_download(repository, allow_patterns=[CONFIG])
        network = timm.create_model(plain, pretrained=True, num_classes=0)
    known: Any = network.pretrained_cfg
    size = known["input_size"][-1] if known.get("fixed_input_size") else None
    mean, std = tuple(known["mean"]), tuple(known["std"])
    return WeightsFile(Path(f"timm/{plain}"), "timm", network.state_dict(), None, plain, size, mean, std)
