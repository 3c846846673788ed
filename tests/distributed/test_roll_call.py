"""What a rank can find out about the others. Real launches are in test_rank_runs.py."""

import socket

import torch.distributed as dist

from jcl.distributed import group
from jcl.distributed.group import Ranks, RollCall


def test_ranks_that_do_not_answer_are_named(monkeypatch):
    monkeypatch.setattr(group, "ANSWER_SECONDS", 0.3)
    store = dist.HashStore()
    first, _, third = (RollCall(Ranks(rank, 4), store) for rank in range(3))
    third.report()
    said = first.describe_other_ranks()
    assert f"No answer from rank 1 (on {socket.gethostname()}), rank 3." in said


def test_ranks_that_all_answer_are_alive(monkeypatch):
    monkeypatch.setattr(group, "ANSWER_SECONDS", 0.3)
    first, second = (RollCall(Ranks(rank, 2), store) for store in [dist.HashStore()] for rank in range(2))
    second.report()
    assert first.describe_other_ranks() == "All ranks are alive."


def test_without_a_store_nothing_is_claimed(monkeypatch):
    monkeypatch.setattr(group, "ANSWER_SECONDS", 0.3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = RollCall(Ranks(0, 2), dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False))
    del store  # with the process that held it
    assert "unknown" in call.describe_other_ranks()
