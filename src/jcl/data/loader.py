"""Batches of images in an order that is a function of (seed, epoch), from wherever the images are."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final

import torch
from torch import Tensor

from jcl.data.batch import ImageBatch
from jcl.data.dealing import Dealer
from jcl.data.prefetch import prefetch_to_device
from jcl.data.reading import Decoded, ImageReader, canvas_for
from jcl.data.resident import GrowingStore, ResidentImages
from jcl.data.source import ArrayImages, ImageSource, NoneReadable, UnreadableImage
from jcl.data.workers import DecodingPool
from jcl.distributed.group import ALONE, Ranks
from jcl.errors import CollectiveDataError, DataError
from jcl.random import DATA_ORDER, permutation

KEPT_BYTES: Final = 2 * 1024**3
"""Decoded images are kept in memory from the first epoch on where all of them take no more than this."""


def refuse_large_batch(source: ImageSource, batch_size: int) -> None:
    """Raise where not even one batch can be had."""
    if batch_size > len(source):
        raise DataError(
            f"A batch of {batch_size} images is larger than the data ({source.description}); use a batch size of "
            f"at most {len(source)}."
        )


class BatchLoader:
    """Endless epochs of full batches; the last images of an epoch that fill no batch are left out of it.

    The batches depend on the source, the seed and the epoch, not on the number of workers, nor on where an epoch was
    started or whether the images were decoded or still in memory. Images that cannot be read are listed in `skipped`
    with the reason, and a stand-in takes their place; a `strict` loader raises instead. On several `ranks` each decodes
    its share of a batch of `batch_size` images and gets from the others what `num_keys` shuffled keys an image need.
    """

    def __init__(
        self,
        source: ImageSource,
        *,
        batch_size: int,
        canvas: int,
        seed: int,
        workers: int = 0,
        device: torch.device | str = "cpu",
        strict: bool = False,
        kept_bytes: int = KEPT_BYTES,
        ranks: Ranks = ALONE,
        num_keys: int = 1,
    ) -> None:
        refuse_large_batch(source, batch_size)
        self.steps_per_epoch = len(source) // batch_size
        self.skipped: dict[str, str] = {}
        self.batch_size = batch_size
        self._ranks, self._own_size = ranks, batch_size // ranks.count
        self._dealer = Dealer(ranks, seed, batch_size, num_keys) if ranks.count > 1 else None
        self._source, self._seed, self._strict = source, seed, strict
        self._device = torch.device(device)
        self._resident: ResidentImages | None = None
        self._store: GrowingStore | None = None
        if isinstance(source, ArrayImages):
            self._resident = ResidentImages(source.pixels, _full_sizes(source), None, self._device)
            canvas, workers = 0, 0
        else:
            canvas = canvas_for(source, canvas)
            if GrowingStore.bytes_needed(len(source), canvas) <= kept_bytes:
                self._store = GrowingStore(len(source), canvas)
        self._pool = DecodingPool(
            ImageReader(source, canvas, stand_ins=True), workers, self._own_size, self._device.type == "cuda"
        )
        self._stream: Iterator[Decoded] = iter(())  # of all epochs to come, so that workers do not pause between two
        self._stream_at: tuple[int, int] | None = None  # the epoch and step of the batch that comes next in it

    def epoch(self, number: int, start: int = 0) -> Iterator[ImageBatch]:
        """Give the batches of one epoch, from step `start` on; ends the epoch given before."""
        if self._store is not None and not self._store.missing():
            self._move_in(self._store)
        if self._resident is not None:
            return prefetch_to_device(self._device, self._resident_batches(self._resident, number, start))
        batches = prefetch_to_device(self._device, self._decoded_batches(number, start))
        return batches if self._dealer is None else self._exchanged(self._dealer, batches, number, start)

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _order(self, epoch: int, start: int, device: torch.device) -> tuple[Tensor, ...]:
        """The indices of each whole batch of an epoch from `start` on."""
        order = permutation(self._seed, DATA_ORDER, epoch, len(self._source), device)
        return torch.split(order[start * self.batch_size : self.steps_per_epoch * self.batch_size], self.batch_size)

    def _resident_batches(self, images: ResidentImages, epoch: int, start: int) -> Iterator[ImageBatch]:
        if start >= self.steps_per_epoch:
            return
        for step, indices in enumerate(self._order(epoch, start, images.device), epoch * self.steps_per_epoch + start):
            if self._dealer is None:
                yield images.batch(indices)
            else:  # every rank has every image, so there is nothing to exchange
                deal = self._dealer.deal(step)
                batch = images.batch(indices[deal.rows.to(images.device)])
                yield replace(batch, places=deal.places.to(images.device))

    def _exchanged(self, dealer: Dealer, batches: Iterator[ImageBatch], epoch: int, start: int) -> Iterator[ImageBatch]:
        batches = self._while_all_have_one(batches) if self._strict else batches
        for step, batch in enumerate(batches, epoch * self.steps_per_epoch + start):
            yield dealer.exchange(batch, dealer.deal(step))

    def _while_all_have_one(self, batches: Iterator[ImageBatch]) -> Iterator[ImageBatch]:
        """A rank that must not go on says so before the others wait for its images."""
        while True:
            batch, error = None, ""
            try:
                batch = next(batches, None)
            except DataError as met:
                error = str(met)
            if self._ranks.any(bool(error)):
                raise CollectiveDataError(next(filter(None, self._ranks.from_all(error))))
            if batch is None:
                return
            yield batch

    def _decoded_batches(self, epoch: int, start: int) -> Iterator[ImageBatch]:
        if self._store is not None:
            yield from self._decoded_to_keep(self._store, epoch, start)
            return
        if self._stream_at != (epoch, start):
            self._stream = self._pool.decode(self._requests(epoch, start, endless=True))
        for step in range(start, self.steps_per_epoch):
            self._stream_at = None  # until it is known that the batch has been given
            batch = self._as_batch(self._checked(next(self._stream), self._own_size))
            self._stream_at = (epoch, step + 1) if step + 1 < self.steps_per_epoch else (epoch + 1, 0)
            yield batch

    def _decoded_to_keep(self, store: GrowingStore, epoch: int, start: int) -> Iterator[ImageBatch]:
        """The batches of an epoch, and then the images that it left out, to complete the store."""
        requests = list(self._requests(epoch, start, endless=False))
        for indices, decoded in zip(requests, self._pool.decode(requests), strict=True):
            store.remember(indices, self._checked(decoded, len(indices)))
            yield self._as_batch(decoded)
        requests = _in_batches(store.missing(), self._own_size)
        for indices, decoded in zip(requests, self._pool.decode(requests), strict=True):
            store.remember(indices, self._checked(decoded, len(indices)))

    def _requests(self, epoch: int, start: int, endless: bool) -> Iterator[list[int]]:
        """This rank's indices of each batch from a step on, to the end of its epoch or for ever."""
        while True:
            if start < self.steps_per_epoch:
                for indices in self._order(epoch, start, torch.device("cpu")):
                    yield self._ranks.share(indices).tolist()
            if not endless:
                return
            epoch, start = epoch + 1, 0

    def _checked(self, decoded: Decoded, asked: int) -> Decoded:
        _note_skipped(decoded, self.skipped, self._strict)
        if len(decoded.samples) < asked:  # there was not even a stand-in: nothing can be read any more
            raise NoneReadable(self._source.description, self.skipped)
        return decoded

    def _as_batch(self, decoded: Decoded) -> ImageBatch:
        return _as_batch(decoded, self._device)

    def _move_in(self, store: GrowingStore) -> None:
        """Every image has been decoded: from now on batches come from memory, and the workers go."""
        self._resident = store.completed(self._device)
        self._store = None
        self.close()


def read_all(
    source: ImageSource,
    *,
    canvas: int,
    batch_size: int,
    device: torch.device | str = "cpu",
    workers: int = 0,
    strict: bool = False,
    skipped: dict[str, str] | None = None,
) -> Iterator[ImageBatch]:
    """Give every image once, in order, the last batch as small as it comes.

    Images that cannot be read are left out and entered into `skipped`, so `samples` says which ones are there;
    `strict` raises instead.
    """
    device = torch.device(device)
    batches: Iterator[ImageBatch]
    if isinstance(source, ArrayImages):
        images = ResidentImages(source.pixels, _full_sizes(source), None, torch.device("cpu"))
        batches = map(images.batch, torch.split(torch.arange(len(source)), batch_size))
    else:
        skipped = {} if skipped is None else skipped
        batches = _decode_all(source, canvas, batch_size, device, workers, strict, skipped)
    return prefetch_to_device(device, batches)


def _decode_all(
    source: ImageSource,
    canvas: int,
    batch_size: int,
    device: torch.device,
    workers: int,
    strict: bool,
    skipped: dict[str, str],
) -> Iterator[ImageBatch]:
    reader = ImageReader(source, canvas_for(source, canvas), stand_ins=False)
    pool = DecodingPool(reader, workers, batch_size, pinned=device.type == "cuda")
    requests = _in_batches(range(len(source)), batch_size)
    any_read, own_skipped = False, dict[str, str]()  # `skipped` may tell of other sources too
    try:
        for decoded in pool.decode(requests):
            _note_skipped(decoded, own_skipped, strict)
            skipped.update(decoded.skipped)
            if len(decoded.samples):
                any_read = True
                yield _as_batch(decoded, device)
        if not any_read:
            raise NoneReadable(source.description, own_skipped)
    finally:
        pool.close()


def _note_skipped(decoded: Decoded, skipped: dict[str, str], strict: bool) -> None:
    if decoded.skipped and strict:
        raise UnreadableImage(*next(iter(decoded.skipped.items())))
    skipped.update(decoded.skipped)


def _as_batch(decoded: Decoded, device: torch.device) -> ImageBatch:
    """Decoded images as a batch: a copy on the CPU; `prefetch_to_device` makes the copy on a GPU."""
    batch = ImageBatch(decoded.pixels, decoded.sizes, decoded.samples)
    return batch if device.type == "cuda" else batch.copied()


def _in_batches(indices: Sequence[int], batch_size: int) -> list[list[int]]:
    return [list(indices[start : start + batch_size]) for start in range(0, len(indices), batch_size)]


def _full_sizes(source: ArrayImages) -> Tensor:
    return torch.tensor(source.pixels.shape[2:]).expand(len(source), 2)
