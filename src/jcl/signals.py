"""Signals that ask a process to stop, and a parent process that is gone."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, Self

STOP_SIGNALS: Final = (
    signal.SIGINT,  # Ctrl-C
    signal.SIGTERM,  # `kill`, and schedulers before they kill
    signal.SIGHUP,  # the terminal or connection is gone
    signal.SIGUSR1,  # SLURM before the time limit: --signal=USR1@120
)
"""Training saves and stops after its step; other work ends at once."""

STARTED_BY: Final = "JCL_STARTED_BY"  # environment variable: the parent process that this one must not outlive

SECONDS_TO_SAVE: Final = 300  # before a process that was asked to stop is killed
_POLL_SECONDS: Final = 1.0

received = ""  # the name of the signal that `interrupt_on_signals` turned into KeyboardInterrupt


def caught_signals() -> list[signal.Signals]:
    """The stop signals, without SIGHUP under `nohup`."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (ignored and number == signal.SIGHUP)]


def interrupt_on_signals() -> None:
    """Let every stop signal raise KeyboardInterrupt, as Ctrl-C does by default, and keep its name."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        global received
        received = signal.Signals(number).name
        raise KeyboardInterrupt

    for number in caught_signals():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, interrupt)


class StopRequest:
    """Turns stop signals into a request that the training loop obeys after the current step.

    A second SIGINT interrupts at once. Outside the main thread signals cannot be caught, and nothing changes.
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None) -> None:
        """`on_request` is called from within the signal handler, so it may only set a flag."""
        self.signal_name = ""
        self._on_request = on_request
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return bool(self.signal_name)

    def __enter__(self) -> Self:
        if received:  # a library has caught the KeyboardInterrupt
            raise KeyboardInterrupt
        if threading.current_thread() is threading.main_thread():
            for number in caught_signals():
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
        self._on_request()


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes that are started in this block do not receive stop signals; this process handles its own at the end.

    The parent may need images from its workers until the end of a step, and Ctrl-C would end the forkserver while it
    imports torch. Other threads of the parent do not block signals, but Python handles them in the main thread.
    """
    from multiprocessing import resource_tracker  # here, for a quick `jcl --help`

    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS if in_main_thread}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    late: list[int] = []
    for number in handlers:
        signal.signal(number, lambda number, _: late.append(number))
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    resource_tracker.ensure_running()  # inherits blocked signals too, but unblocks some here
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for waiting in late:
            signal.raise_signal(waiting)


def stop_with_parent() -> None:
    """Stop this process, as by SIGTERM, when the process named by `STARTED_BY` is gone; kill it if it does not."""
    parent = os.getppid()
    if os.environ.get(STARTED_BY) != str(parent):  # not set, or inherited from a process in between
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SECONDS_TO_SAVE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
