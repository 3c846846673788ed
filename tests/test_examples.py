"""The examples run as programs and learn something."""

import functools
import importlib.util
import json
import re
import runpy
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import jcl.data.named

EXAMPLES = Path(__file__).parents[1] / "examples"
SHORT = ("--epochs", "3")


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """Run an example in an empty folder, in this process, and return what it prints."""
    monkeypatch.setenv("LIGHTLY_DID_VERSION_CHECK", "True")  # no network
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # set by Lightning
        monkeypatch.setenv(name, "0")

    def run(example: str, *options: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [example, *options])
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
        assert list(tmp_path.iterdir()) == []  # no files left
        return capsys.readouterr().out

    return run


def losses(text: str) -> list[float]:
    lines = re.findall(r"^epoch (\d+) loss (\d+\.\d+)$", text, re.MULTILINE)
    assert [int(epoch) for epoch, _ in lines] == list(range(1, len(lines) + 1))
    return [float(loss) for _, loss in lines]


def accuracies(text: str) -> dict[str, float]:
    return {when: float(figure) for when, figure in re.findall(r"^kNN (\w+) training (\d+\.\d) %$", text, re.MULTILINE)}


def falls(figures: list[float]) -> bool:
    """The loss may rise while the queue fills with real keys, which takes an epoch."""
    _, second, third = figures
    return third < second - 0.1


@pytest.fixture
def fewer_images(monkeypatch):
    """Enough for the loss to fall, not for good features, which the first example has."""
    demo, draw = jcl.data.open_demo, jcl.data.drawn_objects
    monkeypatch.setattr(jcl.data, "open_demo", lambda train_count, test_count: demo(train_count // 2, test_count // 5))
    monkeypatch.setattr(jcl.data, "drawn_objects", lambda count, seed: draw(count * 5 // 8, seed))


def test_own_loop(printed):
    text = printed("own_loop.py", *SHORT)
    knn = accuracies(text)
    assert falls(losses(text)), text
    assert knn["after"] > knn["before"] + 3 and knn["after"] > 19, text  # chance is 10 %


def test_own_loop_takes_any_number_of_images(capsys):
    loop = runpy.run_path(str(EXAMPLES / "own_loop.py"))
    loop["train"](torch.randint(0, 256, (loop["BATCH"] + 30, 3, 32, 40), dtype=torch.uint8), loop["Encoder"](), 1)
    assert len(losses(capsys.readouterr().out)) == 1


@needs("pytorch_lightning")
def test_lightning_module(printed, fewer_images):
    text = printed("lightning_module.py", *SHORT)
    assert falls(losses(text)) and "after" in accuracies(text), text


@pytest.mark.slow
@needs("lightly")
def test_lightly_loop(printed, fewer_images):
    assert falls(losses(printed("lightly_loop.py", *SHORT)))


def test_every_example_is_run_here_and_short():
    files = {file.name for file in EXAMPLES.glob("*.py")}
    assert files == {"own_loop.py", "lightning_module.py", "lightly_loop.py"}
    assert all(file in (EXAMPLES / "README.md").read_text(encoding="utf-8") for file in files)


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """Its cells one after the other in this process, on fewer images; a kernel would take longer to start."""
    from matplotlib import pyplot as plt

    cells = json.loads((EXAMPLES / "demo.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells), "clear the outputs before committing"
    assert code[0].startswith("EPOCHS = 24")
    fewer = functools.partial(jcl.data.named.open_demo, train_count=300, test_count=50)
    monkeypatch.setattr("jcl.data.named.open_demo", fewer)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda: str(tmp_path))
    plt.switch_backend("agg")
    names: dict[str, object] = {"EPOCHS": 1}
    for number, source in enumerate(code[1:], 2):
        exec(compile(source, f"cell {number} of demo.ipynb", "exec"), names)
    assert len(plt.get_fignums()) == 2
    plt.close("all")
    text = capsys.readouterr().out
    assert {name for name, _ in re.findall(r"^(MoCo v2|JCL): (\d+\.\d) %$", text, re.MULTILINE)} == {"MoCo v2", "JCL"}
