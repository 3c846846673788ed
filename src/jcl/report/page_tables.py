"""The tables of the page, several runs side by side: every value is a text by the time it gets here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jcl.console import duration, pluralize, readable_size
from jcl.report.contents import Measured, RunContents
from jcl.runs.json_object import is_figure
from jcl.settings.schema import describe_settings

MISSING: Final = "–"


@dataclass(frozen=True)
class Row:
    """A line: what it is, a value for each run, and which run's is best (None: there is no best)."""

    name: str
    values: list[str]
    note: str = ""
    best: int | None = None
    differs: bool = False


@dataclass(frozen=True)
class Table:
    """Lines under a title, and a sentence to be read with them."""

    title: str
    rows: list[Row]
    note: str = ""


_MEASURED: Final = {
    "knn_top1": "kNN, first guess",
    "knn_top5": "kNN, first five guesses",
    "linear_top1": "linear probe, first guess",
    "linear_top5": "linear probe, first five guesses",
    "finetune_top1": "fine-tuned, first guess",
    "finetune_top5": "fine-tuned, first five guesses",
    "box_ap": "detection, box AP",
    "mask_ap": "segmentation, mask AP",
    "keypoint_ap": "key points, AP",
}
_WHOLE_NOTE: Final = (
    "Probes and fine-tuning on all images appear here once their figures lie in the run's folder: "
    "`jcl linear RUN --json RUN/linear.json`, then `jcl report RUN`."
)
MEASURED_NAMES: Final = tuple(_MEASURED)
"""The figures that are looked for in JSON files of a run folder."""


def result_tables(runs: Sequence[RunContents]) -> list[Table]:
    """What the features are worth: on all images, and on the sample that was looked at for the page."""
    same = len({run.settings.data.location for run in runs}) == 1  # else there is no best
    whole = [
        _row(_title(figure), [_measured(run, figure) for run in runs], _percent, best=same)
        for figure in _measured_figures(runs)
    ]
    tables = [Table("On all images", [row for row in whole if row is not None], _WHOLE_NOTE)]
    counts = sorted({result.k for run in runs if run.look is not None for result in run.look.knn})
    sample = [_row(_voters(k), [_sample_knn(run, k) for run in runs], _percent, best=same) for k in counts]
    probes = [run.look.probe_top1 if run.look else None for run in runs]
    sample.append(_row("linear probe", probes, _percent, best=same))
    tables.append(Table("On a sample", [row for row in sample if row is not None], _sample_note(runs)))
    return [table for table in tables if table.rows]


def resource_table(runs: Sequence[RunContents]) -> Table:
    """How fast, how long and in how much memory."""
    rows = [
        _row("images a second", [speed_of(run) for run in runs], lambda value: f"{value:,.0f}"),
        _row("time spent training", [seconds_of(run) for run in runs], duration, best=False),
        _row("peak memory", [of_summary(run, "peak_memory_bytes") for run in runs], readable_size, best=False),
        _row("steps", [of_summary(run, "steps") for run in runs], lambda value: f"{value:,.0f}", best=False),
        _row("ranks", [of_summary(run, "ranks") for run in runs], lambda value: f"{value:,.0f}", best=False),
    ]
    return Table("Speed and memory", [row for row in rows if row is not None])


def settings_tables(runs: Sequence[RunContents]) -> list[Table]:
    """All settings, a table for each section, with what each means; lines in which runs differ are marked."""
    sections: dict[str, list[Row]] = {}
    for name, _, meaning in describe_settings():
        values = [_setting(run, name) for run in runs]
        section = name.partition(".")[0] if "." in name else "recipe"
        sections.setdefault(section, []).append(
            Row(name.rpartition(".")[2], values, meaning, differs=len(set(values)) > 1)
        )
    return [Table(section, rows) for section, rows in sections.items()]


def _row(name: str, values: Sequence[float | None], write: Callable[[float], str], *, best: bool = True) -> Row | None:
    """A line, or None where no run has the figure."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    leader = values.index(max(known)) if best and len(known) > 1 and max(known) > min(known) else None
    return Row(name, [MISSING if value is None else write(value) for value in values], best=leader)


def _percent(value: float) -> str:
    return f"{value:.1f} %"


def _voters(k: int) -> str:
    return "kNN, the nearest image decides" if k == 1 else f"kNN, {k} nearest images vote"


def _sample_knn(run: RunContents, k: int) -> float | None:
    return next((result.top1 for result in run.look.knn if result.k == k), None) if run.look else None


def _sample_note(runs: Sequence[RunContents]) -> str:
    sizes = {(run.look.bank, run.look.queries, run.look.unseen) for run in runs if run.look is not None}
    if len(sizes) != 1:
        return "A quick look at a few images of each run; samples differ in size, so compare with care."
    bank, queries, unseen = sizes.pop()
    where = "of the test set" if unseen else "that were held out"
    return (
        f"A quick look for this page: labels of {pluralize(queries, 'image')} {where}, guessed from "
        f"{pluralize(bank, 'other')}. Figures on so few images are uncertain by a few percent; `jcl knn` and "
        "`jcl linear` measure on all."
    )


def _measured_figures(runs: Sequence[RunContents]) -> list[Measured]:
    """In the order of their names, those measured as usual first; online kNN is in no file."""
    found = {figure for run in runs for figure in run.measured} | {Measured(name) for name in _MEASURED}
    return sorted(found, key=lambda figure: (MEASURED_NAMES.index(figure.name), figure.how))


def _title(figure: Measured) -> str:
    title = _MEASURED[figure.name]
    return title.replace(",", f" ({figure.how}),", 1) if figure.how else title


def _measured(run: RunContents, figure: Measured) -> float | None:
    return run.measured.get(figure, None if figure.how else run.newest("knn").get(figure.name))


def of_summary(run: RunContents, name: str) -> float | None:
    """A figure of a run that has finished."""
    return _figure(run.summary or {}, name)


def speed_of(run: RunContents) -> float | None:
    """Images a second: over the whole run, or at last where it has not finished."""
    return _figure(run.summary or run.newest("train"), "images_per_second")


def seconds_of(run: RunContents) -> float | None:
    """How long the run has been training."""
    return _figure(run.summary or run.newest("train"), "seconds")


def _figure(found: Mapping[str, Any], name: str) -> float | None:
    value = found.get(name)
    return value if is_figure(value) else None


def _setting(run: RunContents, name: str) -> str:
    value: Any = run.settings
    for part in name.split("."):
        value = getattr(value, part)
    return plain_value(value)


def plain_value(value: Any) -> str:
    """A setting's value as a person writes it."""
    if isinstance(value, tuple):
        return ", ".join(f"{part:g}" for part in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else f"{value}" or MISSING
