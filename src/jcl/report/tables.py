"""The tables of the page, with a column for each run and every value as text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import Any, Final

from jcl.console import format_bytes, format_duration, pluralize
from jcl.evaluate.baselines import Estimate, clearly_best, estimate
from jcl.report.contents import QUALITY, Metric, RunContents, SampleResults
from jcl.settings.recipes import describe_settings

MISSING: Final = "–"
_MAX_CLASSES: Final = 8  # in a table; of more, the lowest and the highest accuracies have a table each
METRICS: Final = {
    "knn_top1": "kNN, top-1",
    "knn_top5": "kNN, top-5",
    "linear_top1": "linear probe, top-1",
    "linear_top5": "linear probe, top-5",
    "finetune_top1": "fine-tuned, top-1",
    "finetune_top5": "fine-tuned, top-5",
    "untrained_knn_top1": "untrained network, kNN top-1",
    "start_knn_top1": "weights at the start, kNN top-1",
    "untrained_linear_top1": "untrained network, linear top-1",
    "chance_top1": "chance, top-1",
    "box_ap": "detection, box AP",
    "mask_ap": "segmentation, mask AP",
    "keypoint_ap": "keypoints, AP",
}
"""The metrics that are read from JSON files in a run folder, and their titles."""

RESOURCES: Final[dict[str, tuple[str, Callable[[float], str]]]] = {
    "images per second": ("images_per_second", "{:,.0f}".format),
    "training time": ("seconds", format_duration),
    "peak memory": ("peak_memory_bytes", format_bytes),
}
"""Numbers in `summary.json` by title, and how to write them."""


@dataclass(frozen=True)
class Row:
    """A value for each run; `best` is the index of the one that is clearly best, if any."""

    name: str
    values: list[str]
    note: str = ""
    best: int | None = None
    differs: bool = False


@dataclass(frozen=True)
class Table:
    title: str
    rows: list[Row]
    note: str = ""


def result_tables(runs: Sequence[RunContents]) -> list[Table]:
    """Accuracies on all images and on the sample that was drawn for the page, and the quality without labels."""
    comparable = len({run.settings.data.location for run in runs}) == 1
    metrics = {Metric(name) for name in METRICS}.union(*(run.measured for run in runs))
    whole = {}
    for metric in sorted(metrics, key=lambda metric: (list(METRICS).index(metric.name), metric.protocol)):
        title = METRICS[metric.name]
        if metric.protocol:
            title = title.replace(",", f" ({metric.protocol}),", 1)
        whole[title] = [run.measured.get(metric) for run in runs]
    samples = [_sample_accuracies(run.sample) for run in runs]
    sample = {title: [own.get(title) for own in samples] for own in samples for title in own}
    words = _test_images(runs)
    whole_note = "In parentheses: 95 % intervals. Add results: `jcl linear RUN --json RUN/linear.json; jcl report RUN`."
    banks = " and ".join(f"{size:,}" for size in sorted({run.sample.bank for run in runs if run.sample}))
    sample_note = f"A quick estimate with {banks} reference images; `jcl knn` and `jcl linear` use all images."
    tables = [
        Table(f"On all {words[1]}", _rows(whole, percent, words, best=comparable), whole_note),
        Table("On a sample", _rows(sample, percent, words, best=comparable), sample_note),
        Table("Without labels", _quality_rows(runs), "`jcl compare` tests whether runs differ."),
    ]
    return [table for table in tables if table.rows]


def class_tables(runs: Sequence[RunContents]) -> list[Table]:
    """The kNN accuracy of each class, lowest first; of many classes the lowest and the highest."""
    comparable = len({run.settings.data.location for run in runs}) == 1
    found = {
        name: [estimate(own[1], own[0]) if (own := run.classes.get(name)) else None for run in runs]
        for name in dict.fromkeys(name for run in runs for name in run.classes)
    }
    found = dict(sorted(found.items(), key=lambda item: fmean(one.value for one in item[1] if one)))
    rows = _rows(found, percent, _test_images(runs), best=comparable)
    classes = pluralize(len(found), "class", "classes")
    if len(rows) <= _MAX_CLASSES:
        return [Table(f"kNN top-1 of {classes}, lowest first", rows)] if rows else []
    half = (len(rows) + 1) // 2
    lowest, highest = rows[:half][:_MAX_CLASSES], rows[half:][::-1][:_MAX_CLASSES]
    return [
        Table(f"{word} {len(part)} of {classes}: kNN top-1", part)
        for word, part in (("Lowest", lowest), ("Highest", highest))
    ]


def _test_images(runs: Sequence[RunContents]) -> tuple[str, str]:
    """What to call the test images, in singular and plural."""
    held_out = {not run.sample.from_test_set for run in runs if run.sample is not None} == {True}
    return ("held-out image", "held-out images") if held_out else ("test image", "test images")


def resource_table(runs: Sequence[RunContents]) -> Table:
    rows: list[Row] = []
    counts = {name: (name, "{:,.0f}".format) for name in ("steps", "ranks")}
    for title, (name, write) in (RESOURCES | counts).items():
        values = [None if (value := run.number(name)) is None else estimate(value) for run in runs]
        rows += _rows({title: values}, write, best=name == "images_per_second")
    return Table("Speed and memory", rows)


def settings_tables(runs: Sequence[RunContents]) -> list[Table]:
    """All settings with their meaning, a table for each section; rows in which runs differ are marked."""
    sections: dict[str, list[Row]] = {}
    for name, _, meaning in describe_settings():
        values = [format_setting(attrgetter(name)(run.settings)) for run in runs]
        section, _, short = name.rpartition(".")
        row = Row(short, values, meaning, differs=len(set(values)) > 1)
        sections.setdefault(section or "recipe", []).append(row)
    return [Table(section, rows) for section, rows in sections.items()]


def percent(value: float) -> str:
    return f"{value:.1f} %"


def format_setting(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{part:g}" for part in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "":
        return MISSING
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rows(
    found: dict[str, list[Estimate | None]],
    write: Callable[[float], str],
    images: tuple[str, str] = ("image", "images"),
    *,
    best: bool,
) -> list[Row]:
    """A row for each entry that has a value for some run, with the number of images. Baselines are never the best."""
    baselines = {title for name, title in METRICS.items() if name.startswith(("untrained_", "start_", "chance_"))}
    rows = []
    for name, values in found.items():
        known = [one for one in values if one is not None]
        if not known:
            continue
        texts = [MISSING if one is None else _with_interval(one, write) for one in values]
        counts = sorted({int(one.images) for one in known if one.images})
        note = " and ".join(pluralize(count, *images) for count in counts)
        rows.append(Row(name, texts, note, clearly_best(values) if best and name not in baselines else None))
    return rows


def _with_interval(found: Estimate, write: Callable[[float], str]) -> str:
    return write(found.value) + (f" ({found.interval.removesuffix(' %')})" if found.interval else "")


def _sample_accuracies(sample: SampleResults | None) -> dict[str, Estimate]:
    if sample is None:
        return {}
    found = {f"kNN, k = {result.k}": estimate(result.top1, result.images) for result in sample.knn}
    probe = {} if sample.linear_top1 is None else {"linear probe": estimate(sample.linear_top1, sample.queries)}
    return found | probe


def _quality_rows(runs: Sequence[RunContents]) -> list[Row]:
    lines = [run.last("quality") for run in runs]
    return [
        Row(title, [MISSING if line.get(name) is None else f"{line[name]:.2f}" for line in lines], meaning)
        for name, (title, meaning) in QUALITY.items()
        if any(line.get(name) is not None for line in lines)
    ]
