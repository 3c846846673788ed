"""Work in a process of its own, whose end for want of memory is an answer and not the end of everything."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from jcl.errors import JclError

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class OutOfMemory:
    """What comes back of work that did not fit."""


def run_in_subprocess(work: Callable[[Argument], Result], argument: Argument) -> Result | OutOfMemory:
    """Call `work(argument)` in a new process; both, and what comes of it, must pickle.

    The process starts clean, so nothing that was measured before it weighs on it, and its memory is given back whole.
    """
    context = _process_context(work.__module__)
    answers, into = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(work, argument, into), daemon=True)
    process.start()
    into.close()
    try:
        answer = answers.recv()
    except EOFError:  # it ended without a word
        process.join()
        answer = OutOfMemory() if process.exitcode == -signal.SIGKILL else JclError(_sudden_end(process.exitcode))
    finally:
        answers.close()
        process.terminate()
        process.join()
    if isinstance(answer, BaseException):
        raise answer
    result: Result | OutOfMemory = answer
    return result


def _process_context(module: str) -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])  # imported once, not in every process
    return context


def _work(work: Callable[[Argument], Result], argument: Argument, into: multiprocessing.connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process and is the parent's to answer
    # Should the machine run out of memory, it is this process that the system is to end, and no other.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler has nothing to tell a person
    answer: Any
    try:
        answer = work(argument)
    except (torch.OutOfMemoryError, MemoryError):
        answer = OutOfMemory()
    except JclError as error:
        answer = error
    except RuntimeError as error:
        # On a CPU the allocator has no type of its own for it.
        answer = OutOfMemory() if "DefaultCPUAllocator" in str(error) else error
    into.send(answer)


def _sudden_end(code: int | None) -> str:
    return f"a measurement in a process of its own ended suddenly (exit code {code}); what it printed says why."
