"""Intervals over seeds, and the orders that they support."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, pairwise, product

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit


def interval(values: ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    r"""Confidence interval of the mean over independent seeds.

    .. math:: \bar x \pm t_{n-1} \, s / \sqrt n

    With one value there is nothing to tell the spread from, and both ends are that value.

    Examples
    --------
    >>> low, high = interval([1.0, 2.0, 3.0])
    >>> round(low, 3), round(high, 3)
    (-0.484, 4.484)
    """
    x = np.asarray(values, np.float64)
    mean = float(x.mean())
    if len(x) < 2:
        return mean, mean
    half = float(stdtrit(len(x) - 1, 0.5 + confidence / 2.0) * x.std(ddof=1) / np.sqrt(len(x)))
    return mean - half, mean + half


def draws_needed(half: float, draws: int, wanted: float, confidence: float = 0.95) -> int:
    r"""Draws whose interval would reach no further than wanted, at the deviation of those seen.

    .. math:: \min \{n : t_{n-1} / \sqrt n \le (w / h) \, t_{m-1} / \sqrt m \} \le 10^5

    with h the half-width of the interval over m draws and w the wanted one.

    Examples
    --------
    >>> draws_needed(2.0, 5, 1.0)
    13
    """
    many = np.arange(2, 100_001)
    halves = stdtrit(many - 1, 0.5 + confidence / 2.0) / np.sqrt(many)
    good = half * halves <= wanted * halves[min(draws, len(many)) - 2]
    return int(many[good.argmax()] if good[-1] else many[-1])


def ranking(samples: Mapping[str, ArrayLike], confidence: float = 0.95, space: str = "") -> str:
    """Names from the largest mean to the smallest, as far as the seeds tell them apart.

    ``a>b`` stands where the intervals of the paired differences between ``a``, or anything above
    it, and ``b``, or anything below it, leave 0 out; ``a>=b`` where one does not. Pairs that
    follow from others are left out.

    Parameters
    ----------
    samples
        Values by name, of the same seeds in the same order.
    space
        What parts names from the signs between them.

    Examples
    --------
    >>> ranking({"a": [1.0, 1.1, 1.2], "b": [3.0, 3.1, 3.2], "c": [3.1, 3.0, 3.2]})
    'b>=c>a'
    """
    values = {name: np.asarray(x, np.float64) for name, x in samples.items()}
    names = sorted(values, key=lambda name: -float(values[name].mean()))
    size = len(names)

    def apart(i: int, j: int) -> bool:
        return interval(values[names[i]] - values[names[j]], confidence)[0] > 0.0

    def strict(i: int, j: int) -> bool:
        # A strict pair makes every wider one strict too, so the seeds must tell those apart.
        return all(apart(a, b) for a, b in product(range(i + 1), range(j, size)))

    text = names[0]
    for i, j in pairwise(range(size)):
        text += space + (">" if strict(i, j) else ">=") + space + names[j]
    for i, j in combinations(range(size), 2):
        inner = [pair for pair in combinations(range(i, j + 1), 2) if pair != (i, j)]
        if j > i + 1 and strict(i, j) and not any(strict(*pair) for pair in inner):
            text += f", {names[i]}{space}>{space}{names[j]}"
    return text
