"""Scores: against closed forms, the metrics of the run, and the other definitions there are."""

from __future__ import annotations

import numpy as np
import pytest

from hetero import catalog, workload
from hetero.cluster import cluster
from hetero.costs.cost import PipelineStage
from hetero.costs.replicas import compared_replica
from hetero.deployment import Deployment
from hetero.errors import ParameterError
from hetero.planners import ground
from hetero.planners.base import plan_of
from hetero.planners.bound import bound, goodput_bound
from hetero.planners.score import PRECISION, Estimate, goodput, margin, score, screened
from hetero.plans import Plan
from hetero.question import Question, judged, sustained_rps
from hetero.routers import LeastTokens, RoundRobin
from hetero.simulator import Slo, metrics
from hetero.simulator.metrics import largest_rate
from hetero.simulator.sustained import saturation
from tests.hetero.engine_plans import as_in_papers

EIGHT = catalog.llm("Llama-3.1-8B")
CHATS = workload.load("azure2023_conv").sample(300, np.random.default_rng(3))
SMALL = cluster("current-small-12")
TARGETS = Slo(ttft_s=0.5, tpot_s=0.05)


@pytest.fixture(scope="module")
def question() -> Question:
    return as_in_papers(SMALL, EIGHT, CHATS, 6.0, TARGETS, least_s=30.0)


@pytest.fixture(scope="module")
def plan(question: Question) -> Plan:
    costs = ground.costs(question)
    pipelines = [costs.pipeline([PipelineStage(m, 1, EIGHT.layers)]) for m in (1, 1, 2)]
    nodes = tuple(compared_replica(one, f"r{k}") for k, one in enumerate(pipelines))
    return plan_of("test", Deployment("test", nodes), pipelines, LeastTokens(), "least tokens")


def test_goodput_is_sustained_and_a_little_more_is_not(question: Question, plan: Plan) -> None:
    load = question.load(precision=PRECISION)
    found = goodput(plan, question, (0, 1))
    for seed, rate in zip((0, 1), found, strict=True):
        assert judged(plan, load.at(rate), seed)[1].sustained
        # Chance lets single higher rates pass; by a tenth no chance makes up for the load.
        assert not judged(plan, load.at(1.1 * rate), seed)[1].sustained
        # Where one begins to look matters by no more than the precision.
        assert sustained_rps(plan, load, seed) == pytest.approx(rate, rel=2 * PRECISION)


def test_screening_comes_near_what_is_sustained(question: Question, plan: Plan) -> None:
    for seed, rate in zip((0, 1), goodput(plan, question, (0, 1)), strict=True):
        assert screened(plan, question, seed) == pytest.approx(rate, rel=0.3)
        assert margin(plan, question, 0.5 * rate, seed) > 0 > margin(plan, question, 2 * rate, seed)


def test_figures_are_those_of_the_run(question: Question, plan: Plan) -> None:
    found = score(plan, question, seeds=(0, 1), rate_rps=8.0)
    assert found.rate_rps == 8.0
    load = question.load(8.0, precision=PRECISION)
    runs = [plan.simulate(load.arrivals(load.requests(plan), seed), seed) for seed in (0, 1)]
    told = []
    for run in runs:
        since = run.requests["arrival_s"] - run.requests["arrival_s"][0]
        first, last = since[int(0.2 * len(since))], since[len(since) - int(0.05 * len(since)) - 1]
        told.append(metrics(run, TARGETS, warmup_s=first, until_s=last))
    assert found.throughput_rps.mean == pytest.approx(np.mean([m.requests_per_s for m in told]))
    assert found.ttft_s[95].mean == pytest.approx(
        np.mean([one.percentiles["ttft_s"][95] for one in told])
    )
    assert found.attainment.mean == pytest.approx(np.mean([m.attainment["joint"] for m in told]))
    assert found.throughput_rps.mean == pytest.approx(8.0, rel=0.05)  # asked for 8, serves 8
    assert found.met["tpot"].mean >= found.attainment.mean
    assert found.throughput_rps.low < found.throughput_rps.mean < found.throughput_rps.high
    tokens = float((CHATS.input_tokens + CHATS.output_tokens).mean())
    price = 3 * catalog.gpu("L40S").usd_per_h
    assert found.usd_per_h == pytest.approx(price)
    assert found.usd_per_mtok_at_goodput is not None
    each = [price / 3600 / (rate * tokens) * 1e6 for rate in found.seeds_rps]
    assert found.usd_per_mtok_at_goodput.mean == pytest.approx(np.mean(each))
    limit = bound(question)
    assert limit is not None
    assert found.bound_rps == goodput_bound(question)
    assert found.goodput_rps.mean < found.bound_rps <= limit.rps()
    assert found.gap == pytest.approx(1 - found.goodput_rps.mean / found.bound_rps)
    assert "goodput" in str(found)


def test_without_targets_it_is_what_keeps_up(question: Question, plan: Plan) -> None:
    """Saturation is the goodput without targets."""
    free = as_in_papers(SMALL, EIGHT, CHATS, 6.0)
    assert plan.deployment is not None
    other = saturation(plan.deployment, CHATS, LeastTokens(), precision=PRECISION)
    assert goodput(plan, free) == pytest.approx((other.rate_rps,), rel=2 * PRECISION)


def test_targets_that_none_meets_carry_nothing(plan: Plan) -> None:
    strict = as_in_papers(SMALL, EIGHT, CHATS, 6.0, Slo(ttft_s=1e-4))
    assert goodput(plan, strict) == (0.0,)
    found = score(plan, strict)
    assert found.attainment.mean == 0.0
    assert found.usd_per_mtok_at_goodput is None


def test_nothing_is_served_above_the_bound(plan: Plan) -> None:
    """Targets that requests meet at any rate in a short run."""
    lax = as_in_papers(SMALL, EIGHT, CHATS.head(120), 6.0, Slo(e2e_s=1e4), least_s=1.0)
    limit = bound(lax)
    assert limit is not None
    assert screened(plan, lax, 0) == pytest.approx(limit.rps(lax.goal))
    assert goodput(plan, lax)[0] < limit.rps(lax.goal)


def test_the_same_bytes_twice(question: Question, plan: Plan) -> None:
    assert str(score(plan, question, seeds=(3,))) == str(score(plan, question, seeds=(3,)))


def test_seeds_and_rates_out_of_range_are_refused(question: Question, plan: Plan) -> None:
    with pytest.raises(ParameterError, match="No seed"):
        score(plan, question, seeds=())


@pytest.mark.parametrize("limit", [0.37, 1.0, 9.3, 400.0])
def test_bisection_finds_the_edge_from_either_side(limit: float) -> None:
    for start in (0.5, 50.0):
        found = largest_rate(lambda rate: rate <= limit, start, precision=1e-3)
        assert limit / 1.001 <= found <= limit
    assert largest_rate(lambda rate: False, 1.0, least_rps=0.01) == 0.0
    assert largest_rate(lambda rate: True, 1.0, most_rps=77.0) == 77.0
    assert largest_rate(lambda rate: True, 1.0) == np.inf


def test_estimates_are_student_intervals() -> None:
    found = Estimate.of([11.0, 12.0, 13.0])
    assert (found.mean, round(found.low, 3), round(found.high, 3)) == (12.0, 9.516, 14.484)
    assert str(Estimate.of([5.0])) == "5"
    assert str(Estimate.of([1.0, 2.0, 3.0])) == "2 ± 2.5"
    assert (Estimate.of([1.0, 2.0, 3.0]).low, Estimate.of([0.9, 1.0], most=1.0).high) == (0.0, 1.0)


def test_load_aware_routing_carries_more_than_rotation(question: Question, plan: Plan) -> None:
    """The score tells routers apart: an L40S beside a pair that shares a replica."""
    costs = ground.costs(question)
    pipelines = [costs.pipeline([PipelineStage(0, 1, EIGHT.layers)]), *plan.pipelines]
    nodes = tuple(compared_replica(one, f"r{k}") for k, one in enumerate(pipelines))
    made = [
        plan_of("test", Deployment("test", nodes), pipelines, router, "")
        for router in (RoundRobin(), LeastTokens())
    ]
    turn, load = (goodput(one, question)[0] for one in made)
    assert load > 1.05 * turn
