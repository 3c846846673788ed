"""Commands that take backbones from other libraries and hand them over."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from jcl.cli.app import EXCHANGE, ForceOption, app
from jcl.cli.printing import say
from jcl.console import pluralize, readable_size, typed


class Target(StrEnum):
    """What `jcl export` writes for."""

    TORCHVISION = "torchvision"
    TIMM = "timm"
    DETECTRON2 = "detectron2"
    SAFETENSORS = "safetensors"
    ONNX = "onnx"
    HUB_FOLDER = "hub-folder"


BackboneOption = Annotated[
    str | None, typer.Option("--backbone", help="torchvision or timm name, where the file does not tell it.")
]


@app.command("import", rich_help_panel=EXCHANGE)
def import_(
    file: Annotated[
        Path, typer.Argument(help="Weights of MoCo, JCL, torchvision, timm, lightly, solo-learn or detectron2.")
    ],
    out_file: Annotated[Path, typer.Option("-o", "--out", metavar="OUT.safetensors", help="The backbone to write.")],
    backbone: BackboneOption = None,
    image_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Side in pixels of the images it is for; else 224, 32 or what is usual for the network."
        ),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Take a backbone that another program trained; nothing in its file is run."""
    from jcl.export import import_backbone

    loaded = import_backbone(file, out_file, backbone=backbone, image_size=image_size, force=force)
    info = loaded.info
    stem = " with the small stem" if info.stem == "small" else ""
    say(f"Format: {loaded.source}.")
    say(f"Loaded: {pluralize(loaded.loaded, 'tensor')} of {info.backbone}{stem}, for images of {info.image_size} px.")
    parts = ", ".join(f"{part} ({count:,})" for part, count in loaded.unused.items())
    say(f"Unused: {parts or 'nothing'}.")
    for note in loaded.notes:
        say(f"Note: {note}.")
    say(f"Written to {out_file}. Use it like a run, for example: `jcl knn {typed(out_file)} DATA`.")


@app.command(rich_help_panel=EXCHANGE)
def export(
    weights: Annotated[Path, typer.Argument(metavar="RUN_OR_WEIGHTS", help="A run folder or a backbone's file.")],
    target: Annotated[Target, typer.Option("--to", help="The library or format it is for.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="File or, for hub-folder, folder to write.")],
    backbone: BackboneOption = None,
    force: ForceOption = False,
) -> None:
    """Write a backbone for torchvision, timm, detectron2, ONNX or a model hub."""
    from jcl.export import export_backbone

    written = export_backbone(weights, target.value, out, force=force, backbone=backbone)
    tensors, space = pluralize(written.tensors, "tensor"), readable_size(written.bytes)
    say(f"{written.info.backbone}: {tensors}, {space}, written to {out}.")
    for hint in written.hints:
        say(hint)
