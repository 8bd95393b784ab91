"""Does a mixed fleet pay? The best plan on it, and on homogeneous fleets of equal price.

Every fleet is asked for the plan that vLLM as it starts can run: phases together, requests in the
order they come, replies of lengths that nobody knows before. The search sees arrivals of two seeds;
what a plan carries is told by those of another, and again with step times drawn from their error,
the same for a GPU type in every fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import pandas as pd

from hetero.cluster.fleets import AS, fleet
from hetero.engines import EngineSpec
from hetero.errors import InfeasibleError
from hetero.planners.base import EFFORTS
from hetero.planners.score import Rank, goodput
from hetero.question import Question, drawn
from hetero.routers import LeastRequests
from hetero.search.portfolio import planners, portfolio
from pipelines import kept
from pipelines.studies.contest import (
    Match,
    Rules,
    case_of,
    grid,
    groups_told,
    most_rps,
    requests_of,
)
from pipelines.studies.league import ALONE, CASE, DRAWN, GOODPUT, PLAIN, PORTFOLIO, PRICE, SEARCHED

#: What a case rests on, beside releases: code and data by the beginnings of their names.
DECIDING: Final = (
    *(f"data/{name}" for name in ("clusters", "engines", "measured", "specs", "twins")),
    *(f"hetero/{name}" for name in ("arrays", "bounds", "catalog/", "cluster/", "costs/")),
    *(f"hetero/{name}" for name in ("deployment", "engine", "grouping", "intervals", "latency/")),
    *(f"hetero/{name}" for name in ("memory/", "placement/", "planners/", "plans", "programs")),
    *(f"hetero/{name}" for name in ("question", "routers/", "search/", "simulator/", "streams")),
    *("hetero/workload/", "pipelines/studies/contest.py", "pipelines/studies/counterparts.py"),
)
RELEASES: Final = ("numba", "numpy", "ortools", "scipy")
_APART = 1_000  # from the seeds of arrivals to those that plans are searched by


def question_of(match: Match, rules: Rules, *, split: bool) -> Question:
    """The question of a fleet: requests and targets are those of the mixed one."""
    mixed = case_of(replace(match, cluster=match.cluster.split(AS)[0]), rules)
    asked = replace(
        mixed,
        cluster=fleet(match.cluster),
        engine=EngineSpec(),
        split=split,
        spans=False,
        drawn_from=requests_of(match, rules)[0],
    )
    return replace(asked, rate_rps=rules.demand * most_rps(asked))


def solved(match: Match, rules: Rules, effort: str, *, split: bool) -> dict[str, Any]:
    """What the best plan of a fleet carries; of one with phases together also by parts."""
    question, (seed,), most = question_of(match, rules, split=split), rules.seeds, EFFORTS[effort]
    row = match.names | {"seed": seed, "apart": split, PRICE: question.cluster.usd_per_h}
    asked = planners(most, experts=bool(question.llm.experts))
    seen = (_APART + 2 * seed, _APART + 2 * seed + 1)
    try:
        found = portfolio(question, effort=most, planners=asked, seeds=seen)
    except InfeasibleError as error:
        return row | {"reason": error.what}
    plan, near = found.plan, found.score.goodput_rps.mean
    tried = (one for one in found.tried if one.planner != PORTFOLIO)
    single = max(tried, key=lambda one: Rank(one.score))
    plans = {GOODPUT: plan}
    if not split and single.plan:
        plans |= {PLAIN: replace(plan, router=LeastRequests()), ALONE: single.plan}
        plans |= zip(DRAWN, drawn(plan, replace(question, seed=0), len(DRAWN)), strict=True)
    rates = {key: goodput(p, question, (seed,), near_rps=near)[0] for key, p in plans.items()}
    told = {"planner": single.planner, "routing": plan.routing, "groups": groups_told(plan)}
    return row | {SEARCHED: near} | rates | told


def solve(
    clusters: Mapping[str, str],
    workloads: Sequence[str],
    rules: Rules,
    *,
    effort: str,
    within: Path | None = None,
    jobs: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> pd.DataFrame:
    """Every fleet and its homogeneous counterparts, seed by seed, in processes.

    Parameters
    ----------
    clusters
        Models by mixed fleet.
    within
        Folder of a file per case; those that are there are not solved again.
    """
    calls = (
        (path, partial(solved, match, own, effort, split=split))
        for match, own, split, path in cases(clusters, workloads, rules, effort, within)
    )
    columns = [*CASE, "seed", "apart", PRICE, SEARCHED, GOODPUT, PLAIN, ALONE, *DRAWN]
    columns += ["planner", "routing", "groups", "reason"]
    return pd.DataFrame(list(kept.each(calls, jobs, progress)), columns=columns)


def cases(
    clusters: Mapping[str, str],
    workloads: Sequence[str],
    rules: Rules,
    effort: str,
    within: Path | None = None,
) -> Iterator[tuple[Match, Rules, bool, Path | None]]:
    """Fleet, rules of one seed, whether phases may be apart, and file of each case.

    Seed by seed, so that a part of the cases has all fleets; apart, which takes longest and no
    export runs, with the first seed alone.
    """
    ways = [(rules.seeds[0], True), *((seed, False) for seed in rules.seeds)]
    for (seed, split), match in product(sorted(ways), grid(clusters, workloads, alike=True)):
        own = replace(rules, seeds=(seed,), loads=())
        how = "apart" if split else "together"
        name = " ".join((*match.names.values(), how, str(seed)))
        yield match, own, split, kept.file(within, name, own, effort)
