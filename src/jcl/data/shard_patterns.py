"""Many shards in one word: `shards/{0000..0127}.tar`, as shells write it, expanded here and not by one."""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from jcl.errors import DataError

SHARD_LIMIT: Final = 250_000
"""A pattern that names more shards than this is taken for a mistake."""

_RANGE: Final = re.compile(r"(\d{1,15})\.\.(\d{1,15})(?:\.\.(\d{1,15}))?")


def expand_braces(pattern: str) -> list[str]:
    """Expand `{a,b}` and `{0000..0127}` (also with a step, `{0..90..10}`), nested or side by side.

    The last braces change fastest. Leading zeros are kept; braces with neither a comma nor a range stay as they are.
    """
    try:
        names = list(islice(_expanded(pattern), SHARD_LIMIT + 1))
    except RecursionError:
        raise DataError(f"The pattern {pattern[:80]}... has too many braces inside each other.") from None
    if len(names) > SHARD_LIMIT:
        raise DataError(f"The pattern {pattern} names more than {SHARD_LIMIT:,} shards; check its ranges.")
    return names


def _expanded(pattern: str) -> Iterator[str]:
    found = _first_braces(pattern)
    if found is None:
        yield pattern
        return
    start, end = found
    before, inside, after = pattern[:start], pattern[start + 1 : end], pattern[end + 1 :]
    for choice in _choices(inside):
        for rest in _expanded(after):
            yield before + choice + rest


def _first_braces(pattern: str) -> tuple[int, int] | None:
    """Where the first pair of braces opens and closes."""
    opened: list[int] = []
    found: tuple[int, int] | None = None
    for place, letter in enumerate(pattern):
        if letter == "{":
            opened.append(place)
        elif letter == "}" and opened:
            start = opened.pop()
            if found is None or start < found[0]:
                found = (start, place)
            if not opened:
                return found
    return found


def _choices(inside: str) -> Iterable[str]:
    if match := _RANGE.fullmatch(inside):
        return _numbers(match[1], match[2], int(match[3] or 1) or 1)
    parts = _split_at_commas(inside)
    if len(parts) == 1:
        return (f"{{{text}}}" for text in _expanded(inside))
    return (text for part in parts for text in _expanded(part))


def _numbers(first: str, last: str, step: int) -> Iterator[str]:
    padded = any(len(text) > 1 and text[0] == "0" for text in (first, last))
    width = max(len(first), len(last)) if padded else 0
    start, stop = int(first), int(last)
    numbers = range(start, stop + 1, step) if start <= stop else range(start, stop - 1, -step)
    return (f"{number:0{width}}" for number in numbers)


def _split_at_commas(inside: str) -> list[str]:
    """Split at the commas that lie in no further braces."""
    parts, depth = [""], 0
    for letter in inside:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
