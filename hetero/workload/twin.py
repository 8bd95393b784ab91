r"""The twin: a description of a few KB from which traces like the real one are drawn.

Arrivals are bursts whose counts split in halves, scale by scale (:class:`Arrivals`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetero.arrays import Floats
from hetero.display import Column, Shown, Table
from hetero.errors import DataError, ParameterError, require_positive
from hetero.files import writing
from hetero.workload import twin_check
from hetero.workload.trace import Trace
from hetero.workload.twin_check import TwinCheck

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


def fit_arrivals(arrival_s: ArrayLike) -> Arrivals:
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


#: A twin file is never larger [bytes].
LIMIT_BYTES = 5000
FORMAT = "hetero twin 1"

_TAIL = np.array([0.0005, 0.001, 0.002, 0.004, 0.01])
#: Probabilities of the quantile tables: 128 equal steps, and five more knots in each tail.
PROBABILITIES = np.unique(np.concatenate([np.linspace(0, 1, 129), _TAIL, 1 - _TAIL]))
#: Rank bands per side of the correlation table; the finest that fits into the file is taken.
BANDS = (24, 16, 12, 8, 4)
#: Width [s] and largest number of intervals whose mean lengths drift as in the trace.
DRIFT_S, DRIFTS = 60.0, 60
# Strata of the second length when pairs are dealt out to arrivals.
_STRATA = 64


@dataclass(frozen=True, slots=True, eq=False)
class Twin(Shown):
    """Statistical twin of a trace.

    Lengths: two tables of quantiles and a table of rank bands, a pair of lengths being drawn as a
    cell of that table, uniform within it, and looked up in the quantiles. Arrivals: see
    :class:`hetero.workload.twin.Arrivals`. The drawn pairs are dealt out to the arrivals so
    that the mean normal scores of both lengths drift over time as in the trace. Within such an
    interval lengths and bursts are independent, and prefix blocks and sessions are not kept.

    Attributes
    ----------
    name, source
        Name of the trace, and where it comes from.
    requests
        Number of requests of the trace.
    input_quantiles, output_quantiles
        Shape (139,); lengths [tokens] at :data:`PROBABILITIES`.
    bands
        Shape (B, B); requests whose input rank is in band i and output rank in band j.
    arrivals
        Arrival process, or None if all requests of the trace arrive at once.
    drift_s
        Width of the drift intervals [s].
    drift
        Shape (2, D); mean normal score of input and output lengths per interval.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> trace = Trace(np.cumsum(rng.exponential(0.5, 500)), rng.integers(1, 900, 500),
    ...     rng.integers(0, 90, 500), name="demo")
    >>> twin = Twin.fit(trace)
    >>> drawn = twin.draw(seed=1)
    >>> len(drawn), drawn.source
    (500, 'twin:demo, seed 1')
    """

    name: str
    source: str
    requests: int
    input_quantiles: LongInts
    output_quantiles: LongInts
    bands: LongInts
    arrivals: Arrivals | None = None
    drift_s: float = DRIFT_S
    drift: Floats | None = None

    @classmethod
    def fit(cls, trace: Trace, *, source: str = "") -> Twin:
        """Twin of a trace; deterministic, and never larger than 5 KB as a file."""
        inputs, outputs = trace.input_tokens, trace.output_tokens
        arrivals, drift_s, drift = None, DRIFT_S, None
        if trace.arrival_s[-1] > trace.arrival_s[0]:
            arrivals = fit_arrivals(trace.arrival_s)
            drift_s, drift = _fit_drift(trace)
        quantiles = [
            np.quantile(tokens, PROBABILITIES, method="inverted_cdf").astype(np.int64)
            for tokens in (inputs, outputs)
        ]
        twin = cls(
            name=trace.name,
            source=source or trace.source,
            requests=len(trace),
            input_quantiles=quantiles[0],
            output_quantiles=quantiles[1],
            bands=np.zeros((1, 1), np.int64),
            arrivals=arrivals,
            drift_s=drift_s,
            drift=drift,
        )
        # Ties in random order: atoms of one length then fill their bands evenly.
        rng = np.random.default_rng(0)
        ranks = [_ranks(tokens, rng) for tokens in (inputs, outputs)]
        for count in BANDS:
            cells = np.zeros((count, count), np.int64)
            np.add.at(cells, tuple(rank * count // len(trace) for rank in ranks), 1)
            twin = replace(twin, bands=cells)
            if len(twin.to_json()) <= LIMIT_BYTES:
                break
        return twin

    def draw(self, seed: int = 0, rate: float = 1.0) -> Trace:
        """A trace like the real one; the same seed gives the same requests.

        Parameters
        ----------
        rate
            Multiple of the real trace's rate: the bursts stay where they are and hold more or
            fewer requests.
        """
        require_positive(rate=rate)
        if self.arrivals is None and rate != 1.0:
            raise ParameterError(
                f"The twin {self.name} has lengths but no arrivals, so it has no rate to multiply.",
                resolve="draw with rate=1 and give the trace arrivals: trace.poisson(rate_rps, "
                "rng).",
            )
        rng = np.random.default_rng(seed)
        arrival_s = np.zeros(self.requests)
        if self.arrivals is not None:
            arrival_s = self.arrivals.draw(rng, rate)
        u, v = self._pairs(len(arrival_s), rng)
        if self.drift is not None:
            order = self._deal(arrival_s, u, v, rng)
            u, v = u[order], v[order]
        suffix = "" if rate == 1.0 else f", {rate:g} times its rate"
        return Trace(
            arrival_s=arrival_s,
            input_tokens=_look_up(u, self.input_quantiles),
            output_tokens=_look_up(v, self.output_quantiles),
            name=self.name,
            source=f"twin:{self.name}, seed {seed}{suffix}",
        )

    def _pairs(self, count: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Ranks in (0, 1) of both lengths, in random order, their bands shared as in the trace."""
        side = len(self.bands)
        share = self.bands.ravel() * (count / self.bands.sum())
        number = np.floor(share).astype(np.int64)
        # Largest remainders fill up to the count.
        number[np.argsort(number - share, kind="stable")[: count - number.sum()]] += 1
        cell = rng.permutation(np.repeat(np.arange(side * side), number))
        return (cell // side + rng.random(count)) / side, (cell % side + rng.random(count)) / side

    def _deal(self, arrival_s: Floats, u: Floats, v: Floats, rng: np.random.Generator) -> LongInts:
        """Order of the pairs that gives each drift interval its mean normal scores."""
        assert self.drift is not None
        interval = np.minimum((arrival_s / self.drift_s).astype(np.int64), self.drift.shape[1] - 1)
        wanted = []
        for mean in self.drift:
            score = mean[interval]
            noise = np.sqrt(max(0.0, 1.0 - float(score.var())))
            wanted.append(score + noise * rng.standard_normal(len(score)))
        # Match in two dimensions by strata: ranks of the output first, then of the input.
        strata = max(1, min(_STRATA, len(u) // 50))
        places = np.lexsort((wanted[0], _strata(wanted[1], strata)))
        order = np.empty(len(u), np.int64)
        order[places] = np.lexsort((u, _strata(v, strata)))
        return order

    def check(self, trace: Trace, draws: int = 20) -> TwinCheck:
        """Compare ``draws`` drawn traces (seeds 0, 1, ...) with the real one."""
        return twin_check.compare(self.draw, trace, draws)

    def table(self) -> Table:
        """What the twin holds."""
        rows: list[tuple[object, ...]] = [
            ("requests", "", self.requests),
            ("median input", "tokens", int(np.median(self.input_quantiles))),
            ("median output", "tokens", int(np.median(self.output_quantiles))),
            ("rank bands", "", f"{len(self.bands)} x {len(self.bands)}"),
        ]
        if self.arrivals is not None:
            rows += [
                ("bursts", "", len(self.arrivals.start_s)),
                ("count bins", "", f"{len(self.arrivals.counts)} of {self.arrivals.bin_s:g} s"),
            ]
        rows.append(("file", "bytes", len(self.to_json())))
        return Table(
            f"Twin of {self.name} ({self.source})",
            (Column("part"), Column("unit"), Column("value")),
            tuple(rows),
            () if self.arrivals is not None else ("All requests arrive at once: lengths only.",),
        )

    # In and out -----------------------------------------------------------------------------

    def to_json(self) -> str:
        """The twin as JSON, one field per line."""
        fields: dict[str, object] = {
            "format": FORMAT,
            "name": self.name,
            "source": self.source,
            "requests": self.requests,
            "input_quantiles_tokens": self.input_quantiles.tolist(),
            "output_quantiles_tokens": self.output_quantiles.tolist(),
            "bands": self.bands.tolist(),
        }
        if self.arrivals is not None and self.drift is not None:
            ends = self.arrivals.start_s + self.arrivals.length_s
            silences = self.arrivals.start_s - np.concatenate([[0.0], ends[:-1]])
            fields |= {
                "bin_s": self.arrivals.bin_s,
                "stamp_s": self.arrivals.stamp_s,
                # Differences are shorter than times: silence before each burst, and its length.
                "bursts_s": np.round(np.stack([silences, self.arrivals.length_s], 1), 2).tolist(),
                "counts": self.arrivals.counts.tolist(),
                "rho": self.arrivals.rho.tolist(),
                "drift_s": self.drift_s,
                "drift": self.drift.tolist(),
            }
        lines = [
            f'"{key}":{json.dumps(value, separators=(",", ":"))}' for key, value in fields.items()
        ]
        return "{" + ",\n".join(lines) + "}\n"

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Write the twin as JSON."""
        with writing(path, force=force) as part:
            part.write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> Twin:
        """Read a twin that :meth:`save` wrote.

        Raises
        ------
        DataError
            If the file does not exist or is no twin.
        """
        file = Path(path)
        if not file.is_file():
            raise DataError("there is no such file.", path=file, resolve="check the path.")
        try:
            fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if fields["format"] != FORMAT:
                raise ValueError(f"its format is {fields['format']!r}, not {FORMAT!r}")
            return cls._from_fields(fields)
        except (
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            OverflowError,
            RecursionError,
        ) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(
                f"this is no twin ({reason}).",
                path=file,
                resolve="make one with `hetero trace twin FILE -o OUT.json`.",
            ) from None

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Twin:
        arrivals = drift = None
        if "bursts_s" in fields:
            bursts = np.asarray(fields["bursts_s"], dtype=np.float64)
            length = bursts[:, 1]
            arrivals = Arrivals(
                bin_s=float(fields["bin_s"]),
                start_s=np.round(np.cumsum(bursts.sum(axis=1)) - length, 2),
                length_s=length,
                counts=np.asarray(fields["counts"], dtype=np.int64),
                rho=np.asarray(fields["rho"], dtype=np.float64),
                stamp_s=float(fields["stamp_s"]),
            )
            drift = np.asarray(fields["drift"], dtype=np.float64)
        twin = cls(
            name=str(fields["name"]),
            source=str(fields["source"]),
            requests=int(fields["requests"]),
            input_quantiles=np.asarray(fields["input_quantiles_tokens"], dtype=np.int64),
            output_quantiles=np.asarray(fields["output_quantiles_tokens"], dtype=np.int64),
            bands=np.asarray(fields["bands"], dtype=np.int64),
            arrivals=arrivals,
            drift_s=float(fields.get("drift_s", DRIFT_S)),
            drift=drift,
        )
        tables = (twin.input_quantiles, twin.output_quantiles)
        if any(len(q) != len(PROBABILITIES) or (np.diff(q) < 0).any() for q in tables):
            raise ValueError(f"its quantiles are not {len(PROBABILITIES)} rising lengths")
        if arrivals is not None:
            with np.errstate(all="ignore"):  # no bin is as wide as no time
                bins = np.maximum(1, np.ceil(arrivals.length_s / arrivals.bin_s)).sum()
            if not arrivals.bin_s > 0 or len(arrivals.counts) != bins:
                raise ValueError("its counts do not match its bursts")
        return twin


def _fit_drift(trace: Trace) -> tuple[float, Floats]:
    """Width of the drift intervals [s] and the mean normal scores of both lengths in each."""
    from scipy.special import ndtri
    from scipy.stats import rankdata

    arrival = trace.arrival_s - trace.arrival_s[0]
    width = DRIFT_S * max(1.0, float(np.ceil(arrival[-1] / DRIFT_S / DRIFTS)))
    interval = (arrival / width).astype(np.int64)
    number = np.maximum(np.bincount(interval), 1)
    means = np.empty((2, len(number)))
    for row, tokens in enumerate((trace.input_tokens, trace.output_tokens)):
        score = np.asarray(ndtri((rankdata(tokens) - 0.5) / len(trace)), dtype=np.float64)
        means[row] = np.bincount(interval, weights=score) / number
    return width, np.round(means, 2)


def _ranks(values: NDArray[np.int32], rng: np.random.Generator) -> LongInts:
    """Ranks 0 to n - 1, ties in random order."""
    ranks = np.empty(len(values), np.int64)
    ranks[np.lexsort((rng.random(len(values)), values))] = np.arange(len(values))
    return ranks


def _strata(values: Floats, count: int) -> LongInts:
    """Number 0 to ``count`` - 1 of the equally filled stratum that each value falls into."""
    strata = np.empty(len(values), np.int64)
    strata[np.argsort(values, kind="stable")] = np.arange(len(values)) * count // len(values)
    return strata


def _look_up(probability: Floats, quantiles: LongInts) -> NDArray[np.int32]:
    return np.rint(np.interp(probability, PROBABILITIES, quantiles)).astype(np.int32)
