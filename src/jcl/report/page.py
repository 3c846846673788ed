"""One self-contained page of one or several runs: opened from disk, it asks nothing of any network."""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any, Final

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup, escape

import jcl
from jcl.report import style
from jcl.report.contents import Answer, ExampleViews, RunContents, ShownImage
from jcl.report.inline import image_address, script_json
from jcl.report.page_charts import speed_figure, spread_figures, training_figures
from jcl.report.page_tables import (
    MISSING,
    duration,
    memory,
    plain_value,
    resource_table,
    result_tables,
    settings_tables,
)
from jcl.report.remarks import remarks
from jcl.report.scatter import class_marks, map_chart

# The colours of style.py a little lighter, to be read on a dark page.
_ON_DARK: Final = {
    style.BLUE: "#4ea8de",
    style.ORANGE: "#f0b545",
    style.GREEN: "#35c79c",
    "#cc79a7": "#e29cc4",
    "#56b4e9": "#8fd0f5",
    style.RED: "#f58a4b",
}
_PICTURE_ROWS: Final = 24  # of all runs together, so that a page of many runs stays small


def render_page(runs: Sequence[RunContents], title: str | None = None) -> str:
    """The whole page as HTML."""
    charts = {figure.key: figure.chart.data for figure in (*training_figures(runs), *spread_figures(runs))}
    speed = speed_figure(runs)
    charts |= {speed.key: speed.chart.data} if speed is not None else {}
    shown = [_run(place, run, charts, max(2, _PICTURE_ROWS // len(runs))) for place, run in enumerate(runs)]
    script = _packaged("page.js")
    return _environment().get_template("page.html").render(
        title=title or _title(runs),
        made=datetime.datetime.now(tz=datetime.UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0"),
        version=jcl.__version__,
        runs=shown,
        same_data=len({run.settings.data.location for run in runs}) == 1,
        training=training_figures(runs),
        spread=spread_figures(runs),
        speed=speed,
        results=result_tables(runs),
        resources=resource_table(runs),
        settings=settings_tables(runs),
        data=script_json({"runs": [run.name for run in runs], "charts": charts}),
        css=Markup(_colours(runs) + _packaged("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )  # fmt: skip


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
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _run(place: int, run: RunContents, charts: dict[str, Any], rows: int) -> dict[str, Any]:
    """What the template shows of one run."""
    settings, look = run.settings, run.look
    flat = None
    if look is not None and look.flat_map is not None:
        chart = map_chart(run.name, look.flat_map)
        charts[f"map-{place}"] = chart.data
        legend = {mark.name: mark for mark in class_marks(look.flat_map.labels).values()}
        flat = {"key": f"map-{place}", "svg": chart.svg, "legend": legend.values(), "images": len(look.flat_map.names)}
    return {
        "place": place,
        "name": run.name,
        "path": str(run.path),
        "finished": run.summary is not None,
        "about": _about(run),
        "headline": _headline(run),
        "facts": _facts(run),
        "remarks": remarks(run),
        "absent": run.absent,
        "choices": _choices(run),
        "canvas": settings.views.image_size,
        "map": flat,
        "answers": [_answer(answer) for answer in look.answers[: min(rows, 6)]] if look is not None else [],
        "labelled": look is not None and any(answer.query.label is not None for answer in look.answers),
        "views": _views(run.views, min(rows, 6)) if run.views is not None else None,
        "spread": _spread(run),
        "skipped": list(run.skipped.items())[:20],
        "skipped_count": len(run.skipped),
    }


def _choices(run: RunContents) -> list[tuple[str, str, str]] | None:
    if run.choices is None:
        return None
    return [(choice.name, plain_value(choice.value), choice.reason) for choice in run.choices]


def _about(run: RunContents) -> str:
    settings = run.settings
    keys = f", {settings.method.num_keys} keys an image" if settings.method.num_keys > 1 else ""
    epochs = "1 epoch" if settings.train.epochs == 1 else f"{settings.train.epochs:,} epochs"
    return f"{settings.method.name}{keys} · {settings.model.backbone} · {epochs} on {settings.data.location}"


def _headline(run: RunContents) -> tuple[str, str]:
    """The one figure to look at first: accuracy where there are labels, else how well the task was learned."""
    top1 = run.newest("knn").get("knn_top1")
    if top1 is not None:
        return f"{top1:.1f} %", "kNN accuracy of the frozen features"
    own = run.newest("train").get("contrastive_accuracy")
    return (MISSING if own is None else f"{own:.1f} %"), "of queries find their own image first"


def _facts(run: RunContents) -> list[tuple[str, str]]:
    line, summary = run.newest("train"), run.summary or {}
    seconds = summary.get("seconds", line.get("seconds"))
    peak, loss, speed = summary.get("peak_memory_bytes"), line.get("loss"), line.get("images_per_second")
    own = line.get("contrastive_accuracy")
    found = [
        ("loss", None if loss is None else f"{loss:.3f}"),
        ("own image first", None if own is None else f"{own:.1f} %"),
        ("images a second", f"{summary.get('images_per_second', speed):,.0f}" if speed is not None else None),
        ("training time", None if seconds is None else duration(seconds)),
        ("peak memory", None if peak is None else memory(peak)),
    ]
    return [(name, value) for name, value in found if value is not None]


def _spread(run: RunContents) -> dict[str, str] | None:
    spread = run.look.spread if run.look is not None else None
    if spread is None or len(spread.similarities) == 0:
        return None
    return {
        "similarity": f"{spread.similarities.mean():.3f}",
        "variance": f"{spread.variances.mean():.2e}",
        "images": f"{len(spread.similarities):,}",
        "views": str(spread.views),
    }


def _answer(answer: Answer) -> dict[str, Any]:
    own = answer.query.label
    pairs = zip(answer.neighbours, answer.similarities, strict=True)
    return {
        "query": _picture(answer.query),
        "neighbours": [
            _picture(image)
            | {"similarity": f"{similarity:.2f}", "right": None if None in (own, image.label) else image.label == own}
            for image, similarity in pairs
        ],
    }


def _picture(image: ShownImage) -> dict[str, Any]:
    return {"address": image_address(image.pixels), "name": image.name, "label": image.label}


def _views(example: ExampleViews, rows: int, most: int = 8) -> list[dict[str, Any]]:
    """For each image: itself, its query view and its key views, of which a few are enough."""
    return [
        {"image": _picture(image), "views": [image_address(view) for view in own[:most]]}
        for image, own in zip(example.images[:rows], example.views[:rows], strict=True)
    ]


def _colours(runs: Sequence[RunContents]) -> str:
    """The colours of runs and classes as CSS variables, for light pages and dark ones."""
    methods = [run.settings.method.name for run in runs]
    chosen = style.colours_for(methods)
    if len(set(chosen)) < len(chosen):  # several runs of one method: colours tell runs apart instead
        chosen = [style.PALETTE[place % len(style.PALETTE)] for place in range(len(runs))]
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
