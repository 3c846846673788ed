"""One self-contained page of one or several runs: opened from disk, it asks nothing of any network."""

from __future__ import annotations

import base64
import datetime
import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from typing import Final

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup, escape

import jcl
from jcl.console import listed
from jcl.report import style
from jcl.report.contents import RunContents
from jcl.report.inline import script_json
from jcl.report.page_charts import speed_figure, spread_figures, training_figures
from jcl.report.page_runs import shown_run
from jcl.report.page_tables import resource_table, result_tables, settings_tables

# The colours of style.py a little lighter, to be read on a dark page.
_ON_DARK: Final = {
    style.BLUE: "#4ea8de",
    style.ORANGE: "#f0b545",
    style.GREEN: "#35c79c",
    "#cc79a7": "#e29cc4",
    "#56b4e9": "#8fd0f5",
    style.RED: "#f58a4b",
}
# The sections that can only be made where the images are; what they are called is also what they show.
_MADE_FROM_IMAGES: Final = ("invariance", "map", "neighbours", "views")
_PICTURE_ROWS, _MOST_ROWS = 24, 6  # of all runs together, so that a page of many runs stays small, and of one


def render_page(runs: Sequence[RunContents], title: str | None = None, note: str = "") -> str:
    """The whole page as HTML; `note` is a sentence to be read with the summary."""
    training, spread, speed = training_figures(runs), spread_figures(runs), speed_figure(runs)
    charts = {figure.key: figure.chart.data for figure in (*training, *spread, speed) if figure is not None}
    rows = min(_MOST_ROWS, max(2, _PICTURE_ROWS // len(runs)))
    shown = [shown_run(place, run, charts, rows) for place, run in enumerate(runs)]
    script = _packaged("page.js")
    page = _environment().get_template("page.html").render(
        title=title or _title(runs),
        note=note,
        made=datetime.datetime.now(tz=datetime.UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0"),
        version=jcl.__version__,
        runs=shown,
        same_data=len({run.settings.data.location for run in runs}) == 1,
        training=training,
        spread=spread,
        speed=speed,
        results=result_tables(runs),
        resources=resource_table(runs),
        settings=settings_tables(runs),
        data=script_json({"runs": [run.name for run in runs], "charts": charts}),
        css=Markup(_colours(runs) + _packaged("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )  # fmt: skip
    return page.lstrip()


def lost_parts(old: str, new: str) -> list[str]:
    """The parts made from images that an older page shows and a newer one does not."""
    before, after = (re.findall(r'<section id="(\w+)">', page) for page in (old, new))
    return [part for part in _MADE_FROM_IMAGES if part in before and part not in after]


def _environment() -> Environment:
    loader = DictLoader({"page.html": _packaged("page.html")})
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters["coded"] = _coded
    return made


def _coded(text: str) -> Markup:
    """A sentence, escaped, with what stands between backticks as code."""
    parts = [escape(part) for part in text.split("`")]
    if len(parts) % 2 == 0:  # a backtick too many: somebody's file name
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in enumerate(parts)
    )


def _packaged(name: str) -> str:
    return resources.files("jcl.report").joinpath(name).read_text(encoding="utf-8")


def _title(runs: Sequence[RunContents]) -> str:
    names = [run.name for run in runs]
    if len(names) > 3:
        return f"{len(names)} runs"
    return listed(names)


def _colours(runs: Sequence[RunContents]) -> str:
    """The colours of runs and classes as CSS variables, for light pages and dark ones."""
    chosen = _run_colours([run.settings.method.name for run in runs])
    named = {f"--run-{place}": colour for place, colour in enumerate(chosen)}
    named |= {f"--hue-{place}": colour for place, colour in enumerate(style.PALETTE)}
    light = ";".join(f"{name}:{colour}" for name, colour in named.items())
    dark = ";".join(f"{name}:{_ON_DARK.get(colour, colour)}" for name, colour in named.items())
    # A later run in a colour that is taken already has another dash.
    rules = [
        f".run-{place}{{--colour:var(--run-{place});--dash:{('none', '6 3', '2 2')[chosen[:place].count(colour) % 3]}}}"
        for place, colour in enumerate(chosen)
    ]
    rules += [f".hue-{place}{{--colour:var(--hue-{place})}}" for place in range(len(style.PALETTE))]
    rules = [f":root{{{light}}}", f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}", *rules]
    return "\n".join(rules) + "\n"


def _run_colours(methods: Sequence[str]) -> list[str]:
    """The first run of a method has the method's colour, others one that no run has yet, as long as there are any."""
    own = [colour if method not in methods[:place] else None for place, method, colour in _numbered(methods)]
    free = [colour for colour in style.PALETTE if colour not in own] or list(style.PALETTE)
    further = iter(range(len(methods)))
    return [colour or free[next(further) % len(free)] for colour in own]


def _numbered(methods: Sequence[str]) -> list[tuple[int, str, str]]:
    names = list(dict.fromkeys(methods))
    colours = dict(zip(names, style.colours_for(names), strict=True))
    return [(place, method, colours[method]) for place, method in enumerate(methods)]
