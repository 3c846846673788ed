"""Features in a file are those of `FeatureSettings.extract`, bit for bit, with the names and labels of their images."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import jcl
from jcl.commands.embed import embed as embed_with
from jcl.console import no_progress
from jcl.data import open_data, write_shards
from jcl.errors import DataError, RunError
from jcl.evaluate.feature_file import read_feature_file
from jcl.settings.commands import EmbedOptions
from small_runs import drawn_pixels, write_image_folder


def embed(weights: Path, data: str, out: Path, progress=no_progress, **options) -> tuple[dict, dict]:
    return embed_with(
        EmbedOptions(**{"weights": weights, "data": data, "out": out, "workers": 0} | options), progress=progress
    )


@pytest.fixture
def run(pretrained: Path) -> Path:
    return pretrained


def extracted(run: Path, location: Path, split: str, batch_size: int = 256):
    backbone = jcl.load_backbone(run)
    source = getattr(open_data(str(location)), split)
    return backbone.info.preprocessing.extract(
        backbone, source, device=torch.device("cpu"), batch_size=batch_size
    ), source


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_both_splits_bit_for_bit(run, npz, tmp_path, kind):
    figures, skipped = embed(run, str(npz), tmp_path / f"f.{kind}", batch_size=9, device="cpu")
    table = read_feature_file(tmp_path / f"f.{kind}")
    (train, _), (test, _) = (extracted(run, npz, split, batch_size=9) for split in ("train", "test"))
    assert np.array_equal(table.features, torch.cat([train.values, test.values]).numpy())
    assert table.labels.tolist() == torch.cat([train.labels, test.labels]).tolist()
    assert table.names == [f"number {number}" for number in [*range(34), *range(10)]]
    assert table.splits == ["train"] * 34 + ["test"] * 10
    assert table.class_names is None and table.class_of(4) == "1"
    assert (figures["train_images"], figures["test_images"]) == (34, 10) and not skipped
    assert (figures["images"], figures["train_images"], figures["feature_width"]) == (44, 34, 128)
    assert (table.info.weights, table.info.data) == (str(run), str(npz))
    assert (table.info.backbone, table.info.image_size, table.info.feature_width) == ("tiny_cnn", 16, 128)


def test_one_split(run, npz, tmp_path):
    embed(run, str(npz), tmp_path / "f.npz", split="test", device="cpu")
    table = read_feature_file(tmp_path / "f.npz")
    assert np.array_equal(table.features, extracted(run, npz, "test")[0].values.numpy())
    assert table.splits == ["test"] * 10


def test_a_folder_with_odd_names_and_unreadable_images(run, tmp_path):
    folder = write_image_folder(tmp_path / "photos [1]", classes=("größe", "狗"))
    (folder / "狗" / "broken.png").write_bytes(b"no image")
    (folder / "größe" / "naïve [b].png").write_bytes((folder / "größe" / "000.png").read_bytes())
    told = []
    figures, skipped = embed(
        run,
        str(folder),
        tmp_path / "f.parquet",
        batch_size=8,
        device="cpu",
        progress=lambda done, total: told.append((done, total)),
    )
    table = read_feature_file(tmp_path / "f.parquet")
    features, source = extracted(run, folder, "train", batch_size=8)
    assert np.array_equal(table.features, features.values.numpy())
    assert table.names == [source.name_of(sample) for sample in features.samples.tolist()]
    assert {"größe/naïve [b].png", "狗/001.png"} <= set(table.names) and "狗/broken.png" not in table.names
    assert table.class_names == ("größe", "狗")
    assert all(table.class_of(row) == name.split("/")[0] for row, name in enumerate(table.names))
    assert set(skipped) == {"狗/broken.png"} and figures["skipped"] == 1
    assert told[-1] == (27, 28) and told == sorted(told)


def test_unreadable_images_of_the_same_name_in_both_splits(run, tmp_path):
    for split in ("train", "val"):
        write_image_folder(tmp_path / "photos" / split)
        (tmp_path / "photos" / split / "cats" / "broken.png").write_bytes(b"no image")
    figures, skipped = embed(run, str(tmp_path / "photos"), tmp_path / "f.npz", device="cpu")
    assert set(skipped) == {"cats/broken.png (train)", "cats/broken.png (test)"}
    assert figures["skipped"] == 2


def test_a_class_that_only_test_images_have(run, tmp_path):
    write_image_folder(tmp_path / "photos/train", count=6, classes=("cats", "dogs"))
    write_image_folder(tmp_path / "photos/val", count=6, classes=("bats", "cats", "dogs"))
    embed(run, str(tmp_path / "photos"), tmp_path / "f.npz", device="cpu")
    write_shards(open_data(str(tmp_path / "photos")), tmp_path / "shards")
    embed(run, str(tmp_path / "shards"), tmp_path / "s.npz", device="cpu")
    for file in ("f.npz", "s.npz"):
        table = read_feature_file(tmp_path / file)
        assert table.class_names == ("cats", "dogs", "bats")
        assert sorted(table.labels.tolist()) == [0] * 5 + [1] * 5 + [2] * 2


def test_features_that_are_no_numbers_are_not_written(run, npz, tmp_path):
    spoilt = load_file(run / "backbone.safetensors")
    spoilt = {name: value * 1e30 if value.dim() > 1 else value for name, value in spoilt.items()}
    with safe_open(run / "backbone.safetensors", "pt") as file:
        metadata = {name: value for name, value in file.metadata().items() if "sha256" not in name}
    save_file(spoilt, tmp_path / "huge.safetensors", metadata)  # finite weights, but their products are not
    with pytest.raises(RunError, match="NaN or infinite"):
        embed(tmp_path / "huge.safetensors", str(npz), tmp_path / "f.npz", device="cpu")
    assert not (tmp_path / "f.npz").exists()


def test_images_without_labels_and_shards(run, tmp_path):
    (tmp_path / "flat").mkdir()
    for number, pixels in enumerate(drawn_pixels(5)):
        Image.fromarray(pixels).save(tmp_path / "flat" / f"{number}.png")
    embed(run, str(tmp_path / "flat"), tmp_path / "f.npz", device="cpu")
    table = read_feature_file(tmp_path / "f.npz")
    assert table.labels.tolist() == [-1] * 5 and table.class_names is None
    write_shards(open_data(str(write_image_folder(tmp_path / "photos"))), tmp_path / "shards", images_per_shard=10)
    embed(run, str(tmp_path / "shards"), tmp_path / "s.npz", device="cpu")
    from_shards = read_feature_file(tmp_path / "s.npz")
    features, source = extracted(run, tmp_path / "shards", "train")
    assert np.array_equal(from_shards.features, features.values.numpy())
    assert from_shards.names[0] == source.name_of(0) and ".tar/" in source.name_of(0)


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_the_same_input_gives_the_same_bytes(run, npz, tmp_path, kind):
    first, second = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    for file in (first, second):
        embed(run, str(npz), file, device="cpu")
    assert first.read_bytes() == second.read_bytes()


def test_workers_change_nothing(run, tmp_path):
    folder = write_image_folder(tmp_path / "photos")
    for workers in (0, 2):
        embed(run, str(folder), tmp_path / f"{workers}.npz", device="cpu", batch_size=5, workers=workers)
    assert (tmp_path / "0.npz").read_bytes() == (tmp_path / "2.npz").read_bytes()


def test_what_is_there_is_kept_unless_forced(run, npz, tmp_path):
    file = tmp_path / "f.npz"
    file.write_bytes(b"precious")
    with pytest.raises(RunError, match="--force"):
        embed(run, str(npz), file, device="cpu")
    assert file.read_bytes() == b"precious"
    embed(run, str(npz), file, device="cpu", force=True)
    assert len(read_feature_file(file)) == 44


def test_what_cannot_be_is_refused_before_anything_is_written(run, npz, tmp_path):
    folder = write_image_folder(tmp_path / "photos")
    file = tmp_path / "f.npz"
    with pytest.raises(DataError, match="'test'; use --split train or all"):
        embed(run, str(folder), file, split="test", device="cpu")
    with pytest.raises(RunError, match="missing"):
        embed(tmp_path / "missing", str(npz), file, device="cpu")
    for image in folder.rglob("*.png"):
        image.write_bytes(b"no image")
    with pytest.raises(DataError, match="None of the images can be read"):
        embed(run, str(folder), file, device="cpu")
    assert [entry.name for entry in tmp_path.iterdir()] == ["photos"]


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_class_folders_whose_names_are_not_utf8(run, tmp_path, kind):
    folder = write_image_folder(tmp_path / "photos", classes=("a", os.fsdecode(b"b\xff")))
    embed(run, str(folder), tmp_path / f"f.{kind}", device="cpu")
    assert read_feature_file(tmp_path / f"f.{kind}").class_names == ("a", "b\ufffd")
