"""The queue of negatives."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class KeyQueue(nn.Module):
    """A ring buffer of `size` keys of dimension `dim`, saved with the model; new keys replace the oldest.

    `rows` (size, dim) are the negatives of a loss; pass a clone if you enqueue before the backward pass. They start as
    random unit vectors, as in MoCo. `enqueue` does not synchronize with the GPU.
    """

    rows: Tensor
    enqueued: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        if size < 1 or dim < 1:
            raise ValueError(f"size and dim of a queue must be positive, got {size} and {dim}.")
        self.register_buffer("rows", F.normalize(torch.randn(size, dim), dim=1))
        self.register_buffer("enqueued", torch.zeros((), dtype=torch.int64))

    @property
    def size(self) -> int:
        return self.rows.shape[0]

    @torch.no_grad()
    def enqueue(self, rows: Tensor) -> None:
        """Add `rows` (n, dim) as the newest keys, without normalizing them; JCL enqueues mean keys."""
        if rows.ndim != 2 or rows.shape[1] != self.rows.shape[1]:
            raise ValueError(f"expected rows (n, {self.rows.shape[1]}), got {tuple(rows.shape)}.")
        count = rows.shape[0]
        kept = rows[-self.size :].to(self.rows.dtype)  # the batch may be larger than the queue
        first = self.enqueued + (count - kept.shape[0])
        indices = (first + torch.arange(kept.shape[0], device=self.rows.device)) % self.size
        self.rows.index_copy_(0, indices, kept)
        self.enqueued += count

    def filled(self) -> Tensor:
        """Fraction of the rows (0..1, a scalar tensor) that are keys rather than initial random vectors."""
        return (self.enqueued / self.size).clamp(max=1.0)
