"""The command `jcl`, also as `python -m jcl`."""

import sys


def main() -> None:
    """Whoever presses Ctrl-C while the command line is still being imported sees no trace either."""
    try:
        from jcl.cli import main as command_line
    except KeyboardInterrupt:
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()
