"""Histogram of inter-token times.

The bins divide every power of two of a second into :data:`GAPS_PER_OCTAVE` equal parts, so they
are at most 3.1 % wide, their edges are exact binary numbers, and the bin of a time is read off
its bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero.engine.compiled import compiled
from hetero.engine.state import GAP_BINS, GAP_LOW_EXPONENT, GAPS_PER_OCTAVE

_SHIFT = 52 - (GAPS_PER_OCTAVE.bit_length() - 1)
_OFFSET = (1023 + GAP_LOW_EXPONENT) * GAPS_PER_OCTAVE


@compiled
def _bin(seconds):
    k = (np.float64(seconds).view(np.int64) >> _SHIFT) - _OFFSET
    return min(max(k, 0), GAP_BINS - 1)


@compiled
def _upper_edge(k):
    return np.int64((k + 1 + _OFFSET) << _SHIFT).view(np.float64)


@compiled
def count_gap(IM, seconds, weight):
    """Count ``weight`` inter-token times of ``seconds``."""
    IM[_bin(seconds)] += weight


@compiled
def count_line(IM, first, slope, start, stop, weight):
    """Count ``weight`` times each of ``first + slope j`` for j from ``start`` to ``stop - 1``."""
    j = start
    final = _bin(first + slope * (stop - 1))
    while j < stop:
        k = _bin(first + slope * j)
        if k >= final:
            IM[k] += weight * (stop - j)
            return
        edge = _upper_edge(k)
        following = min(max(int((edge - first) / slope), j + 1), stop)
        # The quotient may be rounded either way; the comparison decides.
        while following > j + 1 and first + slope * (following - 1) >= edge:
            following -= 1
        while following < stop and first + slope * following < edge:
            following += 1
        IM[k] += weight * (following - j)
        j = following


def gap_edges() -> NDArray[np.float64]:
    """Edges of the bins [s]; shape (GAP_BINS + 1,). The outer bins take what lies beyond."""
    bits = (np.arange(GAP_BINS + 1, dtype=np.int64) + _OFFSET) << _SHIFT
    return bits.view(np.float64)
