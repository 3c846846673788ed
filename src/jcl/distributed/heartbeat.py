"""Ranks publish what they are doing, so that a rank that stops answering can be named."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from typing import Any, Self

import torch.distributed as dist

from jcl.distributed.group import Ranks

SECONDS = 2.0  # between two beats
_WAITING = "waiting for another rank"
_STORE_SECONDS = 10.0  # timeout of the store


class Heartbeat:
    """Publishes every few seconds what this rank is doing, in the launcher's store.

    A process that is stopped or whose machine is gone no longer beats; one that waits for a slow disk does.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._at = ranks, "starting"
        self._store: Any = _connect_store() if ranks.count > 1 else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def set_status(self, status: str) -> None:
        """Set what this rank is doing, to complete the sentence "rank 3 is ..."."""
        self._at = status

    def __enter__(self) -> Self:
        if self._store is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=SECONDS)  # a store that does not answer would block it forever

    def describe_other_ranks(self) -> str:
        """A sentence that names the ranks the others wait for, if known; takes a few seconds."""
        self._at = _WAITING
        if self._store is None:
            return "The state of the other ranks is unknown."
        beats: list[dict[int, dict[str, Any]]] = []
        # In a thread, because a store whose process is stopped never answers.
        thread = threading.Thread(target=self._read_twice, args=(beats,), daemon=True)
        thread.start()
        thread.join(timeout=2 * SECONDS + _STORE_SECONDS)
        if len(beats) < 2:
            return "The state of the other ranks is unknown: the machine of rank 0 does not answer."
        before, after = beats
        others = [rank for rank in range(self._ranks.count) if rank != self._ranks.rank]
        if silent := [rank for rank in others if after.get(rank) == before.get(rank)]:  # or it never reported
            return f"No heartbeat from {_names(silent, after)}."
        if slow := [rank for rank in others if after[rank]["at"] != _WAITING]:
            return f"All ranks are alive; waiting for {_names(slow, after)}, which is {after[slow[0]]['at']}."
        return "All ranks are alive."

    def _read_twice(self, beats: list[dict[int, dict[str, Any]]]) -> None:
        """Append the last beats of all ranks now and a little later, or fewer if the store does not answer."""
        names = [str(rank) for rank in range(self._ranks.count)]
        with contextlib.suppress(RuntimeError, ValueError):
            for wait in (0.0, 2 * SECONDS + 0.5):
                time.sleep(wait)
                beats.append({int(n): json.loads(self._store.get(n)) for n in names if self._store.check([n])})

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(SECONDS if count else 0):
            count += 1
            beat = {"count": count, "at": self._at, "host": socket.gethostname()}
            with contextlib.suppress(RuntimeError):  # the store is gone
                self._store.set(str(self._ranks.rank), json.dumps(beat))


def _names(ranks: list[int], beats: dict[int, dict[str, Any]]) -> str:
    names = [f"rank {rank} (on {beats[rank]['host']})" if rank in beats else f"rank {rank}" for rank in ranks[:4]]
    return " and ".join(names) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def _connect_store() -> Any:
    """A separate connection to the launcher's store; None without a launcher."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        return None
    timeout = datetime.timedelta(seconds=_STORE_SECONDS)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, int(port), is_master=False, wait_for_workers=False, timeout=timeout
        )
    except (RuntimeError, ValueError):
        return None
    prefix = f"jcl-heartbeat-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
