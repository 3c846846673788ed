"""Neighbours in a feature file: an image finds itself, and what does not compare is refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from jcl.commands import embed as embedding
from jcl.commands.embed import Matches, draw_matches
from jcl.commands.embed import embed as embed_with
from jcl.commands.embed import find_neighbours as find_with
from jcl.errors import DataError, RunError, SettingsError
from jcl.evaluate.feature_file import FeatureInfo, read_feature_file, write_feature_file
from jcl.settings.commands import EmbedOptions, NeighboursOptions
from small_runs import write_image_folder
from supervised_tools import untrained_weights


def embed(weights: Path, data: str, out: Path, **options) -> None:
    embed_with(EmbedOptions(weights=weights, data=data, out=out, workers=0, **options))


def find_neighbours(index: Path, images=(), rows=(), **options) -> Matches:
    return find_with(NeighboursOptions(index=index, images=tuple(images), row=tuple(rows), **options))


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("data") / "photos")


@pytest.fixture(scope="module")
def run(pretrained) -> Path:
    return pretrained


@pytest.fixture(scope="module")
def index(run, photos, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("index") / "features.npz"
    embed(run, str(photos), file, device="cpu")
    return file


def nearest(matches: Matches) -> list[str]:
    return [matches.table.names[row] for row in matches.found.rows[:, 0].tolist()]


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_an_image_of_the_index_finds_itself(index, photos, tmp_path, kind):
    if kind == "parquet":
        table = read_feature_file(index)
        write_feature_file(index := tmp_path / "features.parquet", [table])
    names = read_feature_file(index).names
    matches = find_neighbours(index, [str(photos / name) for name in names], k=3, device="cpu")
    assert nearest(matches) == names
    assert torch.allclose(matches.found.similarities[:, 0], torch.ones(26, dtype=torch.float64), atol=1e-6)
    assert (matches.found.similarities[:, 1] < 0.9999).all()
    by_row = find_neighbours(index, rows=range(26), k=3, device="cpu")
    assert nearest(by_row) == names
    assert torch.equal(by_row.found.rows, matches.found.rows)


def test_the_order_is_that_of_plain_cosines(index):
    features = read_feature_file(index).features.astype(np.float64)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    expected = np.argsort(-(unit @ unit[4]), kind="stable")
    found = find_neighbours(index, rows=[4], k=26).found
    assert found.rows[0].tolist() == expected.tolist()
    assert np.allclose(found.similarities[0].numpy(), (unit @ unit[4])[expected], atol=1e-7)
    assert find_neighbours(index, rows=[4], k=500).found.rows.shape == (1, 26)


def test_queries_by_file_name_and_row_in_the_order_given(index, photos):
    matches = find_neighbours(index, ["dogs/003.png", str(photos / "cats" / "004.png")], [0], k=2, device="cpu")
    assert [(query.name, query.row) for query in matches.queries] == [
        ("dogs/003.png", 14),
        (str(photos / "cats" / "004.png"), None),
        ("cats/000.png", 0),
    ]
    assert nearest(matches) == ["dogs/003.png", "cats/004.png", "cats/000.png"]
    columns = matches.as_dict()
    assert {len(column) for column in columns.values()} == {6}
    assert columns["rank"] == [1, 2] * 3 and columns["class"][0] == "dogs" and columns["row"][4] == 0


def test_queries_that_are_nothing(index, tmp_path):
    with pytest.raises(SettingsError, match="--row"):
        find_neighbours(index)
    with pytest.raises(DataError, match=r"dogs/003\.jpg"):
        find_neighbours(index, ["dogs/003.jpg"])
    with pytest.raises(SettingsError, match="no row 26; its rows are 0 to 25"):
        find_neighbours(index, rows=[26])
    with pytest.raises(SettingsError, match="no row -1"):
        find_neighbours(index, rows=[-1])
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(DataError, match=r"text.png cannot be read"):
        find_neighbours(index, [str(tmp_path / "text.png")], device="cpu")


def rewritten(index: Path, file: Path, **changes: object) -> Path:
    """The same index with other information in it."""
    table = read_feature_file(index)
    info = FeatureInfo.model_validate(table.info.model_dump() | changes)
    write_feature_file(file, [replace(table, info=info)])
    return file


def test_weights_that_are_gone_or_given(index, photos, run, tmp_path):
    moved = rewritten(index, tmp_path / "f.npz", weights=str(tmp_path / "gone"))
    image = str(photos / "cats" / "004.png")
    with pytest.raises(RunError, match="--weights"):
        find_neighbours(moved, [image], device="cpu")
    assert nearest(find_neighbours(moved, ["cats/004.png"])) == ["cats/004.png"]  # needs no weights
    matches = find_neighbours(moved, [image], weights=run / "backbone.safetensors", device="cpu")
    assert nearest(matches) == ["cats/004.png"]


def test_weights_of_another_width(index, photos, run, tmp_path):
    table = read_feature_file(index)
    info = table.info.model_copy(update={"feature_width": 100})
    narrow = replace(table, features=table.features[:, :100].copy(), info=info)
    write_feature_file(tmp_path / "f.parquet", [narrow])
    with pytest.raises(RunError, match="other weights"):
        find_neighbours(tmp_path / "f.parquet", [str(photos / "cats" / "004.png")], device="cpu")


def test_other_weights_of_the_same_width(index, photos, tmp_path):
    other = untrained_weights(tmp_path / "other.safetensors")
    with pytest.raises(RunError, match="other weights"):
        find_neighbours(index, [str(photos / "cats" / "004.png")], weights=other, device="cpu")


def test_a_name_that_both_splits_have(run, npz, tmp_path):
    embed(run, str(npz), tmp_path / "f.npz", device="cpu")
    with pytest.raises(SettingsError, match="number 3; choose one with --row"):
        find_neighbours(tmp_path / "f.npz", ["number 3"])
    matches = find_neighbours(tmp_path / "f.npz", rows=[37], k=1)
    assert matches.as_dict()["split"] == ["test"] and nearest(matches) == ["number 3"]


def pixels_of(picture: Path) -> np.ndarray:
    with Image.open(picture) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def colors(pixels: np.ndarray, more_than: int = 0) -> set[int]:
    """The colors of more than so many pixels, each as one number."""
    found, counts = np.unique(pixels.astype(np.int32) @ [65536, 256, 1], return_counts=True)
    return set(found[counts > more_than].tolist())


def large_areas(picture: np.ndarray) -> set[int]:
    """The colors that fill much of a picture each."""
    return colors(picture, 300)


def shows(areas: set[int], image: np.ndarray) -> bool:
    """Whether all sixteen colors of one of the test images are among them."""
    return colors(image) <= areas


def test_the_picture_shows_query_and_neighbours(index, photos, tmp_path):
    matches = find_neighbours(index, ["dogs/003.png", str(photos / "cats" / "004.png")], k=2, device="cpu")
    picture = large_areas(pixels_of(draw_matches(matches, tmp_path / "deep" / "picture.png")))
    names = matches.table.names
    drawn = {names[row] for row in matches.found.rows.flatten().tolist()}
    assert all(shows(picture, pixels_of(photos / name)) for name in drawn)
    assert sum(shows(picture, pixels_of(photos / name)) for name in names) == len(drawn)


def test_the_picture_of_arrays(run, npz, tmp_path):
    embed(run, str(npz), tmp_path / "f.npz", device="cpu")
    matches = find_neighbours(tmp_path / "f.npz", rows=[0, 37], k=1)
    picture = large_areas(pixels_of(draw_matches(matches, tmp_path / "p.png")))
    with np.load(npz) as arrays:
        images = [*arrays["x_train"], *arrays["x_test"]]
    assert [row for row, image in enumerate(images) if shows(picture, image)] == [0, 37]


def test_a_picture_of_very_many_shows_the_first(run, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "DRAWN", 3)
    embed(run, str(photos), tmp_path / "f.npz", device="cpu")
    matches = find_neighbours(tmp_path / "f.npz", rows=[*range(26), *range(26)], k=26)
    few = find_neighbours(tmp_path / "f.npz", rows=[0, 1, 2], k=3)
    pictures = [draw_matches(each, tmp_path / f"{place}.png") for place, each in enumerate((matches, few))]
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_images_that_are_gone_or_renamed(run, tmp_path):
    photos = write_image_folder(tmp_path / "photos")
    embed(run, str(photos), tmp_path / "f.npz", device="cpu")
    matches = find_neighbours(tmp_path / "f.npz", rows=[3], k=2)
    second = matches.as_dict()["name"][1]
    (photos / second).rename(photos / "cats" / "!first.png")
    with pytest.raises(DataError, match=f"{second} of the index is no longer in"):
        draw_matches(matches, tmp_path / "p.png")
    few = find_neighbours(tmp_path / "f.npz", rows=[3], k=1)
    draw_matches(few, tmp_path / "p.png")  # the others are found by name, wherever they stand now
    shutil.rmtree(photos)
    with pytest.raises(DataError, match="There is no folder"):
        draw_matches(few, tmp_path / "q.png")
    assert not (tmp_path / "q.png").exists()


@pytest.mark.parametrize("place", ["pipe:touch sprung", "https://example.invalid/{000..009}.tar", "file:///x.tar", "x"])
def test_an_index_cannot_have_anything_run_or_fetched(index, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    matches = find_neighbours(rewritten(index, tmp_path / "f.npz", data=place), rows=[0])
    with pytest.raises(DataError, match="which is not fetched again"):
        draw_matches(matches, tmp_path / "p.png")
    assert [entry.name for entry in tmp_path.iterdir()] == ["f.npz"]


def test_features_that_are_no_numbers(index, tmp_path):
    table = read_feature_file(index)
    features = table.features.copy()
    features[5, 5] = np.nan
    write_feature_file(tmp_path / "f.npz", [replace(table, features=features)])
    with pytest.raises(DataError, match="NaN"):
        find_neighbours(tmp_path / "f.npz", rows=[0])
