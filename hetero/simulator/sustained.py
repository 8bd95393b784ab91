r"""The rule of a sustained rate: whether a fleet could go on serving a load for ever.

A short burst shows nothing: the first requests of any run find an empty fleet, and the last ones
are served while nothing comes any more. So

- arrivals last at least :math:`20\,T`, with T the time that a median request takes where every
  replica decodes as many requests as it holds, by its step times. T does not come from the run that
  is judged: beyond saturation that grows with the run. They last :math:`\tau / p` as well, the
  shortest target :math:`\tau` that waiting counts towards over the precision: beyond saturation by
  p waits reach the target by then. Where that takes more than :math:`20 / p^2` requests, there are
  so many (:meth:`SustainedRule.lax`), and what is not sustained shows by its backlog alone;
- requests that arrive in the first fifth (warm-up) and the last twentieth (drain) do not count;
- of the n that do, more than the goal meet every target, by more than chance
  (:func:`needed_share`): of plans that meet it by luck, a search would take the luckiest. n is so
  large that chance alone moves the rate of Poisson arrivals by no more than the stated precision p,
  one standard deviation: :math:`n \ge 1 / p^2`. The share that meets the targets moves by less;
- the backlog does not grow between the ends of that window beyond noise. It counts in tokens w of
  prompts and answers, as few long requests left behind are much work: it grows by at most
  :math:`p \sum w + 3 \sqrt{F \sum_B w^2}` with the sums over requests that count and over the
  backlogs B at both ends, as arrivals and completions that were independent would let it; F is 1
  for Poisson arrivals and, for a trace's own bursts, the Fano factor of arrivals counted over T.

- the share that meets the targets does not drift: it is not lower in the second half of the window
  than in the first, both by p and by Welch's t-test of the means of ten batches each (one-sided,
  1 %).

Where the share is met but drifts, or the backlog grows by at most twice that, the run is simulated
again twice as long, up to :data:`LONGEST` times as long as at first: the last one decides.

Requests come in the order of their trace. A run that holds fewer takes stretches of it as far apart
from each other, so that each seed sees all of the trace, at other places; a trace's own bursts are
all simulated, up to :data:`MOST_OWN` requests: one of them may be the worst.

A fleet that serves a rate has to serve less as well, which a router that waits for batches or
keeps replicas back may not. So the largest rate that is sustained
(:func:`hetero.question.sustained_rps`) counts if none of the shares :data:`LOWER` of it misses the
goal by more than chance, in runs of :data:`LOWER_PART` as many requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrik, stdtrit

from hetero.deployment import Deployment
from hetero.engine import state
from hetero.errors import ParameterError, require
from hetero.latency.step import StepModel
from hetero.routers import Builtin, Predictor, Router
from hetero.simulator.drivers import Watch
from hetero.simulator.metrics import Slo, largest_rate, met
from hetero.simulator.replicas import simulate
from hetero.simulator.run import Run
from hetero.streams import stream
from hetero.workload import Trace
from hetero.workload.statistics import fano

LIVES: Final = 20.0
"""Times of a median request at the batch limit that arrivals last."""
WARM_UP, DRAIN = 0.2, 0.05
"""Shares of the arrivals at their beginning and end that do not count."""
LOWER: Final = (0.1, 0.25, 0.5, 0.8)
"""Shares of a sustained rate that are tried as well."""
LOWER_PART: Final = 0.25
"""Of the requests of a run at a rate, where a share of it is tried."""
CHANCE: Final = 0.05
"""Of a plan that just meets the goal to pass a run."""
LONGEST: Final = 4
"""Times as long as at first that a run is simulated where that has to decide."""
STRETCH: Final = 500
"""Requests that keep their order, where a run holds fewer than the trace."""
Arrivals: TypeAlias = Literal["poisson", "shuffled", "scaled"]
"""How requests come: as a Poisson process in a trace's order or in any, or in its own bursts, with
all of its gaps stretched to the rate."""
ARRIVING: Final[dict[str, str]] = {
    "poisson": "Poisson arrivals",
    "shuffled": "Poisson arrivals",
    "scaled": "the trace's own bursts, stretched to the rate",
}
"""The same in words."""
MOST_OWN: Final = 20_000
"""Requests of a trace with its own bursts that a run holds for their sake."""
LAX: Final = 20.0
"""Times 1 / p^2 requests that a run holds at most for waits to reach a target."""
_BATCHES = 10  # of half a window, by which a drift is told
_DRIFT_T = float(stdtrit(2 * _BATCHES - 2, 0.99))
_SERVED = 0.01  # of the requests, where none has a target: those that fit no cache wait for nothing


@dataclass(frozen=True, slots=True)
class Judged:
    """What a run shows of a rate.

    Attributes
    ----------
    requests, seconds
        Requests that count, and the time in which they arrive [s].
    attained
        Share of them that met every target; 1 where there is none and all were served.
    growth
        Growth of the backlog over the window, as a share of the tokens of those that count.
    steady
        Whether that is no more than noise.
    drifts
        Whether fewer met their targets in the second half of the window than in the first, beyond
        chance.
    open
        Whether a longer run may show otherwise.
    needed
        Share that has to: the goal, and what chance may add to it (:func:`needed_share`).
    """

    requests: int
    seconds: float
    attained: float
    growth: float
    steady: bool
    needed: float
    drifts: bool = False
    open: bool = False

    @property
    def sustained(self) -> bool:
        """Whether the rate could go on."""
        return self.steady and not self.drifts and self.attained >= self.needed


@dataclass(frozen=True, slots=True)
class SustainedRule:
    """Targets, goal and precision of a sustained rate; nothing else differs between its users.

    Examples
    --------
    >>> SustainedRule(goal=0.9, precision=0.02).requests(1.0, 0.5)
    3334
    >>> SustainedRule(goal=0.9, precision=0.02).requests(100.0, 10.0)  # 20 lives of 10 s
    20000
    """

    slo: Slo = field(default_factory=Slo)
    goal: float = 0.9
    precision: float = 0.02

    def __post_init__(self) -> None:
        if not (0 < self.goal <= 1 and 0 < self.precision < 1):
            raise ParameterError(
                f"A goal of {self.goal:g} cannot be judged to {self.precision:g}.",
                resolve="give a goal above 0 and up to 1, and a precision between 0 and 1.",
            )

    def requests(self, rate_rps: float, life_s: float) -> int:
        """Arrivals that a run at a rate has to hold.

        Parameters
        ----------
        life_s
            Time of a median request at the batch limit [s], see :func:`life_s`.
        """
        counted = 1.0 / self.precision**2
        waits = min(self._waits(rate_rps), LAX * counted)
        lives = LIVES * life_s * rate_rps
        return math.ceil(max(lives, waits, counted / (1.0 - WARM_UP - DRAIN)))

    def lax(self, rate_rps: float) -> bool:
        """Whether a run at a rate ends before waits could reach the targets."""
        return self._waits(rate_rps) > LAX / self.precision**2

    def _waits(self, rate_rps: float) -> float:
        """Requests until waits reach the first target."""
        waits = [one for one in (self.slo.ttft_s, self.slo.e2e_s) if one is not None]
        return min(waits, default=0.0) / self.precision * rate_rps

    def judge(self, run: Run, bursts_s: float = 0.0) -> Judged:
        """What a run of so many requests shows.

        Parameters
        ----------
        bursts_s
            Time over which arrivals that are no Poisson process are counted, :func:`life_s` [s].
        """
        arrival_s = np.asarray(run.requests["arrival_s"])
        first, last = window(len(arrival_s))
        count, inside = last - first, slice(first, last)
        good = met(run, self.slo)[inside]
        finish_s = np.asarray(run.requests["finish_s"])
        begin_s, end_s = float(arrival_s[first]), float(arrival_s[last - 1])
        tokens = run.trace.input_tokens.astype(np.float64) + run.trace.output_tokens
        tokens[run.requests["status"] == state.REJECTED] = 0.0
        before, after = (tokens[(arrival_s <= t) & ~(finish_s <= t)] for t in (begin_s, end_s))
        grown, counted = float(after.sum() - before.sum()), float(tokens[inside].sum())
        burstiness = max(1.0, fano(arrival_s[first:last], bursts_s)) if bursts_s > 0 else 1.0
        noise = 3.0 * math.sqrt(burstiness * float(before @ before + after @ after))
        attained, needed, drifts = float(good.mean()), self._needed(count), self._drifts(good)
        most = self.precision * counted + noise
        return Judged(
            requests=count,
            seconds=end_s - begin_s,
            attained=attained,
            growth=grown / max(counted, 1.0),
            steady=grown <= most,
            needed=needed,
            drifts=drifts,
            open=attained >= needed and (drifts or grown > most) and grown <= 2.0 * most,
        )

    def settled(
        self, count: int, play: Callable[[int], Run], bursts_s: float = 0.0
    ) -> tuple[Run, Judged]:
        """The run of so many requests, or of as many more as decide, and what it shows."""
        longest = LONGEST * count
        while True:
            run = play(count)
            seen = self.judge(run, bursts_s)
            if count >= longest or not seen.open:
                return run, seen
            count *= 2

    def _drifts(self, good: NDArray[np.bool_]) -> bool:
        each = len(good) // (2 * _BATCHES)
        if each < _BATCHES:
            return False
        halves = good[: 2 * _BATCHES * each].reshape(2, _BATCHES, each).mean(axis=2)
        before, after = halves.mean(axis=1)
        noise = _DRIFT_T * math.sqrt(halves.var(axis=1, ddof=1).sum() / _BATCHES)
        return bool(before - after > max(self.precision, noise))

    def watch(self, requests: int, early: tuple[tuple[float, float], ...] = ()) -> Watch | None:
        """What ends a run of so many requests that misses the goal; None without a target."""
        if self.slo == Slo():
            return None
        first, last = window(requests)
        return Watch(self.slo, first, last, self._needed(last - first), early)

    def _needed(self, requests: int) -> float:
        return self.goal if self.slo == Slo() else needed_share(requests, self.goal)


@lru_cache(maxsize=4096)
def needed_share(requests: int, goal: float) -> float:
    r"""Share of n requests that shows that more than the goal g meet their targets.

    .. math:: \min(k / n, 1), \qquad k = \min \{ k : P(X \ge k) \le 0.05 \}, \quad
        X \sim \mathrm{Binomial}(n, g)

    the critical value of the exact one-sided test (Clopper and Pearson, Biometrika 26, 1934). Where
    not even all of n would show it, all have to.

    Examples
    --------
    >>> needed_share(2500, 0.9), needed_share(400, 0.9), needed_share(2500, 1.0)
    (0.91, 0.9275, 1.0)
    """
    met = math.ceil(bdtrik(1.0 - CHANCE, requests, goal)) if goal < 1 else requests
    return min((met + 1) / requests, 1.0)


def window(requests: int) -> tuple[int, int]:
    """First request that counts, and the first after it that does not."""
    first = int(WARM_UP * requests)
    return first, max(first + 1, requests - int(DRAIN * requests))


def steady_s(run: Run) -> tuple[float, float]:
    """The window that counts, from the first arrival [s], as :func:`metrics` takes it."""
    arrival_s = np.asarray(run.requests["arrival_s"]) - float(run.requests["arrival_s"][0])
    first, last = window(len(arrival_s))
    return float(arrival_s[first]), float(arrival_s[last - 1])


def life_s(deployment: Deployment, input_tokens: float, output_tokens: float) -> float:
    r"""Time that a request takes where every replica is as full as it can be [s].

    .. math:: T = t_p(I) + O\,t_d(b), \qquad b = \min(B, K / (I + O))

    with the prefill of I tokens alone, and O decode steps of b requests with :math:`I + O / 2`
    cached tokens each; B the batch limit, K the KV cache of the replica. The slowest replica of
    each phase counts.
    """
    phases = {"prefill": 0.0, "decode": 0.0}
    for replica in deployment.replicas:
        prefill_s, decode_s = _phases_s(
            replica.step, replica.engine.max_batch, replica.kv_tokens, input_tokens, output_tokens
        )
        if replica.role != "decode":
            phases["prefill"] = max(phases["prefill"], prefill_s)
        if replica.role != "prefill":
            phases["decode"] = max(phases["decode"], decode_s)
    return sum(phases.values())


@lru_cache(maxsize=4096)  # searches ask for the same replicas at many rates
def _phases_s(
    step: StepModel, max_batch: int, kv_tokens: int, inputs: float, outputs: float
) -> tuple[float, float]:
    batch = max(1, int(min(float(max_batch), kv_tokens / max(inputs + outputs, 1.0))))
    cached = batch * (inputs + outputs / 2.0)
    prefill = step.seconds(inputs, 0, 0.0, inputs * inputs / 2.0)
    decode = step.seconds(batch, batch, cached)
    return float(np.asarray(prefill)), outputs * float(np.asarray(decode))


def arrivals(
    trace: Trace, count: int, rate_rps: float, seed: int, kind: Arrivals = "poisson"
) -> Trace:
    """So many requests of a trace: the same ones with the same gaps at every rate, only stretched.

    They keep their order unless they are to be shuffled and share no prefixes, and the seed says
    with which the run begins. Where there are fewer than that they come again; where there are
    more, stretches of :data:`STRETCH` do but of scaled arrivals and those that share prefixes.
    Scaled arrivals keep their gaps; where the trace comes again, its mean gap stands between its
    last request and its first.

    Examples
    --------
    >>> bursts = Trace([0.0, 0.0, 1.0], [1, 2, 3], [1, 1, 1])
    >>> arrivals(bursts, 5, 4.0, seed=0, kind="scaled").arrival_s.round(3).tolist()
    [0.0, 0.25, 0.25, 0.75, 1.0]
    """
    if kind == "scaled":
        order = (np.arange(count) + stream(seed, "requests").integers(len(trace))) % len(trace)
        return trace.reordered(order).rescale(rate_rps=rate_rps)
    taken = _ordered(trace, count, seed, shuffled=kind == "shuffled")
    return taken.poisson(rate_rps, stream(seed, "arrivals"))


def redrawn(trace: Trace, count: int, seed: int, block: int) -> Trace:
    """So many requests of a trace, drawn anew in blocks that begin anywhere in it.

    The circular block bootstrap (Politis and Romano, 1992): gaps and order within a block are the
    trace's own.
    """
    starts = stream(seed, "blocks").integers(len(trace), size=-(-count // block))
    order = np.add.outer(starts, np.arange(block)).ravel() % len(trace)
    return trace.reordered(order[:count])


def came(trace: Trace, kind: Arrivals = "poisson", at: str = "") -> str:
    """Arrivals, at a rate in words, and order of the requests, see :func:`arrivals`."""
    kept = kind != "shuffled" or trace.prefix_ids is not None
    order = "their order" if kept else "an order of each seed's own"
    return f"{ARRIVING[kind]}{at}, requests in {order}"


@lru_cache(maxsize=64)  # searches ask for the same requests at many rates
def _ordered(trace: Trace, count: int, seed: int, *, shuffled: bool) -> Trace:
    """So many requests in a seed's order, see :func:`arrivals`."""
    draws, numbers, of = stream(seed, "requests"), np.arange(count), len(trace)
    if trace.prefix_ids is None and shuffled:
        return trace.all_at_once().take(draws.permutation(of)[numbers % of])
    if trace.prefix_ids is None and count < of:
        stretch, within = np.divmod(numbers, STRETCH)
        numbers = stretch * of // (stretch[-1] + 1) + within
    return trace.all_at_once().take((numbers + draws.integers(of)) % of)


def saturation(
    deployment: Deployment,
    trace: Trace,
    router: Router | Builtin,
    *,
    precision: float = 0.02,
    predictor: Predictor | None = None,
    seed: int = 0,
) -> float:
    """Largest rate that is sustained where no target is in the way [requests/s].

    Parameters
    ----------
    trace
        Requests, see :func:`arrivals`; their own rate does not matter.
    precision
        What the rate is known to.

    Examples
    --------
    >>> from hetero.deployment import Engine, Replica
    >>> from hetero.routers import RoundRobin
    >>> step = StepModel.affine(floor_s=0.1, per_token_s=0.0, per_cached_token_s=0.0)
    >>> engine = Engine(max_step_tokens=100)
    >>> one = Deployment("one", (Replica("a", step, kv_tokens=10_000, engine=engine),))
    >>> even = Trace([float(k) for k in range(1000)], [100] * 1000, [1] * 1000)
    >>> 9.8 < saturation(one, even, RoundRobin()) < 10.4
    True
    """
    rule = SustainedRule(goal=_SERVED, precision=precision)
    medians = (float(np.median(each)) for each in (trace.input_tokens, trace.output_tokens))
    life = life_s(deployment, *medians)

    def sustains(rate_rps: float) -> bool:
        def play(count: int) -> Run:
            load = arrivals(trace, count, rate_rps, seed)
            return simulate(deployment, load, router, predictor=predictor, seed=seed)

        return rule.settled(rule.requests(rate_rps, life), play)[1].sustained

    offline = simulate(deployment, trace.all_at_once(), router, predictor=predictor, seed=seed)
    require(
        bool(offline.finished.any()),
        f"{deployment.name} rejects every request of {trace.name}.",
        resolve="use requests that fit its KV cache.",
    )
    rate = largest_rate(sustains, len(trace) / offline.span_s, factor=1.5, precision=precision)
    require(
        rate > 0,
        f"The backlog of {deployment.name} grows at every rate that was tried.",
        resolve="leave out requests that fit no KV cache.",
    )
    return rate
