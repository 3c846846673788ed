import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from jcl.data import ArrayImages, open_data
from jcl.errors import DataError

DRAW = np.random.default_rng(0)
COLOUR = DRAW.integers(0, 256, (5, 6, 7, 3), dtype=np.uint8)  # (n, h, w, 3)
GRAY = COLOUR[..., 0]


def opened(file: Path, **arrays: object) -> ArrayImages:
    np.savez(file, **arrays)
    train = open_data(str(file)).train
    assert isinstance(train, ArrayImages)
    return train


@pytest.mark.parametrize("images", [COLOUR, COLOUR.transpose(0, 3, 1, 2)], ids=["NHWC", "NCHW"])
def test_color_layouts(tmp_path: Path, images: np.ndarray):
    train = opened(tmp_path / "a.npz", x_train=images)
    assert torch.equal(train.pixels, torch.from_numpy(COLOUR).permute(0, 3, 1, 2))
    assert train.labels is None


@pytest.mark.parametrize("images", [GRAY, GRAY[..., None], GRAY[:, None]], ids=["NHW", "NHW1", "N1HW"])
def test_gray_layouts(tmp_path: Path, images: np.ndarray):
    train = opened(tmp_path / "a.npz", x_train=images)
    assert torch.equal(train.pixels, torch.from_numpy(GRAY)[:, None].expand(5, 3, 6, 7))


def test_all_four_arrays(tmp_path: Path):
    file = tmp_path / "set.npz"
    np.savez(file, x_train=COLOUR, y_train=np.arange(5, dtype=np.uint8), x_test=COLOUR[:2], y_test=[[7], [8]])
    data = open_data(str(file))
    assert data.name == "set" and data.test is not None
    assert data.train.labels is not None and data.train.labels.tolist() == [0, 1, 2, 3, 4]
    assert data.train.labels.dtype == torch.int64
    assert data.test.labels is not None and data.test.labels.tolist() == [7, 8]
    assert torch.equal(data.test.read(1), data.train.read(1))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": COLOUR}, "x_train.*images"),
        ({"x_train": np.where(COLOUR, np.nan, 1.0)}, "x_train in .* NaN"),
        ({"x_train": COLOUR.astype(complex)}, "x_train in .* complex128"),
        ({"x_train": COLOUR[0, 0]}, r"shape is \(7, 3\)"),
        ({"x_train": np.zeros((5, 20, 20, 17), np.uint8)}, r"shape is \(5, 20, 20, 17\)"),
        ({"x_train": COLOUR[:0]}, "no images in x_train"),
        ({"x_train": COLOUR, "y_train": [1, 2]}, r"5 images and labels of shape \(2,\)"),
        ({"x_train": COLOUR, "y_train": [0.5] * 5}, "y_train in .*float64"),
        ({"x_train": COLOUR, "x_test": COLOUR[:, 1:]}, r"uint8 of \(3, 6, 7\), those of x_test .*uint8 of \(3, 5, 7\)"),
        ({"x_train": COLOUR, "y_train": np.array([{}] * 5)}, "y_train"),
        ({"x_train": COLOUR, "x_test": COLOUR.astype(np.int64)}, "x_train are torch.uint8.*x_test torch.float32"),
    ],
)
def test_wrong_content_is_named(tmp_path: Path, arrays: dict[str, object], message: str):
    with pytest.raises(DataError, match=message):
        opened(tmp_path / "a.npz", **arrays)


def test_pickled_content_is_not_run(tmp_path: Path):
    ran = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> object:
            return (Path.touch, (ran,))

    np.savez(tmp_path / "a.npz", x_train=np.array([Trap()], dtype=object))
    with pytest.raises(DataError, match="x_train"):
        open_data(str(tmp_path / "a.npz"))
    assert not ran.exists()


def test_no_npz_file(tmp_path: Path):
    file = tmp_path / "a.npz"
    with pytest.raises(DataError, match="does not exist"):
        open_data(str(file))
    file.write_bytes(b"something else")
    with pytest.raises(DataError, match=r"a\.npz"):
        open_data(str(file))


def test_truncated_npz(tmp_path: Path):
    file = tmp_path / "a.npz"
    np.savez(file, x_train=COLOUR)
    file.write_bytes(file.read_bytes()[:-60])
    with pytest.raises(DataError, match=r"a\.npz"):
        open_data(str(file))


def test_array_images_check_what_they_are_given():
    with pytest.raises(DataError, match="uint8 or float32 tensor"):
        ArrayImages(torch.zeros(2, 3, 4, 4, dtype=torch.float64))
    with pytest.raises(DataError, match="labels of shape"):
        ArrayImages(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("harm", ["content", "password", "packing"])
def test_a_damaged_file_is_a_sentence(tmp_path: Path, harm: str):
    file = tmp_path / "a.npz"
    np.savez_compressed(file, x_train=COLOUR.repeat(40, axis=0) // 64)
    content = bytearray(file.read_bytes())
    entry = content.index(b"PK\x01\x02")  # in the list of what the file holds
    if harm == "content":
        content[200:240] = bytes(byte ^ 0xFF for byte in content[200:240])
    elif harm == "password":
        content[entry + 8] |= 1
    else:
        content[entry + 10] = 99
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"x_train.*damaged"):
        open_data(str(file))


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("(1000000000000, 3, 32, 32)", "memory"),
        (f"({10**30}, 3)", "is damaged"),
        ("(True, 3, 3)", "is damaged"),
        ("(5,", "is damaged"),
    ],
)
def test_a_shape_that_makes_no_sense_is_a_sentence(tmp_path: Path, shape: str, said: str):
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".encode()
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("x_train.npy", content)
    with pytest.raises(DataError, match=f"x_train.*{said}"):
        open_data(str(tmp_path / "a.npz"))
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(DataError, match=said):
        open_data(str(tmp_path / "a.npy"))


def test_damage_in_every_packing_is_a_sentence(tmp_path: Path):
    np.save(tmp_path / "x.npy", DRAW.integers(0, 256, (40, 6, 7, 3), dtype=np.uint8))
    for packing in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(tmp_path / "a.npz", "w", packing) as file:
            file.write(tmp_path / "x.npy", "x_train.npy")
        content = bytearray((tmp_path / "a.npz").read_bytes())
        content[400:440] = bytes(byte ^ 0xFF for byte in content[400:440])
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"x_train.*damaged"):
            open_data(str(tmp_path / "a.npz"))


def test_labels_below_none_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"y_train.*from -1"):
        opened(tmp_path / "a.npz", x_train=COLOUR, y_train=[0, 1, -1, -2, 1])
