"""The program `jcl`: user errors become a message and an exit code; other exceptions keep their traceback."""

import difflib
import io
import itertools
import re
import sys
from typing import Any, NoReturn

import typer

from jcl import signals
from jcl.cli.options import WrongUsage, app
from jcl.cli.printing import err, out, rank
from jcl.console import print_line
from jcl.distributed.launch import report_to_launcher
from jcl.errors import Interrupted, JclError, OtherRankFailed, SettingsError, memory_problem

INTERRUPTED = 130  # exit code after Ctrl-C
# Click's UsageError, which some versions of Typer vendor.
_ParserError: type[Exception] = typer.BadParameter.__mro__[1]
# Options and settings with their names in other programs.
_SYNONYMS = {
    "backbone": ("arch", "model"),
    "batch-size": ("bs", "batch"),
    "devices": ("gpus", "num-gpus"),
    "image-size": ("crop-size", "input-size", "size"),
    "init": ("pretrained", "pretrained-weights", "weights"),
    "lr": ("learning-rate", "base-lr"),
    "out": ("output", "output-dir", "save-dir"),
    "weight-decay": ("wd",),
}


def main() -> None:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # do not fail for characters that the encoding lacks
    try:
        for before, argument in itertools.pairwise(sys.argv):
            if re.fullmatch(r"(--[a-z-]+=)?", argument):  # as a path: the current folder
                where = f" after {before}" if before.startswith("-") and not argument else f" {argument}"
                raise SettingsError(f"The argument{where.rstrip()} is empty; is a shell variable not set?")
        code = app(prog_name="jcl", standalone_mode=False)
        if code == INTERRUPTED:  # typer has caught the signal
            _exit_interrupted()
        if out.failure is not None:
            raise JclError(f"Cannot write to standard output: {out.failure.strerror}. The command itself has finished.")
        sys.exit(code or 0)
    except _ParserError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help has been shown
            sys.exit(WrongUsage.exit_code)
        _exit_with(_wrong_usage(error))
    except OtherRankFailed as error:
        sys.exit(error.exit_code)
    except JclError as error:
        _exit_with(error)
    except RuntimeError as error:
        if str(error).startswith("Symlink loop"):  # `Path.resolve` before Python 3.13
            _exit_with(JclError(f"{error}; give another path."))
        if not (problem := memory_problem(error)):
            raise
        remedy = "use a smaller --batch-size or --image-size (`jcl pretrain`, `jcl detect`: --accumulate)"
        _exit_with(JclError(f"{problem}; {remedy}, or free memory that other programs hold."))
    except OSError as error:
        if error.filename is None:
            raise
        _exit_with(JclError(f"Cannot open {error.filename}: {error.strerror}."))
    except KeyboardInterrupt:
        _exit_interrupted()


def _wrong_usage(error: Any) -> WrongUsage:
    context = getattr(error, "ctx", None)
    named = [info.name for info in app.registered_commands if info.name in sys.argv[1:2]]
    command = " ".join(["jcl", *map(str, named)]) if context is None else context.command_path
    problem = _unknown_option(error) if type(error).__name__ == "NoSuchOption" else error.format_message()
    return WrongUsage(" ".join(problem.split()).rstrip("."), command)


def _unknown_option(error: Any) -> str:
    """The message for an unknown option, with the option or setting that was probably meant."""
    from jcl.settings.schema import setting_names

    flags = [] if error.ctx is None else [flag for each in error.ctx.command.params for flag in each.opts]
    known = {flag.lstrip("-"): f"did you mean {flag}?" for flag in flags if flag.startswith("-")}
    known |= {flag: f"give {flag.upper()} without an option name" for flag in flags if not flag.startswith("-")}
    for setting in setting_names() if "--set" in flags else ():
        known.setdefault(setting.rpartition(".")[2].replace("_", "-"), f"use --set {setting}=VALUE")
    name = error.option_name.lstrip("-").replace("_", "-")
    name = next((ours for ours, others in _SYNONYMS.items() if name in others and ours in known), name)
    hint = next((known[close] for close in difflib.get_close_matches(name, known, n=1, cutoff=0.7)), "")
    return f"There is no option {error.option_name}{'; ' if hint else ''}{hint}"


def _exit_with(error: JclError) -> NoReturn:
    if not report_to_launcher(error, rank):
        whose = f" on rank {rank}" if rank > 0 else ""
        # Stopping a run on request is not an error.
        lead = "" if error.exit_code in (Interrupted.exit_code, INTERRUPTED) else f"Error{whose}: "
        print_line(err, str(error), lead=lead)
    sys.exit(error.exit_code)


def _exit_interrupted() -> NoReturn:
    if err.is_terminal:
        err.print()  # ^C is on this line
    if signals.received not in ("", "SIGINT"):
        _exit_with(Interrupted(f"{signals.received} received: stopped before the end; repeat the command."))
    error = JclError("Interrupted.")
    error.exit_code = INTERRUPTED
    _exit_with(error)
