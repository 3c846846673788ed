"""Runs for tests of the page: small, of different kinds, with names that would do harm if they were markup."""

import json
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image
from rich.console import Console

from jcl.commands.pretrain import pretrain
from jcl.commands.run import Run
from small_runs import drawn_pixels, tiny_settings

# Together a path that closes and opens script elements; a slash cannot be part of a file's name.
EVIL_CLASS, EVIL_FILE = "<script>window.hacked=1<", 'script><img src=x onerror="window.hacked=2">'


class Reader(HTMLParser):
    """What is on a page: its elements, the addresses they name, the texts people see, and what scripts hold."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self.open.remove(tag)

    def handle_data(self, data):
        (self.scripts if "script" in self.open else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def headings(self) -> set[str]:
        return {attributes.get("id") or "" for attributes in self.all("section")}

    def data(self) -> dict:
        return json.loads(self.scripts[0])


def evil_folder(folder: Path) -> Path:
    """Images below class folders whose paths read as markup, one of them unreadable."""
    for number, pixels in enumerate(drawn_pixels(26, side=20, seed=1)):
        place = folder / (EVIL_CLASS, "dogs & cats")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{EVIL_FILE}{number:03}.png", format="PNG")
    (folder / EVIL_CLASS / f"{EVIL_FILE}broken.png").write_bytes(b"nothing")
    return folder


def plain_folder(folder: Path) -> Path:
    """Images without labels, larger than those of the others."""
    folder.mkdir(parents=True)
    for number, pixels in enumerate(drawn_pixels(24, side=72, seed=2)):
        Image.fromarray(pixels).save(folder / f"{number:03}.jpg")
    return folder


def small_run(location: Path, out: Path, method: str = "jcl", **changes: object) -> Run:
    return pretrain(tiny_settings(location, method, **changes), out, console=Console(quiet=True))
