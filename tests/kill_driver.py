"""A program that trains in forks of itself and kills them; see `fault_tools.live`."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch._dynamo  # noqa: F401 - imported by every optimizer: once here instead of in every fork
from rich.console import Console

import jcl.commands.pretrain as pretraining
from jcl.runs.checkpoint import search_checkpoints
from jcl.settings.schema import Settings
from jcl.settings.values import read_settings

ON_THE_DISK = {"mkdir", "open", "writelines", "flush", "fsync", "close", "replace", "unlink"}


class KillAtEvent:
    """Dies before or after the n-th call to do with files in the thread that writes checkpoints."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        ours = threading.current_thread().name.startswith("checkpoint") and event in ("c_call", "c_return")
        imports = frame.f_code.co_name == "get_data"
        if not ours or imports or getattr(argument, "__name__", "") not in ON_THE_DISK:
            return
        self.seen += 1
        if self.seen == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(run: Path, settings: Path, life: dict[str, Any]) -> None:
    if "event" in life:
        threading.setprofile(KillAtEvent(life["event"]))
    console = Console(quiet=True)
    if (run / "settings.yaml").exists():
        pretraining.resume(run, console=console)
    else:
        pretraining.pretrain(read_settings(settings, Settings), run, console=console)


def main() -> None:
    run, settings, lives = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    for life in lives:
        child = os.fork()
        if child == 0:
            try:
                train(run, settings, life)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        if "seconds" in life:
            time.sleep(life["seconds"])
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        path, damaged = search_checkpoints(run / "checkpoints")
        partial = [entry.name for entry in (run / "checkpoints").glob(".*")]
        newest = -1 if path is None else int(path.stem.removeprefix("step-"))
        ended = os.waitstatus_to_exitcode(status)
        print(json.dumps({"ended": ended, "newest": newest, "damaged": damaged, "partial": partial}), flush=True)
        if ended > 0:
            sys.exit(f"the life {life} ended by an error of its own")


if __name__ == "__main__":
    main()
