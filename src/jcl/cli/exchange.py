"""Commands that convert backbones from and for other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jcl.cli.app import EXCHANGE
from jcl.cli.options import command
from jcl.cli.printing import say
from jcl.console import pluralize, readable_size, typed

if TYPE_CHECKING:
    from jcl.settings.exchange import ExportOptions, ImportOptions


@command("import", "exchange.ImportOptions", group=EXCHANGE)
def import_(options: ImportOptions) -> None:
    """Import a backbone that another program trained, without executing anything in its file."""
    from jcl.export import import_backbone

    loaded = import_backbone(
        options.file, options.out, backbone=options.backbone, image_size=options.image_size, force=options.force
    )
    info = loaded.info
    stem = " with the small stem" if info.stem == "small" else ""
    say(f"Format: {loaded.source}.")
    say(f"Loaded: {pluralize(loaded.loaded, 'tensor')} of {info.backbone}{stem}, for images of {info.image_size} px.")
    parts = ", ".join(f"{part} ({count:,})" for part, count in loaded.unused.items())
    say(f"Unused: {parts or 'nothing'}.")
    for note in loaded.notes:
        say(f"Note: {note}.")
    say(f"Written to {options.out}. Use it like a run, for example: `jcl knn {typed(options.out)} DATA`.")


@command("export", "exchange.ExportOptions", group=EXCHANGE)
def export(options: ExportOptions) -> None:
    """Write a backbone for torchvision, timm, detectron2, ONNX or a model hub."""
    from jcl.export import export_backbone

    written = export_backbone(
        options.weights, options.target, options.out, force=options.force, backbone=options.backbone
    )
    tensors, size = pluralize(written.tensors, "tensor"), readable_size(written.bytes)
    say(f"{written.info.backbone}: {tensors}, {size}, written to {options.out}.")
    for hint in written.hints:
        say(hint)
