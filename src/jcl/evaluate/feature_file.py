"""Features as files that other programs read too: NumPy's `.npz` and Parquet.

Both hold a row for each image (features, name, label, split) with the names of the classes and where the features came
from. Neither holds anything that runs when it is read, nor a date: equal features give equal bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from jcl.data import UNLABELLED
from jcl.data.arrays import NPZ_ERRORS
from jcl.errors import DataError, SettingsError
from jcl.runs.atomic import replacing

_ROW_GROUP: Final = 4096  # rows of Parquet that are held until they are written, and that readers take at a time
_INFO_KEY: Final = b"jcl.info"
_CLASSES_KEY: Final = b"jcl.class_names"
_NPZ_KEYS: Final = ("features", "names", "labels", "split", "class_names", "info")

# What NumPy, its zip reader and Arrow raise for files that are cut off, damaged or made to do harm.
_DAMAGE: Final = (*NPZ_ERRORS, KeyError, MemoryError)


class FeatureInfo(BaseModel):
    """Where features came from: enough to make those of another image that compare with them."""

    model_config = ConfigDict(frozen=True)

    format: Literal["jcl-features-1"] = "jcl-features-1"
    weights: str  # the run or file, by its whole path
    weights_digest: str  # of the network's tensors, so that other weights at the same path are noticed
    backbone: str
    image_size: PositiveInt
    feature_width: PositiveInt
    precision: str
    data: str  # what `open_data` takes, a folder or file by its whole path


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """A part of a table: features (n, d) float32, labels (n,) int64 with -1 for unknown, a name and split a row."""

    features: NDArray[np.float32]
    names: Sequence[str]
    labels: NDArray[np.int64]
    splits: Sequence[str]

    def __len__(self) -> int:
        return len(self.features)


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """All that a feature file holds; `class_names` is None where the labels are mere numbers, or there are none."""

    rows: FeatureRows
    class_names: tuple[str, ...] | None
    info: FeatureInfo

    def __len__(self) -> int:
        return len(self.rows)

    def class_of(self, row: int) -> str | None:
        """The name of a row's class, its number where classes have no names, None where it is not known."""
        return class_text(int(self.rows.labels[row]), self.class_names)


def class_text(label: int, class_names: Sequence[str] | None) -> str | None:
    """The name of a label's class, its number where classes have no names, None where it is not known."""
    if label == UNLABELLED:
        return None
    return str(label) if class_names is None else class_names[label]


def check_writable(file: Path, *, force: bool) -> None:
    """Refuse a file of another kind, one that is there already, and Parquet without its library: before any work."""
    if _kind(file) == ".parquet":
        _import_pyarrow()
    if file.is_dir():
        raise SettingsError(f"{file} is a folder; give the name of a .npz or .parquet file to write.")
    if file.exists() and not force:
        raise SettingsError(f"{file} is there already and is left as it is; choose another name or add --force.")


def write_feature_file(
    file: Path, parts: Iterable[FeatureRows], class_names: Sequence[str] | None, info: FeatureInfo
) -> None:
    """Write a table that comes in parts; the file appears, or is replaced, when all of it is written.

    Parquet is written as the parts come; a `.npz` file is gathered in memory first, since it begins with its length.
    """
    write = _write_npz if _kind(file) == ".npz" else _write_parquet
    names = None if class_names is None else [_printable(name) for name in class_names]
    with replacing(file) as stream:
        write(stream, parts, names, info)


def read_feature_file(file: Path) -> FeatureTable:
    """Read what `write_feature_file` wrote."""
    read = _read_npz if _kind(file) == ".npz" else _read_parquet
    if not file.is_file():
        raise DataError(f"There is no feature file {file}; write one with `jcl embed`.")
    table = read(file)
    labels, names = table.rows.labels, table.class_names
    highest = np.iinfo(np.int64).max if names is None else len(names)
    if len(labels) and not (labels.min() >= UNLABELLED and labels.max() < highest):
        raise _damaged(file, "it has labels that name no class")
    return table


def _kind(file: Path) -> str:
    kind = file.suffix.lower()
    if kind not in (".npz", ".parquet"):
        raise SettingsError(f"{file} is neither a .npz nor a .parquet file; features are kept in one of these.")
    return kind


def _printable(text: str) -> str:
    """Names of folders may hold bytes that are no text; files of text cannot."""
    return os.fsencode(text).decode("utf-8", "replace")


def _damaged(file: Path, why: str) -> DataError:
    return DataError(f"{file} cannot be read as a feature file: {why}; write it anew with `jcl embed`.")


def _write_npz(
    stream: BinaryIO, parts: Iterable[FeatureRows], class_names: Sequence[str] | None, info: FeatureInfo
) -> None:
    whole = _joined(list(parts))
    np.savez(
        stream,
        features=whole.features,
        names=_text(whole.names),
        labels=whole.labels,
        split=_text(whole.splits),
        class_names=_text(class_names or []),
        info=np.array(info.model_dump_json()),
    )


def _joined(parts: Sequence[FeatureRows]) -> FeatureRows:
    return FeatureRows(
        np.concatenate([part.features for part in parts]),
        [name for part in parts for name in part.names],
        np.concatenate([part.labels for part in parts]),
        [split for part in parts for split in part.splits],
    )


def _text(texts: Sequence[str]) -> NDArray[np.str_]:
    return np.array(texts, dtype=np.str_)


def _read_npz(file: Path) -> FeatureTable:
    try:
        with np.load(file, allow_pickle=False) as content:
            missing = [key for key in _NPZ_KEYS if key not in content.files]
            arrays = [content[key] for key in _NPZ_KEYS if not missing]
    except (*_DAMAGE, AttributeError):  # a lone array has no names to ask for
        raise _damaged(file, "it is cut off, damaged, or holds something other than plain arrays") from None
    if missing:
        raise _damaged(file, f"it holds no array called {missing[0]}")
    features, names, labels, split, class_names, info = arrays
    columns = all(array.shape == features.shape[:1] for array in (names, labels, split))
    kinds = [array.dtype.kind for array in arrays]
    if features.ndim != 2 or not columns or class_names.ndim != 1 or kinds != list("fUiUUU"):
        raise _damaged(file, "its arrays are not those that belong there")
    rows = FeatureRows(features.astype(np.float32, copy=False), names.tolist(), labels.astype(np.int64), split.tolist())
    return FeatureTable(rows, tuple(class_names.tolist()) or None, _info(file, str(info)))


def _info(file: Path, text: str | bytes) -> FeatureInfo:
    try:
        return FeatureInfo.model_validate_json(text)
    except ValidationError:
        raise _damaged(file, "it does not say which weights its features are from") from None


def _import_pyarrow() -> tuple[Any, Any]:
    """`pyarrow` and `pyarrow.parquet`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise SettingsError(
            "Parquet files need pyarrow, which is not installed; run: "
            "pip install 'joint-contrastive-learning[parquet]', or use a .npz file."
        ) from None
    return pyarrow, pyarrow.parquet


def _write_parquet(
    stream: BinaryIO, parts: Iterable[FeatureRows], class_names: Sequence[str] | None, info: FeatureInfo
) -> None:
    arrow, parquet = _import_pyarrow()
    metadata = {_INFO_KEY: info.model_dump_json(), _CLASSES_KEY: json.dumps(class_names)}
    schema = _schema(arrow, info.feature_width).with_metadata(metadata)
    with parquet.ParquetWriter(stream, schema, use_dictionary=["class", "split"]) as writer:
        for part in _in_row_groups(parts):
            classes = [class_text(label, class_names) for label in part.labels.tolist()]
            features = arrow.FixedSizeListArray.from_arrays(part.features.ravel(), info.feature_width)
            writer.write_table(arrow.table([part.names, part.labels, classes, part.splits, features], schema=schema))


def _schema(arrow: Any, width: int) -> Any:
    """The columns as every Parquet reader knows them; `class` is the one that may be empty."""
    return arrow.schema(
        [
            arrow.field("name", arrow.string(), nullable=False),
            arrow.field("label", arrow.int64(), nullable=False),
            arrow.field("class", arrow.string()),
            arrow.field("split", arrow.string(), nullable=False),
            arrow.field("features", arrow.list_(arrow.float32(), width), nullable=False),
        ]
    )


def _in_row_groups(parts: Iterable[FeatureRows]) -> Iterator[FeatureRows]:
    """The parts of a table joined until they are worth a row group."""
    waiting: list[FeatureRows] = []
    for part in parts:
        waiting.append(part)
        if sum(map(len, waiting)) >= _ROW_GROUP:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _read_parquet(file: Path) -> FeatureTable:
    arrow, parquet = _import_pyarrow()
    damage = (*_DAMAGE, arrow.ArrowException)
    try:
        content = parquet.ParquetFile(file)
    except damage:
        raise _damaged(file, "it is cut off, damaged or no Parquet file") from None
    with content:
        metadata = content.schema_arrow.metadata or {}
        info = _info(file, metadata.get(_INFO_KEY, b""))
        try:
            rows = _read_row_groups(content, _schema(arrow, info.feature_width))
            class_names = json.loads(metadata[_CLASSES_KEY])
        except damage:
            raise _damaged(file, "it is damaged, or its columns are not those that belong there") from None
    if class_names is not None and not (isinstance(class_names, list) and all(isinstance(n, str) for n in class_names)):
        raise _damaged(file, "its classes have no names")
    return FeatureTable(rows, None if class_names is None else tuple(class_names), info)


def _read_row_groups(content: Any, schema: Any) -> FeatureRows:
    """The rows of an open Parquet file, a group at a time: read at once, Arrow takes several times their memory."""
    count = content.metadata.num_rows
    features = np.empty((count, schema.field("features").type.list_size), dtype=np.float32)
    labels = np.empty(count, dtype=np.int64)
    names: list[str] = []
    splits: list[str] = []
    for number in range(content.num_row_groups):
        group = content.read_row_group(number).select(schema.names).cast(schema)
        part = slice(len(names), len(names) + len(group))
        values = group["features"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        features[part] = values.reshape(len(group), -1)
        labels[part] = group["label"].to_numpy()
        names += group["name"].to_pylist()
        splits += group["split"].to_pylist()
    if len(names) != count:
        raise ValueError("there are fewer rows than the file says")
    return FeatureRows(features, names, labels, splits)
