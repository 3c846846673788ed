"""What the parser of the command line finds wrong, told as other errors are: the option, its value, what may be."""

from __future__ import annotations

import sys
from typing import Any

import typer

from jcl.cli.app import app
from jcl.errors import JclError

# Typer gives only some names to its parser's errors, which come from another package in some versions of it.
ParserError: type[Exception] = typer.BadParameter.__mro__[1]


class WrongUsage(JclError):
    """The command line cannot be taken apart."""

    exit_code = 2


def wrong_usage(error: Any) -> WrongUsage | None:
    """The sentence for an error of the parser; None where it has shown the help instead."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return None
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # of several commands
    name = next((word for word in sys.argv[1:] if word in commands), "")
    parameter = getattr(error, "param", None) or _called(getattr(error, "option_name", ""), commands.get(name))
    text = _problem(error, parameter)
    if parameter is not None and parameter.nargs > 1:
        meaning = parameter.help.rstrip(".")
        text = f"{text}; {_name(parameter)} takes {parameter.nargs} values: {meaning[0].lower()}{meaning[1:]}"
    end = "" if text.endswith("?") else "."
    return WrongUsage(f"{text}{end} `{f'jcl {name}'.strip()} --help` tells what may be given.")


def _called(option: str, command: Any) -> Any:
    parameters = [] if command is None else command.params
    return next((parameter for parameter in parameters if option in parameter.opts), None)


def _name(parameter: Any) -> str:
    return str(max(parameter.opts, key=len))


def _problem(error: Any, parameter: Any) -> str:
    """Without a full stop, on one line."""
    from pydantic import ValidationError

    from jcl.settings.schema import about_value

    if parameter is not None and isinstance(error.__cause__, ValidationError):
        text = about_value(_name(parameter), error.__cause__.errors())
    else:
        text = error.format_message()
    return " ".join(text.split()).rstrip(".")
