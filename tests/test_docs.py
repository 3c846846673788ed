"""README and docs: the Python code runs, the commands and their options exist, and the links lead somewhere."""

import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image

import jcl
from jcl.cli import app
from jcl.settings.schema import Settings
from jcl.settings.values import with_values

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = {
    "train.epochs": 1,
    "train.batch_size": 4,
    "train.device": "cpu",
    "model.backbone": "tiny_cnn",
    "views.image_size": 16,
    "record.tensorboard": False,
    "record.report": False,
    "data.workers": 0,
}


def blocks(page: Path, language: str) -> list[str]:
    """Contents of the fenced blocks in a language; plain fences have the empty one."""
    fences = re.findall(r"^```(\S*)[^\n]*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [content for found, content in fences if found == language]


WITH_PYTHON = [page for page in PAGES if page.name != "CONTRIBUTING.md" and blocks(page, "python")]


def commands(page: Path) -> Iterator[str]:
    """Commands in the plain blocks, without comments, continuation lines joined."""
    for block in blocks(page, ""):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            found = re.match(r"(?:\.venv/bin/|srun |torchrun .* -m )?(jcl .*)", re.sub(r"\s#.*", "", line).strip())
            if found:
                yield found[1]


@pytest.fixture
def photos(tmp_path, monkeypatch) -> None:
    """A folder of images, and `jcl.pretrain` with a network small enough for a test."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for number in range(8):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(path)
    real = jcl.pretrain

    def small(settings: Settings, out: str) -> jcl.Run:
        return real(with_values(settings, SMALL), out)

    monkeypatch.setattr(jcl, "pretrain", small, raising=False)


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_python_on_a_page_runs(page, photos):
    unit = torch.nn.functional.normalize
    names = {
        "images": torch.rand(2, 3, 32, 32),
        "query": unit(torch.randn(4, 128), dim=1),
        "keys": unit(torch.randn(4, 5, 128), dim=2),
    }
    had = set(names)
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)
    assert "jcl" in set(names) - had


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_on_a_page_exist(page):
    whole = typer.main.get_command(app)
    for line in commands(page):
        words = shlex.split(line.partition(" > ")[0])[1:]
        try:
            name, command, rest = whole.resolve_command(whole.context_class(whole), words)
            assert command is not None
            if "--help" not in rest:
                command.make_context(name, rest)
        except Exception as error:
            raise AssertionError(f"`{line}` in {page.name}: {error}") from error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_on_a_page_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_command_is_on_a_page():
    documented = {shlex.split(line)[1] for page in PAGES for line in commands(page)}
    assert set(typer.main.get_command(app).commands) <= documented


def test_every_public_name_is_on_the_page_of_the_api():
    documented = re.findall(
        r"^\.\. auto\w+:: jcl\.(\w+)(?:\(\))?$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.M
    )
    assert sorted(documented) == sorted(set(jcl.__all__) - {"__version__"})


def test_a_page_that_sphinx_would_overwrite_stops_the_build(tmp_path):
    shutil.copy(ROOT / "docs/conf.py", tmp_path)
    runpy.run_path(str(tmp_path / "conf.py"))
    (tmp_path / "search.md").touch()
    with pytest.raises(ValueError, match="search"):
        runpy.run_path(str(tmp_path / "conf.py"))


def test_files_named_in_contributing_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)*\w+\.py|(?:\w+/)+)`", text))
    assert "core/loss.py" in named
    assert not [name for name in named if not ((ROOT / name).exists() or (ROOT / "src/jcl" / name).exists())]


def test_layout_in_contributing_lists_every_layer():
    (layout,) = blocks(ROOT / "CONTRIBUTING.md", "text")
    layers = {path.name for path in (ROOT / "src/jcl").iterdir() if (path / "__init__.py").is_file()}
    assert set(re.findall(r"^  (\w+)/", layout, re.M)) == layers
