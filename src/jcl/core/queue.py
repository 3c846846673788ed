"""The queue of past keys that serve as negatives."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class KeyQueue(nn.Module):
    """A ring of `size` keys of dimension `dim`; the oldest rows make room for the newest.

    It starts as random unit rows, as MoCo's does, and is saved with the model. Everything is tensor arithmetic on the
    queue's own device: enqueueing never waits for the GPU and works for any batch size, larger than the queue too.
    """

    rows: Tensor
    enqueued: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        if size < 1 or dim < 1:
            raise ValueError(f"a queue needs a positive size and dimension, but got size {size} and dim {dim}.")
        self.register_buffer("rows", F.normalize(torch.randn(size, dim), dim=1))
        self.register_buffer("enqueued", torch.zeros((), dtype=torch.int64))

    @property
    def size(self) -> int:
        return self.rows.shape[0]

    @torch.no_grad()
    def enqueue(self, rows: Tensor) -> None:
        """Put `rows` (n, dim) behind the newest keys, as they are: mean keys are not re-normalised."""
        if rows.ndim != 2 or rows.shape[1] != self.rows.shape[1]:
            raise ValueError(f"expected rows (n, {self.rows.shape[1]}), but got {tuple(rows.shape)}.")
        count = rows.shape[0]
        # Of a batch larger than the queue only the newest rows can stay; the others would be overwritten at once.
        kept = rows[-self.size :].to(self.rows.dtype)
        first = self.enqueued + (count - kept.shape[0])
        places = (first + torch.arange(kept.shape[0], device=self.rows.device)) % self.size
        self.rows.index_copy_(0, places, kept)
        self.enqueued += count

    def filled(self) -> Tensor:
        """Share of the rows (0..1, a scalar tensor) that are real keys rather than the random start."""
        return (self.enqueued / self.size).clamp(max=1.0)
