from pathlib import Path

import pytest
import torch
from image_files import folder_of_sizes, loader_for, write_images

from jcl.data import ArrayImages, ImageBatch, ImageSource, open_data, read_all
from jcl.data.workers import DecodingPool
from jcl.errors import DataError


def array_source(count: int = 23) -> ArrayImages:
    return ArrayImages(torch.randint(0, 256, (count, 3, 6, 8), dtype=torch.uint8))


def assert_same(first: list[ImageBatch], second: list[ImageBatch]) -> None:
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.pixels, other.pixels)
        assert torch.equal(one.sizes, other.sizes)
        assert torch.equal(one.samples, other.samples)


def indices(batches: list[ImageBatch]) -> list[int]:
    return torch.cat([batch.samples for batch in batches]).tolist()


def spoil(root: Path, *numbers: int) -> None:
    for number in numbers:
        (root / f"{number:03}.png").write_bytes(b"spoilt")


@pytest.fixture(params=["arrays", "folder"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> ImageSource:
    return array_source() if request.param == "arrays" else folder_of_sizes(tmp_path, 23)


def test_an_epoch_is_full_batches_of_different_images(source: ImageSource):
    loader = loader_for(source)
    batches = list(loader.epoch(0))
    assert loader.steps_per_epoch == len(batches) == 5
    assert all(len(batch) == 4 for batch in batches)
    assert len(set(indices(batches))) == 20 and set(indices(batches)) <= set(range(23))


def test_order_is_a_function_of_seed_and_epoch(source: ImageSource):
    orders = {
        (seed, epoch): tuple(indices(list(loader_for(source, seed=seed).epoch(epoch))))
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    }
    assert len(set(orders.values())) == 6
    assert indices(list(loader_for(source, seed=1).epoch(2))) == list(orders[1, 2])


def test_over_many_epochs_every_image_comes_equally_often():
    loader = loader_for(array_source(), batch_size=8)
    counts = torch.zeros(23)
    for epoch in range(200):
        for batch in loader.epoch(epoch):
            counts[batch.samples] += 1
    expected = 200 * 16 / 23  # standard deviation sqrt(200 * 16/23 * 7/23) = 6.5
    assert (counts - expected).abs().max() < 4.5 * 6.5


def test_rows_are_the_images_on_their_canvases(tmp_path: Path):
    source = folder_of_sizes(tmp_path, 12)
    for batch in loader_for(source).epoch(0):
        assert batch.pixels.dtype == torch.uint8 and batch.pixels.shape == (4, 3, 16, 16)
        for pixels, (height, width), sample in zip(
            batch.pixels, batch.sizes.tolist(), batch.samples.tolist(), strict=True
        ):
            image = source.read(sample, 16)
            assert image.shape == (3, height, width)
            assert torch.equal(pixels[:, :height, :width], image)
            assert int(pixels.sum()) == int(image.sum())  # zeros around it


def test_arrays_are_their_own_canvas():
    source = array_source()
    (batch,) = loader_for(source, batch_size=23).epoch(0)
    assert torch.equal(batch.pixels, source.pixels[batch.samples])
    assert batch.sizes.tolist() == [[6, 8]] * 23


def test_canvas_is_no_larger_than_the_images(tmp_path: Path):
    write_images(tmp_path, 8, width=12, height=8)
    batch = next(iter(loader_for(open_data(str(tmp_path)).train, canvas=320).epoch(0)))
    assert batch.pixels.shape == (4, 3, 12, 12)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("cache_bytes", [0, 10**9], ids=["decoded", "kept"])
def test_any_start_continues_the_unbroken_run(tmp_path: Path, workers: int, cache_bytes: int):
    """Bit for bit, whatever the workers, wherever it stopped, and with images kept in memory or not."""
    source = folder_of_sizes(tmp_path, 23)
    spoil(tmp_path, 3, 4)
    reference = loader_for(source, cache_bytes=0)
    unbroken = [list(reference.epoch(epoch)) for epoch in range(3)]
    with loader_for(source, workers=workers, cache_bytes=cache_bytes) as loader:
        for start in range(5):
            assert_same(list(loader.epoch(1, start)), unbroken[1][start:])
        assert list(loader.epoch(1, 5)) == []
        assert_same(list(loader.epoch(2)), unbroken[2])
        assert loader.skipped == reference.skipped


@pytest.mark.parametrize("start", range(6))
def test_arrays_continue_from_any_step(start: int):
    source = array_source()
    unbroken = list(loader_for(source).epoch(3))
    resumed = list(loader_for(source).epoch(3, start))
    assert len(resumed) == 5 - start
    if resumed:
        assert_same(resumed, unbroken[start:])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_left_early_does_not_leak_into_the_next(tmp_path: Path, workers: int):
    source = folder_of_sizes(tmp_path, 23)
    expected = list(loader_for(source).epoch(1))
    with loader_for(source, workers=workers, cache_bytes=0) as loader:
        left = loader.epoch(0)
        next(left)
        assert_same(list(loader.epoch(1)), expected)


def test_each_file_is_decoded_once_when_images_are_kept(tmp_path: Path):
    """After the first epoch the files may go: nothing reads them any more, not even those that epoch left out."""
    source = folder_of_sizes(tmp_path, 23)
    spoil(tmp_path, 7)
    reference = loader_for(source, cache_bytes=0)
    expected = [list(reference.epoch(epoch)) for epoch in range(4)]
    loader = loader_for(source)
    assert_same(list(loader.epoch(0, start=2)), expected[0][2:])
    for file in tmp_path.iterdir():
        file.unlink()
    for epoch in range(1, 4):
        assert_same(list(loader.epoch(epoch)), expected[epoch])


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_are_skipped_and_listed(tmp_path: Path, workers: int):
    source = folder_of_sizes(tmp_path, 12)
    spoil(tmp_path, 2, 3, 11)
    with loader_for(source, workers=workers) as loader:
        batches = list(loader.epoch(0))
        assert sorted(loader.skipped) == [f"{number:03}.png" for number in (2, 3, 11)]
    # The next readable image stands in: 4 for 2 and 3, the first one for the last.
    assert sorted(indices(batches)) == sorted([0, 1, 4, 4, 4, 5, 6, 7, 8, 9, 10, 0])


@pytest.mark.parametrize("workers", [0, 1])
def test_strict_stops_at_a_broken_image(tmp_path: Path, workers: int):
    source = folder_of_sizes(tmp_path, 8)
    spoil(tmp_path, 6)
    with loader_for(source, workers=workers, strict=True) as loader:
        with pytest.raises(DataError, match=r"006\.png"):
            list(loader.epoch(0))
        with pytest.raises(DataError, match=r"006\.png"):
            list(read_all(source, canvas=16, batch_size=4, workers=workers, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_no_readable_image_is_an_error_not_a_loop(tmp_path: Path, workers: int):
    source = folder_of_sizes(tmp_path, 9)
    spoil(tmp_path, *range(9))
    with (
        loader_for(source, workers=workers) as loader,
        pytest.raises(DataError, match="None of the images"),
    ):
        list(loader.epoch(0))
    with pytest.raises(DataError, match=r"000\.png"):
        list(read_all(source, canvas=16, batch_size=4, workers=workers))


@pytest.mark.parametrize("cache_bytes", [0, 10**9])
def test_images_that_vanish_within_a_batch_are_an_error_not_a_short_batch(tmp_path: Path, cache_bytes: int):
    source = folder_of_sizes(tmp_path, 12)
    read = source.read

    class Vanishing(type(source)):  # type: ignore[misc]
        reads = 0

        def read(self, index: int, canvas: int | None = None, window: float | None = 0.5) -> torch.Tensor:
            Vanishing.reads += 1
            if Vanishing.reads == 11:  # after two batches and two images of the third
                spoil(tmp_path, *range(12))
            return read(index, canvas, window)

    source.__class__ = Vanishing
    with loader_for(source, cache_bytes=cache_bytes) as loader:
        Vanishing.reads = 0
        batches = loader.epoch(0)
        assert len(next(batches)) == len(next(batches)) == 4
        with pytest.raises(DataError, match="None of the images"):
            list(batches)


def test_batch_larger_than_the_data(source: ImageSource):
    with pytest.raises(DataError, match=r"24.*at most 23"):
        loader_for(source, batch_size=24)


@pytest.mark.parametrize("workers", [0, 2])
def test_read_all_gives_everything_in_order(tmp_path: Path, workers: int):
    source = folder_of_sizes(tmp_path, 11)
    spoil(tmp_path, 4, 5)
    skipped: dict[str, str] = {}
    batches = list(read_all(source, canvas=16, batch_size=2, workers=workers, skipped=skipped))
    assert indices(batches) == [0, 1, 2, 3, 6, 7, 8, 9, 10]
    assert sorted(skipped) == ["004.png", "005.png"]
    for batch in batches:
        for pixels, (height, width), sample in zip(
            batch.pixels, batch.sizes.tolist(), batch.samples.tolist(), strict=True
        ):
            assert torch.equal(pixels[:, :height, :width], source.read(sample, 16))


def test_read_all_of_arrays():
    source = array_source(7)
    batches = list(read_all(source, canvas=99, batch_size=3))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert torch.equal(torch.cat([batch.pixels for batch in batches]), source.pixels)


def test_batches_decoded_in_pieces_are_those_decoded_whole(tmp_path: Path):
    """Over several epochs, so that the workers' memory is used again, with stand-ins and with images left out."""
    source = folder_of_sizes(tmp_path, 40)
    spoil(tmp_path, 7, 8, 31)
    with (
        loader_for(source, batch_size=19, cache_bytes=0) as here,
        loader_for(source, batch_size=19, cache_bytes=0, workers=2) as there,
    ):
        for epoch in range(4):
            assert_same(list(here.epoch(epoch)), list(there.epoch(epoch)))
    assert here.skipped.keys() == there.skipped.keys()
    options = {"canvas": 16, "batch_size": 19}
    assert_same(list(read_all(source, **options)), list(read_all(source, **options, workers=2)))


def test_the_next_epoch_is_decoded_while_this_one_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One pass of the workers serves all epochs; a jump to another step starts a new pass."""
    passes = []
    decode = DecodingPool.decode
    monkeypatch.setattr(DecodingPool, "decode", lambda pool, requests: passes.append(1) or decode(pool, requests))
    source = folder_of_sizes(tmp_path, 13)
    with loader_for(source, workers=1, cache_bytes=0) as loader:
        first = [list(loader.epoch(epoch)) for epoch in (0, 1)]
        assert len(passes) == 1
        again = [list(loader.epoch(epoch)) for epoch in (0, 1)]
        assert len(passes) == 2
    for one, other in zip(first, again, strict=True):
        assert_same(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("cache_bytes", [0, 10**9], ids=["decoded", "kept"])
    def test_batches_are_those_of_the_cpu(self, tmp_path: Path, workers: int, cache_bytes: int):
        source = folder_of_sizes(tmp_path, 23)
        with loader_for(source, workers=workers, cache_bytes=cache_bytes, device="cuda") as loader:
            for epoch in range(3):
                batches = list(loader.epoch(epoch))
                assert all(batch.pixels.is_cuda for batch in batches)
                expected = list(loader_for(source).epoch(epoch))
                assert_same([batch.to("cpu") for batch in batches], expected)

    def test_arrays_stay_on_the_device(self):
        source = array_source()
        loader = loader_for(source, device="cuda")
        batches = list(loader.epoch(1))
        assert all(batch.pixels.is_cuda and batch.samples.is_cuda for batch in batches)
        assert_same([batch.to("cpu") for batch in batches], list(loader_for(source).epoch(1)))

    def test_copies_are_complete_when_they_are_used(self, tmp_path: Path):
        """Keep the device busy so that a copy that nobody waits for would be seen half done."""
        write_images(tmp_path, 64, width=256, height=256)
        source = open_data(str(tmp_path)).train
        loader = loader_for(source, canvas=256, batch_size=16, device="cuda", cache_bytes=0)
        busy = torch.randn(4096, 4096, device="cuda")
        sums = []
        for batch in loader.epoch(0):
            busy = busy @ busy
            sums.append(batch.pixels.long().sum((1, 2, 3)))
        expected = [
            batch.pixels.long().sum((1, 2, 3)) for batch in loader_for(source, canvas=256, batch_size=16).epoch(0)
        ]
        assert torch.equal(torch.cat(sums).cpu(), torch.cat(expected))


def test_none_readable_names_an_image_of_the_same_source(tmp_path: Path):
    """Though the list of what was skipped goes on from another one."""
    first, second = (folder_of_sizes(tmp_path / name, 3) for name in ("first", "second"))
    for file in (tmp_path / "second").rglob("*.png"):
        file.write_bytes(b"spoilt")
    skipped = {"elsewhere.png": "other"}
    list(read_all(first, canvas=16, batch_size=2, skipped=skipped))
    with pytest.raises(DataError, match="None of the images") as error:
        list(read_all(second, canvas=16, batch_size=2, skipped=skipped))
    assert "elsewhere.png" not in str(error.value)
    assert len(skipped) == 4
