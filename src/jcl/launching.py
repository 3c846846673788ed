"""Starting one process for each device of this machine, through PyTorch's elastic launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from jcl.errors import Interrupted, JclError, RunError


class RankFailed(JclError):
    """A rank ended with an error, of which it has told itself."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def launch(arguments: Sequence[str], devices: int, max_restarts: int = 3) -> None:
    """Run `jcl ARGUMENTS`, without its `--devices`, as `devices` ranks.

    When one of them dies, all start again and go on with the run. Several machines are started with torchrun, which is
    the same launcher.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Each rank of a CPU gets its share of the cores; left alone, each would take all of them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // devices)))
    # Started again, ranks must not find each other's former addresses in a store that outlived them.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # The ranks say what went wrong in sentences; the launcher's own words about it are for its developers.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "jcl", *_without_devices(arguments))
    except SignalException as error:
        raise Interrupted(f"{error.sigval.name} received: the ranks were told to save and stop.") from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RankFailed(f"rank {rank} {_ending(failure.exitcode)}.", abs(failure.exitcode)) from None
    except OSError as error:
        raise RunError(f"the ranks could not be started: {error}.") from None


def _ending(exit_code: int) -> str:
    return f"was ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"


def _without_devices(arguments: Sequence[str]) -> list[str]:
    """The same command for one rank."""
    kept, option = [], "--devices"
    waiting = iter(arguments)
    for argument in waiting:
        if argument == option:
            next(waiting, None)
        elif not argument.startswith(f"{option}="):
            kept.append(argument)
    return kept
