"""What was typed, before the commands take it apart."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from jcl.errors import SettingsError
from jcl.paths import home_expanded

_OPTION_WITH_VALUE = re.compile(r"(--[a-z-]+)=(.*)", re.DOTALL)


def normalize_argv(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--out=~/runs` as a shell would expand `--out ~/runs`; an empty one is refused.

    Nothing is what a shell makes of a variable that is not set, and as a path it would be the current folder.
    """
    meant = []
    for place, argument in enumerate(arguments):
        option = _OPTION_WITH_VALUE.fullmatch(argument)
        if argument == "" or (option is not None and option[2] == ""):
            where = option[1] if option is not None else shlex.join(["jcl", *arguments[:place]])
            raise SettingsError(
                f"there is nothing after `{where}`: an empty argument names no file, folder or value. "
                "Is it a variable of the shell that is not set?"
            )
        if option is not None and option[2].startswith("~"):
            argument = f"{option[1]}={home_expanded(option[2])}"
        meant.append(argument)
    return meant
