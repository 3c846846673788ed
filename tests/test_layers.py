"""A layer imports only from the layers above it."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "jcl"
LAYERS = [  # from the top down
    "distributed",
    "core",
    "views",
    "data",
    "settings",
    "runs",
    "train",
    "evaluate",
    "studies",
    "report",
    "export",
    "commands",
    "cli",
]
SHARED = {"console", "cores", "errors", "paths", "random", "signals"}  # modules that every layer may use


def imported(file: Path) -> set[str]:
    """The layers and shared modules that a file imports, at module level or inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {f"jcl.{alias.name}" for alias in node.names} if node.module == "jcl" else {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("jcl.")}


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_imports_only_from_layers_above(layer):
    allowed = {*LAYERS[: LAYERS.index(layer) + 1], *SHARED}
    files = list((SOURCE / layer).rglob("*.py"))
    assert files
    for file in files:
        assert imported(file) <= allowed, file.relative_to(SOURCE)


def test_every_folder_is_a_layer():
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(LAYERS)


def test_only_shared_modules_lie_beside_the_layers():
    files = {path.stem for path in SOURCE.glob("*.py")}
    assert files == {"__init__", "__main__", *SHARED}
