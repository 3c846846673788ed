"""Taking backbones that other programs trained."""

from __future__ import annotations

from pathlib import Path

from jcl.errors import RunError, SettingsError
from jcl.export.backbone_file import save_backbone
from jcl.export.loading import open_backbone
from jcl.export.recognising import Recognised
from jcl.paths import home_expanded
from jcl.runs.atomic import refuse_overwrite


def import_backbone(
    source: str | Path,
    out: str | Path,
    *,
    backbone: str | None = None,
    image_size: int | None = None,
    force: bool = False,
) -> Recognised:
    """Turn a weights file that `load_backbone` opens into a backbone file of this tool, bit for bit.

    `backbone` and `image_size` are needed where the file and its shapes do not tell. The result says what was
    recognised, how many tensors were taken and which were left out.
    """
    source, out = home_expanded(source), home_expanded(out)
    if out.suffix != ".safetensors":
        raise SettingsError(f"backbone files are safetensors files: {out} should end in .safetensors.")
    if source.exists() and out.resolve() == source.resolve():
        raise RunError(f"{out} is what is to be imported; choose another place with -o.")
    refuse_overwrite(out, force=force)
    recognised = open_backbone(source, backbone, image_size)
    save_backbone(recognised.network, recognised.info, out)
    return recognised
