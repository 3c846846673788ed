"""The command `jcl`.

Nothing heavy is imported at the top of these files: each command imports what it calls, so that `jcl --help` answers at
once.
"""

import importlib

from jcl.cli.entry_point import main
from jcl.cli.options import app

__all__ = ["app", "main"]

# Each of these registers its commands, which `jcl --help` lists in this order.
for _module in ("train", "evaluate", "study", "data"):
    importlib.import_module(f"jcl.cli.{_module}")
