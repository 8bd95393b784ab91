"""Values brought together by what they share, in the order in which they first appear."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
N = TypeVar("N", int, float)


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Values of each key.

    Examples
    --------
    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def summed(pairs: Iterable[tuple[K, N]]) -> dict[K, N]:
    """Sum of the values of each key.

    Examples
    --------
    >>> summed([("a", 1), ("b", 2), ("a", 3)])
    {'a': 4, 'b': 2}
    """
    found: dict[K, N] = {}
    for key, value in pairs:
        found[key] = found[key] + value if key in found else value
    return found
