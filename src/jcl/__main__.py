"""The command `jcl`, also as `python -m jcl`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C during its import leaves no traceback either."""
    try:
        from jcl.cli import main as command_line
    except KeyboardInterrupt:
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()
