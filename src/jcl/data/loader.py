"""Batches of images, in an order that is a function of (seed, epoch)."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from jcl.data.batch import Decoded, ImageBatch, ImageReader, canvas_for
from jcl.data.source import ArrayImages, ImageSource, NoReadableImages, UnreadableImage, pixel_format
from jcl.data.workers import DecodingPool
from jcl.distributed.group import ALONE, Ranks, catch_lost_contact
from jcl.errors import CollectiveDataError, DataError
from jcl.random import DATA_ORDER, KEY_SHUFFLE, permutation

CACHE_BYTES: Final = 2 * 1024**3  # decoded images are kept in memory if all of them take no more than this
_DEVICE_MEMORY_SHARE: Final = 0.3  # of the memory still free, so that the networks have room


def refuse_large_batch(source: ImageSource, batch_size: int) -> None:
    """Raise if the source is smaller than one batch."""
    if batch_size > len(source):
        remedy = f"use at most {len(source)}" if len(source) > 1 else "at least two images are needed"
        raise DataError(f"A batch of {batch_size} is larger than the data ({source.description}); {remedy}.")


class BatchLoader(contextlib.AbstractContextManager["BatchLoader"]):
    """Endless epochs of full batches; the last images of an epoch that fill no batch are dropped.

    The batches depend on the source, the seed and the epoch, not on the number of workers, the step an epoch starts at,
    or whether the images are decoded or in memory. Unreadable images are listed in `skipped` with the reason and
    replaced by others. A `strict` loader raises instead; every loader raises if more than `max_failed_share` are
    unreadable. Images longer than 2:1 and larger than the canvas are cut to random `windows`: another one in each
    epoch, or the same if all images are kept in memory. On several `ranks` each decodes its share of a batch of
    `batch_size` images and receives from the others what `num_keys` shuffled keys per image need.
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
        max_failed_share: float = 1.0,
        cache_bytes: int | None = None,
        windows: bool = True,
        ranks: Ranks = ALONE,
        num_keys: int = 1,
    ) -> None:
        refuse_large_batch(source, batch_size)
        self.steps_per_epoch = len(source) // batch_size
        self.skipped: dict[str, str] = {}
        self.batch_size = batch_size
        self._ranks, self._own_size = ranks, batch_size // ranks.count
        self._exchange = ImageExchange(ranks, seed, batch_size, num_keys) if ranks.count > 1 else None
        self._source, self._seed, self._strict = source, seed, strict
        self._max_failed_share = max_failed_share
        self._device = torch.device(device)
        self._resident: ImageBatch | None = None  # every image
        self._store: ImageBatch | None = None  # the same, being filled
        if isinstance(source, ArrayImages):
            self._resident = _to_device_if_it_fits(_all_images(source), self._device)
            canvas, workers = 0, 0
        else:
            canvas = canvas_for(source, canvas, 0.5 if windows else None)
            stored = pixel_format(source)
            size = len(source) * stored.channels * stored.dtype.itemsize * canvas * canvas
            if size <= (CACHE_BYTES if cache_bytes is None else cache_bytes):
                self._store = ImageBatch.empty(len(source), canvas, stored)
        reader = ImageReader(source, canvas, substitute=True, window=None, seed=seed if windows else None)
        self._pool = DecodingPool(reader, workers, self._own_size, pinned=self._device.type == "cuda")
        self._stream: Iterator[ImageBatch] = iter(())  # endless, so that workers do not pause between epochs
        self._stream_at: tuple[int, int] | None = None  # the epoch and step of its next batch

    def epoch(self, number: int, start: int = 0) -> Iterator[ImageBatch]:
        """Yield the batches of one epoch from step `start` on; ends the previous epoch."""
        if self._store is not None and not _missing(self._store):
            self._resident, self._store = _to_device_if_it_fits(self._store, self._device), None
            self.close()  # every image is decoded, so the workers are done
        if self._resident is not None:
            return prefetch_to_device(self._device, self._resident_batches(self._resident, number, start))
        batches = prefetch_to_device(self._device, self._decoded_batches(number, start))
        if (exchange := self._exchange) is None:
            return batches
        batches = self._raising_together(batches) if self._strict else batches
        steps = enumerate(batches, number * self.steps_per_epoch + start)
        return (exchange.run(batch, exchange.plan(step)) for step, batch in steps)

    def close(self) -> None:
        self._pool.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _order(self, epoch: int, start: int, device: torch.device) -> tuple[Tensor, ...]:
        """The indices of each whole batch of an epoch from `start` on."""
        order = permutation(self._seed, DATA_ORDER, epoch, len(self._source), device)
        order = order[start * self.batch_size : self.steps_per_epoch * self.batch_size]
        return torch.split(order, self.batch_size) if len(order) else ()

    def _resident_batches(self, images: ImageBatch, epoch: int, start: int) -> Iterator[ImageBatch]:
        device = images.pixels.device
        for step, indices in enumerate(self._order(epoch, start, device), epoch * self.steps_per_epoch + start):
            if self._exchange is None:
                yield images.gather(indices)
            else:  # every rank has every image, so there is nothing to exchange
                plan = self._exchange.plan(step)
                # Blocking copies would make the host wait for the device to finish the previous step.
                rows, local_rows = (part.to(device, non_blocking=True) for part in (plan.rows, plan.local_rows))
                yield replace(images.gather(indices[rows]), local_rows=local_rows)

    def _raising_together(self, batches: Iterator[ImageBatch]) -> Iterator[ImageBatch]:
        """Raise on all ranks if one cannot read an image, so that none waits for it."""
        while True:
            batch, error = None, ""
            try:
                batch = next(batches, None)
            except DataError as met:
                error = str(met)
            if self._ranks.any(bool(error)):
                raise CollectiveDataError(next(filter(None, self._ranks.gather_objects(error))))
            if batch is None:
                return
            yield batch

    def _decoded_batches(self, epoch: int, start: int) -> Iterator[ImageBatch]:
        """The batches of an epoch. At its end, the images in no batch are decoded too, to complete the store."""
        if self._stream_at != (epoch, start):
            self._stream = self._decode(self._requests(epoch, start))
        for step in range(start, self.steps_per_epoch):
            self._stream_at = None  # until the batch has been received
            batch = _copy_from_workers(next(self._stream), self._device)
            self._stream_at = (epoch, step + 1) if step + 1 < self.steps_per_epoch else (epoch + 1, 0)
            yield batch
        if self._store is not None:
            self._stream_at = None
            for _ in self._decode(iter(_in_batches(_missing(self._store), self._own_size))):
                pass

    def _decode(self, requests: Iterator[list[int]]) -> Iterator[ImageBatch]:
        wanted, requests = itertools.tee(requests)
        for indices, decoded in zip(wanted, self._pool.decode(requests), strict=True):
            batch = self._checked(decoded, len(indices))
            if self._store is not None:
                self._store.put(indices, batch)
            yield batch

    def _requests(self, epoch: int, start: int) -> Iterator[list[int]]:
        """This rank's indices of each batch from a step on, without end."""
        while True:
            for indices in self._order(epoch, start, torch.device("cpu")):
                # Images kept in memory have the same window in every epoch.
                windows_of = 0 if self._store is not None else epoch * len(self._source)
                yield (windows_of + self._ranks.share(indices)).tolist()
            epoch, start = epoch + 1, 0

    def _checked(self, decoded: Decoded, requested: int) -> ImageBatch:
        _record_skipped(decoded, self.skipped, self._strict)
        if len(decoded.batch) < requested:  # no substitute found: no image is readable
            raise NoReadableImages(self._source.description, self.skipped)
        if len(self.skipped) > self._max_failed_share * len(self._source):
            name, reason = next(iter(self.skipped.items()))
            problem = f"{len(self.skipped):,} of {self._source.description} cannot be read"
            limit = f"more than data.max_failed_share={self._max_failed_share:g}"
            raise DataError(f"{problem}, {limit}; the first is {name}: {reason}. `jcl check` lists them all.")
        return decoded.batch


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
    """Yield every image once, in order; unreadable ones are left out and added to `skipped`, or `strict` raises."""
    device = torch.device(device)
    if isinstance(source, ArrayImages):
        rows = torch.split(torch.arange(len(source)), batch_size)
        return prefetch_to_device(device, map(_all_images(source).gather, rows))
    reader = ImageReader(source, canvas_for(source, canvas), substitute=False)
    pool = DecodingPool(reader, workers, batch_size, pinned=device.type == "cuda")

    def decoded_batches() -> Iterator[ImageBatch]:
        any_read, own_skipped = False, dict[str, str]()  # `skipped` may hold images of other sources
        with contextlib.closing(pool):
            for decoded in pool.decode(_in_batches(range(len(source)), batch_size)):
                _record_skipped(decoded, own_skipped, strict)
                if skipped is not None:
                    skipped.update(decoded.skipped)
                if len(decoded.batch):
                    any_read = True
                    yield _copy_from_workers(decoded.batch, device)
            if not any_read:
                raise NoReadableImages(source.description, own_skipped)

    return prefetch_to_device(device, decoded_batches())


def _all_images(source: ArrayImages) -> ImageBatch:
    sizes = torch.tensor(source.pixels.shape[2:]).expand(len(source), 2)
    return ImageBatch(source.pixels, sizes, torch.arange(len(source)))


def _to_device_if_it_fits(images: ImageBatch, device: torch.device) -> ImageBatch:
    """Every image on the training device, so that a batch is one gather there."""
    if device.type == "cuda" and images.pixels.nbytes > _DEVICE_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]:
        return images
    return images.to(device)


def _missing(store: ImageBatch) -> list[int]:
    """The indices not decoded yet."""
    return torch.nonzero(store.samples < 0).flatten().tolist()


def _record_skipped(decoded: Decoded, skipped: dict[str, str], strict: bool) -> None:
    if decoded.skipped and strict:
        raise UnreadableImage(*next(iter(decoded.skipped.items())))
    skipped.update(decoded.skipped)


def _copy_from_workers(batch: ImageBatch, device: torch.device) -> ImageBatch:
    """Copy a batch from the workers' memory, which is reused; for a GPU `prefetch_to_device` does that."""
    return batch if device.type == "cuda" else batch.clone()


def _in_batches(indices: Sequence[int], batch_size: int) -> list[list[int]]:
    return [list(indices[start : start + batch_size]) for start in range(0, len(indices), batch_size)]


def prefetch_to_device(device: torch.device, batches: Iterator[ImageBatch]) -> Iterator[ImageBatch]:
    """Yield the batches on `device`; on a GPU each is copied on a side stream while the one before it is used.

    A batch in host memory is copied before the next one is requested, so its memory may be reused.
    """
    if device.type != "cuda":
        yield from batches
        return
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: tuple[ImageBatch, torch.cuda.Event] | None = None
    for batch in batches:
        if batch.pixels.is_cuda:  # gathered from images on the device: nothing to copy
            yield batch
            continue
        with torch.cuda.stream(side):
            # Only pinned memory is copied asynchronously; memory that is pinned already stays as it is.
            copying = (batch.map(Tensor.pin_memory).to(device), side.record_event())
        if waiting is not None:
            yield _synchronized(*waiting)
        waiting = copying
        copying[1].synchronize()  # usually done: the training of a batch was launched in between
    if waiting is not None:
        yield _synchronized(*waiting)


def _synchronized(batch: ImageBatch, copied: torch.cuda.Event) -> ImageBatch:
    """Make the training stream wait for the copy, and keep the memory until that stream is done with it."""
    training = torch.cuda.current_stream(batch.pixels.device)
    training.wait_event(copied)
    for tensor in batch.tensors():
        tensor.record_stream(training)
    return batch


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """The images that one rank holds in one step, as rows of the whole batch of N images.

    rows (held,): its own images, then those received in rank order, padded with its first row. local_rows (N,): the
    position of each image of the batch in `rows`, -1 if it is not held. sent: for each rank, which of the own images
    are sent there. received: the number of images from each rank.
    """

    rows: Tensor
    local_rows: Tensor
    sent: list[Tensor]
    received: list[int]


class ImageExchange:
    """Decides which images of a batch each rank holds, and exchanges them.

    ShuffleBN assigns the key views of the batch to ranks at random. Views are made where they are encoded, so the
    decoded image is sent, once for all of its views on the same rank. Every rank computes the whole shuffle.
    """

    def __init__(self, ranks: Ranks, seed: int, batch_size: int, num_keys: int) -> None:
        self._ranks, self._seed, self._batch_size, self._num_keys = ranks, seed, batch_size, num_keys
        self._own = batch_size // ranks.count
        # Constant, because CUDA graphs read their images from fixed memory.
        self.held = self._own + min(batch_size - self._own, self._own * num_keys)

    def plan(self, step: int) -> ExchangePlan:
        """What this rank holds, sends and receives in a step; the plans of all ranks agree."""
        ranks, own = self._ranks, self._own
        order = permutation(self._seed, KEY_SHUFFLE, step, self._batch_size * self._num_keys)
        needed = torch.zeros(ranks.count, self._batch_size, dtype=torch.bool)
        needed.scatter_(1, (order // self._num_keys).view(ranks.count, -1), True)
        first = ranks.rank * own
        foreign = needed[ranks.rank].clone()
        foreign[first : first + own] = False
        rows = torch.cat([torch.arange(first, first + own), foreign.nonzero().flatten()])
        local_rows = torch.full((self._batch_size,), -1)
        local_rows[rows] = torch.arange(len(rows))
        sent = [needed[rank, first : first + own].nonzero().flatten() for rank in range(ranks.count)]
        sent[ranks.rank] = sent[ranks.rank][:0]
        received = foreign.view(ranks.count, own).sum(1).tolist()
        padded = torch.cat([rows, torch.full((self.held - len(rows),), first)])
        return ExchangePlan(padded, local_rows, sent, received)

    def run(self, own: ImageBatch, plan: ExchangePlan) -> ImageBatch:
        """Exchange images with the other ranks; returns the images that this rank holds."""
        device = own.pixels.device
        chosen = torch.cat(plan.sent).to(device, non_blocking=True)
        counts = [len(rows) for rows in plan.sent]
        numbers = torch.cat([own.sizes, own.samples[:, None]], dim=1)
        local_rows = plan.local_rows.to(device, non_blocking=True)
        pixels = self._exchange_rows(own.pixels, chosen, counts, plan.received)
        numbers = self._exchange_rows(numbers, chosen, counts, plan.received)
        return ImageBatch(pixels, numbers[:, :2], numbers[:, 2], local_rows)

    def _exchange_rows(self, own: Tensor, chosen: Tensor, counts: list[int], received: list[int]) -> Tensor:
        """The own rows, then those received, padded with the first own row."""
        held = own.new_empty(self.held, *own.shape[1:])
        end = self._own + sum(received)
        held[: self._own] = own
        with catch_lost_contact():
            dist.all_to_all_single(held[self._own : end], own[chosen], received, counts)
        held[end:] = own[0]
        return held
