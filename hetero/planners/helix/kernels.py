"""Compiled dynamic programs: the cheapest way to reach a throughput with parallel nodes."""

from __future__ import annotations

from hetero.engine.compiled import compiled


@compiled
def cover(cost, size, target, best, choice):
    """Cheapest multiset of items whose sizes reach every value up to ``target``.

    ``best`` and ``choice``, of length target + 1, take its cost and its last item; the result is
    the cost at ``target``.
    """
    best[0] = 0.0
    choice[0] = -1
    for value in range(1, target + 1):
        least = 1e300
        chosen = -1
        for k in range(len(cost)):
            rest = value - size[k]
            if rest < 0:
                rest = 0
            price = best[rest] + cost[k]
            if price < least:
                least = price
                chosen = k
        best[value] = least
        choice[value] = chosen
    return best[target]


@compiled
def _side_by_side(base, m, target, widest, best, of_best, steps):
    """Cheapest branches of m layers side by side, each carrying at most ``widest``."""
    # Only the largest flow at every cost is worth having.
    count = 0
    for f in range(1, widest + 1):
        if base[m, f] < 1e200 and (f == widest or base[m, f + 1] > base[m, f]):
            steps[count] = f
            count += 1
    best[m, 0] = 0.0
    for f in range(1, target + 1):
        least = 1e300
        chosen = 0
        for k in range(count):
            rest = f - steps[k]
            if rest < 0:
                rest = 0
            price = base[m, steps[k]] + best[m, rest]
            if price < least:
                least = price
                chosen = steps[k]
        best[m, f] = least
        of_best[m, f] = chosen


@compiled
def series_parallel(cost, size, target, base, best, of_base, of_best, steps):
    """Cheapest series-parallel structure for every number of layers and every flow.

    ``base[m, f]`` is the cost of a branch that holds m layers and carries f: one node, or two
    structures in a row. ``best[m, f]`` is the cost of branches side by side. ``size[t, m]`` is the
    flow of a node of group t with m layers; all flows are whole numbers up to ``target``.

    ``of_base[m, f]`` takes -1 - t for a node of group t or the layers of the first structure in a
    row; ``of_best[m, f]`` the flow of the first branch. ``steps`` is scratch of target + 1.
    """
    for m in range(1, size.shape[1]):
        for f in range(1, target + 1):
            least = 1e300
            chosen = 0
            for t in range(len(cost)):
                if size[t, m] >= f and cost[t] < least:
                    least = cost[t]
                    chosen = -1 - t
            for first in range(1, m // 2 + 1):
                price = best[first, f] + best[m - first, f]
                if price < least:
                    least = price
                    chosen = first
            base[m, f] = least
            of_base[m, f] = chosen
        _side_by_side(base, m, target, target, best, of_best, steps)


@compiled
def narrow(base, target, widest, best, of_best, steps):
    """Cheapest branches side by side that each carry at most ``widest``, for every m."""
    for m in range(1, base.shape[0]):
        _side_by_side(base, m, target, widest, best, of_best, steps)
