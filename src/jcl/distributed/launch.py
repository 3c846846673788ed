"""Start one process per device of this machine with PyTorch's elastic launcher; read what a launcher has set."""

import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jcl.cores import cpu_cores
from jcl.errors import Interrupted, JclError, RunError, SettingsError
from jcl.signals import SECONDS_TO_SAVE, STARTED_BY, caught_signals

ERROR_FOLDER = "JCL_ERROR_FOLDER"  # environment variable: where ranks write their errors; the launcher prints one
RESTARTS = "JCL_RESTARTS"  # environment variable: how often our launcher has restarted the ranks


class LaunchEnvironment(NamedTuple):
    """What torchrun, or a launcher with its conventions, has set for this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restarts: int


def launch_environment() -> LaunchEnvironment:
    """Read the launcher's environment variables; without a launcher this is rank 0 of 1."""
    rank, world_size = _read_variable("RANK", 0), _read_variable("WORLD_SIZE", 1)
    restarts = max(_read_variable(RESTARTS, 0), _read_variable("TORCHELASTIC_RESTART_COUNT", 0))
    restarts = restarts if "TORCHELASTIC_RUN_ID" in os.environ else 0  # left over from another process
    local_rank, local_world_size = _read_variable("LOCAL_RANK", 0), _read_variable("LOCAL_WORLD_SIZE", 1)
    if rank >= world_size or not 1 <= local_world_size <= world_size:
        found = f"RANK={rank}, WORLD_SIZE={world_size} and LOCAL_WORLD_SIZE={local_world_size}"
        raise SettingsError(f"The environment variables {found} are contradictory; unset them, or use torchrun.")
    return LaunchEnvironment(rank, world_size, local_rank, local_world_size, restarts)


def _read_variable(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if text and not (text.isascii() and text.isdigit() and len(text) < 8):
        raise SettingsError(f"Invalid value {text!r} for the environment variable {name}; unset it or set a number.")
    return int(text) if text else default


class RankFailed(JclError):
    """Why the ranks ended, reported once for all of them. `retry`: another start may succeed."""

    def __init__(self, message: str, exit_code: int, *, retry: bool = False) -> None:
        super().__init__(message)
        self.exit_code, self.retry = exit_code, retry


class _RankError(NamedTuple):
    """The error one rank ended with. The one of highest priority is reported."""

    rank: int
    message: str
    exit_code: int
    priority: int


# A rank's own error, or a request to stop, is why others lost contact. Some errors of lost contact name the lost rank.
_LOST, _NAMED, _OWN = range(3)


def is_launched() -> bool:
    """Whether our launcher has started this process."""
    return ERROR_FOLDER in os.environ


def report_to_launcher(error: JclError, rank: int) -> bool:
    """Write the error that ends this rank to a file for our launcher; False if that did not start it."""
    if not is_launched():
        return False
    from jcl.distributed.group import LostContact, SilentRank

    priority = _NAMED if isinstance(error, SilentRank) else _LOST if isinstance(error, LostContact) else _OWN
    partial = Path(os.environ[ERROR_FOLDER]) / f"{rank}.partial"  # a rank may be killed while it writes
    try:
        partial.write_text(json.dumps(_RankError(rank, str(error), error.exit_code, priority)), encoding="utf-8")
        partial.replace(partial.with_suffix(".json"))
    except OSError:
        return False
    return True


def launch(arguments: Sequence[str], devices: int, max_restarts: int = 3) -> None:
    """Run `jcl ARGUMENTS` as `devices` ranks.

    When a rank is killed or stops answering, all are restarted and resume the run. An error that a rank reports would
    only recur, so it ends all ranks. For several machines use torchrun, which is the same launcher.
    """
    # By default, each rank would use all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_cores() // devices)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_SAVE))
    logging.disable(logging.CRITICAL)  # the elastic launcher's messages repeat what the ranks report
    restarts = 0
    while True:
        try:
            return _launch_once(["-m", "jcl", *arguments], devices, restarts)
        except RankFailed as failure:
            if not failure.retry:
                raise
            if restarts == max_restarts:
                raise RankFailed(f"{failure} Gave up after {restarts + 1} starts.", failure.exit_code) from None
            restarts += 1
            left = f"{max_restarts - restarts} more restarts allowed"
            print(f"{failure} Restarting all ranks ({left}).", file=sys.stderr, flush=True)


def _launch_once(command: list[str], devices: int, restarts: int) -> None:
    """Start the ranks and wait for them. A new rendezvous keeps them from finding old addresses."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle=",".join(number.name for number in caught_signals()),
    )
    with tempfile.TemporaryDirectory(prefix="jcl-ranks-") as folder:
        os.environ |= {ERROR_FOLDER: folder, RESTARTS: str(restarts), STARTED_BY: str(os.getpid())}
        try:
            elastic_launch(config, sys.executable)(*command)
        except SignalException as error:
            name = signal.Signals(error.sigval).name
            unsaved = Interrupted(f"{name} received: the ranks ended before they could save a checkpoint.")
            raise _own_failure(_read_errors(folder)) or unsaved from None
        except ChildFailedError as error:
            raise _failure(_read_errors(folder), {rank: at.exitcode for rank, at in error.failures.items()}) from None
        except OSError as error:
            raise RunError(f"The ranks could not be started: {error}.") from None
        finally:
            del os.environ[ERROR_FOLDER], os.environ[RESTARTS], os.environ[STARTED_BY]


def _read_errors(folder: str) -> list[_RankError]:
    """The errors of the ranks, highest priority first."""
    errors = [_RankError(*json.loads(file.read_text(encoding="utf-8"))) for file in Path(folder).glob("*.json")]
    return sorted(errors, key=lambda error: (-error.priority, error.rank))


def _own_failure(errors: list[_RankError]) -> RankFailed | None:
    if not errors or errors[0].priority != _OWN:
        return None
    rank, message, code, _ = errors[0]
    return RankFailed(message if rank == 0 else f"On rank {rank}: {message}", code)


def _failure(errors: list[_RankError], codes: Mapping[int, int]) -> RankFailed:
    """Why the ranks with these exit codes ended: first a rank's own error, then killed ranks, then lost contact."""
    if own := _own_failure(errors):
        return own
    reported = {error.rank for error in errors}
    for rank, code in codes.items():
        if code > 0 and rank not in reported:  # it has printed a traceback
            return RankFailed(f"Rank {rank} ended with exit code {code}.", code)
    # The launcher ends the remaining ranks by SIGTERM.
    killed = [rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM] or list(codes)
    code = codes[killed[0]]
    if code < 0 and not (errors and errors[0].priority == _NAMED):
        return RankFailed(f"Rank {killed[0]} was killed by {signal.Signals(-code).name}.", 128 - code, retry=True)
    return RankFailed(errors[0].message, errors[0].exit_code, retry=True)
