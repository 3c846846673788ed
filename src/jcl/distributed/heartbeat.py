"""Ranks that say where they are, so that one that has fallen silent can be named."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from jcl.distributed.ranks import Ranks

SECONDS = 2.0  # between two signs of life
_WAITING = "waiting for another rank"
_STORE_SECONDS = 10.0  # in which the store answers, if it ever does


class Heartbeat:
    """Publishes, every few seconds, what this rank is at; and tells of the others when contact is lost.

    A process that was stopped or whose machine is gone gives no sign at all; one that waits for a slow disk does, and
    says so. Signs are kept by the launcher's store.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._at = "starting"
        self._store: Any = _store() if ranks.count > 1 else None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def at(self, what: str) -> None:
        """Say what comes now, to complete the sentence "rank 3 is ..."."""
        self._at = what

    def __enter__(self) -> Self:
        if self._store is not None:
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=SECONDS)  # it may wait for ever for a store that does not answer

    def whereabouts(self) -> str:
        """A sentence on the ranks that keep the others waiting, as far as it can be told; takes a few seconds."""
        self._at = _WAITING
        if self._store is None:
            return "Nothing can be learned about the other ranks, because no launcher keeps their signs of life."
        looks: list[dict[int, dict[str, Any]]] = []
        # In a thread, because a store whose process was stopped keeps whoever asks it waiting for ever.
        looking = threading.Thread(target=self._look_twice, args=(looks,), daemon=True)
        looking.start()
        looking.join(timeout=2 * SECONDS + _STORE_SECONDS)
        if len(looks) < 2:
            return "Nothing can be learned about the other ranks, because the machine of the first one does not answer."
        before, after = looks
        others = [rank for rank in range(self._ranks.count) if rank != self._ranks.rank]
        silent = [rank for rank in others if after.get(rank) == before.get(rank)]  # or never heard of
        if silent:
            return f"No sign of life comes from {_named(silent, after)}."
        slow = [rank for rank in others if after[rank]["at"] != _WAITING]
        if slow:
            return f"All ranks are alive; waiting for {_named(slow, after)}, which is {after[slow[0]]['at']}."
        return "All ranks are alive."

    def _look_twice(self, looks: list[dict[int, dict[str, Any]]]) -> None:
        """Append the signs of now and those of a little later, or less where they cannot be had."""
        with contextlib.suppress(RuntimeError, ValueError):
            looks.append(self._signs())
            time.sleep(2 * SECONDS + 0.5)
            looks.append(self._signs())

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(SECONDS if count else 0):
            count += 1
            sign = {"count": count, "at": self._at, "host": socket.gethostname()}
            with contextlib.suppress(RuntimeError):  # the store is gone when the first machine is
                self._store.set(str(self._ranks.rank), json.dumps(sign))

    def _signs(self) -> dict[int, dict[str, Any]]:
        """The last sign of every rank that has given one."""
        names = [str(rank) for rank in range(self._ranks.count)]
        return {int(name): json.loads(self._store.get(name)) for name in names if self._store.check([name])}


def _named(ranks: list[int], signs: dict[int, dict[str, Any]]) -> str:
    named = [f"rank {rank} (on {signs[rank]['host']})" if rank in signs else f"rank {rank}" for rank in ranks[:4]]
    return " and ".join(named) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def _store() -> Any:
    """A connection of our own to the launcher's store; without a launcher there is none."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        return None
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            int(port),
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=_STORE_SECONDS),
        )
    except (RuntimeError, ValueError):
        return None
    prefix = f"jcl-heartbeat-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
