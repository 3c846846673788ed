"""Copies of a run's tensors on the host, for which training does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Tensors as they are at this moment, whatever is done to them afterwards.

    From a GPU they are copied into pinned memory on the stream that trains: behind the step that was launched last
    and before the next one, also if that is the replay of a graph, while the host goes on launching. Pinned memory is
    slow to get, so that of an `earlier` copy, which is void from then on, is used again. On a CPU they are cloned.
    """

    def __init__(self, tensors: dict[str, Tensor], earlier: HostCopy | None = None) -> None:
        pinned: dict[str, Tensor] = {} if earlier is None else earlier._tensors
        with torch.no_grad():
            self._tensors: dict[str, Tensor] = {name: _copy(value, pinned.get(name)) for name, value in tensors.items()}
        self._arrived: torch.cuda.Event | None = None
        device = next((value.device for value in tensors.values() if value.is_cuda), None)
        if device is not None:
            self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(device))

    def finished(self) -> dict[str, Tensor]:
        """The tensors, contiguous, once they have all arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return {name: value.contiguous() for name, value in self._tensors.items()}


def _copy(value: Tensor, pinned: Tensor | None) -> Tensor:
    if not value.is_cuda:
        return value.detach().clone()
    if pinned is None or not _same_layout(value, pinned):
        pinned = torch.empty_like(value, device="cpu", pin_memory=True)  # in the same memory order, so a plain copy
    return pinned.copy_(value, non_blocking=True)


def _same_layout(value: Tensor, pinned: Tensor) -> bool:
    return (value.shape, value.stride(), value.dtype) == (pinned.shape, pinned.stride(), pinned.dtype)
