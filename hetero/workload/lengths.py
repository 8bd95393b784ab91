"""Length ranges: the share of requests whose length falls into each of a few ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetero.arrays import Floats
from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError
from hetero.workload.synthetic import LengthDistribution

LongInts = NDArray[np.int64]

Source: TypeAlias = ArrayLike | LengthDistribution
"""Lengths of requests, as in ``trace.input_tokens``, or a distribution of them."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthRanges(Shown):
    """Ranges [start, end) of lengths with the share of requests in each.

    Attributes
    ----------
    start_tokens, end_tokens
        Shape (K,), int64; range k holds the lengths start <= s < end [tokens].
    middle_tokens
        Shape (K,), int64; the length that stands for the range [tokens].
    share
        Shape (K,); share of requests; they add up to 1.
    """

    start_tokens: LongInts
    end_tokens: LongInts
    middle_tokens: LongInts
    share: Floats

    def __len__(self) -> int:
        return len(self.share)

    def index(self, tokens: ArrayLike) -> LongInts:
        """Number of the range that each length falls into."""
        lengths = np.asarray(tokens)
        outside = (lengths < self.start_tokens[0]) | (lengths >= self.end_tokens[-1])
        if outside.any():
            raise ParameterError(
                f"A length of {np.atleast_1d(lengths)[np.atleast_1d(outside)][0]} tokens lies "
                f"outside the ranges, which hold {self.start_tokens[0]} to "
                f"{self.end_tokens[-1] - 1}.",
                resolve="make ranges that reach further.",
            )
        return np.searchsorted(self.end_tokens, lengths, side="right").astype(np.int64)

    def table(self) -> Table:
        """One row per range."""
        columns = (
            Column("start", "tokens", of=lambda row: int(row[0])),
            Column("end", "tokens", of=lambda row: int(row[1])),
            Column("middle", "tokens", of=lambda row: int(row[2])),
            Column("share", "%", digits=3, of=lambda row: 100 * float(row[3])),
        )
        rows = zip(self.start_tokens, self.end_tokens, self.middle_tokens, self.share, strict=True)
        return Table.of("Length ranges", columns, rows, "A range holds its start but not its end.")


def ranges(source: Source, width_tokens: int, *, limit_tokens: int | None = None) -> LengthRanges:
    """Ranges of equal width W with the middle of each as its length (Rignall, section 4.6.3).

    Range k holds the lengths k W to k W + W - 1, is represented by k W + floor(W / 2), and its
    share is p_k = sum of p(s) over its lengths. The thesis leaves out lengths beyond the last
    whole range; here the last range is whole and holds the largest length.

    Source: Rignall, section 4.6.3: ranges of input lengths; W, p_k.

    Parameters
    ----------
    limit_tokens
        Lengths s < limit are covered; by default just beyond the largest length. Distributions
        need it.

    Examples
    --------
    >>> print(ranges([1, 10, 99, 100], 100))
    Length ranges
    start [tokens]  end [tokens]  middle [tokens]  share [%]
    --------------  ------------  ---------------  ---------
                 0           100               50       75.0
               100           200              150       25.0
    A range holds its start but not its end.
    """
    if width_tokens < 1:
        raise ParameterError(
            f"A range of {width_tokens} tokens holds no length.", resolve="pass width_tokens >= 1."
        )
    if limit_tokens is None:
        if isinstance(source, LengthDistribution):
            raise ParameterError(
                "A distribution has no largest length.", resolve="pass limit_tokens."
            )
        limit_tokens = int(np.max(np.asarray(source))) + 1
    edges = np.arange(0, limit_tokens + width_tokens, width_tokens, dtype=np.int64)
    if edges[-1] - limit_tokens >= width_tokens:
        edges = edges[:-1]
    return _shares(source, edges, edges[:-1] + width_tokens // 2)


def bins(source: Source, edges_tokens: Sequence[int], *, limit_tokens: int) -> LengthRanges:
    """K ranges [0, l_1), [l_1, l_2), ..., [l_(K-1), limit) (HeteroServe, section 3.3).

    The middle is half way between the ends.

    Source: HeteroServe, section 3.3: length bins; K, l_1 to l_(K-1).

    Examples
    --------
    >>> bins([100, 300, 600, 4096], (256, 512, 2048), limit_tokens=4097).share.tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    edges = np.array([0, *edges_tokens, limit_tokens], dtype=np.int64)
    if np.any(np.diff(edges) <= 0):
        raise ParameterError(
            f"The edges {tuple(edges_tokens)} and the limit {limit_tokens} do not rise from 0.",
            resolve="pass rising edges below limit_tokens.",
        )
    return _shares(source, edges, (edges[:-1] + edges[1:]) // 2)


def percentile_edges(source: ArrayLike, percent: Sequence[float]) -> tuple[int, ...]:
    """Edges for :func:`bins` at percentiles of the lengths, equal ones once.

    Examples
    --------
    >>> percentile_edges(range(1, 101), (25, 50, 90))
    (26, 51, 91)
    """
    # +1: the edge is the first length of the upper bin.
    quantiles = np.percentile(np.asarray(source), percent, method="inverted_cdf")
    return tuple(int(edge) for edge in np.unique(quantiles.astype(np.int64) + 1))


def _shares(source: Source, edges: LongInts, middle: LongInts) -> LengthRanges:
    if isinstance(source, LengthDistribution):
        total = source.cdf(edges - 1)
        beyond, share = 1.0 - float(total[-1]), np.diff(total)
    else:
        lengths = np.asarray(source)
        beyond = float(np.mean(lengths >= edges[-1]))
        share = np.histogram(lengths, bins=edges)[0] / len(lengths)
    if beyond > 1e-9:
        raise ParameterError(
            f"{100 * beyond:.3g} % of the lengths lie beyond the last range, which ends at "
            f"{edges[-1]} tokens.",
            resolve="raise limit_tokens, or filter or cut the lengths first.",
        )
    return LengthRanges(edges[:-1], edges[1:], middle, share)
