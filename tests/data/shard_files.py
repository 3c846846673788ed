"""Shards made by hand, and what is read from any."""

import io
import tarfile
from pathlib import Path

from image_files import noise_image

from jcl.data import ImageSource, ShardImages, open_data


def png(seed: int, width: int = 6, height: int = 5) -> bytes:
    stream = io.BytesIO()
    noise_image(width, height, seed).save(stream, "PNG")
    return stream.getvalue()


def write_tar(file: Path, members: dict[str, bytes], format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(file, "w", format=format) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file


def opened(location: Path | str) -> ShardImages:
    source = open_data(str(location)).train
    assert isinstance(source, ShardImages)
    return source


def names(source: ImageSource) -> list[str]:
    return [source.name_of(index).partition("/")[2] for index in range(len(source))]


def by_pixels(source: ImageSource) -> dict[bytes, int]:
    """The label of each image, by what it shows; equal for sources that differ in order only."""
    labels = [None] * len(source) if source.labels is None else source.labels.tolist()
    return {source.read(index).numpy().tobytes(): label for index, label in enumerate(labels)}
