"""How much of an image's detail and range reaches the views."""

import io
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import noise_image
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console

from jcl.commands.pretrain import pretrain
from jcl.data import BatchLoader, ImageBatch, UnreadableImage, open_data, open_demo, read_all, write_shards
from jcl.data.check import check_data, survey_headers
from jcl.data.decode import decode
from jcl.settings.recipes import build_settings
from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts
from jcl.train.build import run_view_recipe
from jcl.views.parameters import draw_parameters


def png_of_sixteen_bits(values: NDArray[np.uint16]) -> bytes:
    """RGB, which Pillow does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def tiff_of_sixteen_bits(values: NDArray[np.uint16], order: str) -> bytes:
    """RGB, which Pillow does not write."""
    (height, width, _), data = values.shape, values.astype(f"{order}u2").tobytes()
    bits_at = 8 + len(data)
    entries = [(256, width), (257, height), (258, bits_at), (259, 1), (262, 2), (273, 8), (277, 3), (278, height)]
    entries.append((279, len(data)))
    content = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", bits_at + 6) + data
    content += struct.pack(f"{order}3H", 16, 16, 16) + struct.pack(f"{order}H", len(entries))
    for tag, value in entries:
        kind, count = (3, 3) if tag == 258 else (4, 1)
        content += struct.pack(f"{order}HHII", tag, kind, count, value)
    return content + bytes(4)


def gray(file: Path, *values: int, **options: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.array([values] * 2, dtype=np.uint16)).save(file, **options)


@pytest.mark.parametrize("kind", ["gray", "float", "RGB"])
def test_more_bits_do_not_multiply_the_memory(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Decoding to numbers of 8 bytes turned a file of 248 kB into 3.8 GB."""
    side, file = 1000, tmp_path / "image"
    if kind == "RGB":
        file.write_bytes(png_of_sixteen_bits(np.full((side, side, 3), 40_000, np.uint16)))
    else:
        value = np.float32(0.5) if kind == "float" else np.uint16(40_000)
        Image.fromarray(np.full((side, side), value)).save(file, "TIFF", compression="tiff_deflate")
    tracemalloc.start()
    try:
        assert decode(file).shape == (3, side, side)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (20 if kind == "RGB" else 11) * side * side + 2**22, peak
    monkeypatch.setattr("jcl.data.decode.PIXEL_LIMIT", side * side)
    if kind == "gray":
        assert decode(file).shape == (3, side, side)
    else:  # of four or six bytes a pixel
        with pytest.raises(UnreadableImage, match="more than the limit"):
            decode(file)


@pytest.mark.parametrize("peak", [200, 900, 4095, 9_000, 65_535])
@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_sixteen_bit_files_are_scaled_from_the_bits_in_use(tmp_path: Path, name: str, peak: int):
    bits = next(bits for bits in (8, 10, 12, 14, 16) if peak < 2**bits)
    gray(tmp_path / name, 0, peak // 3, peak)
    expected = [round(value * 255 / (2**bits - 1)) for value in (0, peak // 3, peak)]
    assert decode(tmp_path / name)[:, 0].tolist() == [expected] * 3


@pytest.mark.parametrize("largest", [4095, 65_535])
def test_twelve_bit_colors_keep_their_range(largest: int):
    values = np.random.default_rng(0).integers(0, largest, (5, 7, 3)).astype(np.uint16)
    values[0, 0] = largest
    scaled = values.astype(np.float64) * 255 / largest
    for content in (png_of_sixteen_bits(values), *(tiff_of_sixteen_bits(values, order) for order in "<>")):
        pixels = decode(content).permute(1, 2, 0).numpy()
        assert np.abs(pixels - scaled).max() <= (0.5 if largest == 4095 else 1)


def test_all_images_of_a_data_set_have_one_scale(tmp_path: Path):
    for number, peak in enumerate((4000, 700, 90)):
        gray(tmp_path / f"train/{number}.png", 80, peak)
    gray(tmp_path / "val/0.png", 80, 700)
    write_shards(open_data(str(tmp_path)), tmp_path / "shards")
    for location in (tmp_path, tmp_path / "shards"):
        data = open_data(str(location))
        assert data.test is not None
        for source in (data.train, data.test):
            images = [source.read(row) for row in range(len(source))]
            assert {image.shape for image in images} == {(1, 2, 2)}
            assert {float(image[0, 0, 0]) for image in images} == {float(np.float32(80) / np.float32(65_535))}


def test_a_panorama_is_a_window_at_full_sharpness(tmp_path: Path):
    Image.fromarray(np.tile(np.linspace(0, 255, 2000).astype(np.uint8), (120, 1))).save(tmp_path / "wide.png")
    places = [decode(tmp_path / "wide.png", canvas=100, window=window).float() for window in (0.0, 0.5, 1.0)]
    assert [tuple(pixels.shape) for pixels in places] == [(3, 66, 100)] * 3
    assert [round(pixels.mean().item() / 255, 2) for pixels in places] == [0.04, 0.5, 0.95]
    noise_image(2_000, 120).save(tmp_path / "wide.jpg")
    assert decode(tmp_path / "wide.jpg", canvas=50).shape == (3, 33, 50)
    assert decode(tmp_path / "wide.jpg", canvas=50, window=None).shape[1] < 4
    noise_image(90, 30).save(tmp_path / "small.png")  # fits as it is
    assert decode(tmp_path / "small.png", canvas=100).shape == (3, 30, 90)
    noise_image(40, 300).save(tmp_path / "high.png")  # nothing is gained by scaling it
    assert decode(tmp_path / "high.png", canvas=100).shape == (3, 100, 40)


@pytest.fixture(scope="module")
def panoramas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("panoramas")
    for number in range(6):
        noise_image(200, 10, seed=number).save(folder / f"{number}.png")
    return folder


def batches_of(folder: Path, epoch: int, start: int = 0, **options: object) -> list[ImageBatch]:
    fixed = {"batch_size": 3, "canvas": 20, "seed": 1, "cache_bytes": 0}
    with BatchLoader(open_data(str(folder)).train, **(fixed | options)) as loader:  # type: ignore[arg-type]
        return list(loader.epoch(epoch, start))


def pixels_by_image(batches: list[ImageBatch]) -> dict[int, torch.Tensor]:
    rows = [pair for batch in batches for pair in zip(batch.samples.tolist(), batch.pixels, strict=True)]
    return dict(sorted(rows))


def test_training_sees_another_window_in_each_epoch(panoramas: Path):
    first, second = (pixels_by_image(batches_of(panoramas, epoch)) for epoch in (0, 1))
    assert all(first[image].shape == (3, 20, 20) for image in first)
    assert not any(torch.equal(first[image], second[image]) for image in first)
    again = batches_of(panoramas, 1, start=1, workers=1)
    assert torch.equal(again[0].pixels, batches_of(panoramas, 1)[1].pixels)


def test_images_in_memory_keep_their_window(panoramas: Path):
    options = {"cache_bytes": 10**6}
    with BatchLoader(open_data(str(panoramas)).train, batch_size=3, canvas=20, seed=1, **options) as loader:  # type: ignore[arg-type]
        first, second = (pixels_by_image(list(loader.epoch(epoch))) for epoch in (0, 1))
    resumed = pixels_by_image(batches_of(panoramas, 1, **options))
    assert all(torch.equal(first[image], second[image]) for image in first)
    assert all(torch.equal(first[image], resumed[image]) for image in first)


def test_evaluation_uses_the_center(panoramas: Path):
    source = open_data(str(panoramas)).train
    (batch,) = read_all(source, canvas=20, batch_size=6)
    assert torch.equal(batch.pixels[0, :, :10], source.read(0)[:, :, 90:110])


@pytest.mark.parametrize("recipe", ["imagenet-paper", "imagenet-official", "imagenet100-ablation", "photos", "folder"])
def test_few_crops_of_a_photograph_are_enlarged(tmp_path: Path, recipe: str):
    settings, _ = resolve(build_settings(recipe), DataFacts(10_000, 375, decoded=False))
    noise_image(500, 375).save(tmp_path / "photograph.jpg")
    size = decode(tmp_path / "photograph.jpg", settings.data.canvas).shape[1:]
    samples = torch.arange(10_000)
    views = run_view_recipe(settings)
    boxes = draw_parameters(views, 0, 0, samples, samples * 0, torch.tensor([size]).expand(10_000, 2)).box
    enlarged = (boxes[:, 2:] < views.size).all(dim=1).double().mean()
    assert views.size == 224 and enlarged <= 0.10
    # As from the file itself: no pixel is lost before the crop.
    assert size == (375, 500)


@pytest.fixture(scope="module")
def unusual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unusual")
    for number in range(16):
        noise_image(40, 40, seed=number).save(folder / f"{number}.png")
    for number in range(2):
        gray(folder / f"deep-{number}.png", 3000, 900 + number)
    noise_image(300, 40).save(folder / "long.png")
    pages = [noise_image(40, 40, seed=20 + page) for page in range(3)]
    pages[0].save(folder / "pages.tif", save_all=True, append_images=pages[1:])
    return folder


def test_unusual_images_are_counted(unusual: Path):
    data = open_data(str(unusual))
    lines = survey_headers(data.train, windows=True)
    assert [line.split()[0] for line in lines] == ["2", "1", "1"]  # in this order:
    assert "8 bits" in lines[0] and "2:1" in lines[1] and "TIFF" in lines[2]
    assert check_data(data).splits["train"].warnings == lines
    assert survey_headers(data.train, windows=False) == [lines[0], lines[2]]
    assert survey_headers(open_demo(8, 8).train, windows=True) == []


def test_the_start_of_a_run_says_what_happens_to_unusual_images(unusual: Path, tmp_path: Path):
    console = Console(file=io.StringIO(), width=1000)
    values = {"data.location": str(unusual), "data.workers": 0, "train.epochs": 1, "record.report": False}
    settings = build_settings("folder", values=values | {"model.backbone": "tiny_cnn", "train.batch_size": 4})
    pretrain(settings, tmp_path / "run", console=console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(line in printed for line in survey_headers(open_data(str(unusual)).train, windows=True))
