"""COCO's own code, which rasterises masks and computes the metrics; it prints what nobody asked for."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator
from types import ModuleType

from jcl.errors import SettingsError


def coco_module(name: str) -> ModuleType:
    """`pycocotools.NAME`, or a sentence where the library is missing."""
    try:
        return importlib.import_module(f"pycocotools.{name}")
    except ImportError:
        raise SettingsError(
            "`jcl detect` needs pycocotools, COCO's own code for masks and metrics, which is not installed; "
            "run: pip install 'joint-contrastive-learning[coco]'."
        ) from None


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep what the library prints from standard output."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
