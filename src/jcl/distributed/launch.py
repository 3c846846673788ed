"""Starting one process for each device of this machine, through PyTorch's elastic launcher."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jcl.cores import cpu_cores
from jcl.errors import Interrupted, JclError, RunError

SENTENCES = "JCL_SENTENCES"
"""Names the folder in which ranks leave the sentences they end with, for the launcher to say one of them once."""
RESTARTS = "JCL_RESTARTS"
"""Says how often the launcher has started the ranks again."""

_HEALTHY_SECONDS = 3600.0  # ranks that lived so long have their restarts forgiven
_SECONDS_TO_SAVE = "300"  # before ranks that were asked to stop are killed; the elastic launcher's 30 may be too few


class RankFailed(JclError):
    """What the ranks ended with, said once for all of them."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _RanksDied(Exception):
    """Ranks were killed, or lost contact with one that was: worth another start."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class _Sentence:
    """How one rank ended: with what words and exit code, and how much weight they have beside those of others."""

    rank: int
    text: str
    exit_code: int
    weight: int


# An error of a rank's own, or a wish to stop, is why the others lost contact; one that looked for them knows who it is.
_LOST, _NAMED, _OWN = range(3)


def tell_launcher(error: JclError, rank: int) -> bool:
    """Leave what this rank ends with to our launcher, which says it once for all; False where none started it."""
    folder = os.environ.get(SENTENCES)
    if folder is None:
        return False
    from jcl.distributed.ranks import LostContact, SilentRank

    weight = _NAMED if isinstance(error, SilentRank) else _LOST if isinstance(error, LostContact) else _OWN
    sentence = _Sentence(rank, str(error), error.exit_code, weight)
    partial = Path(folder) / f"{rank}.partial"  # a rank may be killed while it writes, and half of it is no JSON
    try:
        partial.write_text(json.dumps(asdict(sentence)), encoding="utf-8")
        partial.replace(partial.with_suffix(".json"))
    except OSError:
        return False
    return True


def launch(arguments: Sequence[str], devices: int, max_restarts: int = 3) -> None:
    """Run `jcl ARGUMENTS`, without its `--devices`, as `devices` ranks.

    When one of them is killed or falls silent, all start again and go on with the run; an error that they can put into
    a sentence would only come again, and ends them all. Several machines are started with torchrun, which is the same
    launcher.
    """
    # Each rank of a CPU gets its share of the cores; left alone, each would take all of them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_cores() // devices)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SECONDS_TO_SAVE)
    # The ranks say what went wrong in sentences; the launcher's own words about it are for its developers.
    logging.disable(logging.CRITICAL)
    command = ["-m", "jcl", *_without_devices(arguments)]
    left, restarts = max_restarts, 0
    while True:
        begun = time.monotonic()
        try:
            _launch_once(command, devices, restarts)
            return
        except _RanksDied as died:
            left = max_restarts if time.monotonic() - begun > _HEALTHY_SECONDS else left
            if left == 0:
                raise RankFailed(f"{died} The ranks were started {restarts + 1} times.", died.exit_code) from None
            left, restarts = left - 1, restarts + 1
            print(f"{died} All ranks start again ({left} more times if need be).", file=sys.stderr, flush=True)


def _launch_once(command: list[str], devices: int, restarts: int) -> None:
    """One life of the ranks; a rendezvous of its own keeps them from finding former addresses of each other."""
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
    )
    with tempfile.TemporaryDirectory(prefix="jcl-ranks-") as folder:
        os.environ |= {SENTENCES: folder, RESTARTS: str(restarts)}
        try:
            elastic_launch(config, sys.executable)(*command)
        except SignalException as error:
            raise _stopped(_sentences(folder), signal.Signals(error.sigval).name) from None
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            raise _failed(_sentences(folder), codes) from None
        except OSError as error:
            raise RunError(f"the ranks could not be started: {error}.") from None
        finally:
            del os.environ[SENTENCES], os.environ[RESTARTS]


def _sentences(folder: str) -> list[_Sentence]:
    """What the ranks left, the most telling first."""
    left = [_Sentence(**json.loads(file.read_text(encoding="utf-8"))) for file in Path(folder).glob("*.json")]
    return sorted(left, key=lambda sentence: (-sentence.weight, sentence.rank))


def _stopped(sentences: list[_Sentence], signal_name: str) -> JclError:
    if sentences and sentences[0].weight == _OWN:
        return RankFailed(_attributed(sentences[0]), sentences[0].exit_code)
    return Interrupted(f"{signal_name} received: the ranks ended before they could save; the newest checkpoint stays.")


def _failed(sentences: list[_Sentence], codes: Mapping[int, int]) -> JclError | _RanksDied:
    """What to make of exit codes by rank: an error of a rank's own goes before deaths, and deaths before lost contact.

    A rank that ends with an error code and without a sentence has shown a trace.
    """
    if sentences and sentences[0].weight == _OWN:
        return RankFailed(_attributed(sentences[0]), sentences[0].exit_code)
    speaking = {sentence.rank for sentence in sentences}
    for rank, code in codes.items():
        if code > 0 and rank not in speaking:
            return RankFailed(f"rank {rank} ended with exit code {code}.", code)
    # The launcher ends by SIGTERM those that are left.
    dead = [rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM] or list(codes)
    first = dead[0]
    if sentences and sentences[0].weight == _NAMED:
        return _RanksDied(sentences[0].text, sentences[0].exit_code)
    if codes[first] < 0:
        return _RanksDied(f"Rank {first} was ended by {signal.Signals(-codes[first]).name}.", 128 - codes[first])
    return _RanksDied(sentences[0].text, sentences[0].exit_code)


def _attributed(sentence: _Sentence) -> str:
    return sentence.text if sentence.rank == 0 else f"on rank {sentence.rank}: {sentence.text}"


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
