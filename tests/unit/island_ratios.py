r"""The original problem with ratios (Rignall, section 4.5), solved to its global optimum.

It maximises :math:`R - \lambda \sum_s |R_s / R - p_s|` for one phase, which is neither linear nor
convex. For a fixed total R the smallest deviation
:math:`h(R) = \min \sum_s |R_s - p_s R|` is a linear program, and h is convex and piecewise linear
in R. On a piece :math:`h = \alpha + \beta R` the objective is
:math:`R - \lambda \beta - \lambda \alpha / R`, which rises where :math:`\alpha \ge 0`
and is convex where :math:`\alpha < 0`: its maximum over a piece lies at an end. So the optimum lies
at a breakpoint of h, and these are found by intersecting the lines on both sides of an interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero.arrays import Floats, Ints
from hetero.programs import Program

_SAME = 1e-9  # relative distance below which two lines meet on the curve


@dataclass(frozen=True, slots=True, eq=False)
class Ratios:
    """Optimum of the problem with ratios.

    Attributes
    ----------
    work
        Shape (islands, ranges), x.
    total_rps
        R [requests/s].
    deviation
        Delta, the sum of ``|sigma_s - p_s|``.
    objective
        R - lambda Delta.
    breakpoints_rps
        Totals at which h changes its slope, with both ends [requests/s].
    """

    work: Floats
    total_rps: float
    deviation: float
    objective: float
    breakpoints_rps: tuple[float, ...]


def solve(rate: Floats, share: Floats, price: float) -> Ratios:
    r"""Maximise :math:`R - \lambda \sum_s |R_s / R - p_s|` with :math:`\sum_s x_i(s) = 1`.

    Parameters
    ----------
    rate
        Shape (islands, ranges), b [requests/s].
    share
        Shape (ranges,), p.
    price
        lambda > 0 [requests/s].

    Examples
    --------
    >>> found = solve(np.array([[4.0, 1.0], [1.0, 1.0]]), np.array([0.5, 0.5]), 4.0)
    >>> round(found.total_rps, 6), round(found.objective, 6)  # both ranges at 1.6
    (3.2, 3.2)
    """
    rate, share = np.asarray(rate, np.float64), np.asarray(share, np.float64)
    low, high = float(rate.min(axis=1).sum()), float(rate.max(axis=1).sum())
    lines: dict[float, tuple[float, float, Floats]] = {}

    def at(total: float) -> tuple[float, float, Floats]:
        """Value, slope and work of h at a total."""
        if total not in lines:
            lines[total] = _least_deviation(rate, share, total)
        return lines[total]

    def explore(left: float, right: float) -> None:
        (h0, s0, _), (h1, s1, _) = at(left), at(right)
        if s1 - s0 <= _SAME or right - left <= _SAME * high:
            return
        meet = (h1 - h0 + s0 * left - s1 * right) / (s0 - s1)
        if not left + _SAME * high < meet < right - _SAME * high:
            return
        on_lines = h0 + s0 * (meet - left)
        if at(meet)[0] > on_lines + _SAME * max(1.0, abs(h1)):
            explore(left, meet)
            explore(meet, right)

    explore(max(low, 1e-12), high)
    best = max(lines, key=lambda total: total - price * lines[total][0] / total)
    value, _, work = lines[best]
    return Ratios(work, best, value / best, best - price * value / best, tuple(sorted(lines)))


def _least_deviation(rate: Floats, share: Floats, total: float) -> tuple[float, float, Floats]:
    """h(R), its slope from the dual values, and the work that attains it."""
    islands, width = rate.shape
    program = Program()
    x = program.variables(islands * width).reshape(islands, width)
    delta = program.variables(width, objective=-1.0)
    whole = program.rows(islands, lower=1.0, upper=1.0)
    program.entries(whole[:, None], x, 1.0)
    ends: list[tuple[float, Ints]] = []
    for sign in (1.0, -1.0):
        row = program.rows(width, upper=sign * share * total)
        program.entries(row[None, :], x, sign * rate)
        program.entries(row, delta, -1.0)
        ends.append((sign, row))
    sum_row = program.rows(1, lower=total, upper=total)
    program.entries(sum_row, x, rate)
    found = program.solve(names="the least deviation at a total")
    slope = float(found.duals[sum_row[0]])
    for sign, row in ends:
        slope += float((sign * share * found.duals[row]).sum())
    return -found.objective, -slope, found.values[x]
