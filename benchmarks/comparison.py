"""Rows and results of a comparison, and the table made of them in Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Self

from jcl.core.registry import METHODS


@dataclass(frozen=True)
class Row:
    """A method with settings, trained for a multiple of the epochs."""

    name: str
    words: str
    method: str
    settings: tuple[str, ...] = ()
    times_epochs: int = 1

    @classmethod
    def of_words(cls, name: str, words: str) -> Self:
        """A row of the user: "jcl train.lr=0.3", a method and its settings."""
        method, *settings = words.split()
        return cls(name, words, method, tuple(settings))


TWO_QUERIES = ("method.num_queries=2", "method.num_keys=3")
MOCO_SETTINGS = ("model.head_width=2048",)  # from its own search, see docs/recipe-search.md
ROWS = {
    row.name: row
    for row in (
        Row("jcl", "JCL", "jcl"),
        Row("jcl-two-queries", "JCL, two queries and three keys", "jcl", TWO_QUERIES),
        Row("jcl-one-query", "JCL, one query and five keys", "jcl", ("method.num_queries=1", "method.num_keys=5")),
        Row("moco-v2", "MoCo v2", "moco-v2", MOCO_SETTINGS),
        Row("moco-v2-two-queries", "MoCo v2, two queries", "moco-v2", (*MOCO_SETTINGS, "method.num_queries=2")),
        Row("moco-v2-symmetric", "MoCo v2, symmetric, two queries and two keys", "moco-v2-symmetric", MOCO_SETTINGS),
        Row(
            "moco-v2-plain",
            "MoCo v2 without local queries, 475 epochs",  # as much compute as JCL with the recipe cifar10
            "moco-v2",
            (*MOCO_SETTINGS, "method.num_local_queries=0", "train.epochs=475"),
        ),
        Row("moco-v2-twice", "MoCo v2, twice the epochs", "moco-v2", MOCO_SETTINGS, times_epochs=2),
        Row("multi-key", "multi-key", "multi-key"),
        Row("multi-key-two-queries", "multi-key, two queries and three keys", "multi-key", TWO_QUERIES),
        Row("jcl-scale-0", "JCL, covariance scale 0", "jcl", ("method.covariance_scale=0",)),
        Row(
            "jcl-scale-0-two-queries",
            "JCL, covariance scale 0, two queries and three keys",
            "jcl",
            (*TWO_QUERIES, "method.covariance_scale=0"),
        ),
    )
}
ACCURACIES = {"kNN": ("pretrain", "knn_top1"), "linear": ("linear", "linear_top1")}


def results_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    """The results of a row by seed."""
    seeds: dict[str, Any] = found["rows"].get(name, {}).get("seeds", {})
    return seeds


def measured_rows(found: dict[str, Any]) -> list[str]:
    """The rows with results, the user's own last."""
    return [name for name in [*ROWS, *(own for own in found["rows"] if own not in ROWS)] if results_of(found, name)]


def accuracies(results: Sequence[dict[str, Any]], measure: str) -> list[float]:
    part, name = ACCURACIES[measure]
    return [result[part][name] for result in results]


def row_title(words: str, result: dict[str, Any]) -> str:
    """The words of a row, with its numbers of queries and keys unless the words mention them."""
    keys, queries, local = result["num_keys"], result["num_queries"], result.get("num_local_queries", 0)
    if "quer" in words:
        return words
    return (
        words
        + (f", {queries} queries" if queries > 1 else "")
        + (f", M' = {keys}" if keys > 1 else "")
        + (f", {local} local queries" if local else "")
    )


def relative_compute(row: dict[str, Any], result: dict[str, Any]) -> float:
    """Compute of an epoch relative to plain MoCo v2, in units of a forward pass: 3 for a query, 1 for a key."""
    method = METHODS.get(row["settings"].get("method.name", ""))
    key = 3 if method is not None and method.gradient_through_keys else 1
    local = result.get("num_local_queries", 0) * result.get("local_share", 0)
    return float(3 * (result["num_queries"] + local) + key * result["num_keys"]) / 4


def table(found: dict[str, Any]) -> str:
    """The results in Markdown, the differences of the first row to the others, and the machines."""
    names = measured_rows(found)
    lines = [
        "| | kNN, last epoch | linear, fast protocol | whole command | training images/s | peak memory | "
        "compute (plain MoCo v2 = 1) | seeds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *(_line(found["rows"][name], list(results_of(found, name).values()), found["epochs"]) for name in names),
    ]
    differences = [line for name in names[1:] if (line := _difference(names[0], name, found))]
    machines = [result["measured_on"] for name in names for result in results_of(found, name).values()]
    described = dict.fromkeys(f"{on['gpu'] or on['cpu']}, torch {on['torch']}, {on['date']}" for on in machines)
    lines += ["", *differences] if differences else []
    return "\n".join([*lines, "", f"Measured on {'; '.join(described) or 'nothing'}."])


def _line(row: dict[str, Any], results: list[dict[str, Any]], base_epochs: int) -> str:
    compute = relative_compute(row, results[0]) * results[0]["pretrain"]["epochs"] / base_epochs
    cells = [
        row_title(row["words"], results[0]),
        *(f"{_mean_and_std(accuracies(results, measure))} %" for measure in ACCURACIES),
        _mean_of_known([result["seconds"] for result in results], " s"),
        _mean_of_known([result["images_per_second"] for result in results]),
        f"{max(result['pretrain']['peak_memory_bytes'] for result in results) / 2**30:.2f} GiB",
        f"{compute:.2f}",
        str(len(results)),
    ]
    return f"| {' | '.join(cells)} |"


def _difference(name: str, other: str, found: dict[str, Any]) -> str:
    """A row minus another, over the seeds that both have."""
    own, others = results_of(found, name), results_of(found, other)
    seeds = sorted(own.keys() & others.keys(), key=int)
    if not seeds:
        return ""
    parts = []
    for measure in ACCURACIES:
        first, second = (accuracies([row[seed] for seed in seeds], measure) for row in (own, others))
        differences = [one - another for one, another in zip(first, second, strict=True)]
        parts.append(f"{measure} {_mean_and_std(differences, sign='+')}")
    which = f"seed {seeds[0]}" if len(seeds) == 1 else f"paired by seed: {', '.join(seeds)}"
    words, other_words = (found["rows"][each]["words"] for each in (name, other))
    return f"- {words} minus {other_words}, in points: {', '.join(parts)} ({which})"


def _mean_of_known(values: Sequence[float | None], unit: str = "") -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "not known"
    return f"{fmean(known):,.0f}{unit}" + (f" ({len(known)} of {len(values)})" if len(known) < len(values) else "")


def _mean_and_std(values: Sequence[float], sign: str = "") -> str:
    mean = f"{fmean(values):{sign}.2f}"
    return f"{mean} ± {stdev(values):.2f}" if len(values) > 1 else mean
