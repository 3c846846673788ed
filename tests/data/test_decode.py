import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import noise_image, smooth_image
from PIL import Image, ImageOps
from torch import Tensor

from jcl.data import UnreadableImage
from jcl.data import decode as decoding
from jcl.data.decode import decode

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # as in a run; pytest undoes our own filter


def pixels_of(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def mean_difference(first: Tensor, second: Tensor) -> float:
    return (first.float() - second.float()).abs().mean().item()


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM", "TGA"])
def test_lossless_formats_are_exact(format: str):
    image = noise_image(13, 7)
    assert torch.equal(decode(saved(image, format)), pixels_of(image))


@pytest.mark.parametrize("format", ["JPEG", "WEBP", "JPEG2000"])
def test_lossy_formats_are_close(format: str):
    image = smooth_image(64, 48)
    assert mean_difference(decode(saved(image, format)), pixels_of(image)) < 3


def test_gray_is_repeated():
    values = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5
    pixels = decode(saved(Image.fromarray(values), "PNG"))
    assert torch.equal(pixels, torch.from_numpy(values).expand(3, 6, 8))


def test_one_bit_image_is_black_and_white():
    values = np.eye(8, dtype=bool)
    assert torch.equal(decode(saved(Image.fromarray(values), "PNG"))[0], torch.from_numpy(values).to(torch.uint8) * 255)


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_is_scaled_not_clipped(format: str):
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    expected = (values.astype(np.float64) / 65535 * 255).round()
    pixels = decode(saved(Image.fromarray(values), format))
    assert torch.equal(pixels[0].double(), torch.from_numpy(expected))


@pytest.mark.parametrize(
    ("least", "greatest", "expected"), [(0.0, 1.0, (0, 255)), (0.0, 0.5, (0, 128)), (-3.0, 9.0, (0, 255))]
)
def test_float_images(least: float, greatest: float, expected: tuple[int, int]):
    values = np.linspace(least, greatest, 16, dtype=np.float32).reshape(4, 4)
    pixels = decode(saved(Image.fromarray(values), "TIFF"))
    assert (int(pixels.min()), int(pixels.max())) == expected


def test_palette():
    image = smooth_image(16, 16).quantize(16)
    assert torch.equal(decode(saved(image, "PNG")), pixels_of(image))


def test_alpha_is_shown_over_white():
    values = np.zeros((2, 3, 4), dtype=np.uint8)
    values[0, :, 3] = 255  # opaque black above, transparent below
    values[1, 2] = (0, 0, 0, 128)
    pixels = decode(saved(Image.fromarray(values), "PNG"))
    assert pixels[:, 0].unique().tolist() == [0]
    assert pixels[:, 1, :2].unique().tolist() == [255]
    assert pixels[:, 1, 2].tolist() == [127, 127, 127]


def test_transparent_palette_color_is_shown_as_white():
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 200, 10, 10])
    image.putpixel((0, 0), 0)
    pixels = decode(saved(image, "PNG", transparency=1))
    assert pixels[:, 0, 0].tolist() == [0, 0, 0]
    assert pixels[:, 3, 3].tolist() == [255, 255, 255]


def test_gray_with_alpha():
    image = Image.new("LA", (3, 3), (10, 0))
    assert decode(saved(image, "PNG")).unique().tolist() == [255]


def test_cmyk():
    image = smooth_image(32, 32)
    assert mean_difference(decode(saved(image.convert("CMYK"), "JPEG")), pixels_of(image)) < 6
    assert mean_difference(decode(saved(image.convert("CMYK"), "TIFF")), pixels_of(image)) < 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("canvas", [None, 20])
@pytest.mark.parametrize("format", ["JPEG", "TIFF", "PNG"])
def test_camera_orientation_is_obeyed(orientation: int, canvas: int | None, format: str):
    """Store the picture as a camera held that way would; decoding gives it back upright."""
    upright = smooth_image(60, 40)
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Transpose operations that turn upright into stored
    stored = upright.transpose(Image.Transpose(undo[orientation])) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decode(saved(stored, format, exif=exif, quality=95), canvas)
    expected = upright if canvas is None else upright.resize((20, 13), Image.Resampling.BILINEAR)
    assert pixels.shape == pixels_of(expected).shape
    assert mean_difference(pixels, pixels_of(expected)) < 4


def test_separate_planes_of_16_bits_are_refused():
    """Pillow would read them as 8 bits."""
    tifffile = pytest.importorskip("tifffile")
    stream = io.BytesIO()
    values = np.zeros((3, 8, 8), dtype=np.uint16)
    tifffile.imwrite(stream, values, photometric="rgb", planarconfig="separate")
    with pytest.raises(UnreadableImage, match="interleaved"):
        decode(stream.getvalue())


def test_damaged_exif_does_not_matter():
    content = saved(smooth_image(16, 16), "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff")
    assert decode(content).shape == (3, 16, 16)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation(format: str):
    frames = [Image.new("RGB", (8, 8), color) for color in ("#ff0000", "#00ff00", "#0000ff")]
    options = {"lossless": True} if format == "WEBP" else {}
    content = saved(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert decode(content)[:, 4, 4].tolist() == [255, 0, 0]


def test_tiny():
    assert decode(saved(Image.new("RGB", (1, 1), (3, 2, 1)), "PNG"), canvas=64)[:, 0, 0].tolist() == [3, 2, 1]


def test_very_long_image_keeps_a_pixel():
    assert decode(saved(Image.new("RGB", (3000, 2)), "PNG"), canvas=100).shape == (3, 2, 100)
    assert decode(saved(Image.new("RGB", (3000, 2)), "PNG"), canvas=100, window=None).shape == (3, 1, 100)


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize(("width", "height"), [(640, 480), (481, 641), (1900, 300), (320, 320)])
def test_fits_the_canvas_and_keeps_the_aspect_ratio(format: str, width: int, height: int):
    image = smooth_image(width, height)
    pixels = decode(saved(image, format, quality=95), canvas=160, window=None)
    scale = 160 / max(width, height)
    assert max(pixels.shape) == 160
    assert abs(pixels.shape[1] - height * scale) < 1 and abs(pixels.shape[2] - width * scale) < 1
    expected = image.resize((pixels.shape[2], pixels.shape[1]), Image.Resampling.BILINEAR)
    assert mean_difference(pixels, pixels_of(expected)) < 2


def test_never_enlarged():
    assert decode(saved(noise_image(20, 10), "PNG"), canvas=64).shape == (3, 10, 20)


def test_reduction_is_antialiased():
    """A pattern finer than the canvas turns into its mean, not into a coarse pattern."""
    values = np.zeros((256, 256), dtype=np.uint8)
    values[:, ::2] = 255
    pixels = decode(saved(Image.fromarray(values), "PNG"), canvas=32)
    assert (pixels[:, :, 2:-2].float() - 127.5).abs().max() < 4


def test_content_decides_not_the_extension(tmp_path: Path):
    file = tmp_path / "picture.jpg"
    file.write_bytes(saved(noise_image(5, 4), "PNG"))
    assert torch.equal(decode(file), pixels_of(noise_image(5, 4)))


def test_pixel_limit(monkeypatch: pytest.MonkeyPatch):
    content = saved(Image.new("1", (100, 100)), "PNG")
    monkeypatch.setattr(decoding, "PIXEL_LIMIT", 10_000)
    assert decode(content).shape == (3, 100, 100)
    monkeypatch.setattr(decoding, "PIXEL_LIMIT", 9_999)
    with pytest.raises(UnreadableImage, match=r"100 x 100 pixels.*9,999"):
        decode(content)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4_000)  # Pillow's own limit is half of what it refuses
    with pytest.raises(UnreadableImage, match="far too many pixels, more than the limit"):
        decode(content)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP"])
def test_truncated(format: str):
    content = saved(noise_image(64, 64), format)
    with pytest.raises(UnreadableImage):
        decode(content[: len(content) // 2], canvas=32)


def test_changed_bytes_never_escape_as_another_error():
    """Whatever is wrong with the content, it is read or reported, and nothing else happens."""
    draw = np.random.default_rng(0)
    unreadable = 0
    for format in ("JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP"):
        content = np.frombuffer(saved(noise_image(24, 24), format), dtype=np.uint8)
        for _ in range(40):
            changed = content.copy()
            changed[draw.integers(0, len(changed), 6)] = draw.integers(0, 256, 6)
            try:
                assert decode(changed.tobytes(), canvas=16).shape[0] == 3
            except UnreadableImage:
                unreadable += 1
    assert unreadable > 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "empty"), (b"just some text", "format")],
)
def test_no_image_at_all(tmp_path: Path, content: bytes, reason: str):
    file = tmp_path / "picture.png"
    file.write_bytes(content)
    with pytest.raises(UnreadableImage) as caught:
        decode(file)
    assert reason in caught.value.reason and str(file) in str(caught.value)


def test_missing_file(tmp_path: Path):
    with pytest.raises(UnreadableImage, match=r"none\.png"):
        decode(tmp_path / "none.png")


def test_format_that_would_start_another_program_is_refused():
    with pytest.raises(UnreadableImage, match="format"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")


def test_error_survives_the_way_out_of_a_worker():
    error = pickle.loads(pickle.dumps(UnreadableImage("a.png", "the file is empty")))
    assert (error.name, error.reason) == ("a.png", "the file is empty")


def test_sixteen_bit_big_endian_tiff():
    values = np.linspace(0, 65535, 16).astype(">u2").reshape(4, 4)
    image = Image.frombytes("I;16B", (4, 4), values.tobytes())
    assert torch.equal(decode(saved(image, "TIFF"))[0].double(), torch.from_numpy((values.astype(float) / 257).round()))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("canvas", [None, 40, 30])
def test_jpegs_have_the_pixels_that_pillow_decodes(mode: str, orientation: int, canvas: int | None):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(smooth_image(40, 26).convert(mode), "JPEG", exif=exif, progressive=mode == "L")
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    if canvas == 30:
        size = (30, 19) if orientation == 1 else (19, 30)
        assert mean_difference(decode(data, canvas), pixels_of(upright.resize(size, Image.Resampling.BILINEAR))) < 1
    else:
        assert torch.equal(decode(data, canvas), pixels_of(upright))
