"""Which part of a running engine differs from its simulation, by how much, and the engine refitted.

The simulation serves the same requests at the same times. Five parts can be off: the front end (a
time per request), prefill (a factor on what prompt tokens add to a step), decode (a factor on what
decoding takes), the KV cache (its tokens) and cache hits (the share of the expected ones).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from scipy.optimize import least_squares, lsq_linear

from hetero.apps.refitted import refitted
from hetero.arrays import Floats
from hetero.deployment import Deployment, Replica
from hetero.display import Column, Shown, Table
from hetero.errors import DataError, FitError, require
from hetero.routers import Oracle, RoundRobin
from hetero.simulator import simulate
from hetero.streams import stream
from hetero.workload import Trace, readers

_KV_FACTORS: Final = tuple(2.0 ** (k / 6) for k in range(-12, 13))
_BETWEEN: Final = (-1 / 9, -1 / 18, 1 / 18, 1 / 9)  # of a doubling, around the best factor
_HIT_SHARES: Final = (0.75, 0.5, 0.25, 0.0)
_STARTS: Final = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.4), (0.0, 0.4, 0.0), (0.0, -0.3, -0.3))
_MOST: Final = np.log(8.0)  # of a factor, either way
_MOVE: Final = 0.08  # of a factor's logarithm, for the slope of what is simulated
_HUBER: Final = 1.5  # spreads from which on residuals count linearly
_BLOCKS: Final = 20  # of consecutive requests, drawn together: neighbours wait for each other
_LEAST: Final = 40  # requests
_COLUMNS: Final = ("arrival_s", "input_tokens", "output_tokens", "ttft_s", "tpot_s")


@dataclass(frozen=True, slots=True, eq=False)
class ServedLog:
    """What the requests of one engine saw.

    Attributes
    ----------
    trace
        Arrivals and lengths.
    ttft_s, tpot_s
        Time to the first token, and per token after it [s]; NaN for fewer than two tokens.
    """

    trace: Trace
    ttft_s: Floats
    tpot_s: Floats

    @classmethod
    def read(cls, path: Path | str, replica: str = "") -> ServedLog:
        """What a benchmark or ``hetero simulate`` wrote, or a table with the columns of the latter.

        Failures are left out. Arrivals may be dates, and ``e2e_s`` may stand in place of
        ``tpot_s``; benchmarks are those of :func:`hetero.workload.readers.read`.

        Raises
        ------
        DataError
            If the file cannot be read, lacks a column, or has requests of several replicas and
            none is named.
        """
        rows, layout = readers.opened(path, {})
        frame = (readers.answered_frame(rows, layout) if layout.tool else rows.frame).copy()
        numbers = [name for name in (*_COLUMNS[1:], "e2e_s") if name in frame]
        try:
            frame[numbers] = frame[numbers].replace("", np.nan).astype(np.float64)
            if pd.to_numeric(frame.get("arrival_s", pd.Series()), errors="coerce").isna().any():
                dates = pd.to_datetime(frame["arrival_s"], utc=True, format="mixed")
                frame["arrival_s"] = (dates - dates.min()).dt.total_seconds()
        except (ValueError, TypeError) as error:
            what = f"A cell is neither a number nor a date ({error})."
            raise DataError(what, path=path, resolve="write times in seconds.") from None
        if "tpot_s" not in frame and {"e2e_s", "ttft_s", "output_tokens"} <= {*frame}:
            later = frame["output_tokens"] - 1
            frame["tpot_s"] = (frame["e2e_s"] - frame["ttft_s"]) / later.where(later > 0)
        names = frame.get("replica", pd.Series("", frame.index)).fillna("").astype(str)
        kept = (names == replica) | (not replica)
        if "status" in frame:
            kept &= frame["status"] == "finished"
        what = ""
        if missing := [name for name in _COLUMNS if name not in frame]:
            what = f"The column '{missing[0]}' is missing."
        elif not kept.any() or names[kept].nunique() > 1:
            what = f"It has answers of {', '.join(sorted({*names} - {''})) or 'nobody'}."
        if what:
            hint = f"give answers of one replica (--replica), with {', '.join(_COLUMNS)}."
            raise DataError(what, path=path, resolve=hint)
        return cls.of(frame[kept], Path(path).name)

    @classmethod
    def of(cls, frame: pd.DataFrame, name: str = "log") -> ServedLog:
        """Rows with the columns of a run's :meth:`~hetero.simulator.run.Run.frame`."""
        rows = frame[[*_COLUMNS]].astype(np.float64).sort_values("arrival_s", kind="stable")
        arrival, inputs, outputs, ttft, tpot = rows.to_numpy().T
        require(
            bool((ttft > 0).all()),
            f"{name}: {int((~(ttft > 0)).sum())} requests have no time to first token above 0 s.",
            resolve="leave out requests that were not answered.",
        )
        return cls(Trace(arrival - arrival[0], inputs, outputs, name=name), ttft, tpot)


@dataclass(frozen=True, slots=True)
class PartFound:
    """What the requests say of one part.

    Attributes
    ----------
    part
        Front end, prefill, decode, KV cache or cache hits.
    told, found, low, high
        What the simulation was told, the best fit, and the ends of its interval; ``unit`` says of
        what. An end that the requests do not show is infinite or 0.
    off
        Whether the interval leaves out all that is within the tolerance of what was told.
    """

    part: str
    unit: str
    told: float
    found: float
    low: float
    high: float
    off: bool


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Observation(Shown):
    """An engine beside its simulation.

    Attributes
    ----------
    parts
        What was found of each.
    replica
        The engine refitted: step times, time per request and KV cache.
    before_percent, after_percent
        Median size of the error of TTFT and TPOT, as told and refitted [%].
    """

    parts: tuple[PartFound, ...]
    replica: Replica
    before_percent: tuple[float, float]
    after_percent: tuple[float, float]
    notes: tuple[str, ...]

    @property
    def named(self) -> tuple[str, ...]:
        """Parts that are off."""
        return tuple(one.part for one in self.parts if one.off)

    def table(self) -> Table:
        """One row per part."""
        columns = (
            Column("part"),
            Column("unit"),
            *(Column(name) for name in ("told", "found", "low", "high")),
            Column("verdict", of=lambda one: "off" if one.off else ""),
        )
        errors = (
            f"median error of {name} {before:.1f} % as told, {after:.1f} % refitted"
            for name, before, after in zip(
                ("TTFT", "TPOT"), self.before_percent, self.after_percent, strict=True
            )
        )
        said = f"Off: {', '.join(self.named)}." if self.named else "Nothing is off."
        return Table.of(
            "Engine beside its simulation", columns, self.parts, said, *errors, *self.notes
        )


def observe(
    log: ServedLog,
    replica: Replica,
    *,
    tolerance: float = 0.1,
    confidence: float = 0.95,
    resamples: int = 400,
    seed: int = 0,
) -> Observation:
    r"""Compare an engine with the simulation of the same requests, and refit the simulation.

    .. math:: \min \sum_i \rho\left(\frac{\log y_i - \log \hat y_i(\theta)}{s}\right)

    over the TTFT and TPOT ``y`` of every request, with ``rho`` Huber's loss and ``s`` the spread of
    either kind, by Gauss-Newton on simulated sensitivities for front end, prefill and decode,
    anew for each size of the KV cache and each share of cache hits. Intervals are those of
    resampled blocks of consecutive requests.

    Parameters
    ----------
    replica
        The engine as it is told to be.
    tolerance
        A part is named if its interval leaves out every value within this share of what was told
        (of the median TTFT for the front end).

    Raises
    ------
    FitError
        If there are fewer than 40 requests, or the engine told could not hold them.

    Examples
    --------
    >>> from hetero import workload
    >>> from hetero.latency.step import StepModel
    >>> from hetero.streams import stream
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-3, per_cached_token_s=1e-6)
    >>> engine = Replica("engine", step, kv_tokens=10_000)
    >>> drawn = workload.load("azure2023_conv").sample(50, stream(0, "doctest"))
    >>> trace = Trace(drawn.arrival_s, drawn.input_tokens // 10 + 1, drawn.output_tokens // 30 + 2)
    >>> trace = trace.poisson(3.0, stream(0, "arrivals"))
    >>> slower = replace(engine, step=refitted(step, 1.0, 1.5, 0.0))
    >>> run = simulate(Deployment("real", (slower,)), trace, RoundRobin())
    >>> found = observe(ServedLog.of(run.frame()), engine, resamples=50)
    >>> found.named, round(found.parts[2].found, 2)
    (('decode',), 1.5)
    """
    require(
        0 < tolerance < 1 and 0 < confidence < 1 and resamples >= 20,
        f"A tolerance of {tolerance:g}, a confidence of {confidence:g} and {resamples} resamples.",
        resolve="give a tolerance and a confidence between 0 and 1, and at least 20 resamples.",
    )
    require(
        len(log.trace) >= _LEAST,
        f"{len(log.trace)} requests tell nothing of an engine.",
        resolve=f"observe at least {_LEAST} that were answered.",
        error=FitError,
    )
    work = _Work(log, replica)
    told = work.left(np.zeros(3), 1.0, 1.0)
    if told is None:
        raise FitError(
            f"A KV cache of {replica.kv_tokens:,} tokens cannot hold every request of the log.",
            resolve="give the KV cache that the engine printed.",
        )
    left, fits = told, list[_Scenario]()
    for _ in range(3):
        work.spread(left)
        fits = work.scenarios(fits)
        best = min(fits, key=lambda one: (one.loss, one.apart))
        left = best.left
    drawn = _resampled(work, fits, resamples, stream(seed, "resamples"))
    same = work.alike(best)
    kv, tail = float(replica.kv_tokens), 50.0 * (1.0 - confidence)
    ends = np.percentile(drawn, [tail, 100.0 - tail], axis=0)
    ends[:, 3] = min(ends[0, 3], same[0]), max(ends[1, 3], same[1])
    parts = []
    for k, (part, unit, told_, slack) in enumerate(
        (
            ("front end", "s per request", replica.step.request_s, tolerance * work.typical_s),
            ("prefill", "x", 1.0, tolerance),
            ("decode", "x", 1.0, tolerance),
            ("KV cache", "tokens", kv, tolerance * kv),
            *[("cache hits", "share of expected", 1.0, tolerance)] * work.hits,
        )
    ):
        low, high = (float(x) * (kv if k == 3 else 1.0) for x in ends[:, k])
        found = work.values(best)[k] * (kv if k == 3 else 1.0)
        off = low > told_ + slack or high < told_ - slack
        parts.append(PartFound(part, unit, told_, found, low, high, off))
    if not any(one.off for one in parts[3:]):  # nothing speaks against the cache told
        best = min(fits, key=lambda one: one.apart)
    refit = work.refit(best.theta, best.kv, best.hits)
    source = f"{replica.step.source}, refitted to {len(log.trace)} requests"
    refit = replace(refit, step=replace(refit.step, source=source, provenance="measured"))
    notes = (
        f"{len(log.trace):,} requests in {log.trace.arrival_s[-1]:.0f} s; intervals of "
        f"{confidence:.0%}; off is what is more than {tolerance:.0%} away in all of its interval",
        "the requests never filled the KV cache" if np.isinf(same[1]) else "",
    )
    return Observation(tuple(parts), refit, work.percent(told), work.percent(best.left), notes)


@dataclass(frozen=True, slots=True, eq=False)
class _Scenario:
    """The best fit of the three times for one KV cache and share of hits."""

    kv: float
    hits: float
    theta: Floats
    left: Floats
    slopes: Floats
    loss: float

    @property
    def apart(self) -> float:
        return float(abs(np.log(self.kv))) + 1.0 - self.hits


class _Work:
    """Residuals of TTFT, then of TPOT; ``theta`` is front end over the median TTFT, and logs."""

    def __init__(self, log: ServedLog, replica: Replica) -> None:
        self.log, self.replica = log, replica
        self.typical_s = float(np.median(log.ttft_s))
        self.later = np.isfinite(log.tpot_s) & (log.tpot_s > 0) & (log.trace.output_tokens >= 2)
        self.many = len(log.trace)
        self.request = np.concatenate([np.arange(self.many), np.flatnonzero(self.later)])
        self.hits = bool(replica.engine.prefix_cache and log.trace.prefix_ids is not None)
        self.least = np.array([-replica.step.request_s / self.typical_s - 1e-9, -_MOST, -_MOST])
        self.known: dict[tuple[float, ...], tuple[Floats, Floats] | None] = {}

    def values(self, one: _Scenario) -> tuple[float, ...]:
        """Time per request [s], and factors of all else."""
        front = self.replica.step.request_s + one.theta[0] * self.typical_s
        return max(float(front), 0.0), *np.exp(one.theta[1:]).tolist(), one.kv, one.hits

    def refit(self, theta: Floats, kv: float, hits: float) -> Replica:
        """The engine of a scenario."""
        one, (prefill, decode) = self.replica, np.exp(theta[1:])
        front_s = max(one.step.request_s + theta[0] * self.typical_s, 0.0)
        step = refitted(one.step, prefill, decode, front_s, min(one.engine.max_batch, 1024))
        engine = replace(one.engine, prefix_cache=one.engine.prefix_cache and hits > 0)
        return replace(one, step=step, engine=engine, kv_tokens=round(kv * one.kv_tokens))

    def _served(self, theta: Floats, kv: float, hits: float) -> tuple[Floats, Floats] | None:
        """TTFT without the front end, and TPOT; None where a request does not fit."""
        key = (*theta[1:].tolist(), kv, hits)
        if key not in self.known:
            self.known[key] = None
            engine = self.refit(np.array([self.least[0], *theta[1:]]), kv, hits)
            trace = _fewer_hits(self.log.trace, hits) if self.hits else self.log.trace
            run = simulate(Deployment("told", (engine,)), trace, RoundRobin(), predictor=Oracle())
            if run.finished.all():
                self.known[key] = run.ttft_s, run.tpot_s
        return self.known[key]

    def left(self, theta: Floats, kv: float, hits: float) -> Floats | None:
        """Logarithms of measured over simulated times."""
        if round(kv * self.replica.kv_tokens) < self.replica.engine.block_tokens:
            return None
        found = self._served(theta, kv, hits)
        if found is None:
            return None
        ttft = found[0] + max(self.replica.step.request_s + theta[0] * self.typical_s, 0.0)
        tpot = self.log.tpot_s[self.later] / np.maximum(found[1][self.later], 1e-9)
        return np.concatenate([np.log(self.log.ttft_s / ttft), np.log(tpot)])

    def spread(self, left: Floats) -> None:
        """Take over the spread of either kind of residuals."""
        kinds = (left[: self.many], left[self.many :])
        wide = [1.48 * np.median(np.abs(x - np.median(x))) if len(x) else 1.0 for x in kinds]
        self.scale = np.repeat(np.maximum(wide, 0.01), [len(x) for x in kinds])

    def scenarios(self, before: list[_Scenario]) -> list[_Scenario]:
        """Fits for every size of the cache, and for fewer hits; from where they ended before."""
        if before:
            found = [self.fit([one.theta], one.kv, one.hits) for one in before]
            return list(filter(None, found))
        starts = [np.array(one) for one in _STARTS]
        found = [self.fit(starts, kv, 1.0) for kv in _KV_FACTORS]
        best = min(filter(None, found), key=lambda one: (one.loss, one.apart))
        around = [best.kv * 2.0**k for k in _BETWEEN] if best.kv != 1.0 else []
        found += [self.fit([best.theta, *starts], kv, 1.0) for kv in around]
        found += [self.fit(starts, 1.0, hits) for hits in _HIT_SHARES * self.hits]
        return list(filter(None, found))

    def fit(self, starts: list[Floats], kv: float, hits: float) -> _Scenario | None:
        """The best of Gauss-Newton from each start; None where the cache cannot hold a request."""
        if self.left(starts[0], kv, hits) is None:
            return None

        def left(theta: Floats) -> Floats:
            found = self.left(theta, kv, hits)
            assert found is not None  # what fits the cache does so at any speed
            return np.asarray(found / self.scale)

        def slopes(theta: Floats) -> Floats:
            front, *factors = _MOVE * np.eye(3)  # the front end takes no time below 0
            ends = [(theta, theta + front), *((theta - one, theta + one) for one in factors)]
            return np.column_stack([(left(b) - left(a)) / (b - a).sum() for a, b in ends])

        found = [
            least_squares(
                left,
                np.maximum(start, self.least + 1e-9),
                slopes,
                (self.least, [np.inf, _MOST, _MOST]),
                loss="huber",
                f_scale=_HUBER,
                max_nfev=12,
            )
            for start in starts
        ]
        best = min(found, key=lambda one: one.cost)
        return _Scenario(kv, hits, best.x, self.scale * best.fun, slopes(best.x), float(best.cost))

    def alike(self, best: _Scenario) -> tuple[float, float]:
        """Smallest and largest factor of the cache with the same simulated times as the best."""
        same = [best.kv]
        for kv in _KV_FACTORS:
            left = self.left(best.theta, kv, best.hits)
            if left is not None and np.allclose(left, best.left, rtol=0.0, atol=1e-9):
                same.append(kv)
        return min(same), np.inf if max(same) == _KV_FACTORS[-1] else max(same)

    def percent(self, left: Floats) -> tuple[float, float]:
        """Median sizes of the errors of TTFT and TPOT [%]."""
        size = 100.0 * np.abs(np.expm1(-left))
        later = size[self.many :]
        return float(np.median(size[: self.many])), float(np.median(later)) if len(later) else 0.0


def _resampled(work: _Work, fits: list[_Scenario], count: int, rng: np.random.Generator) -> Floats:
    """What :meth:`_Work.values` says with blocks of requests drawn again; shape (count, 5)."""
    fits = sorted(fits, key=lambda one: one.apart)
    block = work.request * _BLOCKS // work.many
    sizes = np.array([np.abs(one.left / work.scale) for one in fits])
    losses = np.where(sizes < _HUBER, 0.5 * sizes**2, _HUBER * (sizes - 0.5 * _HUBER))
    roots = np.sqrt(np.minimum(1.0, _HUBER / np.maximum(sizes, 1e-9)))
    rows = []
    for _ in range(count):
        drawn = np.bincount(rng.integers(0, _BLOCKS, _BLOCKS), minlength=_BLOCKS)[block]
        sums = losses @ drawn
        k = int(np.argmax(sums <= (1.0 + 1e-9) * sums.min()))
        one, weight = fits[k], np.sqrt(drawn) * roots[k]
        bounds = (np.minimum(work.least - one.theta, -1e-9), np.array([np.inf, _MOST, _MOST]))
        move = lsq_linear(-one.slopes * weight[:, None], one.left / work.scale * weight, bounds).x
        rows.append(work.values(replace(one, theta=one.theta + move)))
    return np.array(rows)


def _fewer_hits(trace: Trace, share: float) -> Trace:
    """The trace in which only a share of the requests has the prefix blocks of others."""
    if share >= 1.0 or trace.prefix_ids is None or trace.prefix_offsets is None:
        return trace
    blocks = np.repeat(
        stream(0, "fewer hits").random(len(trace)) >= share, np.diff(trace.prefix_offsets)
    )
    fresh = int(trace.prefix_ids.max(initial=0)) + 1 + np.arange(len(blocks))
    return replace(trace, prefix_ids=np.where(blocks, fresh, trace.prefix_ids))
