"""The results of a comparison as a table in Markdown, with by how much the first row differs from every other."""

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from comparison_rows import LEADING, ROWS

from jcl.core.method import METHODS

UNITS_OF_MOCO = 4  # an image's query, forward and back, and its key
ACCURACIES = {"kNN": ("pretrain", "knn_top1"), "linear": ("linear", "linear_top1")}


def table(found: dict[str, Any]) -> str:
    """The results in Markdown, the differences and what they were measured on."""
    lines = [
        "| | kNN, last epoch | linear, fast protocol | whole command | training images/s | peak memory | "
        "compute (MoCo v2 = 1) | seeds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    shown = rows_in_order(found)
    lines += [line_of(found["rows"][name], list(seeds_of(found, name).values()), found["epochs"]) for name in shown]
    differences = [line for name in shown if name != LEADING and (line := difference_to(name, found))]
    machines = {
        f"{on['gpu'] or on['cpu']}, torch {on['torch']}, {on['date']}": None
        for name in shown
        for result in seeds_of(found, name).values()
        for on in [result["measured_on"]]
    }
    return "\n".join(
        [*lines, *(["", *differences] if differences else []), "", f"Measured on {'; '.join(machines) or 'nothing'}."]
    )


def rows_in_order(found: dict[str, Any]) -> list[str]:
    """The rows that have results, those of one's own last."""
    order = [*ROWS, *(name for name in found["rows"] if name not in ROWS)]
    return [name for name in order if seeds_of(found, name)]


def line_of(row: dict[str, Any], results: list[dict[str, Any]], base_epochs: int) -> str:
    words, keys, queries = row["words"], results[0]["num_keys"], results[0]["num_queries"]
    cells = [
        f"{words}{views_not_told(words, queries, keys)}",
        *(f"{mean_and_spread(accuracies(results, measure))} %" for measure in ACCURACIES),
        mean_of_known([result["seconds"] for result in results], " s"),
        mean_of_known([result["images_per_second"] for result in results]),
        f"{max(result['pretrain']['peak_memory_bytes'] for result in results) / 2**30:.2f} GiB",
        f"{compute_of_an_epoch(row, results[0]) * results[0]['pretrain']['epochs'] / base_epochs:.2f}",
        str(len(results)),
    ]
    return f"| {' | '.join(cells)} |"


def views_not_told(words: str, queries: int, keys: int) -> str:
    """How many views an image has, where a row's own words do not say it; nothing where they do."""
    if "quer" in words:
        return ""
    further = f", {queries} queries" if queries > 1 else ""
    return f"{further}, M' = {keys}" if keys > 1 else further


def compute_of_an_epoch(row: dict[str, Any], result: dict[str, Any]) -> float:
    """Its arithmetic, that of MoCo's epoch being one: a query's way forward and back three units and a key's one."""
    units: int = 3 * result["num_queries"] + units_of_a_key(row) * result["num_keys"]
    return units / UNITS_OF_MOCO


def units_of_a_key(row: dict[str, Any]) -> int:
    """One for the way forward, as a rule; with gradients the way back costs twice that, as it does for queries."""
    method = METHODS.get(row["settings"].get("method.name", ""))
    return 3 if method is not None and method.gradient_through_keys else 1


def difference_to(other: str, found: dict[str, Any]) -> str:
    """The first row minus another, over the seeds that both have; nothing where they share none."""
    own, others = seeds_of(found, LEADING), seeds_of(found, other)
    seeds = sorted(own.keys() & others.keys(), key=int)
    if not seeds:
        return ""
    parts = []
    for measure in ACCURACIES:
        first, second = (accuracies([row[seed] for seed in seeds], measure) for row in (own, others))
        differences = [one - another for one, another in zip(first, second, strict=True)]
        parts.append(f"{measure} {mean_and_spread(differences, sign='+')}")
    which = f"seed {seeds[0]}" if len(seeds) == 1 else f"paired by seed: {', '.join(seeds)}"
    return f"- {ROWS[LEADING].words} minus {found['rows'][other]['words']}, in points: {', '.join(parts)} ({which})"


def seeds_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    """The results of a row by seed."""
    seeds: dict[str, Any] = found["rows"].get(name, {}).get("seeds", {})
    return seeds


def accuracies(results: Sequence[dict[str, Any]], measure: str) -> list[float]:
    part, name = ACCURACIES[measure]
    return [result[part][name] for result in results]


def mean_of_known(values: Sequence[float | None], unit: str = "") -> str:
    """The mean, and of how many values where not all are known."""
    known = [value for value in values if value is not None]
    if not known:
        return "not known"
    return f"{fmean(known):,.0f}{unit}" + (f" ({len(known)} of {len(values)})" if len(known) < len(values) else "")


def mean_and_spread(values: Sequence[float], sign: str = "") -> str:
    mean = f"{fmean(values):{sign}.2f}"
    return f"{mean} ± {stdev(values):.2f}" if len(values) > 1 else mean
