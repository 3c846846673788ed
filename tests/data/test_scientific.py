"""Images with other than three channels or more than 8 bits stay as they are."""

import io
import struct
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import loader_for, noise_image, smooth_image, write_images
from PIL import Image
from scientific_files import KINDS, as_stored, cells, dicom, write_folder, write_image

from jcl.commands.inputs import data_facts
from jcl.data import open_data, write_shards
from jcl.data.check import check_data
from jcl.data.source import RGB, NoReadableImages, PixelFormat, pixel_format
from jcl.errors import DataError, SettingsError
from jcl.settings.recipes import build_settings
from jcl.settings.resolve import resolve
from jcl.views import center_views

FLOAT = torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_values_reach_the_network_undistorted(tmp_path: Path, kind: str):
    channels, dtype = KINDS[kind]
    source = open_data(str(write_folder(tmp_path / "images", kind, 4))).train
    color, deep = kind == "tiff-rgb", dtype != np.uint8
    assert pixel_format(source)[:2] == (channels, FLOAT if deep else torch.uint8)
    facts = data_facts(source)
    assert (
        facts.channels == channels and (facts.color or not color) and facts.mean is not None and facts.std is not None
    )
    wanted = np.stack([as_stored(kind, cells(kind, number)) for number in (0, 2, 1, 3)])  # class a, then b
    np.testing.assert_allclose(facts.mean, wanted.mean(axis=(0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(facts.std, wanted.std(axis=(0, 2, 3)), rtol=1e-5)
    with loader_for(source, canvas=64, batch_size=4) as loader:
        batch = next(iter(loader.epoch(0)))
    wanted = wanted[batch.samples][..., 2:-2, :]  # the center of 24 x 20
    views = center_views(batch.pixels, batch.sizes, 20, mean=facts.mean, std=facts.std).double().numpy()
    mean, std = (np.array(values)[:, None, None] for values in (facts.mean, facts.std))
    assert np.abs(views * std + mean - wanted).max() < (0.5 / 65_535 if dtype in (np.uint8, np.uint16) else 1e-3)


def test_workers_shards_and_test_images_read_the_same(tmp_path: Path):
    for split in ("train", "val"):
        write_folder(tmp_path / "images" / split, "tiff-channels", 6)
    data = open_data(str(tmp_path / "images"))
    write_shards(data, tmp_path / "shards")
    shards = open_data(str(tmp_path / "shards"))
    images = {source.read(row).numpy().tobytes() for source in (data.train, shards.train) for row in range(6)}
    assert len(images) == 6 and data.test is not None and data.test.read(0).shape == (5, 24, 20)
    batches = []
    for workers in (0, 1):
        with loader_for(data.train, workers=workers, cache_bytes=0) as loader:
            batches.append(next(iter(loader.epoch(0))).clone())
    assert batches[0].pixels.dtype == FLOAT and torch.equal(batches[0].pixels, batches[1].pixels)


def test_large_images_are_scaled_down_as_photographs_are(tmp_path: Path):
    values = np.random.default_rng(0).integers(0, 256, (90, 60, 3), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "a.png")
    np.save(tmp_path / "b.npy", values.astype(np.uint16) * 257)
    photograph = open_data(str(tmp_path)).train.read(0, 40).float() / 255
    (tmp_path / "a.png").unlink()
    kept = open_data(str(tmp_path)).train.read(0, 40)
    torch.testing.assert_close(kept, photograph, rtol=0, atol=1 / 255)


def test_photographs_are_8_bit_rgb_as_ever(tmp_path: Path):
    write_images(tmp_path, 3)
    noise_image(12, 8, seed=9).convert("L").save(tmp_path / "gray.png")
    write_image(tmp_path / "deep", "png", cells("png", 0))
    source = open_data(str(tmp_path)).train
    assert pixel_format(source) is RGB and {source.read(row).dtype for row in range(5)} == {torch.uint8}
    assert data_facts(source).mean is None
    split = check_data(open_data(str(tmp_path))).splits["train"]
    assert split.figures["sixteen_bit"] == 1 and len(split.warnings) == 1


def test_gray_and_color_are_converted_if_asked(tmp_path: Path):
    for number in range(2):
        noise_image(12, 8, seed=number).convert("L").save(tmp_path / f"{number}.png")
    split = check_data(open_data(str(tmp_path))).splits["train"]
    assert split.figures["gray"] == 2 and "data.channels=1" in split.warnings[0]
    gray = open_data(str(tmp_path), channels=1).train
    with Image.open(tmp_path / "0.png") as image:
        assert torch.equal(gray.read(0), torch.from_numpy(np.array(image))[None])
    write_image(tmp_path / "deep" / "0", "png", cells("png", 0))
    deep = open_data(str(tmp_path / "deep"), channels=3).train
    assert pixel_format(deep) == PixelFormat(3, FLOAT, False)
    assert torch.equal(deep.read(0), open_data(str(tmp_path / "deep")).train.read(0).expand(3, -1, -1))


def test_a_wrong_mix_is_one_sentence(tmp_path: Path):
    for kind in ("tiff", "tiff-channels"):
        write_image(tmp_path / kind, kind, cells(kind, 0))
    with pytest.raises(DataError, match=r"channels.tif has 5 channels, but tiff.tif has 1; "):
        pixel_format(open_data(str(tmp_path)).train)
    with pytest.raises(DataError, match=r"tiff-channels.tif has 5 channels, but data.channels or the weights need 3"):
        pixel_format(open_data(str(tmp_path), channels=3).train)


def test_dicom(tmp_path: Path):
    values = cells("dicom", 0)[..., 0] // 16
    (tmp_path / "a.dcm").write_bytes(dicom(values, PhotometricInterpretation="MONOCHROME1", BitsStored=12, HighBit=11))
    source = open_data(str(tmp_path)).train
    np.testing.assert_allclose(source.read(0)[0], (4095 - values.astype(np.float64)) / 65_535, atol=1e-7)
    signed = values.astype(np.int16) - 999
    (tmp_path / "a.dcm").write_bytes(dicom(signed, PhotometricInterpretation="MONOCHROME1"))
    np.testing.assert_array_equal(open_data(str(tmp_path)).train.read(0)[0], -1.0 - signed)
    photograph = np.array(noise_image(9, 7))
    (tmp_path / "a.dcm").write_bytes(dicom(photograph))
    source = open_data(str(tmp_path)).train
    assert pixel_format(source) == RGB and np.array_equal(source.read(0).permute(1, 2, 0), photograph)
    (tmp_path / "a.dcm").write_bytes(dicom(photograph[..., 0], PhotometricInterpretation="PALETTE COLOR"))
    report = check_data(open_data(str(tmp_path))).splits["train"]
    assert "palette" in str(report.unreadable["a.dcm"])
    (tmp_path / "a.dcm").write_bytes(dicom(values)[:-50])
    report = check_data(open_data(str(tmp_path))).splits["train"]
    assert len(report.unreadable) == 1 and report.kinds == {}


def test_compressed_dicom_names_the_missing_library(tmp_path: Path):
    pydicom = pytest.importorskip("pydicom")
    (tmp_path / "a.dcm").write_bytes(dicom(cells("dicom", 0)[..., 0]))
    data = pydicom.dcmread(tmp_path / "a.dcm")
    data.file_meta.TransferSyntaxUID = pydicom.uid.JPEGLSLossless
    data.PixelData = pydicom.encaps.encapsulate([bytes(100)])
    data["PixelData"].is_undefined_length = True
    data.save_as(tmp_path / "a.dcm")
    reason = str(check_data(open_data(str(tmp_path))).splits["train"].unreadable["a.dcm"])
    assert "damaged" in reason if find_spec("jpeg_ls") else "damaged" not in reason and "pyjpegls" in reason


def test_of_depth_and_time_the_first_place_is_used(tmp_path: Path):
    tifffile = pytest.importorskip("tifffile")
    values = np.random.default_rng(0).integers(0, 65_536, (4, 3, 8, 9)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", values, imagej=True, metadata={"axes": "ZCYX"})
    report = check_data(open_data(str(tmp_path)))
    assert report.splits["train"].kinds == {"TIFF uint16 x 3": 1} and report.as_dict()["train_multi_page"] == 1
    source = open_data(str(tmp_path)).train
    assert not pixel_format(source).color  # channels of a microscope
    np.testing.assert_allclose(source.read(0), values[0] / 65_535, atol=1e-7)


def test_arrays_in_one_file(tmp_path: Path):
    images = np.stack([cells("npy", number) for number in range(5)])
    np.save(tmp_path / "a.npy", images)
    np.savez(tmp_path / "a.npz", x_train=images.transpose(0, 3, 1, 2)[:4], x_test=images[4:])
    for name, count in (("a.npy", 5), ("a.npz", 4)):
        source = open_data(str(tmp_path / name)).train
        assert len(source) == count and pixel_format(source) == PixelFormat(16, FLOAT, False)
        np.testing.assert_array_equal(source.read(3), images[3].transpose(2, 0, 1))
    write_shards(open_data(str(tmp_path / "a.npz")), tmp_path / "shards")
    shards = open_data(str(tmp_path / "shards")).train
    assert {shards.read(row).numpy().tobytes() for row in range(4)} == {
        image.transpose(2, 0, 1).tobytes() for image in images[:4]
    }
    np.save(tmp_path / "gray.npy", np.full((2, 8, 9), 65_535, np.uint16))
    assert open_data(str(tmp_path / "gray.npy"), channels=3).train.read(1).unique().tolist() == [1.0]
    with pytest.raises(DataError, match="16 channels, not 3"):
        open_data(str(tmp_path / "a.npy"), channels=3)


def test_arrays_beside_images_are_not_images(tmp_path: Path):
    write_images(tmp_path, 2)
    np.save(tmp_path / "features.npy", np.zeros((2, 128)))
    assert len(open_data(str(tmp_path)).train) == 2


def test_heic_and_avif(tmp_path: Path):
    heif = pytest.importorskip("pillow_heif")
    photograph = smooth_image(64, 48)
    heif.from_pillow(photograph).save(tmp_path / "a.heic", quality=95)
    photograph.save(tmp_path / "b.avif", quality=95)
    source = open_data(str(tmp_path)).train
    for row in range(2):
        pixels = source.read(row).permute(1, 2, 0).numpy().astype(float)
        assert pixels.shape == (48, 64, 3) and np.abs(pixels - np.array(photograph)).mean() < 4


def test_missing_libraries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_image(tmp_path / "a", "tiff-samples", cells("tiff-samples", 0))
    (tmp_path / "b.dcm").write_bytes(dicom(cells("dicom", 0)[..., 0]))
    for library in ("tifffile", "pydicom"):
        monkeypatch.setitem(sys.modules, library, None)
    unreadable = check_data(open_data(str(tmp_path))).splits["train"].unreadable
    assert len(unreadable) == 2 and all("[scientific]" in reason for reason in unreadable.values())


@pytest.mark.parametrize("kind", ["npy", "tiff-float"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_refused(tmp_path: Path, value: float, kind: str):
    """Also of floats that are scaled to 8 bits, because they are among photographs."""
    if kind != "npy":
        noise_image(12, 8, seed=9).save(tmp_path / "a.png")
    for number in range(2):
        image = cells(kind, number)[..., :1]
        image[0, 0, 0] = value if number else 1
        write_image(tmp_path / str(number), kind, image)
    (unreadable,) = check_data(open_data(str(tmp_path))).splits["train"].unreadable
    assert unreadable.startswith("1.")


def test_check_names_images_of_other_channels(tmp_path: Path):
    for number, channels in enumerate((2, 4)):
        np.save(tmp_path / f"{number}.npy", cells("npy", number)[..., :channels])
    with pytest.raises(DataError, match=r"1\.npy has 4 channels, but 0\.npy has 2|0\.npy has 2 .* 1\.npy has 4"):
        check_data(open_data(str(tmp_path)))


@pytest.mark.filterwarnings("ignore:End of file")
def test_dicom_without_an_image(tmp_path: Path):
    """Folders of scanners hold reports and plans too."""
    pydicom = pytest.importorskip("pydicom")
    content = dicom(cells("dicom", 0)[..., 0])
    report = pydicom.dcmread(io.BytesIO(content))
    for name in ("Rows", "Columns", "BitsAllocated", "PixelRepresentation", "PixelData"):
        delattr(report, name)
    report.save_as(tmp_path / "report.dcm", enforce_file_format=True)
    (tmp_path / "image.dcm").write_bytes(content)
    (tmp_path / "junk.dcm").write_bytes(bytes(128) + b"DICM" + b"\xff" * 40)
    unreadable = check_data(open_data(str(tmp_path))).splits["train"].unreadable
    assert unreadable == dict.fromkeys(("junk.dcm", "report.dcm"), "it holds no image")


@pytest.mark.filterwarnings("ignore:.*zero-size")
def test_images_without_pixels_or_with_too_many_channels_are_refused(tmp_path: Path, caplog):
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "empty.tif", np.zeros((0, 0), np.uint16))
    tifffile.imwrite(tmp_path / "many.tif", np.zeros((9, 8, 20), np.uint16), planarconfig="contig")
    report = check_data(open_data(str(tmp_path))).splits["train"]
    assert report.unreadable.keys() == {"empty.tif", "many.tif"}
    assert all("its shape is" in str(reason) for reason in report.unreadable.values())
    assert not caplog.records
    np.save(tmp_path / "ok.npy", np.zeros((9, 8)))
    with pytest.raises(NoReadableImages, match=r"empty\.tif: its shape is"):
        data_facts(open_data(str(tmp_path)).train)


def test_compressed_tiffs_need_no_imagecodecs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tifffile = pytest.importorskip("tifffile")
    monkeypatch.setattr(tifffile.TIFF, "DECOMPRESSORS", {1: None})
    values = cells("tiff", 0)[..., 0]
    Image.fromarray(values).save(tmp_path / "a.tif", compression="tiff_lzw")
    source = open_data(str(tmp_path)).train
    assert pixel_format(source)[:2] == (1, FLOAT)
    np.testing.assert_allclose(source.read(0)[0] * 65_535, values, atol=0.01)
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "a.tif", compression="tiff_lzw")
    np.testing.assert_array_equal(open_data(str(tmp_path)).train.read(0)[0], values)


def test_tiffs_that_pillow_cannot_read_among_photographs(tmp_path: Path):
    tifffile = pytest.importorskip("tifffile")
    write_images(tmp_path, 2)
    values = np.arange(216, dtype=np.float32).reshape(9, 8, 3)
    tifffile.imwrite(tmp_path / "float.tif", values, photometric="rgb")
    source = open_data(str(tmp_path)).train
    row = next(row for row in range(3) if source.name_of(row) == "float.tif")
    assert np.array_equal(source.read(row).permute(1, 2, 0), (values * (255 / 215)).round())


def test_only_the_first_place_of_a_compressed_stack_is_decoded(tmp_path: Path):
    tifffile = pytest.importorskip("tifffile")
    values = np.random.default_rng(0).integers(0, 65_536, (3, 4, 8, 9)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "a.ome.tif", values, metadata={"axes": "CZYX"}, compression="zlib")
    content = bytearray((tmp_path / "a.ome.tif").read_bytes())
    with tifffile.TiffFile(tmp_path / "a.ome.tif") as tiff:
        for number, page in enumerate(tiff.pages):
            if number % 4:  # of other depths: damage it
                start, count = page.dataoffsets[0], page.databytecounts[0]
                content[start : start + count] = bytes(count)
    (tmp_path / "a.ome.tif").write_bytes(content)
    np.testing.assert_allclose(open_data(str(tmp_path)).train.read(0), values[:, 0] / 65_535, atol=1e-7)


def test_odd_metadata_of_a_tiff(tmp_path: Path):
    tifffile = pytest.importorskip("tifffile")
    photograph = noise_image(12, 8)
    photograph.save(tmp_path / "a.tif", tiffinfo={270: "ImageJ=1.5\nimages=9\nslices=many"})
    tifffile.imwrite(tmp_path / "b.tif", np.zeros((6, 5, 8, 9), np.uint16), photometric="minisblack")
    data = open_data(str(tmp_path))
    assert np.array_equal(data.train.read(0).permute(1, 2, 0), np.array(photograph))
    (report,) = check_data(data).splits.values()
    assert report.kinds == {"TIFF RGB": 1} and "with axes" in str(report.unreadable["b.tif"])


def test_colors_of_unknown_range_are_not_clamped(tmp_path: Path):
    tifffile = pytest.importorskip("tifffile")
    for number in range(20):
        values = np.random.default_rng(number).uniform(0, 1000, (20, 20, 3)).astype(np.float32)
        tifffile.imwrite(tmp_path / f"{number}.tif", values, photometric="rgb")
    facts = data_facts(open_data(str(tmp_path)).train)
    assert not facts.color and not resolve(build_settings("folder"), facts)[0].views.color
    with pytest.raises(SettingsError, match=r"views\.color=false"):
        resolve(build_settings("folder", values={"views.color": True}), facts)


def test_bits_that_pillow_does_not_read_are_reported(tmp_path: Path):
    values = np.random.default_rng(0).integers(0, 65_536, (9, 8, 4)).astype(">u2")
    header = b"IHDR" + struct.pack(">IIBBBBB", 8, 9, 16, 6, 0, 0, 0)
    rows = b"IDAT" + zlib.compress(b"".join(b"\0" + row.tobytes() for row in values))
    parts = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (header, rows)]
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts) + b"\0\0\0\0IEND\xaeB`\x82")
    (tmp_path / "b.ppm").write_bytes(b"P6 8 9 65535\n" + values[..., :3].tobytes())
    report = check_data(open_data(str(tmp_path)))
    assert report.as_dict()["train_sixteen_bit"] == 2 and len(report.splits["train"].warnings) == 1


def test_gray_pgm_is_scaled_as_16_bit_png(tmp_path: Path):
    values = np.random.default_rng(0).integers(0, 65_536, (9, 8)).astype(">u2")
    (tmp_path / "a.pgm").write_bytes(b"P5 8 9 65535\n" + values.tobytes())
    np.testing.assert_allclose(open_data(str(tmp_path)).train.read(0)[0], values / 65_535, atol=1e-7)


def test_palettes_have_color(tmp_path: Path):
    for suffix in ("png", "gif"):
        noise_image(12, 8).quantize().save(tmp_path / f"a.{suffix}")
    report = check_data(open_data(str(tmp_path)))
    assert report.as_dict()["train_gray"] == 0 and not report.splits["train"].warnings


def test_pickled_objects_are_never_loaded(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.array([[CreatesFile(tmp_path / "ran")]], dtype=object), allow_pickle=True)
    assert "a.npy" in check_data(open_data(str(tmp_path))).splits["train"].unreadable
    with pytest.raises(DataError, match=r"a\.npy"):
        open_data(str(tmp_path / "a.npy"))
    assert not (tmp_path / "ran").exists()


class CreatesFile:
    """An object whose unpickling creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)
