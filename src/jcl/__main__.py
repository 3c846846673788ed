"""The command `jcl`, also as `python -m jcl`."""

import gc
import os
import sys
from pathlib import Path

from jcl import signals


def main() -> None:
    """Run the command line; a signal during its import leaves no traceback either."""
    try:
        Path.cwd()
    except FileNotFoundError:  # torch cannot be imported
        sys.exit("Error: The current folder no longer exists; change to another one.")
    gc.set_threshold(20_000)  # importing torch makes half a million objects: fewer collections save 0.3 s
    signals.stop_with_parent()
    if os.environ.get("WORLD_SIZE", "1") == "1":  # a rank that waits for others in C++ could not answer
        signals.interrupt_on_signals()
    try:
        from jcl.cli import main as command_line

        command_line()
    except (Exception, KeyboardInterrupt) as error:  # an interrupted import may raise anything
        if not signals.received and not isinstance(error, KeyboardInterrupt):
            raise
        sys.exit(130 if signals.received in ("", "SIGINT") else 75)
    finally:
        # CPython remembers a KeyboardInterrupt that left an `exec`, and `python -m` would end by SIGINT although it was
        # caught here. Another `exec` clears that.
        exec("")


if __name__ == "__main__":
    main()
