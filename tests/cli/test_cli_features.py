"""`jcl embed` and `jcl neighbours` as a person calls them."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

import jcl
from jcl.evaluate.feature_file import read_feature_file
from small_runs import tiny_settings, write_image_folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """26 readable images with brackets in their paths, which are no markup, and one that is none."""
    folder = write_image_folder(tmp_path_factory.mktemp("data") / "photos [bold]", classes=("[red]cats", "dogs"))
    (folder / "dogs" / "broken[x].png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def run_folder(photos, tmp_path_factory) -> Path:
    settings = tiny_settings(photos, train__epochs=1)
    return jcl.pretrain(settings, tmp_path_factory.mktemp("runs") / "run", console=Console(quiet=True)).path


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_embed_then_look_up(call, run_folder, photos, kind):
    code, out, err = call("embed", run_folder, photos, "-o", f"f.{kind}", "--json", "embed.json", "--device", "cpu")
    assert code == 0, err
    assert "width 128" in out and "26 train images, 1 unreadable" in out and f"f.{kind}" in out
    assert err.startswith("Skipped dogs/broken[x].png: ") and err.count("\n") == 1
    figures = json.loads(Path("embed.json").read_text())
    assert (figures["images"], figures["skipped"], figures["skipped_names"]) == (26, 1, ["dogs/broken[x].png"])
    assert len(read_feature_file(Path(f"f.{kind}"))) == 26

    image = photos / "[red]cats" / "004.png"
    arguments = ("--index", f"f.{kind}", "-k", 2, "-o", "near.png", "--json", "near.json", "--device", "cpu")
    code, out, err = call("neighbours", image, "--row", 13, *arguments)
    assert code == 0 and err == ""
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert lines[0] == ["1", "1.0000", "2", "[red]cats/004.png", "[red]cats"]
    assert lines[2] == ["1", "1.0000", "13", "dogs/001.png", "dogs"] and len(lines) == 4
    assert "photos [bold]/[red]cats/004.png" in out and "drawn in near.png" in out
    assert Path("near.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    columns = json.loads(Path("near.json").read_text())
    assert columns["name"][0] == "[red]cats/004.png" and columns["rank"] == [1, 2, 1, 2]
    assert columns["similarity"][0] == pytest.approx(1, abs=1e-6)


def test_splits_are_shown_where_there_are_two(call, run_folder, npz):
    code, out, err = call("embed", run_folder, npz, "-o", "f.npz", "--device", "cpu")
    assert code == 0 and err == "" and "(34 train images, 10 test images)" in out
    _, out, _ = call("neighbours", "--row", 40, "--index", "f.npz", "-k", 40)
    assert "split" in out and " test " in out and " train " in out
    assert call("embed", run_folder, npz, "-o", "t.npz", "--split", "test", "--device", "cpu")[0] == 0
    _, out, _ = call("neighbours", "--row", 4, "--index", "t.npz")
    assert "split" not in out


def test_classes_are_shown_where_there_are_some(call, run_folder, photos):
    assert call("embed", run_folder, photos / "dogs", "-o", "f.npz", "--device", "cpu")[0] == 0
    _, out, _ = call("neighbours", "--row", 0, "--index", "f.npz", "-k", 2)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert lines[0] == ["1", "1.0000", "0", "001.png"] and len(lines) == 2


def test_refusals(call, refused, run_folder, photos, npz, tmp_path):
    Path("mine.npz").write_text("precious")
    assert "--force" in refused("embed", run_folder, npz, "-o", "mine.npz")
    assert Path("mine.npz").read_text() == "precious"
    assert ".npz or .parquet" in refused("embed", run_folder, npz, "-o", "f.csv")
    assert "no run or weights file" in refused("embed", tmp_path / "missing", npz, "-o", "f.npz")
    assert "There is no folder" in refused("embed", run_folder, tmp_path / "missing", "-o", "f.npz")
    assert "use --split train or test or all" in refused("embed", run_folder, npz, "-o", "f.npz", "--split", "val")
    assert "no feature file" in refused("neighbours", "--row", 0, "--index", "f.npz")
    assert "not a feature file" in refused("neighbours", "--row", 0, "--index", "mine.npz")
    assert "must end in .png" in refused("neighbours", "--row", 0, "--index", "f.npz", "-o", "near.jpg")
    assert sorted(entry.name for entry in Path().iterdir()) == ["mine.npz"]
    assert call("embed", run_folder, npz, "-o", "mine.npz", "--force", "--device", "cpu")[0] == 0
    assert "Nothing to search for" in refused("neighbours", "--index", "mine.npz")
    assert "no row 99" in refused("neighbours", "--row", 99, "--index", "mine.npz")
    asked = Path("asked.png")
    asked.write_text("mine")
    assert "is an input" in refused("neighbours", asked, "--index", "mine.npz", "-o", asked, "--force")
    assert "is an input" in refused("embed", run_folder, npz, "-o", npz, "--force")
    one_row = ("neighbours", "--row", 0, "--index", "mine.npz", "-o")
    assert "asked.png already exists" in refused(*one_row, asked)
    Path("folder.png").mkdir()
    assert "folder.png is a folder" in refused(*one_row, "folder.png")
    assert call(*one_row, asked, "--force")[0] == 0 and asked.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").write_text("mine")
    code, out, err = call(*one_row, tmp_path / "file" / "near.png")
    assert code == 1 and "number 0" in out and "near.png could not be written" in err and "Traceback" not in err


def test_without_pyarrow(refused, tmp_path, monkeypatch):
    """Nothing is opened before the sentence: there is neither a run nor data."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    said = refused("embed", tmp_path / "no run", tmp_path / "no data", "-o", "f.parquet")
    assert "pyarrow" in said and "'joint-contrastive-learning[parquet]'" in said
