"""Exact nearest neighbors by cosine similarity, in bounded memory, with the same result on every machine.

Similarities are computed in float64 from unit rows rounded to multiples of 2^-26. Every product is then a multiple
of 2^-52 and, by Cauchy-Schwarz, no partial sum exceeds 1 by more than rounding, so every sum is exact whatever its
order: chunk size, thread count and device do not change a bit, equal rows are exactly tied, and the rounding (below
1e-8 in each coordinate) is finer than that of float32 features. Ties go to the lower row of the bank.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from jcl.errors import DataError

DEFAULT_CHUNK = 4096
_GRID = 2.0**26


@dataclass(frozen=True)
class Neighbours:
    """The k nearest bank rows of each query, nearest first: cosine similarities and row numbers, both (q, k)."""

    similarities: Tensor
    rows: Tensor


def unit_rows(features: Tensor) -> Tensor:
    """Rows scaled to length one in float64, rounded to multiples of 2^-26; an all-zero row stays zero."""
    wide = features.double()
    unit: Tensor = wide / torch.linalg.vector_norm(wide, dim=1, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny)
    return (unit * _GRID).round_().div_(_GRID)


def nearest_neighbours(
    queries: Tensor, bank: Tensor, k: int, *, chunk: int = DEFAULT_CHUNK, device: torch.device | str | None = None
) -> Neighbours:
    """The k rows of `bank` (b, d) most similar by cosine to each of `queries` (q, d), or all; compared in float64.

    Working memory is a small multiple of chunk x (chunk + k + d) numbers. Chunks are moved to `device` (default: that
    of the queries) one by one, so a large bank can stay on the host.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}.")
    found = list(neighbour_chunks(queries, bank, k, chunk=chunk, device=device))
    return Neighbours(torch.cat([part.similarities for part in found]), torch.cat([part.rows for part in found]))


def neighbour_chunks(
    queries: Tensor, bank: Tensor, k: int, *, chunk: int = DEFAULT_CHUNK, device: torch.device | str | None = None
) -> Iterator[Neighbours]:
    """`nearest_neighbours` for `chunk` queries at a time, against `chunk` rows of the bank at a time."""
    # In parts, to save memory.
    if not all(bool(part.isfinite().all()) for table in (queries, bank) for part in torch.split(table, chunk)):
        raise DataError("The features are NaN or infinite; the training of the encoder probably diverged.")
    target = torch.device(device) if device is not None else queries.device
    return (
        _search(unit_rows(queries[start : start + chunk].to(target)), bank, min(k, len(bank)), chunk)
        for start in range(0, max(1, len(queries)), chunk)
    )


def _search(queries: Tensor, bank: Tensor, k: int, chunk: int) -> Neighbours:
    """Neighbors of unit `queries`, keeping the best k seen so far while going through the bank."""
    similarities = queries.new_empty(len(queries), 0)
    rows = torch.empty_like(similarities, dtype=torch.int64)
    for start in range(0, len(bank), chunk):
        part = unit_rows(bank[start : start + chunk].to(queries.device))
        best = _largest(queries @ part.T, min(k, len(part)))
        # Earlier rows stand first, so a stable sort breaks ties by row.
        merged = torch.cat([similarities, best.similarities], 1).sort(stable=True, dim=1, descending=True)
        rows = torch.cat([rows, best.rows + start], 1).gather(1, merged.indices[:, :k])
        similarities = merged.values[:, :k]
    return Neighbours(similarities.clamp_(-1.0, 1.0), rows)  # rounding may exceed 1


def _largest(similarities: Tensor, k: int) -> Neighbours:
    """The k largest entries of each row in falling order, equal ones by rising column."""
    values, columns = similarities.topk(k, dim=1)
    # topk does not say which of several equal entries it takes. That matters in rows where an entry equal to the
    # smallest one taken was left out; only those rows need a full stable sort.
    smallest = values[:, -1:]
    crowded = (similarities == smallest).sum(1) > (values == smallest).sum(1)
    if crowded.any():
        sorted_rows = similarities[crowded].sort(stable=True, dim=1, descending=True)
        columns[crowded] = sorted_rows.indices[:, :k]
    columns = columns.sort(1).values
    ordered = similarities.gather(1, columns).sort(stable=True, dim=1, descending=True)
    return Neighbours(ordered.values, columns.gather(1, ordered.indices))
