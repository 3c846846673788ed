"""Handing a backbone to the libraries people use next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jcl.errors import RunError, SettingsError
from jcl.export.backbone_file import BackboneInfo
from jcl.export.loading import open_backbone
from jcl.export.targets import TARGETS, Parcel
from jcl.paths import home_expanded
from jcl.runs.atomic import refuse_overwrite, write_atomically
from jcl.runs.folder import RunFolder

_ENDINGS = {"detectron2": ".pkl", "safetensors": ".safetensors", "onnx": ".onnx"}


@dataclass(frozen=True)
class Exported:
    """What was written, and what to know when it is used."""

    path: Path
    info: BackboneInfo
    tensors: int
    bytes: int
    hints: tuple[str, ...]


def export_backbone(
    source: str | Path, target: str, out: str | Path, *, force: bool = False, backbone: str | None = None
) -> Exported:
    """Write the backbone of a run folder or weights file in the form that `target` (one of `TARGETS`) reads.

    What lies at `out` is overwritten only with `force`. `backbone` names the network as in `load_backbone`.
    """
    source, out = home_expanded(source), home_expanded(out)
    if target not in TARGETS:
        raise SettingsError(f"there is no target called {target!r}; choose one of {', '.join(TARGETS)}.")
    _demand_room(source, target, out, force)
    opened = open_backbone(source, backbone)
    if not all(bool(value.isfinite().all()) for value in opened.network.state_dict().values()):
        raise RunError(
            f"the weights in {source} hold NaN or infinite values, which are of use to no program; the training that "
            "made them has probably diverged (lower its learning rate)."
        )
    packed = TARGETS[target](Parcel(opened.network, opened.info, source, out))
    for name, content in packed.files.items():
        write_atomically(out / name if name else out, content)
    size = sum(len(content) for content in packed.files.values())
    return Exported(out, opened.info, len(opened.network.state_dict()), size, packed.hints)


def _demand_room(source: Path, target: str, out: Path, force: bool) -> None:
    """Refuse to write over what is there without `force`, and over what is exported in any case."""
    ending = _ENDINGS.get(target)
    if ending and out.suffix != ending:
        raise SettingsError(f"files for {target} are known by their ending: {out} should end in {ending}.")
    if out.resolve() in (source.resolve(), RunFolder(source).backbone_file.resolve()):
        raise RunError(f"{out} is what is to be exported; choose another place with -o.")
    if target == "hub-folder":
        _demand_folder(out, force)
    else:
        refuse_overwrite(out, force=force)


def _demand_folder(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise RunError(f"{out} is a file; a hub folder needs a folder of its own.")
    if RunFolder(out).holds_run():
        raise RunError(f"{out} holds a run; a hub folder needs a folder of its own.")
    if any(out.iterdir()) and not force:
        raise RunError(f"{out} is not empty and is left as it is; choose another folder or add --force.")
