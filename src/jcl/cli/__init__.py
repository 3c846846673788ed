"""The command `jcl`: thin, one command, one call.

Nothing heavy is imported at the top of these files: `jcl --help` must answer at once, so each command imports what it
calls.
"""

from __future__ import annotations

import importlib
import sys

from rich.markup import escape

from jcl.cli.app import app, err, rank
from jcl.errors import FailedElsewhere, JclError
from jcl.launching import tell_launcher

__all__ = ["app", "main"]

# Each of these registers its commands, which `jcl --help` lists in this order.
for _group in ("train", "evaluate", "detect", "features", "study", "exchange", "data"):
    importlib.import_module(f"jcl.cli.{_group}")


def main() -> None:
    """Run the command line; an error of the user's becomes its sentence and an exit code, not a trace."""
    try:
        app()
    except FailedElsewhere as error:
        sys.exit(error.exit_code)
    except JclError as error:
        if tell_launcher(error, rank):
            sys.exit(error.exit_code)
        whose = f" on rank {rank}" if rank > 0 else ""
        err.print(f"[bold red]Error{whose}:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        err.print("Interrupted.", highlight=False)
        sys.exit(130)
