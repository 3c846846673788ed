"""The command that writes a report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jcl.cli.app import EVALUATE
from jcl.cli.options import command
from jcl.cli.printing import say
from jcl.console import readable_size

if TYPE_CHECKING:
    from jcl.settings.evaluation import ReportOptions


@command("report", "evaluation.ReportOptions", group=EVALUATE)
def report(options: ReportOptions) -> dict[str, Any]:
    """Write one HTML page about one or several runs: curves, accuracies, neighbours, views, settings.

    [dim]jcl report runs/moco-v2 runs/jcl -o compared.html[/]
    """
    from jcl.commands.report import report_runs

    made = report_runs(options)
    for run in made.runs:
        for sentence in run.missing:
            say(f"{run.name}: {sentence}")
    say(f"Wrote {made.file} ({readable_size(made.size)}); open it in a browser.")
    return made.as_dict()
