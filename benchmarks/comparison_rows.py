"""The lines of the comparison: which methods, with which settings, for how long."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    words: str
    method: str
    settings: tuple[str, ...] = ()
    times_epochs: int = 1

    @classmethod
    def of_words(cls, name: str, words: str) -> Self:
        """A row of the user's own: "jcl train.lr=0.3", a method and settings of it."""
        method, *settings = words.split()
        return cls(name, words, method, tuple(settings))


MOCO_SETTINGS = ("model.head_width=2048",)  # by its own search, in docs/recipe-search.md; the rest came out as for JCL
ROWS = {
    row.name: row
    for row in (
        Row("jcl", "JCL", "jcl"),
        Row("jcl-one-query", "JCL, one query and five keys", "jcl", ("method.num_queries=1", "method.num_keys=5")),
        Row("moco-v2", "MoCo v2", "moco-v2", MOCO_SETTINGS),
        Row("moco-v2-two-queries", "MoCo v2, two queries", "moco-v2", (*MOCO_SETTINGS, "method.num_queries=2")),
        Row("moco-v2-twice", "MoCo v2, twice the epochs", "moco-v2", MOCO_SETTINGS, times_epochs=2),
        Row("multi-key", "vanilla multi-key", "multi-key"),
        Row("jcl-scale-0", "JCL, covariance scale 0", "jcl", ("method.covariance_scale=0",)),
    )
}
LEADING, BASELINE = "jcl", "moco-v2"
