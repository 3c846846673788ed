"""One run as the page's template shows it: texts, and pictures as addresses."""

from __future__ import annotations

from typing import Any

from jcl.console import duration, pluralize, readable_size
from jcl.report.contents import Answer, ExampleViews, RunContents, ShownImage
from jcl.report.inline import image_address
from jcl.report.page_tables import MISSING, of_summary, plain_value, seconds_of, speed_of
from jcl.report.pictures import view_names
from jcl.report.remarks import remarks
from jcl.report.scatter import class_marks, map_chart
from jcl.settings.schema import known, views_in_words


def shown_run(place: int, run: RunContents, charts: dict[str, Any], rows: int) -> dict[str, Any]:
    """What the template shows of one run, with so many rows of pictures; the data of its map goes to `charts`."""
    look = run.look
    flat = None
    if look is not None and look.flat_map is not None:
        chart = map_chart(run.name, look.flat_map)
        charts[f"map-{place}"] = chart.data
        legend = {mark.name: mark for mark in class_marks(look.flat_map.labels).values()}
        flat = {
            "key": f"map-{place}",
            "svg": chart.svg,
            "legend": list(legend.values()),
            "images": len(look.flat_map.names),
        }
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
        "map": flat,
        "answers": [_answer(answer) for answer in look.answers[:rows]] if look is not None else [],
        "labelled": look is not None and any(answer.query.label is not None for answer in look.answers),
        "views": _views(run.views, rows) if run.views is not None else None,
        "view_names": view_names(known(run.settings.method.num_queries), known(run.settings.method.num_keys)),
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
    epochs = pluralize(settings.train.epochs, "epoch")
    method = f"{settings.method.name}{views_in_words(settings)}"
    return f"{method} · {settings.model.backbone} · {epochs} on {settings.data.location}"


def _headline(run: RunContents) -> tuple[str, str]:
    """The one figure to look at first: accuracy where there are labels, else how well the task was learned."""
    top1 = run.newest("knn").get("knn_top1")
    if top1 is not None:
        return f"{top1:.1f} %", "kNN accuracy of the frozen features"
    own = run.newest("train").get("contrastive_accuracy")
    return (MISSING if own is None else f"{own:.1f} %"), "of queries find their own image first"


def _facts(run: RunContents) -> list[tuple[str, str]]:
    line = run.newest("train")
    loss, own = line.get("loss"), line.get("contrastive_accuracy")
    speed, seconds, peak = speed_of(run), seconds_of(run), of_summary(run, "peak_memory_bytes")
    found = [
        ("loss", None if loss is None else f"{loss:.3f}"),
        ("own image first", None if own is None else f"{own:.1f} %"),
        ("images a second", None if speed is None else f"{speed:,.0f}"),
        ("training time", None if seconds is None else duration(seconds)),
        ("peak memory", None if peak is None else readable_size(peak)),
    ]
    return [(name, value) for name, value in found if value is not None]


def _spread(run: RunContents) -> dict[str, str] | None:
    spread = run.look.spread if run.look is not None else None
    if spread is None or len(spread.similarity) == 0:
        return None
    return {
        "similarity": f"{spread.similarity.mean():.3f}",
        "variance": f"{spread.variance.mean():.3g}",
        "images": f"{len(spread.similarity):,}",
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
    """For each image: itself, its query views and its key views, of which a few are enough."""
    return [
        {"image": _picture(image), "views": [image_address(view) for view in own[:most]]}
        for image, own in zip(example.images[:rows], example.views[:rows], strict=True)
    ]
