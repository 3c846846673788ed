"""Hub folders as timm opens them: `config.json`, `model.safetensors` and a model card; repositories of Hugging Face."""

import contextlib
import json
import logging
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

import jcl
from jcl.core.registry import METHODS
from jcl.data.shards.fetch import without_secrets
from jcl.errors import RunError
from jcl.export.backbone_file import BackboneInfo
from jcl.paths import read_file
from jcl.runs.folder import RunFolder
from jcl.runs.metrics import read_metrics
from jcl.settings.schema import Settings
from jcl.views import IMAGENET_MEAN, IMAGENET_STD

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
TORCH_WEIGHTS = "pytorch_model.bin"  # of older repositories
_USUAL_ARGS = (("in_chans", 3), ("global_pool", "avg"), ("global_pool", "token"))  # as timm 1.0.31 writes them


def read_hub_config(folder: Path) -> dict[str, Any]:
    """The fields of `WeightsFile` in a `config.json` of timm."""
    file = folder / CONFIG
    try:
        values = json.loads(read_file(file, RunError))
        preprocessing = values.get("pretrained_cfg", values)
        name, options = values.get("architecture"), dict(values.get("model_args") or {})
        size = options.pop("img_size", None) or preprocessing.get("input_size")
        options.pop("num_classes", None)
        if unknown := [name for name, value in options.items() if (name, value) not in _USUAL_ARGS]:
            raise RunError(f"{file} has unsupported model_args: {', '.join(sorted(unknown))}.")
        side = size[-1] if isinstance(size, list) else 224 if size is None else size
        mean, std = preprocessing.get("mean", IMAGENET_MEAN), preprocessing.get("std", IMAGENET_STD)
        checked = BackboneInfo("", "imagenet", side, 0, mean, std)
        return {
            "architecture": f"timm/{name}" if isinstance(name, str) else None,
            "image_size": None if size is None else checked.image_size,
            "mean": checked.mean,
            "std": checked.std,
        }
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        raise RunError(f"{file} is not a model description as timm writes it.") from None


def hub_config(name: str, info: BackboneInfo) -> dict[str, Any]:
    """The `config.json` with which timm builds the network and preprocesses images as this package does."""
    import timm

    known = timm.get_pretrained_cfg(name)
    return {
        "architecture": name.partition(".")[0],
        "num_classes": 0,
        "num_features": info.feature_width,
        "pretrained_cfg": {
            "num_classes": 0,
            "input_size": [3, info.image_size, info.image_size],
            "fixed_input_size": bool(known and known.fixed_input_size),
            "interpolation": "bilinear",
            "crop_pct": info.preprocessing.crop_ratio,
            "crop_mode": "center",
            "mean": list(info.mean),
            "std": list(info.std),
            "first_conv": known.first_conv if known else None,
            "classifier": known.classifier if known else None,
        },
    }


def download_repository(name: str) -> Path:
    """The folder in Hugging Face's cache with the files of a model repository, `USER/NAME` or `USER/NAME@REVISION`."""
    repository, _, revision = name.partition("@")
    with library_errors(f"The model hf:{name} could not be downloaded"):
        import huggingface_hub  # timm, which builds most of the networks, installs it

        download = partial(huggingface_hub.snapshot_download, repository, revision=revision or None)
        folder = Path(download(allow_patterns=[CONFIG, WEIGHTS]))
        if not (folder / WEIGHTS).is_file():
            download(allow_patterns=[TORCH_WEIGHTS])
    if not (folder / CONFIG).is_file():
        raise RunError(f"The model hf:{name} is not in timm's format: it has no {CONFIG}.")
    return folder


def upload_repository(name: str, files: Mapping[str, bytes], *, force: bool) -> str:
    """Write files into a new private model repository `USER/NAME`, or with `force` into an old one; returns its URL."""
    with library_errors(f"The model could not be uploaded to hf:{name}"):
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi()
        if not force and api.repo_exists(name):
            raise RunError(f"The repository hf:{name} exists; use --force to write into it.")
        url = api.create_repo(name, private=True, exist_ok=force)
        changes = [CommitOperationAdd(file, content) for file, content in files.items()]
        api.create_commit(name, changes, commit_message=f"Export by jcl {jcl.__version__}")
    return str(url)


@contextlib.contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Whatever a library raises without a network, its files or a login becomes one sentence."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it prints every retry
    try:
        with contextlib.redirect_stdout(sys.stderr):  # torch.hub prints what it downloads
            yield
    except RunError:
        raise
    except Exception as error:
        reason = textwrap.shorten(str(error).strip(" .\n"), 200, placeholder=" ...") or type(error).__name__
        raise RunError(f"{problem} ({reason}).") from None
    finally:
        log.setLevel(level)


def model_card(name: str, info: BackboneInfo, source: Path, repository: str = "") -> str:
    """The README: training settings and accuracies if `source` is a run folder, and how to load the model."""
    folder, own_path = RunFolder(source), "PATH_OF_THIS_FOLDER"
    tags = ["timm", "image-feature-extraction", "jcl"]
    training = "The source of its weights is not recorded."
    if source.is_dir() and folder.holds_run():
        tags += ["self-supervised-learning", "contrastive-learning"]
        training = _training(folder.settings(), folder)
    front = {"library_name": "timm", "pipeline_tag": "image-feature-extraction", "tags": tags}
    return f"""---
{yaml.safe_dump(front, sort_keys=False)}---

# {name}

A {name} without classifier: images of {info.image_size} px to {info.feature_width} pooled features. Exported by jcl
{jcl.__version__}.

{training}

## Usage

```python
import timm

model = timm.create_model("{f"hf-hub:{repository}" if repository else f"local-dir:{own_path}"}", pretrained=True)
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
features = model.eval()(transform(image).unsqueeze(0))  # (1, {info.feature_width})
```

or `jcl.load_backbone("{f"hf:{repository}" if repository else own_path}")`. Images are RGB in [0, 1], normalized with
mean {list(info.mean)} and std {list(info.std)}.

## License

Not stated: it depends on the training images. Add `license:` at the top of this file before publishing.
"""


def _training(settings: Settings, folder: RunFolder) -> str:
    data, init, recipe = map(_without_local_path, (settings.data.location, settings.model.init, settings.recipe))
    summary = METHODS[settings.method.name].summary.rstrip(".")
    sections = settings.model_dump(mode="json", include={"recipe", "method", "train", "views", "model"})
    sections |= {"recipe": recipe, "model": sections["model"] | {"init": init}}
    start = f" from the weights `{init}`" if init else ""
    text = f"""## Training

Pre-trained{start} without labels on `{data}` with {settings.method.name} ({summary}).

```yaml
{yaml.safe_dump(sections, sort_keys=False).replace("```", "")}```"""
    if accuracies := _accuracies(folder):
        rows = "\n".join(f"| {name} | {value:.2f} % |" for name, value in accuracies.items())
        text += f"\n\n## Evaluation\n\nMeasured on the run's own data.\n\n| metric | value |\n| --- | --- |\n{rows}"
    return text


def _without_local_path(place: str) -> str:
    public = without_secrets(place)
    return Path(public).name if Path(public).is_absolute() else public


def _accuracies(folder: RunFolder) -> dict[str, float]:
    """The newest accuracies of a run."""
    lines = read_metrics(folder.metrics_file) if folder.metrics_file.exists() else []
    figures = {name: value for line in lines for name, value in line.items() if name.endswith(("_top1", "_top5"))}
    return {name: value for name, value in figures.items() if value is not None}
