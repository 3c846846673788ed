"""Data sets of Hugging Face, written to disk and opened by its own library, without a network."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shard_files import by_pixels

from jcl.commands.pretrain import pretrain, resume
from jcl.commands.report import _reopen_data as reopen_data
from jcl.data import UnreadableImage, open_data, write_shards
from jcl.data.check import check_data
from jcl.data.named import absolute_location
from jcl.errors import DataError
from run_tools import QUIET
from small_runs import drawn_pixels, tiny_settings

datasets = pytest.importorskip("datasets")


def table(count: int, seed: int = 0, label: str = "label"):
    kinds = {"text": datasets.Value("string"), "image": datasets.Image(), label: datasets.ClassLabel(names=["a", "b"])}
    pixels = drawn_pixels(count, seed=seed)
    columns = {"text": ["?"] * count, "image": [Image.fromarray(each) for each in pixels], label: [0, 1] * (count // 2)}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def repository(tmp_path) -> Path:
    """A repository as the Hub has them: Parquet files named after their splits."""
    (tmp_path / "photos/data").mkdir(parents=True)
    for seed, (split, count) in enumerate({"train": 26, "test": 10, "extra": 4}.items()):
        table(count, seed).to_parquet(tmp_path / f"photos/data/{split}-00000-of-00001.parquet")
    return tmp_path / "photos"


def test_splits_images_and_labels_are_found(repository):
    data = open_data(f"hf:{repository}")
    assert data.name == "photos" and (len(data.train), len(data.test)) == (26, 10)
    assert data.train.labels.tolist() == [0, 1] * 13 and data.train.class_names == ("a", "b")
    for index, pixels in enumerate(drawn_pixels(26)):
        assert np.array_equal(data.train.read(index).permute(1, 2, 0), pixels)
    extra = open_data(f"hf:{repository}:extra")
    assert (len(extra.train), len(extra.test), extra.train.name_of(3)) == (4, 10, "extra/3")
    assert open_data(f"hf:{repository}:test").test is None
    assert check_data(data).splits["train"].figures["readable"] == 26


def test_a_saved_data_set_opens_too(tmp_path):
    table(6, label="class").save_to_disk(tmp_path / "saved")
    data = open_data(f"hf:{tmp_path / 'saved'}")
    assert data.test is None and data.train.labels.tolist() == [0, 1] * 3


def test_shards_of_it_can_be_opened(repository, tmp_path):
    data = open_data(f"hf:{repository}")
    write_shards(data, tmp_path / "shards")
    shards = open_data(str(tmp_path / "shards"))
    assert len(shards.train) == 26 and shards.train.class_names == ("a", "b") and len(shards.test) == 10
    assert by_pixels(shards.train) == by_pixels(data.train)


def test_a_run_is_trained_and_resumed(repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = pretrain(tiny_settings("hf:photos:train", train__epochs=1, data__workers=1), "run", console=QUIET)
    assert run.settings.data.location == f"hf:{repository}:train" == absolute_location("hf:photos:train")
    assert run.summary["steps"] == 3 and run.summary["test_images"] == 10
    assert len(reopen_data(run.settings).train) == 26, "for `jcl report`"
    (run.path / "summary.json").unlink()
    assert resume(run.path, console=QUIET).summary["steps"] == 3


def test_images_that_cannot_be_read(tmp_path):
    kinds = datasets.Features({"image": datasets.Image(decode=False)})
    good = table(2).cast_column("image", datasets.Image(decode=False))[0]["image"]
    (tmp_path / "gone.png").touch()
    rows = [good, {"bytes": b"?", "path": None}, {"bytes": None, "path": str(tmp_path / "gone.png")}, None]
    datasets.Dataset.from_dict({"image": rows}, features=kinds).save_to_disk(tmp_path / "saved")
    (tmp_path / "gone.png").unlink()
    source = open_data(f"hf:{tmp_path / 'saved'}").train
    assert source.labels is None
    assert source.read(0).shape == (3, 16, 16)
    for index in (1, 2, 3):
        with pytest.raises(UnreadableImage, match=f"train/{index}"):
            source.read(index)


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("hf:{0}:nope", "train, test, extra"),
        ("hf:nobody/nothing", "nobody/nothing"),
        ("hf:{0}/data/none.parquet", "none.parquet"),
    ],
)
def test_mistakes_are_messages(repository, location, said):
    with pytest.raises(DataError, match=said):
        open_data(location.format(repository))


def test_a_table_without_images_is_a_message(tmp_path):
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="text"):
        open_data(f"hf:{tmp_path / 'saved'}")
