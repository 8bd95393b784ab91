"""The contest: planners on the same cases, simulated with the same requests.

A case is a cluster, a model and a workload. Every planner is asked once per case, for a load that
is a share of the bound on throughput; what its plan carries within the targets is found by
simulation, seed by seed, and the plan is simulated at shares of the best that any planner carries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from hetero import catalog, workload
from hetero.apps.export import vllm
from hetero.apps.export.service import Service
from hetero.catalog import Llm
from hetero.cluster import Cluster
from hetero.cluster.fleets import AS, fleet
from hetero.engines import PAPERS
from hetero.errors import ExportError, InfeasibleError, require, require_positive
from hetero.latency import for_gpu
from hetero.planners.base import NORMAL, Effort, Planner
from hetero.planners.bound import bound
from hetero.planners.score import Estimate, Score, score
from hetero.plans import Plan
from hetero.question import Question
from hetero.search.portfolio import Tried, ask, planner, portfolio
from hetero.simulator import Slo
from hetero.streams import stream
from hetero.workload import Trace, TraceSource
from pipelines import kept
from pipelines.studies.league import CASE, GOODPUT, PORTFOLIO, PRICE, VLLM

#: Targets are never tighter than this: people do not notice the difference.
LEAST_TTFT_S: Final = 0.5
LEAST_TPOT_S: Final = 0.05
_FEWEST_REQUESTS = 100
# Arrivals last this many times the target of the first token: a queue that grows shows in time.
_SPANS = 6.0
# Requests that tell how long a case has to be.
_SAMPLED = 2_000


@dataclass(frozen=True, slots=True)
class Match:
    """A case by names: a fleet of :mod:`hetero.cluster.fleets`, a model and a workload."""

    cluster: str
    model: str
    workload: str

    @property
    def names(self) -> dict[str, str]:
        """The names under the columns of the table."""
        return dict(zip(CASE, (self.cluster, self.model, self.workload), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is the same for all.

    Attributes
    ----------
    seeds
        Arrivals that every plan is simulated with.
    span_s
        Time that arrivals last at least [s], and six times the target of the first token: long
        against targets and the life of a request, so that what a plan carries it could carry on.
        As many requests are sampled from the workload as arrive in that time at the bound on
        throughput, 100 at least and all of it at most; where they do not suffice, they come again.
    loads
        Offered loads, over the best goodput of the case.
    demand
        Load that plans are made for, over the bound on throughput.
    slo_scale
        Targets over the latencies of the mean request alone, see :func:`targets`.
    goal
        Share of the requests that must meet both targets.
    source
        Twins, or real traces where they are here.
    """

    seeds: tuple[int, ...] = (0, 1)
    span_s: float = 60.0
    loads: tuple[float, ...] = (0.5, 0.9)
    demand: float = 0.5
    slo_scale: float = 4.0
    goal: float = 0.9
    source: TraceSource = "twin"

    def __post_init__(self) -> None:
        require(
            len(self.seeds) > 0, "Without a seed nothing is played.", resolve="give one or more."
        )
        require_positive(span_s=self.span_s, demand=self.demand, slo_scale=self.slo_scale)
        for load in self.loads:
            require_positive(load=load)


def targets(cluster: Cluster, llm: Llm, trace: Trace, scale: float) -> Slo:
    r"""Targets that the GPUs of a case give a chance, the same for every planner.

    .. math::
        \max\Big(0.5\,s, \kappa \frac{N}{\sum_g N_g / T^{pre}_g(\bar I)}\Big), \qquad
        \max\Big(50\,ms, \kappa \frac{N}{\sum_g N_g / T^{dec}_g(1, \bar I + \bar O / 2)}\Big)

    for the first token and for each further one, with :math:`\kappa` the scale and T the step of a
    single GPU of type g that had memory for the whole model. The harmonic mean is what the mean
    request alone takes in a pipeline over all N GPUs of the cluster, layers dealt out by speed and
    the network free. A mixture of experts has no targets, since its latencies are known for islands
    only.
    """
    if llm.experts:
        return Slo()
    inputs, outputs = float(trace.input_tokens.mean()), float(trace.output_tokens.mean())
    first = later = 0.0
    for name, gpu in cluster.gpu_types.items():
        step = for_gpu(gpu, llm).step_model()
        count = cluster.gpu_counts[name]
        first += count / float(step.prefill_seconds([inputs]))
        cached = np.array([inputs + outputs / 2.0])
        later += count / float(step.seconds(np.ones(1), np.ones(1, np.int64), cached)[0])
    return Slo(
        ttft_s=max(LEAST_TTFT_S, scale * cluster.gpus / first),
        tpot_s=max(LEAST_TPOT_S, scale * cluster.gpus / later),
    )


def requests_of(match: Match, rules: Rules) -> tuple[Trace, float]:
    """Requests of a workload that a model takes, and the share that exceeds its context.

    Raises
    ------
    InfeasibleError
        If the model can hardly take any of the requests.
    """
    llm = catalog.llm(match.model)
    whole = _load(match.workload, workload.attainable(match.workload, rules.source))
    fits = np.flatnonzero(whole.input_tokens + whole.output_tokens <= llm.max_position)
    if len(fits) < _FEWEST_REQUESTS:
        raise InfeasibleError(
            f"{llm.name} takes {llm.max_position:,} tokens, and {len(fits)} of the {len(whole):,} "
            f"requests of {match.workload} are no longer.",
            resolve="choose a model with a longer context.",
        )
    return whole.take(fits), 1.0 - len(fits) / len(whole)


@lru_cache(maxsize=16)
def _load(name: str, source: TraceSource) -> Trace:
    return workload.load(name, source)


def case_of(match: Match, rules: Rules) -> Question:
    """The question that every planner is asked; targets are those of the fleet whose price counts.

    Raises
    ------
    CatalogError, ParameterError, InfeasibleError
        If a name is unknown, or the model can hardly take any of the requests.
    """
    llm, cluster = catalog.llm(match.model), fleet(match.cluster)
    mixed = fleet(match.cluster.split(AS)[0])
    whole, _ = requests_of(match, rules)
    few = whole.sample(min(_SAMPLED, len(whole)), stream(0, "arena"))
    slo = targets(mixed, llm, few, rules.slo_scale)
    span_s = max(rules.span_s, _SPANS * (slo.ttft_s or 0.0))
    asked = Question(
        cluster, llm, few, 1.0, slo, rules.goal, least_s=span_s, seed=rules.seeds[0], engine=PAPERS
    )
    count = round(span_s * most_rps(asked))
    trace = whole.sample(int(np.clip(count, _FEWEST_REQUESTS, len(whole))), stream(1, "arena"))
    slo = targets(mixed, llm, trace, rules.slo_scale)
    asked = replace(asked, trace=trace, slo=slo)
    return replace(asked, rate_rps=rules.demand * most_rps(asked))


def most_rps(question: Question) -> float:
    """Bound on the throughput of a case; for a mixture of experts that of its island layouts."""
    limit = bound(question)
    if limit is not None:
        return limit.rps()
    proven = planner("islands exact").plan(question).bound_rps
    assert proven is not None
    return proven


def describe(matches: Sequence[Match], rules: Rules) -> pd.DataFrame:
    """One row per case: what is served, on what, and under which targets."""
    rows = []
    for match in matches:
        question, (_, left_out) = case_of(match, rules), requests_of(match, rules)
        limit = bound(question)
        slo = question.slo
        rows.append(
            {
                **match.names,
                "GPUs": ", ".join(f"{n} {gpu}" for gpu, n in question.cluster.gpu_counts.items()),
                "price of the cluster [$/h]": _number(question.cluster.usd_per_h),
                "requests": len(question.trace),
                "mean input [tokens]": float(question.trace.input_tokens.mean()),
                "mean output [tokens]": float(question.trace.output_tokens.mean()),
                "beyond the context [% of requests]": 100.0 * left_out,
                "target TTFT [s]": _number(slo.ttft_s),
                "target TPOT [ms]": 1e3 * _number(slo.tpot_s),
                "planned load [requests/s]": question.rate_rps,
                "bound on throughput [requests/s]": _number(limit.rps() if limit else None),
            }
        )
    return pd.DataFrame(rows)


def tried(
    question: Question, planners: Sequence[Planner], rules: Rules, effort: Effort
) -> tuple[Tried, ...]:
    """What every planner says, and the portfolio, where there is more than one planner, last."""
    try:
        found = portfolio(question, planners=planners, effort=effort, seeds=rules.seeds)
    except InfeasibleError:
        # Nobody has a plan; each says why.
        none = () if len(planners) == 1 else (Tried(PORTFOLIO, reason="No planner has a plan."),)
        return (*(ask(one, question, rules.seeds) for one in planners), *none)
    single = tuple(one for one in found.tried if one.planner != PORTFOLIO)
    whole = () if len(planners) == 1 else (replace(found.best, planner=PORTFOLIO),)
    return (*single, *whole)


def play(
    match: Match,
    planners: Sequence[Planner],
    rules: Rules,
    effort: Effort = NORMAL,
) -> list[dict[str, object]]:
    """The rows of one case, see :func:`contest`."""
    question = case_of(match, rules)
    answers = tried(question, planners, rules, effort)
    scores = [one.score for one in answers if one.score and one.planner != PORTFOLIO]
    best = max((one.goodput_rps.mean for one in scores), default=0.0)

    @cache  # the portfolio's plan may be a planner's own
    def simulated(plan: Plan, load: float, known: Score) -> Score:
        rate = load * (best or question.rate_rps)
        rates = [known.goodput_rps.mean] * len(rules.seeds)  # only what happens at this load is new
        return score(plan, question, seeds=rules.seeds, rate_rps=rate, known=rates)

    rows: list[dict[str, object]] = []
    for answer in answers:
        head = {**match.names, "planner": answer.planner}
        plan, known = answer.plan, answer.score
        if plan is None or known is None:
            rows.append({**head, "reason": answer.reason})
            continue
        for load in rules.loads:
            found = _cells(simulated(plan, load, known), known, plan, question.llm)
            rows.append({**head, "load": load, **found})
    return rows


def contest(
    matches: Sequence[Match],
    planners: Sequence[Planner],
    rules: Rules | None = None,
    *,
    effort: Effort = NORMAL,
    within: Path | None = None,
    jobs: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> pd.DataFrame:
    """Every planner on every case.

    Parameters
    ----------
    effort
        How much the portfolio may try to improve the best plans.
    within
        Folder of a file per case; those that are there are not played again.
    jobs
        Cases that are simulated side by side (joblib); the table is the same for any number.
    progress
        Called with 1 after every case.

    Returns
    -------
    pandas.DataFrame
        One row per case, planner and load, with the columns of :data:`COLUMNS`; a planner without
        a plan has one row that says why.
    """
    rules = rules or Rules()
    told = ([(one.name, one.effort) for one in planners], rules, effort)
    calls = (
        (
            kept.file(within, " ".join(one.names.values()), *told),
            partial(play, one, planners, rules, effort),
        )
        for one in matches
    )
    rows = [row for part in kept.each(calls, jobs, progress) for row in part]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(_KINDS)


def grid(
    clusters: Mapping[str, str], workloads: Sequence[str], *, alike: bool = False
) -> tuple[Match, ...]:
    """Every cluster with its model on every workload, followed by its counterparts where asked.

    Parameters
    ----------
    clusters
        Model by cluster.
    alike
        Whether homogeneous fleets of equal price, one per GPU type, take part as well.

    Examples
    --------
    >>> [m.cluster for m in grid({"current-small-12": "Qwen2.5-14B"}, ["sharegpt"], alike=True)]
    ['current-small-12', 'current-small-12 as H100-SXM', 'current-small-12 as L40S']
    """
    return tuple(
        Match(fleet_name, model, trace)
        for name, model in clusters.items()
        for fleet_name in (name, *(f"{name}{AS}{k}" for k in fleet(name).gpu_types if alike))
        for trace in workloads
    )


COLUMNS: Final = (
    *CASE,
    *("planner", "load", "rate [requests/s]"),
    *(GOODPUT, "goodput, low [requests/s]", "goodput, high [requests/s]"),
    *("throughput [tokens/s]", "throughput, low [tokens/s]", "throughput, high [tokens/s]"),
    *("SLO met [%]", "SLO met, low [%]", "SLO met, high [%]"),
    *("TTFT P90 [s]", "TPOT P90 [ms]"),
    *(PRICE, "cost [$/10^6 tokens]", "cost at goodput [$/10^6 tokens]"),
    *("bound [requests/s]", "gap [%]", "own bound [requests/s]"),
    *("groups", "GPUs used", VLLM, "reason"),
)
"""Columns of the table of a contest; ends named low and high are 95 % intervals over seeds."""

_WORDS = {*CASE, "planner", "groups", "GPUs used", VLLM, "reason"}
_KINDS = {name: object if name in _WORDS else np.float64 for name in COLUMNS}


def _refused(plan: Plan, llm: Llm) -> str | None:
    """Why vLLM's export refuses a plan; None if it writes it.

    Planners are asked for the best plan of any engine here, as the papers do.
    """
    try:
        service = Service.of_plan(plan, llm, "contest")
        for serving in service.servings:
            vllm.commands(service, serving)
    except ExportError as error:
        return error.what
    return None


def _cells(found: Score, known: Score, plan: Plan, llm: Llm) -> dict[str, object]:
    return {
        "rate [requests/s]": found.rate_rps,
        **_spread("goodput", "requests/s", known.goodput_rps),
        **_spread("throughput", "tokens/s", found.throughput_tps),
        **_spread("SLO met", "%", found.attainment, 100.0),
        "TTFT P90 [s]": found.ttft_s[90].mean,
        "TPOT P90 [ms]": 1e3 * found.tpot_s[90].mean,
        PRICE: _number(found.usd_per_h),
        "cost [$/10^6 tokens]": _number(found.usd_per_mtok),
        "cost at goodput [$/10^6 tokens]": _number(known.usd_per_mtok_at_goodput),
        "bound [requests/s]": _number(found.bound_rps),
        "gap [%]": 100.0 * _number(found.gap),
        "own bound [requests/s]": _number(plan.bound_rps),
        "groups": groups_told(plan),
        "GPUs used": ", ".join(f"{count} {name}" for name, count in plan.gpus.items()),
        VLLM: _refused(plan, llm),
    }


def groups_told(plan: Plan) -> str:
    """Alike groups counted, such as ``2 x TP 4 H100-SXM (both)``."""
    labels = (f"{one.parallelism} {'+'.join(one.gpus)} ({one.phase})" for one in plan.groups)
    return "; ".join(f"{n} x {label}" for label, n in Counter(labels).items())


def _spread(name: str, unit: str, one: Estimate, factor: float = 1.0) -> dict[str, object]:
    return {
        f"{name} [{unit}]": factor * one.mean,
        f"{name}, low [{unit}]": factor * one.low,
        f"{name}, high [{unit}]": factor * one.high,
    }


def _number(value: float | Estimate | None) -> float:
    return value.mean if isinstance(value, Estimate) else float("nan") if value is None else value
