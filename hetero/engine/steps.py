"""Compiled step times, and how long runs of decode steps take."""

from __future__ import annotations

import math

import numpy as np

from hetero.engine.compiled import compiled


@compiled
def token_s(e, FM, p, n):
    """Time of ``n`` new tokens in piece ``p`` of an engine: its piecewise linear table."""
    j = e.knots[p]
    if n <= FM[j]:
        return FM[j + 1]
    last = j + 3 * (e.knot_count[p] - 1)
    while j < last and n >= FM[j + 3]:
        j += 3
    return FM[j + 1] + FM[j + 2] * (n - FM[j])


@compiled
def cached_rate(e, FM, p, b):
    """Time per cached token of a step in which ``b`` requests decode and none prefills."""
    return FM[e.rates[p] + max(min(b, e.rate_count[p]) - 1, 0)]


@compiled
def decode_level(e, FM, p, b):
    """Time of a decode step of ``b`` requests without cached tokens."""
    count = e.rate_count[p]
    return token_s(e, FM, p, float(b)) + FM[e.rates[p] + 4 * count + max(min(b, count) - 1, 0)]


@compiled
def bend(e, FM, p, b, cached):
    """What a decode step takes on top of its line, that per cached token, and until how many.

    The last is -1 where nothing changes any more.
    """
    count = e.bend_count[p]
    x = e.bends[p]
    size = max(min(b, e.rate_count[p]), 1)
    k = np.int64(0)
    while k < count and FM[x + k] * size <= cached:
        k += 1
    row = x + count + 2 * count * (size - 1)
    if k == 0:
        return FM[row], 0.0, np.int64(FM[x]) * size
    k -= 1
    slope = FM[row + count + k]
    extra = FM[row + k] + slope * (cached - FM[x + k] * size)
    return extra, slope, np.int64(FM[x + k + 1]) * size if k + 1 < count else np.int64(-1)


@compiled
def decode_line(e, FM, p, b, cached, limit):
    """First step time in piece ``p``, growth per step, and how many of ``limit`` steps keep it."""
    rate = cached_rate(e, FM, p, b)
    first = decode_level(e, FM, p, b) + rate * cached
    slope = rate * b
    if e.bend_count[p] > 0:
        extra, more, until = bend(e, FM, p, b, float(cached))
        first += extra
        slope += more * b
        if until >= 0:
            limit = min(limit, (until - cached + b - 1) // b)
    return first, slope, limit


@compiled
def piece_s(e, FM, p, n, b, cached, pairs):
    """Time of one step in piece ``p``; one that prefills and decodes has rates of its own."""
    count = e.rate_count[p]
    j = e.rates[p] + max(min(b, count) - 1, 0)
    time = token_s(e, FM, p, n) + e.pair_s[p] * pairs
    if n > b and b > 0:
        mixed = FM[j + 2 * count] + FM[j + 3 * count] * (n - b)
        return time + mixed + FM[j + count] * cached
    if b > 0:
        time += FM[j + 4 * count]
        if e.bend_count[p] > 0:
            time += bend(e, FM, p, b, cached)[0]
    return time + FM[j] * cached


@compiled
def step_s(e, FM, n, b, cached, pairs):
    """Time of one step: the larger of the pieces."""
    n, cached = float(n), float(cached)
    time = piece_s(e, FM, 0, n, b, cached, pairs)
    if e.pieces == 2:
        time = max(time, piece_s(e, FM, 1, n, b, cached, pairs))
    return time


@compiled
def decode_run(e, FM, b, cached, limit):
    """First step time, growth per step, and how many of ``limit`` steps keep to that line.

    With ``b`` constant the cached tokens grow by ``b`` a step, so each piece is a line in the
    step number up to its next bend, and the step time their maximum: until then the line changes
    at most once.
    """
    first, slope, limit = decode_line(e, FM, 0, b, cached, limit)
    if e.pieces == 2:
        other, steep, limit = decode_line(e, FM, 1, b, cached, limit)
        if other > first or (other == first and steep > slope):
            first, other = other, first
            slope, steep = steep, slope
        if other + steep * (limit - 1) > first + slope * (limit - 1):
            k = int(min((first - other) / (steep - slope), float(limit)))
            # The quotient may be rounded either way; the comparison decides.
            while k > 1 and other + steep * (k - 1) > first + slope * (k - 1):
                k -= 1
            while k < limit and other + steep * k <= first + slope * k:
                k += 1
            limit = max(k, 1)
    return first, slope, limit


@compiled
def run_s(first, slope, n):
    """Time of ``n`` steps of a line: n first + slope n (n - 1) / 2."""
    return n * first + slope * (n * (n - 1) // 2)


@compiled
def steps_to_reach(first, slope, start, t, limit):
    """Smallest number of steps (at least 1, at most ``limit``) that ends at ``t`` or later."""
    want = t - start
    if want <= first or limit == 1:
        return 1
    guess = want / first if first > 0.0 else float(limit)
    if slope > 0.0:
        half = slope * 0.5
        linear = first - half
        guess = 2.0 * want / (linear + math.sqrt(linear * linear + 4.0 * half * want))
    n = max(int(min(guess, float(limit))), 1)
    # The estimate may be off by rounding; the sum that the simulator itself uses decides.
    while n > 1 and start + run_s(first, slope, n - 1) >= t:
        n -= 1
    while n < limit and start + run_s(first, slope, n) < t:
        n += 1
    return n
