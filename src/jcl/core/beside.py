"""Two pieces of work on one GPU at the same time.

The kernels of a small network on small images do not fill a GPU. Keys and queries do not need each other until the
loss, so they may share it: the keys are queued on a second stream, which a recorded step keeps as a second branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SecondStream:
    """Queues what is done inside `work` beside what comes after it, until `join`; without a GPU simply one by one.

    Memory needs no further care as long as every `work` is followed by a `join`: the second stream starts after all
    that was queued before, and so never reuses memory that the first one is still reading.
    """

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self.stream: torch.cuda.Stream | None = None

    @contextmanager
    def work(self, device: torch.device) -> Iterator[None]:
        if not self.wanted or device.type != "cuda":
            yield
            return
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """What is queued from now on sees what `work` did."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
