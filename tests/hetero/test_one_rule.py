"""Whoever states a goodput of a plan states the same: it is one rule."""

from __future__ import annotations

import numpy as np
import pytest

from hetero import catalog, workload
from hetero.apps.capacity.market import Market
from hetero.apps.capacity.prices import from_catalog
from hetero.apps.capacity.resilience import resilience
from hetero.apps.cards import delivery
from hetero.apps.explorer import explore
from hetero.cluster import cluster
from hetero.costs.cost import IN_PAPERS
from hetero.planners.score import score
from hetero.plans import Plan
from hetero.question import judged, sustained_rps
from hetero.search.portfolio import planner
from hetero.simulator import Slo
from hetero.simulator.sustained import saturation
from tests.hetero.engine_plans import as_in_papers

CHATS = workload.load("azure2023_conv")
SLO = Slo(ttft_s=2.0, tpot_s=0.1)
CASE = as_in_papers(
    cluster("xiong-v100-a800"),
    catalog.llm("Llama-3-8B"),
    CHATS.sample(500, np.random.default_rng(0)),
    6.0,
    SLO,
    drawn_from=CHATS,
)
PRECISION = 0.02


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planner("Mélange").plan(CASE)


@pytest.fixture(scope="module")
def rate_rps(plan: Plan) -> float:
    """The truth: the rule itself, looked for from another place and to a finer bracket."""
    load = CASE.load(precision=PRECISION)
    found = sustained_rps(plan, load, 0, near_rps=1.0, bracket=0.002)
    assert judged(plan, load.at(found), 0)[1].sustained
    assert not judged(plan, load.at(1.003 * found), 0)[1].sustained
    return found


def test_card_contest_and_resilience_agree(plan: Plan, rate_rps: float) -> None:
    effort = delivery.CardEffort(seeds=1, draws=0, precision=PRECISION)
    found = {
        "card": delivery.goodput(plan, CASE, effort).value,
        "contest": score(plan, CASE).goodput_rps.mean,
        "resilience": resilience(plan, CASE, precision=PRECISION, seeds=(0,)).whole.sustained_rps,
    }
    assert found == pytest.approx(dict.fromkeys(found, rate_rps), rel=PRECISION)


def test_the_explorer_agrees_to_its_precision(plan: Plan, rate_rps: float) -> None:
    assert plan.deployment is not None
    view = explore(plan.deployment, CHATS, 4.0, SLO, plan.router, requests=3000)
    assert view.goodput_rps == pytest.approx(rate_rps, rel=0.05)


def test_without_targets_it_is_saturation(plan: Plan) -> None:
    assert plan.deployment is not None
    free = CASE.load(precision=PRECISION)
    free = type(free)(free.trace, 6.0, precision=PRECISION)
    found = saturation(plan.deployment, CHATS, plan.router, precision=PRECISION)
    assert found == pytest.approx(sustained_rps(plan, free, 0), rel=PRECISION)


def test_a_fleet_that_is_sized_sustains_what_its_plan_does() -> None:
    load = CASE.load(precision=PRECISION, seeds=(0,))
    market = Market(from_catalog(["A40"], sizes=(1,)), CASE.llm, load, IN_PAPERS)
    fleet = {next(iter(market.fluid.columns)): 3}
    most = sustained_rps(market.plan(fleet), load, 0)
    assert market.sustains(fleet, load.at(most))
    assert not market.sustains(fleet, load.at((1 + 2 * PRECISION) * most))
