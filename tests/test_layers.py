"""A layer imports only from the layers above it, so that data flows one way."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "jcl"
LAYERS = ["core", "views", "data", "train", "evaluate", "studies", "report", "exchange", "actions"]  # from the top down
FOR_ALL = {"cores", "errors", "paths", "randomness", "ranks", "speech"}
SETTINGS = {"settings", "recipes", "automatic"}  # which core, views and data do without


def imported(file: Path) -> set[str]:
    """The parts of the package that a file names in its imports, wherever these stand."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("jcl.")}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_looks_up_only(layer):
    place = LAYERS.index(layer)
    allowed = {*LAYERS[: place + 1], *FOR_ALL} | (SETTINGS if place > LAYERS.index("data") else set())
    files = list((SOURCE / layer).rglob("*.py"))
    assert files
    for file in files:
        assert imported(file) <= allowed, file.relative_to(SOURCE)


def test_no_layer_is_left_out():
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert folders == {*LAYERS, "cli", "recipes"}


def test_beside_the_layers_there_is_only_what_they_share():
    files = {path.stem for path in SOURCE.glob("*.py")}
    assert files == {"__init__", "__main__", *FOR_ALL, *SETTINGS} - {"recipes"}
