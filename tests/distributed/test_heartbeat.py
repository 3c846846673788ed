"""What a rank can find out about the others. Real launches are in test_rank_runs.py."""

import socket

import pytest
import torch.distributed as dist

from jcl.distributed import group
from jcl.distributed.group import Heartbeat, Ranks


def test_ranks_that_stopped_or_never_started_to_beat_are_named(monkeypatch):
    monkeypatch.setattr(group, "BEAT_SECONDS", 0.01)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    with Heartbeat(Ranks(0, 3)) as watcher:
        with Heartbeat(Ranks(1, 3)) as other, Heartbeat(Ranks(2, 3)) as third:
            other.status = "in step 7"
            third.describe_other_ranks()  # waits, as all but the slow one do
            said = watcher.describe_other_ranks()
            assert "All ranks are alive" in said and "rank 1 " in said and "in step 7" in said and "rank 2" not in said
        assert f"from rank 1 (on {socket.gethostname()}) and rank 2" in watcher.describe_other_ranks()
    with Heartbeat(Ranks(3, 5)) as watcher:
        assert watcher.describe_other_ranks().endswith(" and rank 4.")


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_without_a_store_nothing_is_claimed(monkeypatch, name):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv(name)
    assert "unknown" in Heartbeat(Ranks(0, 2)).describe_other_ranks()
