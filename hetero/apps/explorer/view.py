"""One answer of the explorer: what a fleet delivers at a rate, as a table and a figure."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hetero.apps.explorer.setting import Exploration, setting
from hetero.catalog import Llm
from hetero.cluster import Cluster
from hetero.comparison import compare
from hetero.deployment import Deployment
from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError
from hetero.plans import Plan
from hetero.question import Load, sustained_rps
from hetero.routers import Builtin, Router
from hetero.routers.named import router_of
from hetero.simulator import Metrics, Run, Slo, metrics, simulate
from hetero.simulator.sustained import SustainedRule, arrivals, life_s, steady_s
from hetero.workload import Trace, TraceSource

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

LOADS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2)
"""Offered rates over the bound, along which throughput is shown."""

_PRECISION = 0.05  # of the goodput
_RULE = f"sustained by 90 % of the requests, to {100 * _PRECISION:g} %"
_SAMPLES = 160  # along a run
_MOST = 30_000  # requests of a run


@dataclass(frozen=True, slots=True)
class Point:
    """What one rate gives, in the part of a run that counts.

    Attributes
    ----------
    offered_rps, served_rps, met_rps
        Requests per second that arrive, that finish, and that finish and met every target.
    """

    offered_rps: float
    served_rps: float
    met_rps: float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class View(Shown):
    """What a fleet delivers at a rate.

    Attributes
    ----------
    setting
        Deployment, requests and bound.
    run
        Every request, with samples of the replicas over time.
    metrics
        Of the part that counts, see :mod:`hetero.simulator.sustained`.
    router
        Which replica serves a request.
    here
        The rate that was asked for.
    curve
        Other rates with the same requests and router, see :data:`LOADS`.
    """

    setting: Exploration
    slo: Slo
    run: Run
    metrics: Metrics
    router: Router | Builtin
    here: Point
    curve: tuple[Point, ...]

    @property
    def title(self) -> str:
        """Deployment, workload, rate and router in words."""
        run = self.run
        place = f"{run.trace.name} on {run.deployment.name}"
        return f"{place}, {self.here.offered_rps:.3g} requests/s, {run.router}"

    @property
    def of_bound(self) -> float:
        """Offered rate over the bound; NaN where there is none."""
        bound = self.setting.bound_rps
        return self.here.offered_rps / bound if bound else float("nan")

    def table(self) -> Table:
        """Throughput beside its bound, and latencies beside their targets."""
        found = self.metrics
        attained = found.attainment
        bound = self.setting.bound_rps
        rows: list[tuple[object, ...]] = [
            ("offered", self.here.offered_rps, None, "requests/s", ""),
            ("throughput", self.here.served_rps, bound, "requests/s", "bound of any router"),
            ("within all targets", self.here.met_rps, bound, "requests/s", ""),
            ("goodput", self.goodput_rps, bound, "requests/s", _RULE),
        ]
        for name, target_s in (("ttft", self.slo.ttft_s), ("tpot", self.slo.tpot_s)):
            unit, scale = ("s", 1.0) if name == "ttft" else ("ms", 1e3)
            target = None if target_s is None else scale * target_s
            shares = found.percentiles[f"{name}_s"]
            met = f"{100 * attained[name]:.3g} % within target" if name in attained else ""
            rows += [
                (f"{name.upper()} P50", scale * shares[50], target, unit, met),
                (f"{name.upper()} P95", scale * shares[95], target, unit, ""),
            ]
        rows += [
            ("time in steps", 100 * found.utilisation, 100, "%", "mean over replicas"),
            ("preemptions", found.preemptions, None, "", "requests evicted and computed again"),
            ("rejected", found.rejected, None, "requests", "longer than every KV cache"),
        ]
        if self.run.deployment.usd_per_h is not None:
            rows.append(("price", self.run.deployment.usd_per_h, None, "$/h", ""))
        if found.usd_per_mtok is not None:
            rows.append(("cost", found.usd_per_mtok, None, "$ per 10^6 tokens", "inputs too"))
        columns = (
            Column("figure"),
            Column("value", digits=3),
            Column("target or limit", digits=3),
            Column("unit"),
            Column("remark"),
        )
        return Table(self.title, columns, tuple(rows), self.notes)

    @property
    def goodput_rps(self) -> float | None:
        """Largest rate that is sustained within the targets [requests/s]; None if not known.

        Of routers of plain Python, which plans do not hold, none is known.
        """
        router = self.router
        if not isinstance(router, Builtin):
            return None
        return _goodput_rps(_Asked(self.setting, self.slo, repr(router), router))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know before trusting the figures."""
        notes = list(self.setting.notes)
        if len(self.run.requests) < (needed := _needed(self.setting, self.here.offered_rps)):
            notes.append(
                f"{len(self.run.requests):,} requests are played of {needed:,} that it takes until "
                "such a load shows what it does: more waits in the end than here."
            )
        if self.of_bound > 1:
            notes.append("More arrives than any router could serve: queues grow without end.")
        return tuple(notes)

    def figure(self) -> Figure:
        """Latencies against targets, queue and KV use over time, throughput against the bound."""
        from hetero.apps.explorer.panels import draw

        return draw(self)


def explore(
    cluster: Cluster | Deployment | str,
    workload: Trace | str,
    rate_rps: float,
    slo: Slo,
    router: Router | Builtin | str = "hetero",
    *,
    llm: Llm | str = "Llama-3-8B",
    source: TraceSource = "twin",
    requests: int = 1500,
    seed: int = 0,
) -> View:
    """Serve a workload with a fleet at one rate, and at a few others beside it.

    Requests are those of the workload with Poisson arrivals. The same arguments give the same
    view; what the rate, the targets and the router do not change is kept from call to call.

    Parameters
    ----------
    cluster
        Cluster, its name or its file; each machine is divided by the best tensor-parallel degree.
        Or a deployment that a planner has made.
    workload
        Trace, its name or its file; lengths and order are played, arrivals drawn.
    rate_rps
        Offered load [requests/s].
    router
        Router, or its name as in ``hetero simulate --router``.
    requests
        How many are taken of the workload; they come again where a run takes more.

    Raises
    ------
    InfeasibleError
        If no machine can hold the model.
    CatalogError, ParameterError
        If a name is unknown, or the rate is not above 0.

    Examples
    --------
    >>> view = explore("heteroserve-4", "azure2023_conv", 10.0, Slo(ttft_s=1.0, tpot_s=0.1),
    ...                requests=300)
    >>> len(view.setting.deployment.replicas), view.here.offered_rps
    (4, 10.0)
    >>> view.here.met_rps <= view.here.served_rps < view.setting.bound_rps
    True
    """
    if not 0 < rate_rps < float("inf"):
        raise ParameterError(
            f"A rate of {rate_rps:g} requests/s cannot be served.", resolve="give one above 0."
        )
    chosen = router_of(router)
    where = setting(cluster, llm, workload, source=source, count=requests, seed=seed)
    draw, curve = partial(_arriving, where), list[Point]()
    if rates := [load * where.bound_rps for load in LOADS] if where.bound_rps else []:
        counted = partial(_counted, slo=slo)
        others = compare(where.deployment, chosen, draw, rates, [seed], measure=counted).frame
        curve = [*map(Point, others["rate_rps"], others["served_rps"], others["met_rps"])]
    trace = draw(rate_rps, seed)
    sample_s = max(float(np.ptp(trace.arrival_s)), 1e-9) / _SAMPLES
    run = simulate(where.deployment, trace, deepcopy(chosen), seed=seed, sample_s=sample_s)
    begin_s, end_s = steady_s(run)
    seen = metrics(
        run, slo, warmup_s=begin_s, until_s=max(end_s, math.nextafter(begin_s, math.inf))
    )
    here = Point(rate_rps, **_counted(run, slo))
    return View(where, slo, run, seen, chosen, here, tuple(curve))


def _arriving(where: Exploration, rate_rps: float, seed: int) -> Trace:
    return arrivals(where.requests, min(_needed(where, rate_rps), _MOST), rate_rps, seed)


def _needed(where: Exploration, rate_rps: float) -> int:
    """Requests that a run at a rate has to hold before it says anything."""
    trace = where.requests
    medians = (float(np.median(each)) for each in (trace.input_tokens, trace.output_tokens))
    return SustainedRule(precision=_PRECISION).requests(
        rate_rps, life_s(where.deployment, *medians)
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a goodput depends on; routers with arrays have no hash, but a text."""

    where: Exploration
    slo: Slo
    text: str
    router: Builtin = field(compare=False)


@lru_cache(maxsize=64)
def _goodput_rps(asked: _Asked) -> float:
    where, router = asked.where, asked.router
    plan = Plan("explorer", (), where.deployment, router, router.name, None)
    load = Load(where.requests, where.bound_rps or 1.0, asked.slo, precision=_PRECISION)
    return sustained_rps(plan, load, 0)


def _counted(run: Run, slo: Slo) -> dict[str, float]:
    """Requests that finish in the part of a run that counts."""
    start_s, last_s = (float(run.requests["arrival_s"][0]) + one for one in steady_s(run))
    finish_s = run.requests["finish_s"]
    done = run.finished & (finish_s >= start_s) & (finish_s <= last_s)
    good = done.copy()
    for times_s, target_s in (
        (run.ttft_s, slo.ttft_s),
        (run.tpot_s, slo.tpot_s),
        (run.e2e_s, slo.e2e_s),
    ):
        if target_s is not None:
            # Replies of one token have no TPOT and cannot miss it.
            good &= ~(times_s > target_s)
    length_s = max(last_s - start_s, math.ulp(last_s))
    counts = {"served_rps": done, "met_rps": good}
    return {name: float(which.sum()) / length_s for name, which in counts.items()}
