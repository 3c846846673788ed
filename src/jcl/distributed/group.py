"""The processes that a launcher started, brought together so that they can exchange tensors."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from jcl.console import pluralize
from jcl.distributed.device import choose_device
from jcl.distributed.ranks import ALONE, Ranks, contact
from jcl.errors import JclError, OtherRankFailed, SettingsError

Result = TypeVar("Result")

# Set by torchrun, and by anything else that follows its conventions.
_RANK, _COUNT, _LOCAL_RANK, _LOCAL_COUNT = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"


def launched() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return int(os.environ.get(_COUNT) or 1) > 1


def restarted() -> bool:
    """Whether a launcher started this process anew after another rank, or this one, had failed."""
    return any(int(os.environ.get(name) or 0) > 0 for name in ("JCL_RESTARTS", "TORCHELASTIC_RESTART_COUNT"))


def ranks_on_this_machine() -> int:
    """How many ranks the launcher started here."""
    return int(os.environ.get(_LOCAL_COUNT) or 1)


@contextlib.contextmanager
def joined_ranks(device_name: str, timeout_seconds: float) -> Iterator[tuple[Ranks, torch.device]]:
    """The ranks and this rank's device; alone on the chosen device where no launcher started several.

    A process group that the caller has set up already is used and left as it is.
    """
    if dist.is_initialized():
        yield Ranks(dist.get_rank(), dist.get_world_size()), _own_device(device_name)
        return
    if not launched():
        yield ALONE, choose_device(device_name)
        return
    device = _own_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with contact():
        _meet(device, datetime.timedelta(seconds=timeout_seconds))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size()), device
    finally:
        dist.destroy_process_group()


def _meet(device: torch.device, timeout: datetime.timedelta) -> None:
    store, rank, count = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # The launcher's store outlives the ranks: started again, they must not find each other's former addresses.
        # With several launchers, whose counts may differ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 sees to that.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"start-{start}", store)  # type: ignore[attr-defined]
    # What ranks agree on as hosts goes over the CPU's network whatever the device, hence gloo besides NCCL.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)


def fail_together(ranks: Ranks, work: Callable[[], Result]) -> Result:
    """Do what may fail with a sentence; where it fails on one rank it has failed on all, and only one rank says why."""
    if ranks.count == 1:
        return work()
    result, error = None, None
    try:
        result = work()
    except JclError as raised:
        error = raised
    failed = ranks.gather(torch.tensor([error is not None])).tolist()
    if not any(failed):
        return result  # type: ignore[return-value]
    if error is not None and failed.index(True) == ranks.rank:
        raise error
    raise OtherRankFailed


def _own_device(name: str) -> torch.device:
    """Each rank of a machine has a GPU of its own; on CPUs they share."""
    device = choose_device(name)
    if device.type != "cuda":
        return device
    local = int(os.environ.get(_LOCAL_RANK) or 0)
    if ":" in name:
        raise SettingsError(f"every rank needs a GPU of its own, so the device cannot be {name}; use --device cuda.")
    if local >= torch.cuda.device_count():
        raise SettingsError(
            f"{ranks_on_this_machine()} ranks were started on a machine with "
            f"{pluralize(torch.cuda.device_count(), 'GPU')}; start one for each GPU, or use --device cpu."
        )
    return torch.device("cuda", local)
