"""What `jcl check` found, for a person: a table of the splits, then a line for each thing worth looking at."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from jcl.cli.app import out
from jcl.cli.printing import in_table, say
from jcl.console import pluralize
from jcl.data.check import SMALL_SIDE, DataReport, SplitReport

_SHOWN = 5  # names for each kind of trouble; all of them are in the JSON file


def print_report(report: DataReport) -> None:
    """The table, then the troubles of each split."""
    table = Table("", *(in_table(split) for split in report.splits), title=f"What is in {in_table(report.name)}")
    for title, values in _rows(report.splits.values()):
        table.add_row(title, *(in_table(value) for value in values))
    out.print(table)
    for split, found in report.splits.items():
        for line in _troubles(split, found):
            say(line)
    if report.why_untested:
        say(report.why_untested)
    if report.shared:
        say(f"{pluralize(len(report.shared), 'test image')} also among the training images: {_some(report.shared)}")


def _rows(splits: Iterable[SplitReport]) -> list[tuple[str, list[str]]]:
    found = list(splits)
    return [
        ("images", [f"{split.images:,}" for split in found]),
        ("width (least, median, most)", [_sides(split.widths) for split in found]),
        ("height (least, median, most)", [_sides(split.heights) for split in found]),
        ("kinds", [", ".join(f"{kind} {count:,}" for kind, count in split.kinds.items()) for split in found]),
        ("classes", [_classes(split) for split in found]),
        ("unreadable", [f"{len(split.unreadable):,}" for split in found]),
        ("copies of others", [f"{sum(len(group) - 1 for group in split.duplicates):,}" for split in found]),
        ("ms to decode one", [f"{1000 * split.seconds_per_image:.1f}" for split in found]),
    ]


def _sides(values: tuple[int, int, int]) -> str:
    return ", ".join(f"{value:,}" for value in values) + " px"


def _classes(split: SplitReport) -> str:
    if not split.class_counts:
        return "no labels"
    least, most = min(split.class_counts.values()), max(split.class_counts.values())
    each = f"{pluralize(most, 'image')} each" if least == most else f"{least:,} to {most:,} images"
    return f"{len(split.class_counts):,}, of {each}"


def _troubles(split: str, found: SplitReport) -> list[str]:
    lines = [
        f"{split}: {_one_line(name)} cannot be read: {reason}"
        for name, reason in list(found.unreadable.items())[:_SHOWN]
    ]
    if len(found.unreadable) > _SHOWN:
        lines.append(f"{split}: {len(found.unreadable) - _SHOWN:,} more cannot be read; --json FILE lists them all.")
    lines += [f"{split}: {warning}" for warning in found.warnings]
    if found.small:
        many = pluralize(len(found.small), "image")
        lines.append(f"{split}: {many} with a side below {SMALL_SIDE} px: {_some(found.small)}")
    lines += [f"{split}: the same picture: {_some(group)}" for group in found.duplicates[:_SHOWN]]
    if len(found.duplicates) > _SHOWN:
        lines.append(f"{split}: {pluralize(len(found.duplicates) - _SHOWN, 'more group')} of copies.")
    return lines


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _SHOWN:,} more" if len(listed) > _SHOWN else ""
    return ", ".join(map(_one_line, listed[:_SHOWN])) + more


def _one_line(name: str) -> str:
    return name.replace("\n", "\\n")
