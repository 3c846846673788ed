"""The command that puts runs on a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jcl.cli.app import EVALUATE, ForceOption, JsonOption, app
from jcl.cli.printing import say, write_json
from jcl.console import pluralize, readable_size


@app.command(rich_help_panel=EVALUATE)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, finished or not.")],
    out_file: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write (default: report.html in the run's folder).")
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="What to call a run on the page, in their order; repeatable.")
    ] = None,
    force: ForceOption = False,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    json_file: JsonOption = None,
) -> None:
    """Put one or several runs on a page to look at: curves, accuracies, neighbours, views, settings.

    [dim]jcl report runs/moco-v2 runs/jcl -o compared.html[/]
    """
    from jcl.commands.report import write_report
    from jcl.errors import SettingsError
    from jcl.runs.atomic import refuse_overwrite

    if name and len(name) != len(runs):
        raise SettingsError(
            f"got {pluralize(len(name), '--name')} for {pluralize(len(runs), 'run')}; give one for each run, or none."
        )
    if out_file is not None and not out_file.is_dir() and out_file.suffix.lower() not in (".html", ".htm"):
        raise SettingsError(f"a page is known by its ending: {out_file} should end in .html.")
    if out_file is None and len(runs) > 1:
        raise SettingsError("Several runs have no folder in common; say where to write the page with -o FILE.")
    own = runs[0] / "report.html"  # which is made anew, unless it shows what cannot be made any more
    if out_file is not None and (len(runs) > 1 or out_file.resolve() != own.resolve()):
        refuse_overwrite(out_file, force=force)
    made = write_report(runs, out_file or own, names=name, title=title, device=device, force=force)
    for run in made.runs:
        for sentence in run.absent:
            say(f"{run.name}: {sentence}")
    say(f"The page is in {made.file} ({readable_size(made.size)}); open it in a browser.")
    write_json(made.as_dict(), json_file)
