"""The command `jcl`: thin, one command, one call.

Nothing heavy is imported at the top of these files: `jcl --help` must answer at once, so each command imports what it
calls.
"""

from __future__ import annotations

import importlib
import io
import sys
from typing import NoReturn

from jcl.cli.app import app, err, rank
from jcl.cli.arguments import normalize_argv
from jcl.cli.standard_output import outlast_readers
from jcl.cli.usage import ParserError, WrongUsage, wrong_usage
from jcl.console import print_line
from jcl.distributed.launch import report_to_launcher
from jcl.errors import Interrupted, JclError, OtherRankFailed

__all__ = ["app", "main"]

INTERRUPTED = 130  # what a shell gives a command that Ctrl-C ended
_CPU_IS_FULL = "DefaultCPUAllocator"  # how torch names it, in a plain RuntimeError

# Each of these registers its commands, which `jcl --help` lists in this order.
for _group in ("train", "evaluate", "detect", "features", "report", "ablate", "study", "exchange", "data"):
    importlib.import_module(f"jcl.cli.{_group}")


def main() -> None:
    """Run the command line; an error of the user's becomes its sentence and an exit code, not a trace."""
    _write_any_sign()
    demand_written = outlast_readers()
    try:
        sys.argv[1:] = normalize_argv(sys.argv[1:])  # which --devices hands on
        code = app(prog_name="jcl", standalone_mode=False)  # errors are printed here
        if code == INTERRUPTED:  # typer has caught the key stroke and says nothing
            _leave_interrupted()
        demand_written()
        sys.exit(code or 0)
    except ParserError as error:
        wrong = wrong_usage(error)
        if wrong is None:  # it has shown the help
            sys.exit(WrongUsage.exit_code)
        _leave_with(wrong)
    except OtherRankFailed as error:
        sys.exit(error.exit_code)
    except JclError as error:
        _leave_with(error)
    except RuntimeError as error:
        # The first is torch's, which is not imported before it is needed; on a CPU there is only what it says.
        if type(error).__name__ != "OutOfMemoryError" and _CPU_IS_FULL not in str(error):
            raise
        _leave_with(_memory_is_full(error))
    except KeyboardInterrupt:
        _leave_interrupted()


def _write_any_sign() -> None:
    """What a terminal or a log of few signs (Latin-1, ASCII) has none for is written as its number.

    As it is, the figures of a long measurement would be lost for the sake of a dot in q·k.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not None, as where it was closed, nor what a test listens to
            stream.reconfigure(errors="backslashreplace")


def _leave_with(error: JclError) -> NoReturn:
    if report_to_launcher(error, rank):
        sys.exit(error.exit_code)
    whose = f" on rank {rank}" if rank > 0 else ""
    # Whoever asked a run to stop has made no error.
    print_line(
        err, str(error), lead="" if error.exit_code in (Interrupted.exit_code, INTERRUPTED) else f"Error{whose}: "
    )
    sys.exit(error.exit_code)


def _leave_interrupted() -> NoReturn:
    nothing_left = JclError("Interrupted.")
    nothing_left.exit_code = INTERRUPTED
    if not report_to_launcher(nothing_left, rank):
        if err.is_terminal:
            err.print()  # what was typed, ^C, stands on this line
        print_line(err, str(nothing_left))
    sys.exit(INTERRUPTED)


def _memory_is_full(error: RuntimeError) -> JclError:
    """The library's own words go on for a screen; the first two sentences say how much was wanted."""
    if _CPU_IS_FULL in str(error):
        wanted = str(error).partition("you tried to allocate ")[2].split(" ")[0]
        more = f": {int(wanted):,} bytes more were wanted" if wanted.isdecimal() else ""
        return JclError(
            f"The memory of this machine is too small{more}; smaller batches (--batch-size), views "
            "(views.image_size) or a shorter queue (method.queue_size) need less."
        )
    wanted = ". ".join(str(error).split(". ")[:2]).rstrip(".")
    return JclError(
        f"{wanted}; a smaller batch needs less (--batch-size, and --accumulate for `jcl detect`), and other programs "
        "on the same GPU may be holding memory."
    )
