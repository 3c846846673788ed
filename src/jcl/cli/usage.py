"""Errors of the command line's parser as one sentence: the option, its value and what it may be."""

from __future__ import annotations

from typing import Any

import typer

from jcl.errors import JclError

# Typer gives only some names to its parser's errors, which come from another package in some of its versions.
ParserError: type[Exception] = typer.BadParameter.__mro__[1]


class WrongUsage(JclError):
    """The command line cannot be parsed."""

    exit_code = 2

    def __init__(self, problem: str, command: str) -> None:
        end = "" if problem.endswith("?") else "."
        super().__init__(f"{problem}{end} See `{command} --help`.")


def wrong_usage(error: Any) -> WrongUsage | None:
    """The sentence for an error of the parser; None where it has shown the help instead."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return None
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    return WrongUsage(_problem(error, parameter), "jcl" if context is None else context.command_path)


def _name(parameter: Any) -> str:
    return str(max(parameter.opts, key=len))


def _problem(error: Any, parameter: Any) -> str:
    """Without a full stop, on one line."""
    from pydantic import ValidationError

    from jcl.settings.schema import invalid_value

    if parameter is not None and isinstance(error.__cause__, ValidationError):
        problems = error.__cause__.errors()
        text = invalid_value(_name(parameter), problems, str(problems[0]["input"]))
    else:
        text = error.format_message()
    return " ".join(text.split()).rstrip(".")
