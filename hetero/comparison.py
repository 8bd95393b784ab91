"""The grid of a comparison: plans and routers, rate by rate and seed by seed, paired.

In one seed all get the same requests at the same moments (common random numbers), so differences
are of pairs, and their intervals those of a paired t-test. By default each seed draws the requests
anew in blocks (circular block bootstrap: Politis and Romano, 1992): an interval then speaks of
requests such as these, where serving the same ones again would only show what routers draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import joblib
import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from hetero.deployment import Deployment
from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError, require
from hetero.intervals import draws_needed, interval, ranking
from hetero.plans import Plan, footing
from hetero.routers import Predictor, fresh, router_of
from hetero.simulator import Run, Slo, metrics, simulate
from hetero.simulator.sustained import ARRIVING, Arrivals, redrawn
from hetero.streams import stream
from hetero.workload import Trace
from hetero.workload.statistics import rate_rps as mean_rps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw: TypeAlias = Callable[[float, int], Trace]
"""Makes requests of a rate [requests/s] and a seed."""
Measure: TypeAlias = Callable[[Run], Mapping[str, Any]]

KEYS: Final = ("plan", "rate_rps", "router", "seed")
"""Columns of a comparison that say what a row is of."""
_SHOWN: Final = (
    *("attainment", "within_targets_rps", "ttft_p95_s", "tpot_p95_s"),
    *("output_tps", "cached_share"),
)
_LOWER: Final = ("ttft", "tpot", "e2e", "rejected")


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Shown):
    """What :func:`compare` found; its first metric is meant where none is named.

    Attributes
    ----------
    frame
        A row per plan, rate, seed and router: columns :data:`KEYS`, and then the metrics.
    note
        Predictor, engine, arrivals, order of the requests and seeds in a line.
    """

    frame: pd.DataFrame
    note: str

    def summary(
        self, metric: str = "", *, baseline: str = "", lower: bool | None = None
    ) -> pd.DataFrame:
        """Mean by rate and system, and its paired difference to a baseline, with 95 % intervals.

        A system is what differs of plan and router; of one seed the intervals are NaN.

        Parameters
        ----------
        baseline
            A system, by default the best by mean at each rate.
        lower
            Whether lower values are better, by default of times and rejected requests.
        """
        rows = []
        for rate, sign, wide in self._wide(metric, lower):
            best = baseline or str((sign * wide.mean()).idxmax())
            require(
                best in wide,
                f"No system is called '{best}'.",
                resolve=f"name one of {', '.join(wide)}.",
            )
            for name in wide:
                row: list[Any] = [rate, name]
                for values in (wide[name], wide[name] - wide[best]):
                    ends = interval(values) if len(values) > 1 else (math.nan, math.nan)
                    row += [values.mean(), *ends, best]
                rows.append(row[:-1])
        columns = ["rate_rps", "system", "mean", "mean_low", "mean_high", "baseline"]
        return pd.DataFrame(rows, columns=[*columns, "difference", "low", "high"])

    def ranking(self, metric: str = "", *, lower: bool | None = None) -> str:
        """Systems from the best to the worst, a line per rate (:func:`hetero.intervals.ranking`).

        ``>`` stands where paired intervals leave 0 out, and so never for one seed.
        """
        texts = {}
        for rate, sign, wide in self._wide(metric, lower):
            text = ranking({str(name): sign * wide[name] for name in wide}, space=" ")
            texts[rate] = text if len(wide) > 1 else text.replace(" > ", " >= ")
        lines = [f"{rate:.4g} requests/s: {text}" for rate, text in texts.items()]
        return "\n".join(lines if len(lines) > 1 else texts.values())

    @property
    def sentence(self) -> str:
        """What was found by the first metric, a line per rate, and how requests came.

        Paired differences have 95 % intervals; seeds that would tell: at their mean and deviation.
        """
        said = []
        for rate, rows in self.summary().groupby("rate_rps", sort=False):
            best, behind = rows["baseline"].iloc[0], []
            mean = float(rows["mean"][rows["system"] == best].iloc[0])
            level = [best, *rows["system"][(rows["difference"] == 0) & (rows["system"] != best)]]
            for _, one in rows[~rows["system"].isin(level)].iterrows():
                turn = -1.0 if one["difference"] < 0 else 1.0
                low, high = sorted((turn * one["low"], turn * one["high"]))
                told = _told(low, high, self.frame["seed"].nunique())
                away = f"{one['system']} by {abs(one['difference']):.3g}"
                behind.append(away + told * bool(one["low"] == one["low"]))
            has = f"{' and '.join(level)} {'have' if len(level) > 1 else 'has'} the best"
            said.append(f"{rate:.4g} requests/s: {has} {self._first}, {mean:.3g}")
            said[-1] += "; behind it " * bool(behind) + ", ".join(behind) + "."
        return "\n".join([*said, *filter(None, [self.note])])

    def figure(self, metric: str = "", *, baseline: str = "", lower: bool | None = None) -> Figure:
        """Means with 95 % intervals, and paired differences to a baseline, rate by rate.

        The arguments are those of :meth:`summary`.
        """
        found = self.summary(metric, baseline=baseline, lower=lower)
        drawn: Figure = resolve_name("hetero.plots.comparisons:draw")(
            found, metric or self._first, self.note
        )
        return drawn

    def table(self) -> Table:
        """Means over the seeds, and the order by the first metric."""
        found = [str(name) for name in self.frame.columns[len(KEYS) :]]
        shown = [name for name in _SHOWN if name in found] or found
        groups = self.frame.groupby(["rate_rps", "plan", "router"], sort=False)
        rows = groups[shown].mean().reset_index()
        notes = [*self.ranking().splitlines(), *self.sentence.splitlines()]
        if self.frame["seed"].nunique() == 1:
            notes.insert(0, "One seed: no interval, the order may be chance.")
        else:
            at = 1 + list(rows).index(self._first)
            for k, end in enumerate(("low", "high")):
                ends = [interval(values)[k] for _, values in groups[self._first]]
                rows.insert(at + k, f"{self._first} {end}", ends)
        columns = tuple(Column(str(name), digits=3) for name in rows)
        return Table("", columns, tuple(map(tuple, rows.to_numpy().tolist())), tuple(notes))

    @property
    def _first(self) -> str:
        return str(self.frame.columns[len(KEYS)])

    def _wide(self, metric: str, lower: bool | None) -> Iterator[tuple[float, Any, Any]]:
        """By rate: -1 where less is better, else 1; and values by seed and system."""
        metric, known = metric or self._first, [*map(str, self.frame.columns[len(KEYS) :])]
        require(
            metric in known,
            f"No metric is called '{metric}'.",
            resolve=f"name one of {', '.join(known)}.",
        )
        sign = -1.0 if (metric.startswith(_LOWER) if lower is None else lower) else 1.0
        differ = [key for key in KEYS[:3:2] if self.frame[key].nunique() > 1] or ["router"]
        named = self.frame.assign(system=self.frame[differ].astype(str).agg(", ".join, axis=1))
        for rate, rows in named.groupby("rate_rps", sort=False):
            wide = rows.pivot(index="seed", columns="system", values=metric)
            yield float(str(rate)), sign, wide[[*rows["system"].unique()]]


def _told(low: float, high: float, seeds: int) -> str:
    if not low <= 0 < high:
        return f" [{low:.3g}, {high:.3g}]"
    needed = float(f"{draws_needed((high - low) / 2.0, seeds, abs(low + high) / 2.0):.2g}")
    return f" [{low:.3g}, {high:.3g}: cannot tell, about {needed:,.0f} seeds would]"


def measured(run: Run, slo: Slo | None = None) -> dict[str, float]:
    """Metrics of a whole run, see :mod:`hetero.simulator.metrics`; those of targets come first.

    Of engines with a prefix cache, the share of prompt tokens found there, too.
    """
    seen = metrics(run, slo)
    found: dict[str, float] = {}
    if seen.within_targets_rps is not None:
        found = {
            "attainment": seen.attainment["joint"],
            "within_targets_rps": seen.within_targets_rps,
        }
    for kind in ("ttft", "tpot", "e2e"):
        found[f"{kind}_mean_s"] = seen.means[f"{kind}_s"]
        found |= {f"{kind}_p{p}_s": seen.percentiles[f"{kind}_s"][p] for p in (50, 95, 99)}
    if any(one.engine.prefix_cache for one in run.deployment.replicas):
        hits, inputs = (run.requests[name].sum() for name in ("hit_tokens", "input_tokens"))
        found["cached_share"] = float(hits / inputs)
    counts = {"finished": seen.finished, "rejected": seen.rejected}
    return found | {"output_tps": seen.output_tps, **counts}


def compare(
    plans: Any,
    routers: Any,
    trace: Trace | Draw,
    rates: ArrayLike | None = None,
    seeds: int | Sequence[int] = 5,
    *,
    slo: Slo | str | None = None,
    process: Arrivals | None = None,
    resample: bool | int = True,
    predictor: Predictor | None = None,
    measure: Measure | None = None,
    playing: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> Comparison:
    """Serve the same requests with every plan and router, rate by rate and seed by seed.

    Parameters
    ----------
    plans
        One, several, or by name: plans, deployments, pairs of a deployment and its router.
    routers
        One, several, or by name: names of built-in routers, routers, their classes or functions
        that make them; each run has a copy of its own. None for those that plans have, as plans of
        layers over a network always do.
    trace
        Requests; or a function that makes them of a rate and a seed, and alone says how they come.
    rates
        Requests per second, infinite for all at once; by default as the trace says.
    seeds
        So many from 0 on, or these: of arrivals, resampling, and the draws of routers.
    slo
        Targets, or as commands take them: ``ttft=1s,tpot=60ms``.
    process
        How requests come at a rate, see :func:`hetero.simulator.sustained.arrivals`; by default
        the own bursts of a file that has them, stretched to the rate, else a Poisson process.
    resample
        Requests of a block, True for the root of the trace's; False for the trace as it is.
    predictor
        See :func:`hetero.simulator.simulate`.
    measure
        What is noted of a run, by default :func:`measured`.
    playing
        Further arguments of :func:`hetero.simulator.simulate`, such as ``sample_s``.
    jobs
        Processes, by default as joblib's context says: ``with joblib.parallel_config("dask")``
        carries the runs to a cluster.
    progress
        Called with the number of runs that are handed out.

    Examples
    --------
    >>> from hetero import catalog, cluster, workload
    >>> from hetero.engines import replicated
    >>> fleet, model = cluster.cluster("heteroserve-4"), catalog.llm("Llama-3-8B")
    >>> four = replicated(fleet, model, {machine.name: 1 for machine in fleet.machines})
    >>> chats = workload.load("azure2023_conv").head(400)
    >>> found = compare(four, ["round-robin", "hetero"], chats, 30.0, 4, slo=Slo(ttft_s=0.5))
    >>> found.ranking()
    'hetero > round robin'
    """
    systems = _named(plans, "plan", _system, itemgetter(0))
    chosen = None if routers is None else _named(routers, "router", router_of, attrgetter("name"))
    asked: list[float] = [] if rates is None else np.atleast_1d(rates).tolist()
    for rate in asked:
        require(rate > 0, f"A rate of {rate:g} requests/s.", resolve="give one above 0, or inf.")
    slo = Slo.read(slo) if isinstance(slo, str) else slo
    numbers = tuple(dict.fromkeys(range(seeds) if isinstance(seeds, int) else seeds))
    require(bool(numbers), "No seeds are given.", resolve="give one or more.")
    if isinstance(trace, Trace):
        block = round(math.sqrt(len(trace))) if resample is True else int(resample)
        process = process or ("scaled" if trace.own_bursts else "poisson")
        came = ARRIVING[process] if asked else "arrivals of the trace"
        came += f", requests drawn in blocks of {block}" if block else ", requests in its order"
        draw: Draw = partial(_drawn, trace, block, process if asked else "")
        asked = asked or [mean_rps(trace.arrival_s)]
    else:
        require(callable(trace), f"{trace!r} is no trace.", resolve="pass a hetero.Trace.")
        require(bool(asked), "Requests are made of no rates.", resolve="give one or more.")
        draw, came = trace, "requests as a function makes them"
    how = {"predictor": predictor} if predictor else {}
    how |= playing or {}
    play = joblib.delayed(partial(_play, draw, how, measure or partial(measured, slo=slo)))

    grid: list[tuple[Any, ...]] = []
    for name, (_, served, own) in systems.items():
        what = f"{name} has no router of its own."
        require(chosen is not None or own is not None, what, resolve="give one or more.")
        mine = {own.name: own} if chosen is None or isinstance(served, Plan) else chosen
        grid += [(name, served, mine, rate, seed) for rate in asked for seed in numbers]

    def calls() -> Iterator[Any]:
        for cell in grid:
            yield play(cell)
            if progress:
                progress(len(cell[2]))

    rows = [row for part in joblib.Parallel(n_jobs=jobs)(calls()) for row in part]
    every = (one for _, served, *_ in grid for one in getattr(served, "replicas", ()))
    return Comparison(pd.DataFrame(rows), footing(every, came, numbers, predictor))


def _play(
    draw: Draw, how: Mapping[str, Any], measure: Measure, cell: tuple[Any, ...]
) -> list[dict[str, Any]]:
    """Rows of the runs that have their requests in common."""
    name, served, routers, rate_rps, seed = cell
    requests, rows = draw(rate_rps, seed), []
    for label, router in routers.items():
        if isinstance(served, Plan):
            run: Run = served.simulate(requests, seed)
        else:
            run = simulate(served, requests, fresh(router), seed=seed, **how)
        rows.append(dict(zip(KEYS, (name, rate_rps, label, seed), strict=True)) | {**measure(run)})
    return rows


def resampled(trace: Trace, seed: int, block: int | None = None) -> Trace:
    """The requests drawn anew in blocks, by default of the root of their number."""
    return redrawn(trace, len(trace), seed, block or round(math.sqrt(len(trace))))


def _drawn(trace: Trace, block: int, process: str, rate_rps: float, seed: int) -> Trace:
    if block:
        trace = resampled(trace, seed, block)
    if process and math.isinf(rate_rps):
        return trace.all_at_once()
    if process == "scaled":
        return trace.rescale(rate_rps=rate_rps)
    return trace.poisson(rate_rps, stream(seed, "arrivals")) if process else trace


def _system(one: object) -> tuple[str, Plan | Deployment, Any]:
    """Name; replicas, or a plan of layers; and the router that comes with them."""
    if isinstance(one, Plan):
        return one.planner, one.deployment or one, one.router
    deployment, own = one if isinstance(one, tuple) and len(one) == 2 else (one, None)
    if isinstance(deployment, Deployment):
        return deployment.name, deployment, None if own is None else router_of(own)
    what = f"{one!r} is no plan and no deployment."
    raise ParameterError(what, resolve="pass what hetero.plan or hetero.replicated gives.")


def _named(given: Any, what: str, read: Any, name: Any) -> dict[Any, Any]:
    """What is given by its own name, or by that in a mapping."""
    if isinstance(given, Mapping):
        found = [(key, read(one)) for key, one in given.items()]
    else:
        several = isinstance(given, Iterable) and not isinstance(given, str)
        found = [(name(one), one) for one in map(read, given if several else [given])]
    require(bool(found), f"No {what}s are given.", resolve="give one or more.")
    once = len(dict(found)) == len(found)
    require(once, f"Two {what}s have one name.", resolve="give them names in a mapping.")
    return dict(found)
