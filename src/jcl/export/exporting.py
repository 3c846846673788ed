"""Export of backbones for other libraries, and import of backbones that other programs trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jcl.errors import RunError, SettingsError
from jcl.export.backbone_file import BackboneInfo, save_backbone
from jcl.export.loading import LoadedBackbone, open_backbone
from jcl.export.targets import TARGETS, ExportJob
from jcl.paths import home_expanded
from jcl.runs.atomic import refuse_overwrite, write_atomically
from jcl.runs.folder import RunFolder

_SUFFIXES = {"detectron2": ".pkl", "safetensors": ".safetensors", "onnx": ".onnx"}


@dataclass(frozen=True)
class Exported:
    """What was written, and hints on how to use it."""

    path: Path
    info: BackboneInfo
    tensors: int
    bytes: int
    hints: tuple[str, ...]


def export_backbone(
    source: str | Path, target: str, out: str | Path, *, force: bool = False, backbone: str | None = None
) -> Exported:
    """Write the backbone of a run folder or weights file for `target`, one of `TARGETS`.

    `out` is overwritten only with `force`. `backbone` names the network as in `load_backbone`.
    """
    source, out = home_expanded(source), home_expanded(out)
    if target not in TARGETS:
        raise SettingsError(f"unknown export target {target!r}; choose one of {', '.join(TARGETS)}.")
    suffix = _SUFFIXES.get(target)
    if suffix and out.suffix != suffix:
        raise SettingsError(f"{out} must end in {suffix} for {target}.")
    if out.resolve() in (source.resolve(), RunFolder(source).backbone_file.resolve()):
        raise RunError(f"{out} is the backbone to export; choose another file with -o.")
    if target == "hub-folder":
        _check_hub_folder(out, force)
    else:
        refuse_overwrite(out, force=force)
    loaded = open_backbone(source, backbone)
    weights = loaded.network.state_dict()
    if not all(bool(value.isfinite().all()) for value in weights.values()):
        raise RunError(f"the weights in {source} are NaN or infinite; the training probably diverged.")
    content = TARGETS[target](ExportJob(loaded.network, loaded.info, source, out))
    for name, file in content.files.items():
        write_atomically(out / name if name else out, file)
    return Exported(out, loaded.info, len(weights), sum(map(len, content.files.values())), content.hints)


def import_backbone(
    source: str | Path,
    out: str | Path,
    *,
    backbone: str | None = None,
    image_size: int | None = None,
    force: bool = False,
) -> LoadedBackbone:
    """Convert a weights file that `load_backbone` opens to a backbone file, bit for bit.

    `backbone` and `image_size` are needed if neither the file nor its shapes state them.
    """
    source, out = home_expanded(source), home_expanded(out)
    if out.suffix != ".safetensors":
        raise SettingsError(f"{out} must end in .safetensors.")
    if source.exists() and out.resolve() == source.resolve():
        raise RunError(f"{out} is the file to import; choose another file with -o.")
    refuse_overwrite(out, force=force)
    loaded = open_backbone(source, backbone, image_size)
    save_backbone(loaded.network, loaded.info, out)
    return loaded


def _check_hub_folder(out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file; a hub folder needs a folder.")
    if RunFolder(out).holds_run():
        raise RunError(f"{out} is a run folder; choose another folder with -o.")
    if out.exists() and any(out.iterdir()) and not force:
        raise RunError(f"{out} is not empty; use --force to write into it.")
