"""A program that runs `jcl` as ranks which are forks of itself; see `launch_tools.forked_ranks`.

A scenario is {"ranks": how many, "arguments": of jcl, "environment": further variables}. With {"stop": "rank" or
"workers", "after": a file} rank 1, or the processes that decode for it, are halted once the file is there. For each it
prints the exit codes of the other ranks, what was said on both streams and the seconds from the halt on. With "unkept"
no decoded image stays in memory, as if there were very many; with "unmeasured" rank 1 fails to measure kNN and the
quality; "places" are working folders, one for each rank. A rank that trained without compiling says so if it imported
PyTorch's compiler, which takes seconds.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Imported once here instead of in every fork.
import jcl.commands.pretrain
import jcl.commands.probes
import jcl.settings.commands
from jcl.data import loader
from jcl.errors import DataError
from launch_tools import descendants, wait_until


def _fail(*_: Any, **__: Any) -> Any:
    raise DataError("a decoding process was killed.")


def become_rank(scenario: dict[str, Any], rank: int, port: int, said: int) -> None:
    """Run the command in this process, as a launcher would have started it."""
    for stream in (1, 2):
        os.dup2(said, stream)
    count = str(scenario["ranks"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **scenario.get("environment", {})}
    if scenario.get("unkept"):
        loader.CACHE_BYTES = 0
    if scenario.get("unmeasured") and rank == 1:
        jcl.commands.train_run.online_quality = lambda *_: _fail
        jcl.evaluate.features.read_all = _fail
    if "places" in scenario:
        os.chdir(scenario["places"][rank])
    sys.argv = ["jcl", *scenario["arguments"]]
    from jcl.cli import main  # which looks at the rank as it is imported

    main()


def halt(scenario: dict[str, Any], pid: int) -> list[int]:
    """The processes halted."""
    wait_until(lambda: Path(scenario["after"]).exists())
    halted = [pid] if scenario["stop"] == "rank" else list(descendants(pid))
    for each in halted:
        os.kill(each, signal.SIGSTOP)
    return halted


def play(scenario: dict[str, Any]) -> dict[str, Any]:
    with socket.socket() as probe, tempfile.TemporaryFile() as said:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        ranks = []
        for rank in range(scenario["ranks"]):
            child = os.fork()
            if child == 0:
                try:
                    become_rank(scenario, rank, port, said.fileno())
                except SystemExit as ended:
                    if "pretrain" in scenario["arguments"] and "torch._dynamo" in sys.modules:
                        print("torch._dynamo was imported", file=sys.stderr, flush=True)
                    os._exit(int(ended.code or 0))
                except BaseException as error:
                    print(repr(error), file=sys.stderr, flush=True)
                    os._exit(99)
                sys.stdout.flush()
                os._exit(0)
            ranks.append(child)
        halted = halt(scenario, ranks[1]) if "stop" in scenario else []
        begun = time.monotonic()
        kept_waiting = ranks[1:2] if halted else []
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks if child not in kept_waiting]
        seconds = time.monotonic() - begun
        for each in {*kept_waiting, *halted}:
            os.kill(each, signal.SIGKILL)
        for child in kept_waiting:
            os.waitpid(child, 0)
        said.seek(0)
        return {"codes": codes, "said": said.read().decode(), "seconds": seconds}


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        print(json.dumps(play(each)), flush=True)
