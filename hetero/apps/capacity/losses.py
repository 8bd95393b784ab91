"""Machines that are lost at random and replaced: how many serve, moment by moment."""

from __future__ import annotations

import numpy as np

from hetero.arrays import Floats, Ints
from hetero.streams import stream


def availability(losses_per_h: float, replace_s: float) -> float:
    """Share of the time that a spot machine serves.

    Examples
    --------
    >>> availability(0.1, 3600.0)
    0.9090909090909091
    """
    return 1.0 / (1.0 + losses_per_h * replace_s / 3600.0)


def timeline(
    numbers: Ints, losses_per_h: Floats, down_h: float, hours: int, seed: int
) -> tuple[Floats, Ints]:
    """Machines that serve over time, by kind; starts in the steady state.

    Returns
    -------
    times
        Ends of the intervals in which nothing changes, cut at every full hour; shape (T + 1,) [h].
    up
        Machines of every kind that serve in each interval; shape (T, kinds).
    """
    draws = stream(seed, "losses")
    marks = [np.arange(hours + 1, dtype=np.float64)]
    kind = [np.full(hours + 1, -1)]
    steps = [np.zeros(hours + 1, np.int64)]
    start = numbers.copy()
    for c, (n, rate) in enumerate(zip(numbers, losses_per_h, strict=True)):
        for _ in range(int(n)):
            down_first = draws.random() < rate * down_h / (1.0 + rate * down_h)
            begin = down_h * draws.random() if down_first else 0.0
            count = int(hours * rate + 6.0 * np.sqrt(hours * rate) + 16)
            lasts = draws.exponential(1.0 / rate, count)
            lost = begin + np.cumsum(lasts) + down_h * np.arange(count)
            back = lost + down_h
            if down_first:
                start[c] -= 1
                back = np.append(begin, back)
            for at, step in ((lost, -1), (back, 1)):
                inside = at[at < hours]
                marks.append(inside)
                kind.append(np.full(len(inside), c))
                steps.append(np.full(len(inside), step))
    time, of, change = (np.concatenate(parts) for parts in (marks, kind, steps))
    order = np.argsort(time, kind="stable")
    time, of, change = time[order], of[order], change[order]
    changes = np.zeros((len(time), len(numbers)), np.int64)
    known = of >= 0
    changes[np.flatnonzero(known), of[known]] = change[known]
    return time, (start + np.cumsum(changes, axis=0))[:-1]
