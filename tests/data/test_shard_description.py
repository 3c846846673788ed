"""What `index.json` beside shards may say, and what is refused."""

import json
from pathlib import Path

import pytest
from image_files import write_images

from jcl.data import open_data
from jcl.errors import DataError


@pytest.mark.parametrize(
    "change",
    [
        {"splits": {"train": {"../train-0000.tar": 8}}},
        {"splits": {"train": {"/etc/passwd": 8}}},
        {"splits": {"train": {"train-0000.tar": "8"}}},
        {"splits": ["train"]},
        {"class_names": 3},
    ],
)
def test_hostile_description(shards: Path, change: dict[str, object]):
    file = shards / "index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match=r"index\.json is damaged; write the shards anew"):
        open_data(str(shards))


def test_other_descriptions(shards: Path, tmp_path: Path):
    file = shards / "index.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"version": 2}))
    with pytest.raises(DataError, match="are of version 2, and this program reads version 1"):
        open_data(str(shards))
    file.write_text(json.dumps(content | {"class_names": ["ant", "bee"]}))
    with pytest.raises(DataError, match=r"an image of class 2, but index\.json there names 2 classes"):
        open_data(str(shards))
    write_images(tmp_path / "other", 2)
    (tmp_path / "other" / "index.json").write_text("{}")
    assert len(open_data(str(tmp_path / "other")).train) == 2
