"""Feature files: NumPy's `.npz` or Parquet, with a row for each image (features, name, label, split).

They also hold the class names and where the features came from. Reading executes nothing, and equal features give
equal bytes.
"""

import contextlib
import importlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PositiveInt, TypeAdapter

from jcl.data import UNLABELED
from jcl.errors import DataError, SettingsError, import_extra
from jcl.runs.atomic import atomic_open, refuse_overwrite

_INFO_KEY, _CLASSES_KEY = b"jcl.info", b"jcl.class_names"


class FeatureInfo(BaseModel):
    """Where features came from: enough to extract comparable features of other images."""

    model_config = ConfigDict(frozen=True)

    format: Literal["jcl-features-1"] = "jcl-features-1"
    weights: str  # absolute path of the run or file
    weights_digest: str  # detects that the weights at this path have changed
    backbone: str
    image_size: PositiveInt
    feature_width: PositiveInt
    data: str  # as for `open_data`, with an absolute path


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """Rows of a feature file: features (n, d) float32, labels (n,) int64, -1 for unknown. Classes may have no names."""

    features: NDArray[np.float32]
    names: Sequence[str]
    labels: NDArray[np.int64]
    splits: Sequence[str]
    class_names: tuple[str, ...] | None
    info: FeatureInfo

    def __len__(self) -> int:
        return len(self.features)

    def class_of(self, row: int) -> str | None:
        """The class of a row as text, None if it is unknown."""
        label = int(self.labels[row])
        if label == UNLABELED:
            return None
        return str(label) if self.class_names is None else self.class_names[label]


def check_writable(file: Path, *, force: bool) -> None:
    """Refuse, before any work, another suffix, an existing file without `force`, and Parquet without pyarrow."""
    _format(file)
    refuse_overwrite(file, force=force)


def write_feature_file(file: Path, parts: Iterable[FeatureTable]) -> None:
    """Write a table that comes in parts, Parquet as they come; the file appears when it is complete."""
    _, write = _format(file)
    with atomic_open(file, follow_links=True) as stream:
        write(stream, parts)


def read_feature_file(file: Path) -> FeatureTable:
    """Read what `write_feature_file` wrote. Nothing in the file is executed."""
    read, _ = _format(file)
    if not file.is_file():
        raise DataError(f"There is no feature file {file}; write one with `jcl embed`.")
    try:
        table = read(file)
        labels = table.labels
        classes = np.iinfo(np.int64).max if table.class_names is None else len(table.class_names)
        if len(labels) and not (labels.min() >= UNLABELED and labels.max() < classes):
            raise ValueError("labels without a class")
    except Exception:  # NumPy, Arrow and pydantic refuse damaged files in many ways
        raise DataError(f"{file} is not a feature file, or is damaged; write it again with `jcl embed`.") from None
    return table


def _format(file: Path) -> tuple[Callable[[Path], FeatureTable], Callable[[BinaryIO, Iterable[FeatureTable]], None]]:
    """How to read and write a file with this suffix."""
    if file.suffix.lower() == ".npz":
        return _read_npz, _write_npz
    if file.suffix.lower() != ".parquet":
        raise SettingsError(f"The feature file {file} must end in .npz or .parquet.")
    _import_pyarrow()
    return _read_parquet, _write_parquet


def _write_npz(stream: BinaryIO, parts: Iterable[FeatureTable]) -> None:
    table = _concatenate(list(parts))
    np.savez(
        stream,
        features=table.features,
        names=np.array(table.names, dtype=np.str_),
        labels=table.labels,
        split=np.array(table.splits, dtype=np.str_),
        class_names=np.array(table.class_names or [], dtype=np.str_),
        info=np.array(table.info.model_dump_json()),
    )


def _read_npz(file: Path) -> FeatureTable:
    with np.load(file, allow_pickle=False) as content:
        arrays = [content[key] for key in ("features", "names", "labels", "split", "class_names", "info")]
    features, names, labels, split, class_names, info = arrays
    columns = all(array.shape == features.shape[:1] for array in (names, labels, split))
    kinds = [array.dtype.kind for array in arrays]
    if features.ndim != 2 or not columns or class_names.ndim != 1 or kinds != list("fUiUUU"):
        raise ValueError("arrays of the wrong shape or type")
    return FeatureTable(
        features.astype(np.float32, copy=False),
        names.tolist(),
        labels.astype(np.int64),
        split.tolist(),
        tuple(class_names.tolist()) or None,
        FeatureInfo.model_validate_json(str(info)),
    )


def _concatenate(parts: Sequence[FeatureTable]) -> FeatureTable:
    return replace(
        parts[0],
        features=np.concatenate([part.features for part in parts]),
        names=[name for part in parts for name in part.names],
        labels=np.concatenate([part.labels for part in parts]),
        splits=[split for part in parts for split in part.splits],
    )


def _import_pyarrow() -> Any:
    arrow = import_extra("pyarrow", "parquet", "A .parquet file, unlike .npz,")
    importlib.import_module("pyarrow.parquet")
    return arrow


def _parquet_schema(width: int) -> Any:
    arrow = _import_pyarrow()
    types = {"name": arrow.string(), "label": arrow.int64(), "class": arrow.string(), "split": arrow.string()}
    types["features"] = arrow.list_(arrow.float32(), width)
    return arrow.schema([arrow.field(name, kind, nullable=name == "class") for name, kind in types.items()])


def _write_parquet(stream: BinaryIO, parts: Iterable[FeatureTable]) -> None:
    arrow, writer = _import_pyarrow(), None
    with contextlib.ExitStack() as opened:
        for part in parts:
            width = part.info.feature_width
            metadata = {_INFO_KEY: part.info.model_dump_json(), _CLASSES_KEY: json.dumps(part.class_names)}
            schema = _parquet_schema(width).with_metadata(metadata)
            writer = writer or opened.enter_context(
                arrow.parquet.ParquetWriter(stream, schema, use_dictionary=["class", "split"])
            )
            classes = [part.class_of(row) for row in range(len(part))]
            features = arrow.FixedSizeListArray.from_arrays(part.features.ravel(), width)
            writer.write_table(arrow.table([part.names, part.labels, classes, part.splits, features], schema=schema))


def _read_parquet(file: Path) -> FeatureTable:
    """Read row group by row group, because Arrow needs several times the memory for the whole file."""
    parts = []
    with _import_pyarrow().parquet.ParquetFile(file) as content:
        metadata = content.schema_arrow.metadata
        info = FeatureInfo.model_validate_json(metadata[_INFO_KEY])
        class_names = TypeAdapter(tuple[str, ...] | None).validate_json(metadata[_CLASSES_KEY])
        schema = _parquet_schema(info.feature_width)
        for number in range(content.num_row_groups):
            group = content.read_row_group(number).select(schema.names).cast(schema)
            features = group["features"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            names, splits = group["name"].to_pylist(), group["split"].to_pylist()
            labels = group["label"].to_numpy()
            parts.append(FeatureTable(features.reshape(len(group), -1), names, labels, splits, class_names, info))
    return _concatenate(parts)
