"""Arrivals as bursts whose counts split in halves, scale by scale: the arrival part of a twin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetero.arrays import Floats

LongInts = NDArray[np.int64]

#: Halvings of a bin; 14 take 60 s down to 4 ms.
LEVELS = 14
#: Longest silences that are kept one by one.
SILENCES = 96
#: Width of the count bins [s] of a steady trace, and of one made of bursts.
STEADY_BIN_S, BURSTY_BIN_S = 60.0, 5.0
#: A longer trace gets wider bins.
BINS = 240


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """Arrival process: bursts, counts per bin, and how unevenly a bin's halves share its count.

    A steady trace is a single burst. Within a burst, bins of ``bin_s`` seconds (the last one cut
    off) hold fixed counts. The m arrivals of an interval of width w go to its two halves as a
    symmetric beta-binomial with intra-class correlation rho(w): its variance is
    m/4 (1 + (m - 1) rho), so rho = 0 is Poisson-like and rho = 1 puts all into one half. That
    repeats down to bin_s / 2^LEVELS, so counts vary on every scale as they do in the trace.

    Attributes
    ----------
    bin_s
        Width of the bins [s].
    start_s, length_s
        Shape (B,); start and length of each burst [s]. A burst starts and ends with an arrival.
    counts
        Shape (sum of bins over bursts,); arrivals per bin.
    rho
        Shape (LEVELS,); rho at width bin_s / 2^l.
    stamp_s
        Step of the time stamps [s], where they are so coarse that most requests share one (the
        Mooncake trace has 3 s); else 0.
    """

    bin_s: float
    start_s: Floats
    length_s: Floats
    counts: LongInts
    rho: Floats
    stamp_s: float = 0.0

    def bins(self) -> tuple[LongInts, Floats, Floats]:
        """Bins per burst, and the left edge and width of each bin [s]."""
        per_burst = np.maximum(1, np.ceil(self.length_s / self.bin_s)).astype(np.int64)
        first = np.repeat(np.cumsum(per_burst) - per_burst, per_burst)
        within = (np.arange(per_burst.sum()) - first) * self.bin_s
        left = np.repeat(self.start_s, per_burst) + within
        width = np.minimum(self.bin_s, np.repeat(self.length_s, per_burst) - within)
        return per_burst, left, np.maximum(width, 0.0)

    def draw(self, rng: np.random.Generator, rate: float = 1.0) -> Floats:
        """Arrival times [s], sorted; ``rate`` multiplies the counts and leaves the bursts."""
        per_burst, left, width = self.bins()
        number = self.counts
        if rate != 1.0:
            number = np.floor(number * rate + rng.random(len(number))).astype(np.int64)
        ends = np.cumsum(number)
        lo, wide, many = left, width, number
        level = _level(self.bin_s, width)
        for depth in range(LEVELS):
            keep = many > 0
            lo, wide, many, level = lo[keep], wide[keep] / 2, many[keep], level[keep]
            # Beta(s, s) has intra-class correlation 1 / (2 s + 1).
            rho = np.clip(self.rho[np.clip(level + depth, 0, LEVELS - 1)], 1e-6, 1 - 1e-6)
            shape = (1 / rho - 1) / 2
            first = rng.binomial(many, rng.beta(shape, shape))
            lo = np.stack([lo, lo + wide], axis=1).ravel()
            many = np.stack([first, many - first], axis=1).ravel()
            wide, level = np.repeat(wide, 2), np.repeat(level, 2)
        arrival = np.repeat(lo, many) + np.repeat(wide, many) * rng.random(int(many.sum()))
        arrival.sort()
        # A burst starts and ends with an arrival, so that silences keep their length.
        last_bin = np.cumsum(per_burst) - 1
        first_bin = last_bin - per_burst + 1
        for bins, at, position in (
            (first_bin, self.start_s, ends[first_bin] - number[first_bin]),
            (last_bin, self.start_s + self.length_s, ends[last_bin] - 1),
        ):
            filled = number[bins] > 0
            arrival[position[filled]] = at[filled]
        if self.stamp_s > 0:
            arrival = np.floor(arrival / self.stamp_s + 1e-6) * self.stamp_s
        # Microseconds are finer than any trace, and equal on machines that round differently.
        return np.sort(np.round(arrival, 6))


def fit(arrival_s: ArrayLike) -> Arrivals:
    """Arrival process of sorted arrivals that span some time.

    The trace falls into bursts where its longest silences (at most 96, and 2 % of the gaps) hold
    more than half of its span; otherwise it is one burst.
    """
    arrival = np.asarray(arrival_s, dtype=np.float64)
    arrival = arrival - arrival[0]
    stamp_s = _stamp(arrival)
    if stamp_s > 0:
        arrival = np.rint(arrival / stamp_s) * stamp_s
    gaps = np.diff(arrival)
    longest = np.argsort(-gaps, kind="stable")[: min(SILENCES, len(arrival) // 50)]
    bursty = bool(gaps[longest].sum() > arrival[-1] / 2)
    breaks = np.sort(longest) + 1 if bursty else np.empty(0, np.int64)
    edges = np.concatenate([[0], breaks, [len(arrival)]]).astype(np.int64)
    # Hundredths of a second keep the description small; silences are seconds long.
    start = np.round(arrival[edges[:-1]], 2)
    length = np.round(np.round(arrival[edges[1:] - 1], 2) - start, 2)
    bin_s = BURSTY_BIN_S if bursty else STEADY_BIN_S
    if stamp_s > 0:  # halvings of a bin then meet the steps
        bin_s = stamp_s * 2.0 ** max(0, round(np.log2(bin_s / stamp_s)))
    bin_s *= max(1.0, float(np.ceil(length.sum() / bin_s / BINS)))
    model = Arrivals(bin_s, start, length, np.zeros(0, np.int64), np.zeros(LEVELS))
    per_burst, left, width = model.bins()
    burst = np.repeat(np.arange(len(start)), np.diff(edges))
    within = np.floor((arrival - start[burst]) / bin_s).astype(np.int64)
    bins = (np.cumsum(per_burst) - per_burst)[burst] + np.clip(within, 0, per_burst[burst] - 1)
    counts = np.bincount(bins, minlength=len(width)).astype(np.int64)
    place = np.clip(
        (arrival - left[bins]) / np.where(width > 0, width, 1.0)[bins], 0.0, 1 - 2.0**-LEVELS / 2
    )
    rho = _correlations(bins, place, _level(bin_s, width)[bins])
    return Arrivals(bin_s, start, length, counts, rho, stamp_s)


def _stamp(arrival_s: Floats) -> float:
    """Step of the time stamps [s] if four requests or more share one on average, else 0."""
    stamps = np.unique(arrival_s)
    if len(stamps) < 2 or len(arrival_s) < 4 * len(stamps):
        return 0.0
    return float(np.round(np.median(np.diff(stamps)), 3))


def _level(bin_s: float, width_s: Floats) -> LongInts:
    """Halvings that lead from ``bin_s`` to the nearest width; widths of 0 count as the finest."""
    return np.rint(np.log2(bin_s / np.maximum(width_s, bin_s / 2.0**LEVELS))).astype(np.int64)


def _correlations(bins: LongInts, place: Floats, level: LongInts) -> Floats:
    """Intra-class correlation of halves per level, by the method of moments.

    For an interval with m arrivals, k of them in its first half, (k - m/2)^2 has the mean
    m/4 + rho m (m - 1) / 4.
    """
    excess, weight = np.zeros(LEVELS), np.zeros(LEVELS)
    for depth in range(LEVELS):
        half = np.floor(place * 2 ** (depth + 1)).astype(np.int64)
        interval, which = np.unique((bins << (depth + 1)) + (half >> 1), return_inverse=True)
        many = np.bincount(which)
        first = np.bincount(which, weights=half % 2 == 0)
        scale = np.zeros(len(interval), np.int64)
        scale[which] = level + depth
        used = (many >= 2) & (scale < LEVELS)
        m, k = many[used], first[used]
        excess += np.bincount(scale[used], weights=(k - m / 2) ** 2 - m / 4, minlength=LEVELS)
        weight += np.bincount(scale[used], weights=m * (m - 1) / 4, minlength=LEVELS)
    rho = np.divide(excess, weight, out=np.zeros(LEVELS), where=weight > 0)
    return np.round(np.clip(rho, 0.0, 1.0), 4)
