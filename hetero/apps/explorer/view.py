"""One answer of the explorer: what a fleet delivers at a rate, as a table and a figure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from hetero import catalog
from hetero import cluster as clusters
from hetero import workload as workloads
from hetero.bounds import deployment_rps
from hetero.catalog import Llm
from hetero.cluster import Cluster
from hetero.comparison import compare
from hetero.deployment import Deployment
from hetero.display import Column, Shown, Table
from hetero.errors import require
from hetero.planners.xiong import plan as xiong
from hetero.plans import Plan, footing
from hetero.question import Load, Question, sustained_rps
from hetero.routers import Builtin, Predictive, Router, fresh, router_of
from hetero.simulator import Metrics, Run, Slo, metrics, simulate
from hetero.simulator.metrics import attainment
from hetero.simulator.sustained import SustainedRule, arrivals, came, steady_s
from hetero.streams import stream
from hetero.workload import Trace, TraceSource

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOADS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2)
"""Offered rates over the bound, along which throughput is shown."""

_PRECISION = 0.05  # of the goodput
_RULE = f"sustained by 90 % of the requests, to {100 * _PRECISION:g} %"
_SAMPLES = 160  # along a run
_MOST = 30_000  # requests of a run
_KEPT = 16  # plans


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
    plan
        Replicas, the router, the rate that no router exceeds, GPUs left idle.
    requests
        Lengths that are simulated; arrivals are drawn for each rate.
    run
        Every request, with samples of the replicas over time.
    metrics
        Of the part that counts, see :mod:`hetero.simulator.sustained`.
    here
        The rate that was asked for.
    curve
        Other rates with the same requests and router, see :data:`LOADS`.
    """

    plan: Plan
    requests: Trace
    slo: Slo
    run: Run
    metrics: Metrics
    here: Point
    curve: tuple[Point, ...]

    @property
    def title(self) -> str:
        """Deployment, workload, rate and router in words."""
        run = self.run
        place = f"{run.trace.name} on {run.deployment.name}"
        return f"{place}, {self.here.offered_rps:.3g} requests/s, {run.router}"

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Which requests latencies and targets are told of, in table and figure; shape (N,)."""
        begin_s, end_s = self.metrics.window_s
        since_s = self.run.requests["arrival_s"] - self.run.requests["arrival_s"][0]
        return np.asarray((since_s >= begin_s) & (since_s <= end_s))

    @property
    def of_bound(self) -> float:
        """Offered rate over the bound; NaN where there is none."""
        bound = self.plan.bound_rps
        return self.here.offered_rps / bound if bound else float("nan")

    def table(self) -> Table:
        """Throughput beside its bound, and latencies beside their targets."""
        found = self.metrics
        attained = found.attainment
        bound = self.plan.bound_rps
        rows: list[tuple[object, ...]] = [
            ("offered", self.here.offered_rps, None, "requests/s", ""),
            ("throughput", self.here.served_rps, bound, "requests/s", "bound of any router"),
            ("within all targets", self.here.met_rps, bound, "requests/s", "of these"),
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
        known = isinstance(self.plan.router, Builtin)
        return _goodput_rps(self.requests, self.slo, self.plan) if known else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know before trusting the figures."""
        begin_s, end_s = self.metrics.window_s
        notes = [
            f"Counted: the {self.counted.sum():,} of {len(self.counted):,} requests that arrive "
            f"from {begin_s:.3g} s to {end_s:.3g} s; throughput counts those that finish then.",
            *self.plan.notes,
        ]
        needed = _needed(self.plan, self.requests, self.here.offered_rps)
        if len(self.run.requests) < needed:
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
    cluster: Cluster | Deployment | Plan | str,
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
        Cluster, its name or its file; each machine is divided by the best tensor-parallel degree
        (Xiong et al.) under vLLM as it starts. Or a plan, or a deployment.
    workload
        Trace, its name or its file; lengths and order are simulated, arrivals drawn.
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
    >>> len(view.plan.deployment.replicas), view.here.offered_rps
    (4, 10.0)
    >>> view.here.met_rps <= view.here.served_rps < view.plan.bound_rps
    True
    """
    what = f"{requests} requests at {rate_rps:g} requests/s cannot be served."
    require(0 < rate_rps < math.inf and requests > 0, what, resolve="give numbers above 0.")
    chosen = router_of(router)
    at = clusters.find(cluster) if isinstance(cluster, str) else cluster
    model = catalog.find_llm(llm) if isinstance(llm, str) else llm
    trace = _opened(workload, source, seed) if isinstance(workload, str) else workload
    # By the identity of its parts, which the entries keep alive.
    parts = (at, model, trace)
    key = (*map(id, parts), repr(chosen), requests, seed)
    if key not in _plans:
        while len(_plans) >= _KEPT:
            del _plans[next(iter(_plans))]
        plan, taken = _planned(at, model, trace, requests, seed)
        plan = replace(plan, router=cast(Builtin, chosen), routing=chosen.name)
        _plans[key] = parts, plan, taken
    _, plan, taken = _plans[key]
    assert plan.deployment is not None
    draw, curve = partial(_arriving, plan, taken), list[Point]()
    if rates := [load * plan.bound_rps for load in LOADS] if plan.bound_rps else []:
        others = compare(
            plan.deployment, chosen, draw, rates, [seed], measure=partial(_counted, slo=slo)
        ).frame
        curve = [*map(Point, others["rate_rps"], others["served_rps"], others["met_rps"])]
    simulated = draw(rate_rps, seed)
    sample_s = max(float(np.ptp(simulated.arrival_s)), 1e-9) / _SAMPLES
    run = simulate(plan.deployment, simulated, fresh(chosen), seed=seed, sample_s=sample_s)
    begin_s, end_s = steady_s(run)
    seen = metrics(
        run, slo, warmup_s=begin_s, until_s=max(end_s, math.nextafter(begin_s, math.inf))
    )
    return View(plan, taken, slo, run, seen, Point(rate_rps, **_counted(run, slo)), tuple(curve))


_plans: dict[tuple[object, ...], tuple[tuple[object, ...], Plan, Trace]] = {}


@lru_cache(maxsize=8)
def _opened(name: str, source: TraceSource, seed: int) -> Trace:
    known = name in workloads.names()
    return workloads.open_trace(name, workloads.attainable(name, source) if known else source, seed)


def _planned(
    at: Cluster | Deployment | Plan, llm: Llm, trace: Trace, count: int, seed: int
) -> tuple[Plan, Trace]:
    """The plan with the bound of its deployment, and a sample of the requests."""
    # The order of a trace says nothing of its lengths: a sample stands for all of it.
    taken = trace.sample(count, stream(seed, "requests")) if len(trace) > count else trace
    if isinstance(at, Cluster):
        # Asked as it is: that an engine does not run on a GPU keeps nobody from exploring it.
        plan = xiong.plan.make(Question(at, llm, taken, rate_rps=1.0, seed=seed))
    else:
        plan = at if isinstance(at, Plan) else Plan("by hand", (), at, Predictive(), "", None)
    served = plan.deployment
    require(
        served is not None,
        f"{plan.planner} sets up layers over a network, which have no replicas to look into.",
        resolve="explore a plan of replicas.",
    )
    assert served is not None
    if isinstance(at, Cluster):
        served = replace(served, name=at.name)
    notes = tuple(dict.fromkeys((*plan.notes, footing(served.replicas, came(taken), [seed]))))
    bound, whose = deployment_rps(served, taken), "any router, whatever the targets"
    return replace(plan, serving=served, bound_rps=bound, bound=whose, notes=notes), taken


def _arriving(plan: Plan, taken: Trace, rate_rps: float, seed: int) -> Trace:
    return arrivals(taken, min(_needed(plan, taken, rate_rps), _MOST), rate_rps, seed)


def _needed(plan: Plan, taken: Trace, rate_rps: float) -> int:
    """Requests that a run at a rate has to hold before it says anything."""
    return SustainedRule(precision=_PRECISION).requests(rate_rps, plan.life_s(taken))


@lru_cache(maxsize=64)
def _goodput_rps(taken: Trace, slo: Slo, plan: Plan) -> float:
    return sustained_rps(plan, Load(taken, plan.bound_rps or 1.0, slo, precision=_PRECISION), 0)


def _counted(run: Run, slo: Slo) -> dict[str, float]:
    """Requests that finish in the part of a run that counts."""
    begin_s, end_s = (float(run.requests["arrival_s"][0]) + one for one in steady_s(run))
    finish_s = run.requests["finish_s"]
    done = run.finished & (finish_s >= begin_s) & (finish_s <= end_s)
    served_rps = float(done.sum()) / max(end_s - begin_s, math.ulp(end_s))
    met = attainment(run, slo, done) if done.any() else 0.0
    return {"served_rps": served_rps, "met_rps": met * served_rps}
