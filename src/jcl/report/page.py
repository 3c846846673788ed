"""One self-contained HTML page for one or several runs; it loads nothing from the network."""

import base64
import datetime
import hashlib
import io
import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image
from torch import Tensor

import jcl
from jcl.console import join_words, pluralize, unique_names
from jcl.report import style, tables
from jcl.report.charts import PLOT_AREA, SPEED, map_chart, training_chart, training_charts, view_histograms
from jcl.report.contents import RunContents, SampleResults
from jcl.report.remarks import remarks
from jcl.settings.resolved import ResolvedSettings, describe_views

IMAGE_SIDE: Final = 112  # the longest side of an image in pixels
_LOSSLESS_SIDE: Final = 48  # images up to this size are stored as PNG
_MAX_ROWS, _MAX_ROWS_OF_ALL = 6, 24  # rows of images of one run, and of all runs, so that the page stays small
_IMAGE_SECTIONS: Final = ("invariance", "map", "neighbors", "views")
# Lighter versions of the colors in style.py, for dark pages.
_DARK_COLORS: Final = {
    style.BLUE: "#4ea8de",
    style.ORANGE: "#f0b545",
    style.GREEN: "#35c79c",
    "#cc79a7": "#e29cc4",
    "#56b4e9": "#8fd0f5",
    style.RED: "#f58a4b",
}


def render_page(runs: Sequence[RunContents], title: str | None = None, note: str = "") -> str:
    """The page as HTML; `note` is shown below the summary."""
    training, histograms, speed = training_charts(runs), view_histograms(runs), training_chart(SPEED, runs)
    charts = {chart.spec.metric: chart.data for chart in (*training, *histograms, speed) if chart is not None}
    described = [_describe(index, run) for index, run in enumerate(runs)]
    charts |= {f"map-{one['index']}": one["map"]["data"] for one in described if one["map"] is not None}
    script = _asset("page.js")
    page = _environment().from_string(_asset("page.html")).render(
        title=title or (join_words([run.name for run in runs]) if len(runs) <= 3 else f"{len(runs)} runs"),
        note=note,
        made=datetime.datetime.now(tz=datetime.UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0"),
        version=jcl.__version__,
        runs=described,
        max_rows=min(_MAX_ROWS, max(2, _MAX_ROWS_OF_ALL // len(runs))),
        same_data=len({run.settings.data.location for run in runs}) == 1,
        training=training,
        histograms=histograms,
        speed=speed,
        results=tables.result_tables(runs),
        classes=tables.class_tables(runs),
        resources=tables.resource_table(runs),
        settings=tables.settings_tables(runs),
        data={"runs": [run.name for run in runs], "charts": charts},
        colors=style.colors_for(unique_names([run.settings.method.name for run in runs], " ")),
        hues=style.PALETTE,
        dark=_DARK_COLORS,
        css=Markup(_asset("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )  # fmt: skip
    return page.lstrip()


def missing_sections(old: str, new: str) -> list[str]:
    """The sections made from images that the old page has and the new one lacks."""
    before, after = (re.findall(r'<section id="(\w+)">', page) for page in (old, new))
    return [section for section in _IMAGE_SECTIONS if section in before and section not in after]


def _environment() -> Environment:
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"code": _code, "data_url": _data_url, "setting": tables.format_setting}
    made.globals["plot_area"] = PLOT_AREA
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return made


def _asset(name: str) -> str:
    return resources.files("jcl.report").joinpath(name).read_text(encoding="utf-8")


def _code(text: str) -> Markup:
    """Escaped text, with text between backticks as code."""
    return Markup(re.sub("`(.*?)`", r"<code>\1</code>", str(escape(text))))


def _data_url(pixels: Tensor) -> str:
    """An image (3, h, w) uint8, scaled down if it is large."""
    image = Image.fromarray(pixels.permute(1, 2, 0).cpu().contiguous().numpy())
    image.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
    buffer = io.BytesIO()
    kind = "png" if max(image.size) <= _LOSSLESS_SIDE else "jpeg"
    image.save(buffer, kind, optimize=kind == "png", quality=82)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def view_names(settings: ResolvedSettings) -> list[str]:
    """What the views of `ExampleViews` are called: query, key 1, key 2, ..."""
    method = settings.method
    counts = {"query": method.num_queries, "key": method.num_keys, "local": method.num_local_queries}
    return [name if count == 1 else f"{name} {i}" for name, count in counts.items() for i in range(1, count + 1)]


def _describe(index: int, run: RunContents) -> dict[str, Any]:
    method, sample = run.settings.method, run.sample or SampleResults(0, 0, from_test_set=False)
    top1, contrastive = run.accuracy("knn_top1"), run.last("train").get("contrastive_accuracy")
    if top1 is not None:
        headline = tables.percent(top1.value), "kNN accuracy of the frozen features"
    else:
        headline = tables.MISSING if contrastive is None else tables.percent(contrastive), "contrastive accuracy"
    epochs = pluralize(run.settings.train.epochs, "epoch")
    about = f"{run.settings.model.backbone} · {epochs} on {run.settings.data.location}"
    titles = {"untrained_knn": "untrained network", "start_knn": "weights at the start", "chance": "chance"}
    baselines = {title: run.accuracy(f"{name}_top1") for name, title in titles.items()}
    facts: dict[str, tuple[Any, Callable[[Any], str]]] = {
        "95 % interval": ((top1 and top1.interval) or None, str),
        "images tested": ((top1 and int(top1.images)) or None, "{:,}".format),
        **{name: (found and found.value, tables.percent) for name, found in baselines.items()},
        "loss": (run.last("train").get("loss"), "{:.3f}".format),
        "contrastive accuracy": (contrastive, tables.percent),
        **{title: (run.number(name), write) for title, (name, write) in tables.RESOURCES.items()},
    }
    return {
        "index": index,
        "contents": run,
        "name": run.name,
        "about": f"{method.name}{describe_views(run.settings)} · {about}",
        "headline": headline,
        "facts": {name: write(value) for name, (value, write) in facts.items() if value is not None},
        "remarks": remarks(run),
        "map": map_chart(run.name, sample.feature_map) if sample.feature_map else None,
        "neighbours": sample.neighbours,
        "labeled": any(row.query.label is not None for row in sample.neighbours),
        "spread": sample.spread,
        "view_names": view_names(run.settings),
    }
