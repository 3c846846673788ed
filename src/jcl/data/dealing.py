"""Which images of a batch each rank holds, and how they get there.

The shuffle of ShuffleBN deals every key view of the batch to some rank, mostly to another one than its image's. Views
are made where they are encoded, so what moves is the decoded image, as uint8 and once for all of its views that go to
the same rank. Every rank works out the whole shuffle by itself, hence knows what to send and what will come.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from jcl.data.batch import ImageBatch
from jcl.distributed.group import Ranks, contact
from jcl.random import KEY_SHUFFLE, permutation


@dataclass(frozen=True, eq=False)
class Deal:
    """One rank's part of one step, with rows counted in the whole batch of N images.

    rows (held,): the images it holds, its own first, then the others by rank; a row of its own fills up the rest.
    places (N,): where in `rows` an image lies, -1 where it is not held. sent: for each rank, which of the own images go
    there. received: how many come from each.
    """

    rows: Tensor
    places: Tensor
    sent: list[Tensor]
    received: list[int]


class Dealer:
    """Works out each step's deal and carries it out."""

    def __init__(self, ranks: Ranks, seed: int, batch_size: int, num_keys: int) -> None:
        self._ranks, self._seed, self._batch_size, self._num_keys = ranks, seed, batch_size, num_keys
        self._own = batch_size // ranks.count
        # The number held never changes, so that recorded steps can read their images from one place.
        self.held = self._own + min(batch_size - self._own, self._own * num_keys)

    def deal(self, step: int) -> Deal:
        """The deal of a step, the same on whatever rank it is worked out."""
        ranks, own = self._ranks, self._own
        order = permutation(self._seed, KEY_SHUFFLE, step, self._batch_size * self._num_keys)
        needed = torch.zeros(ranks.count, self._batch_size, dtype=torch.bool)
        needed.scatter_(1, (order // self._num_keys).view(ranks.count, -1), True)
        first = ranks.rank * own
        foreign = needed[ranks.rank].clone()
        foreign[first : first + own] = False
        rows = torch.cat([torch.arange(first, first + own), foreign.nonzero().flatten()])
        places = torch.full((self._batch_size,), -1)
        places[rows] = torch.arange(len(rows))
        sent = [needed[rank, first : first + own].nonzero().flatten() for rank in range(ranks.count)]
        sent[ranks.rank] = sent[ranks.rank][:0]
        received = foreign.view(ranks.count, own).sum(1).tolist()
        filled = torch.cat([rows, torch.full((self.held - len(rows),), first)])
        return Deal(filled, places, sent, received)

    def exchange(self, own: ImageBatch, deal: Deal) -> ImageBatch:
        """From the own images of every rank to the images each rank holds: only rows that move are sent."""
        device = own.pixels.device
        chosen = torch.cat(deal.sent).to(device)
        counts = [len(rows) for rows in deal.sent]
        numbers = torch.cat([own.sizes, own.samples[:, None]], dim=1)
        places = deal.places.to(device, non_blocking=True)
        pixels = self._completed(own.pixels, chosen, counts, deal.received)
        numbers = self._completed(numbers, chosen, counts, deal.received)
        return ImageBatch(pixels, numbers[:, :2], numbers[:, 2], places)

    def _completed(self, own: Tensor, chosen: Tensor, counts: list[int], received: list[int]) -> Tensor:
        """The own rows, those received behind them, and the first own row in what is left."""
        held = own.new_empty(self.held, *own.shape[1:])
        end = self._own + sum(received)
        held[: self._own] = own
        arrived = own.new_empty(sum(received), *own.shape[1:])
        with contact():
            dist.all_to_all_single(arrived, own[chosen], received, counts)
        held[self._own : end] = arrived
        held[end:] = own[0]
        return held
