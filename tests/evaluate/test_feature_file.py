"""Feature files: what was written comes back bit for bit, and a damaged or hostile file is a sentence."""

import json
import runpy
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jcl.errors import DataError, RunError, SettingsError
from jcl.evaluate import feature_file
from jcl.evaluate.feature_file import (
    FeatureInfo,
    FeatureTable,
    check_writable,
    read_feature_file,
    write_feature_file,
)

KINDS = ["npz", "parquet"]
CLASSES = ("cats", "größe", "狗 [x]")
INFO = FeatureInfo(
    weights="/runs/ä b/run",
    weights_digest="0" * 64,
    backbone="tiny_cnn",
    image_size=16,
    feature_width=5,
    data="/photos",
)
NAMES = ["cats/a.png", "größe/naïve café.jpg", "狗 [x]/犬.webp", "🐈/x\ufffdy.png", "plain", "", "a/b/c.png"]


def rows(start: int = 0, stop: int = len(NAMES), class_names=CLASSES) -> FeatureTable:
    features = np.random.default_rng(0).standard_normal((len(NAMES), 5)).astype(np.float32)
    features[1, 2], features[2, 0] = np.float32(1e-42), -0.0  # a denormal and a signed zero
    labels = np.array([0, 1, 2, -1, -1, 0, 2])
    splits = ["train"] * 4 + ["test"] * 3
    own = slice(start, stop)
    return FeatureTable(features[own], NAMES[own], labels[own], splits[own], class_names, INFO)


def written(file: Path, class_names: tuple[str, ...] | None = CLASSES) -> Path:
    parts = ((0, 3), (3, 4), (4, len(NAMES)))
    write_feature_file(file, (rows(start, stop, class_names) for start, stop in parts))
    return file


def same(table: FeatureTable, expected: FeatureTable) -> bool:
    return (
        table.features.tobytes() == expected.features.tobytes()
        and table.features.dtype == np.float32
        and list(table.names) == list(expected.names)
        and table.labels.dtype == np.int64
        and table.labels.tolist() == expected.labels.tolist()
        and list(table.splits) == list(expected.splits)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_everything_comes_back_bit_for_bit(tmp_path, kind):
    table = read_feature_file(written(tmp_path / f"features.{kind}"))
    assert same(table, rows()) and len(table) == 7
    assert table.class_names == CLASSES and table.info == INFO
    assert [table.class_of(row) for row in range(7)] == ["cats", "größe", "狗 [x]", None, None, "cats", "狗 [x]"]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_without_names_and_no_labels(tmp_path, kind):
    table = read_feature_file(written(tmp_path / f"features.{kind}", class_names=None))
    assert table.class_names is None and table.class_of(1) == "1" and table.class_of(3) is None
    bare = FeatureTable(rows().features, NAMES, np.full(7, -1), ["train"] * 7, None, INFO)
    write_feature_file(tmp_path / f"bare.{kind}", [bare])
    assert same(read_feature_file(tmp_path / f"bare.{kind}"), bare)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_features_give_equal_bytes(tmp_path, kind):
    first = written(tmp_path / f"a.{kind}").read_bytes()
    assert written(tmp_path / f"b.{kind}").read_bytes() == first


def test_npz_is_plain_numpy(tmp_path):
    with np.load(written(tmp_path / "features.npz"), allow_pickle=False) as content:
        assert set(content.files) == {"features", "names", "labels", "split", "class_names", "info"}
        assert content["features"].dtype == np.float32 and content["names"].dtype.kind == "U"
        assert json.loads(str(content["info"])) == INFO.model_dump()


def test_parquet_is_a_plain_table(tmp_path):
    table = pyarrow.parquet.read_table(written(tmp_path / "features.parquet"))
    assert table.column_names == ["name", "label", "class", "split", "features"]
    assert pyarrow.types.is_fixed_size_list(table.schema.field("features").type)
    assert table.schema.field("features").type.value_type == pyarrow.float32()
    assert table.schema.field("features").type.list_size == 5
    lines = table.to_pylist()
    assert lines[1]["class"] == "größe" and lines[3]["class"] is None and lines[4]["split"] == "test"
    assert np.array_equal(np.array(lines[2]["features"], np.float32), rows().features[2])
    assert json.loads(table.schema.metadata[b"jcl.info"]) == INFO.model_dump()


def test_parquet_is_written_while_the_parts_come(tmp_path):
    file, sizes = tmp_path / "features.parquet", []

    def parts() -> Iterator[FeatureTable]:
        for start in range(0, 8000, 1000):
            (partial,) = tmp_path.glob(".features.parquet.*partial")
            sizes.append(partial.stat().st_size)
            features = np.arange(5 * start, 5 * (start + 1000), dtype=np.float32).reshape(-1, 5)
            labels = np.zeros(1000, np.int64)
            yield FeatureTable(features, ["x"] * 1000, labels, ["train"] * 1000, CLASSES, INFO)

    write_feature_file(file, parts())
    assert sizes == sorted(sizes) and sizes[-1] > 10 * max(sizes[0], 1000)
    assert pyarrow.parquet.ParquetFile(file).num_row_groups == 8
    assert read_feature_file(file).features[:, 0].tolist() == list(range(0, 40_000, 5))


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_half_way_leaves_what_was_there(tmp_path, kind):
    file = written(tmp_path / f"features.{kind}")
    before = file.read_bytes()

    def parts() -> Iterator[FeatureTable]:
        yield rows(0, 3)
        raise DataError("The disk with the images is gone.")

    with pytest.raises(DataError, match="is gone"):
        write_feature_file(file, parts())
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_a_sentence(tmp_path, kind, no_room_for):
    file = tmp_path / f"features.{kind}"
    no_room_for(file)
    with pytest.raises(RunError, match="No space left"):
        written(file)
    assert not file.exists()


def test_overwriting_is_refused_unless_forced(tmp_path):
    file = written(tmp_path / "features.npz")
    with pytest.raises(RunError, match="--force"):
        check_writable(file, force=False)
    check_writable(file, force=True)
    check_writable(tmp_path / "new.parquet", force=False)
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(RunError, match="is a folder"):
        check_writable(tmp_path / "folder.npz", force=True)
    with pytest.raises(SettingsError, match=r"\.csv"):
        check_writable(tmp_path / "features.csv", force=False)


class Trap:
    """Unpickling this writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.write_text, (self.file, "sprung")


@pytest.mark.parametrize("key", ["features", "names", "labels", "info"])
def test_a_pickled_object_is_refused_and_not_run(tmp_path, key):
    with np.load(written(tmp_path / "good.npz")) as content:
        arrays = dict(content)
    arrays[key] = np.array([Trap(tmp_path / "sprung")] * 7, dtype=object)
    np.savez(tmp_path / "evil.npz", **arrays)
    with pytest.raises(DataError, match="not a feature file"):
        read_feature_file(tmp_path / "evil.npz")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_a_sentence(tmp_path, kind):
    content = written(tmp_path / f"good.{kind}").read_bytes()
    file = tmp_path / f"torn.{kind}"
    for length in range(0, len(content), 97):
        file.write_bytes(content[:length])
        with pytest.raises(DataError, match="not a feature file"):
            read_feature_file(file)


@pytest.mark.parametrize("kind", KINDS)
def test_changed_bytes_never_show_a_trace(tmp_path, kind):
    content = bytearray(written(tmp_path / f"good.{kind}").read_bytes())
    file, generator = tmp_path / f"changed.{kind}", np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        changed = content.copy()
        for place in generator.integers(0, len(content), 8):
            changed[place] = generator.integers(256)
        file.write_bytes(changed)
        try:
            read_feature_file(file)
        except DataError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    "change",
    [
        {"names": None},
        {"features": np.zeros((6, 5), np.float32)},
        {"features": np.zeros(7, np.float32)},
        {"features": np.zeros((7, 5), np.int64)},
        {"labels": np.full(7, 3)},
        {"labels": np.full(7, -2)},
        {"info": np.array("{}")},
        {"info": np.array(INFO.model_dump_json().replace("features-1", "features-9"))},
    ],
)
def test_arrays_that_do_not_belong_there(tmp_path, change):
    with np.load(written(tmp_path / "good.npz")) as content:
        arrays = {key: value for key, value in (dict(content) | change).items() if value is not None}
    np.savez(tmp_path / "odd.npz", **arrays)
    with pytest.raises(DataError, match="not a feature file"):
        read_feature_file(tmp_path / "odd.npz")


def test_an_array_that_claims_to_be_huge(tmp_path):
    written(tmp_path / "good.npz")
    with zipfile.ZipFile(tmp_path / "good.npz") as good, zipfile.ZipFile(tmp_path / "huge.npz", "w") as huge:
        for name in good.namelist():
            content = good.read(name)
            if name == "features.npy":
                content = content.replace(b"(7, 5), }        ", b"(99999999999, 5)}")
                assert b"(99999999999, 5)}" in content
            huge.writestr(name, content)
    with pytest.raises(DataError, match="not a feature file"):
        read_feature_file(tmp_path / "huge.npz")


def test_a_lone_array_and_other_files(tmp_path):
    with (tmp_path / "lone.npz").open("wb") as stream:
        np.save(stream, np.zeros(3))
    (tmp_path / "text.parquet").write_text("name,label\n")
    for name in ("lone.npz", "text.parquet"):
        with pytest.raises(DataError, match="not a feature file"):
            read_feature_file(tmp_path / name)
    with pytest.raises(DataError, match="no feature file"):
        read_feature_file(tmp_path / "missing.npz")


def test_parquet_tables_of_others(tmp_path):
    good = pyarrow.parquet.read_table(written(tmp_path / "good.parquet"))
    file = tmp_path / "odd.parquet"
    pyarrow.parquet.write_table(good.replace_schema_metadata(None), file)
    with pytest.raises(DataError, match="not a feature file"):
        read_feature_file(file)
    for other in (good.drop_columns(["split"]), good.set_column(4, "features", pyarrow.array([[1.0]] * 7))):
        pyarrow.parquet.write_table(other, file)
        with pytest.raises(DataError, match="not a feature file"):
            read_feature_file(file)
    metadata = good.schema.metadata | {b"jcl.class_names": b'["a", 2]'}
    pyarrow.parquet.write_table(good.replace_schema_metadata(metadata), file)
    with pytest.raises(DataError, match="not a feature file"):
        read_feature_file(file)
    wider = good.set_column(0, "name", good["name"].cast(pyarrow.large_string()))  # as other writers have it
    pyarrow.parquet.write_table(wider, file)
    assert same(read_feature_file(file), rows())


def test_without_pyarrow_parquet_is_a_sentence_and_npz_works(tmp_path, monkeypatch):
    """The module is run anew, as where it is not installed."""
    written(tmp_path / "good.parquet"), written(tmp_path / "good.npz")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    module = runpy.run_path(feature_file.__file__)
    assert len(module["read_feature_file"](tmp_path / "good.npz")) == 7
    for call in (
        lambda: module["read_feature_file"](tmp_path / "good.parquet"),
        lambda: module["check_writable"](tmp_path / "new.parquet", force=False),
    ):
        with pytest.raises(SettingsError, match=r"pyarrow.*pip install 'joint-contrastive-learning\[parquet\]'"):
            call()
