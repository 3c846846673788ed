"""What a rank can tell of the others. Real launches are in test_rank_runs.py."""

import json

import pytest
import torch.distributed as dist

from jcl.distributed import heartbeat
from jcl.distributed.group import Ranks
from jcl.distributed.heartbeat import Heartbeat


@pytest.fixture
def watcher(monkeypatch) -> Heartbeat:
    """Rank 0 of three, with a store to which the others may write."""
    monkeypatch.setattr(heartbeat, "SECONDS", 0.01)
    monkeypatch.setattr(heartbeat, "_store", dist.HashStore)
    return Heartbeat(Ranks(0, 3))


def test_a_rank_that_never_gave_a_sign_is_not_called_alive(watcher):
    watcher._store.set("1", json.dumps({"count": 4, "at": "in step 7", "host": "north"}))
    assert watcher.whereabouts() == "No sign of life comes from rank 1 (on north) and rank 2."


def test_without_a_store_nothing_is_claimed(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert Heartbeat(Ranks(0, 2)).whereabouts().startswith("Nothing can be learned about the other ranks, because no")
