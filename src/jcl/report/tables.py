"""The tables of the page, with a column for each run and every value as text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean
from typing import Any, Final

from jcl.console import format_bytes, format_duration, pluralize
from jcl.evaluate.baselines import Estimate, clearly_best, estimate
from jcl.report.contents import QUALITY, Metric, RunContents
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
    samples = [run.sample for run in runs]
    sample: dict[str, list[Estimate | None]] = {
        f"kNN, k = {k}": [
            next((estimate(each.top1, each.images) for each in own.knn if each.k == k), None) if own else None
            for own in samples
        ]
        for k in sorted({result.k for own in samples if own for result in own.knn})
    }
    probes = [(own.linear_top1, own.queries) if own else (None, 0) for own in samples]
    sample["linear probe"] = [None if top1 is None else estimate(top1, images) for top1, images in probes]
    words = _test_images(runs)
    rows = _rows(whole, percent, best=comparable)
    for place, row in enumerate(rows):
        counts = sorted({int(one.images) for one in whole[row.name] if one is not None and one.images})
        rows[place] = replace(row, note=" and ".join(pluralize(count, *words) for count in counts))
    whole_note = "In parentheses: 95 % intervals. Add results: `jcl linear RUN --json RUN/linear.json; jcl report RUN`."
    tables = [
        Table(f"On all {words[1]}", rows, whole_note),
        Table("On a sample", _rows(sample, percent, best=comparable), _sample_note(runs)),
        Table("Without labels", _quality_rows(runs), "`jcl compare` tells how sure a difference between runs is."),
    ]
    return [table for table in tables if table.rows]


def class_tables(runs: Sequence[RunContents]) -> list[Table]:
    """The kNN accuracy of each class; of many classes the lowest and the highest."""
    comparable = len({run.settings.data.location for run in runs}) == 1
    names = dict.fromkeys(name for run in runs for name in run.classes)
    found = {name: [run.classes.get(name) for run in runs] for name in names}
    means = {name: fmean(own[1] for own in values if own) for name, values in found.items()}
    images = {name: max(own[0] for own in values if own) for name, values in found.items()}
    same = len(set(images.values())) == 1
    words = _test_images(runs)
    note = f"{pluralize(next(iter(images.values())), *words)} of each class." if same else ""
    order = sorted(names, key=means.__getitem__)
    rows = _rows(
        {name: [own and estimate(own[1], own[0]) for own in found[name]] for name in order}, percent, best=comparable
    )
    if not same:
        rows = [replace(row, note=pluralize(images[row.name], *words)) for row in rows]
    if 0 < len(rows) <= _MAX_CLASSES:
        return [Table(f"kNN top-1 of {pluralize(len(rows), 'class', 'classes')}, lowest first", rows, note)]
    half = (len(rows) + 1) // 2
    lowest, highest = rows[:half][:_MAX_CLASSES], rows[half:][::-1][:_MAX_CLASSES]
    return [
        Table(f"{word} {len(part)} of {pluralize(len(rows), 'class', 'classes')}: kNN top-1", part, own_note)
        for word, part, own_note in (("Lowest", lowest, note), ("Highest", highest, ""))
        if part
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
    return f"{value:g}" if isinstance(value, float) else f"{value}" or MISSING


def _rows(found: dict[str, list[Estimate | None]], write: Callable[[float], str], *, best: bool = False) -> list[Row]:
    """A row for each entry that at least one run has a value for; baselines have no best run."""
    baselines = {title for name, title in METRICS.items() if name.startswith(("untrained_", "start_", "chance_"))}
    rows = []
    for name, values in found.items():
        if any(values):
            texts = [
                MISSING
                if one is None
                else write(one.value) + (f" ({one.interval.removesuffix(' %')})" if one.interval else "")
                for one in values
            ]
            rows.append(Row(name, texts, best=clearly_best(values) if best and name not in baselines else None))
    return rows


def _quality_rows(runs: Sequence[RunContents]) -> list[Row]:
    lines = [run.last("quality") for run in runs]
    return [
        Row(title, [MISSING if line.get(name) is None else f"{line[name]:.2f}" for line in lines], meaning)
        for name, (title, meaning) in QUALITY.items()
        if any(line.get(name) is not None for line in lines)
    ]


def _sample_note(runs: Sequence[RunContents]) -> str:
    sizes = {(own.bank, own.queries, own.from_test_set) for run in runs if (own := run.sample) is not None}
    if len(sizes) != 1:
        return "A quick estimate on a few images of each run. The sample sizes differ, so compare with care."
    bank, queries, from_test_set = sizes.pop()
    tested = pluralize(queries, "test image" if from_test_set else "held-out image")
    return f"On {tested} with {pluralize(bank, 'reference image')}; `jcl knn` and `jcl linear` use all images."
