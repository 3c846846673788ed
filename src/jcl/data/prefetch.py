"""Copies to the device that run beside the training of the batch before."""

from collections.abc import Iterator

import torch
from torch import Tensor

from jcl.data.batch import ImageBatch


def prefetch_to_device(device: torch.device, batches: Iterator[ImageBatch]) -> Iterator[ImageBatch]:
    """Give the batches on `device`; on a GPU each is copied on a side stream while the one before it is used.

    A batch in the host's memory is read before the next one is asked for, so it may lie in memory that is used again.
    """
    return _copied_ahead(device, batches) if device.type == "cuda" else batches


def _copied_ahead(device: torch.device, batches: Iterator[ImageBatch]) -> Iterator[ImageBatch]:
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: tuple[ImageBatch, torch.cuda.Event] | None = None
    for batch in batches:
        if batch.pixels.is_cuda:  # a gather from images that live there: nothing to copy
            yield batch
            continue
        with torch.cuda.stream(side):
            # Only pinned memory is copied without waiting; pinned already, it stays as it is.
            copying = (batch.of_each(Tensor.pin_memory).to(device), side.record_event())
        if waiting is not None:
            yield _handed_over(*waiting)
        waiting = copying
        copying[1].synchronize()  # done long ago, as a rule: the training of a batch was launched in between
    if waiting is not None:
        yield _handed_over(*waiting)


def _handed_over(batch: ImageBatch, copied: torch.cuda.Event) -> ImageBatch:
    """Make the training stream wait for the copy, and keep the memory until that stream is done with it."""
    training = torch.cuda.current_stream(batch.pixels.device)
    training.wait_event(copied)
    for tensor in batch.tensors():
        tensor.record_stream(training)
    return batch
