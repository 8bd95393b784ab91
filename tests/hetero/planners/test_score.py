"""Scores of plans, and the bound that none exceeds: closed forms, metrics, and runs that try."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero import catalog, workload
from hetero.bounds import deployment_rps
from hetero.catalog import EngineName
from hetero.cluster import Cluster, Machine, cluster
from hetero.cluster.topology import Network
from hetero.costs.cost import PipelineStage
from hetero.costs.replicas import compared_replica
from hetero.costs.transfer import KvTransfer
from hetero.deployment import Batching, Deployment, Engine, Role
from hetero.engines import EngineSpec
from hetero.errors import InfeasibleError, ParameterError
from hetero.latency import for_gpu
from hetero.planners import bound as bounds
from hetero.planners import ground
from hetero.planners.base import plan_of
from hetero.planners.bound import Bound, amounts, bound, goodput_bound
from hetero.planners.score import (
    PRECISION,
    Estimate,
    goodput,
    margin,
    score,
    screened,
)
from hetero.plans import Plan
from hetero.question import Question, judged, sustained_rps
from hetero.routers import LeastTokens, RoundRobin
from hetero.search.portfolio import planner
from hetero.simulator import Run, Slo, metrics, simulate
from hetero.simulator.metrics import largest_rate
from hetero.simulator.sustained import saturation
from hetero.workload import Trace
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
    assert goodput(plan, free) == pytest.approx((other,), rel=2 * PRECISION)


def test_targets_that_none_meets_carry_nothing(plan: Plan) -> None:
    strict = as_in_papers(SMALL, EIGHT, CHATS, 6.0, Slo(ttft_s=1e-4))
    assert goodput(plan, strict) == (0.0,)
    found = score(plan, strict)
    assert found.attainment.mean == 0.0
    assert found.usd_per_mtok_at_goodput is None


def test_nothing_is_served_above_the_bound(plan: Plan) -> None:
    """Targets that requests meet at any rate in a short run."""
    lax = as_in_papers(SMALL, EIGHT, CHATS.head(120), 6.0, Slo(e2e_s=300.0), least_s=1.0)
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


MORE = workload.load("azure2023_conv").sample(400, np.random.default_rng(3))
GPUS = ("A100-SXM-80GB", "L40S", "RTX-A6000", "H100-SXM")


def fleet(*kinds: tuple[str, int]) -> Cluster:
    machines = tuple(
        Machine(f"m{k}", catalog.gpu(name), count) for k, (name, count) in enumerate(kinds)
    )
    link = catalog.links().find("Ethernet-100G")
    return Cluster("fleet", machines, Network(within_region=link))


def test_one_type_is_the_work_of_the_roofline_alone() -> None:
    question = as_in_papers(fleet(("L40S", 3)), EIGHT, MORE, 1.0)
    one = for_gpu(catalog.gpu("L40S"), EIGHT)
    most = max(2048.0, float(MORE.input_tokens.max()))
    # A decode step of 256 and a prefill step as long as can be, less what is per step alone.
    overhead = one.efficiency.step_overhead_s + float(one.terms(0.0)["logits"])
    decode_s = (float(one.seconds(256.0)) - overhead) / 256.0 + overhead / 256.0
    prefill_s = (float(one.seconds(most)) - overhead) / most
    cached_s = float(one.terms(0.0, 0, 1.0)["kv cache"])
    pair_s = float(one.terms(0.0, 0, 0.0, 1.0)["attention"])
    steps = MORE.output_tokens - 1.0
    cached = sum(
        i + j
        for i, o in zip(MORE.input_tokens.tolist(), MORE.output_tokens.tolist(), strict=True)
        for j in range(o - 1)
    )
    busy_s = (
        MORE.input_tokens.sum() * prefill_s
        + (MORE.input_tokens.astype(float) ** 2).sum() / 2.0 * pair_s
        + steps.sum() * decode_s
        + cached * cached_s
    )
    found = bound(question)
    assert found is not None
    assert found.rps() == pytest.approx(3.0 * len(MORE) / busy_s, rel=1e-6)


def test_chunks_share_the_reading_of_the_weights() -> None:
    """Steps of 256 decode and 256 prompt tokens cost what reading the weights does."""
    # Two corners do one kind of work, the third both in the time of either.
    rates = {"a": np.array([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]])}
    cost, work = {"a": np.full(4, 1e-9)}, np.zeros((6, 1))
    work[[0, 2], 0] = 1.0
    one = Bound("one", {"a": 1}, rates, cost, work)
    assert one.rps() == pytest.approx(1.0, rel=1e-6)
    apart = Bound("apart", {"a": 1}, {"a": rates["a"][:2]}, cost, work)
    assert apart.rps() == pytest.approx(2.0 / 3.0, rel=1e-6)


@pytest.mark.parametrize("batching", ["chunked", "prefill first"])
def test_corners_of_an_engine_by_hand(batching: Batching) -> None:
    """A millisecond per token, but not less than 100 ms; up to 10 decode in up to 200 tokens."""
    engine = Engine(batching, "paged", max_batch=10, max_step_tokens=200)
    found = bounds._steps(
        lambda n, _: np.maximum(n * 1e-3, 0.1), np.array([0.0, 100.0]), engine, longest=150.0
    )
    # (1,000, 0) prompts alone, (900, 100) with ten that decode in a step of 100 tokens.
    both = {(1000.0, 0.0), (900.0, 100.0), (0.0, 100.0)}
    apart = {(1000.0, 0.0), (0.0, 100.0)}
    corners = {tuple(one) for one in found.round(6).tolist()}
    assert (both if batching == "chunked" else apart) <= corners
    # What else the hull names lies between these, on their sides.
    assert all(p + d <= 1000.0 + 1e-6 and d <= 100.0 + 1e-6 for p, d in corners)
    if batching != "chunked":
        assert all(p / 1000.0 + d / 100.0 <= 1.0 + 1e-9 for p, d in corners)


def test_two_types_divide_the_work_where_each_is_better() -> None:
    cost = {"a": np.full(4, 1e-9), "b": np.full(4, 1e-9)}
    rates = {"a": np.diag([1.0, 0.25]), "b": np.diag([0.25, 1.0])}
    work = np.zeros((6, 1))
    work[[0, 2], 0] = 1.0
    # One GPU each: each does what it is good at, one request per second.
    assert Bound("two", {"a": 1, "b": 1}, rates, cost, work).rps() == pytest.approx(1.0, rel=1e-6)
    # Three of a: it also does x of the other part, 3 = r + 4 x, r = 1 + x, so r = 1.4.
    assert Bound("two", {"a": 3, "b": 1}, rates, cost, work).rps() == pytest.approx(1.4, rel=1e-6)


def test_leaving_requests_out_leaves_the_largest_out() -> None:
    found = bound(as_in_papers(fleet(("L40S", 1)), EIGHT, MORE, 1.0))
    assert found is not None
    short = MORE.filter(input_tokens=(1, int(np.quantile(MORE.input_tokens, 0.5))))
    half = bound(as_in_papers(fleet(("L40S", 1)), EIGHT, short, 1.0))
    assert half is not None
    assert found.rps() < found.rps(0.9) < found.rps(0.5)
    assert half.rps() <= found.rps(len(short) / len(MORE)) * 1.02


def test_islands_of_the_analytic_model_have_a_bound_on_goodput_alone() -> None:
    question = as_in_papers(fleet(("H200-SXM", 32)), catalog.llm("DeepSeek-V3"), MORE, 1.0)
    assert bound(question) is None
    eight = replace(question, cluster=fleet(("H200-SXM", 8)))
    assert bound(replace(eight, engine=EngineSpec(precision="fp8"))) is not None
    limit = goodput_bound(question)
    assert limit is not None
    plan = planner("islands exact").plan(question)
    assert 0.75 < score(plan, question, seeds=(0,)).goodput_rps.mean / limit < 1.02


def test_work_of_a_request_by_hand() -> None:
    found = amounts(Trace([0.0], [10], [4]))
    assert found[:, 0].tolist() == [10.0, 50.0, 3.0, 10.0 + 11.0 + 12.0, 3.0, 3.0]


@settings(max_examples=25)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(GPUS), st.sampled_from((1, 2, 4))), min_size=1, max_size=3
    ),
    parts=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from((1, 2, 4)), st.integers(0, 2)),
        min_size=1,
        max_size=5,
    ),
    mixed=st.booleans(),
    split=st.booleans(),
    long=st.booleans(),
    engine=st.sampled_from(("any", "vllm")),
)
def test_no_run_exceeds_it(
    kinds: list[tuple[str, int]],
    parts: list[tuple[int, int, int]],
    mixed: bool,
    split: bool,
    long: bool,
    engine: EngineName,
) -> None:
    """Random replicas, pipelines of mixed stages and split phases, flooded with requests."""
    where = fleet(*kinds)
    trace = replace(MORE, output_tokens=np.maximum(MORE.output_tokens // 8, 1)) if long else MORE
    question = as_in_papers(where, EIGHT, trace, 1.0, engine=EngineSpec(name=engine))
    costs = ground.costs(question)
    left = [machine.count for machine in where.machines]
    pipelines = []
    if mixed and len(left) > 1:
        halves = [PipelineStage(0, 1, 20), PipelineStage(1, 1, 12)]
        pipelines.append(costs.pipeline(halves))
        left[0] -= 1
        left[1] -= 1
    for machine, gpus, stages in parts:
        m, count = machine % len(left), gpus * (stages + 1)
        if left[m] < count:
            continue
        held = [32 // (stages + 1)] * (stages + 1)
        held[-1] += 32 - sum(held)
        try:
            pipelines.append(costs.pipeline([PipelineStage(m, gpus, n) for n in held]))
        except InfeasibleError:
            continue
        left[m] -= count
    if not pipelines:
        return
    roles: list[Role] = ["both"] * len(pipelines)
    if split and len(pipelines) > 1:
        roles = ["prefill" if k % 2 else "decode" for k in range(len(pipelines))]
    nodes = tuple(
        compared_replica(one, f"r{k}", role)
        for k, (one, role) in enumerate(zip(pipelines, roles, strict=True))
    )
    transfer = KvTransfer(bits=4)
    links = tuple(
        (f"r{a}", f"r{b}", transfer.link(pipelines[a], pipelines[b]))
        for a in range(len(nodes))
        for b in range(len(nodes))
        if (roles[a], roles[b]) == ("prefill", "decode")
    )
    drawn = Deployment("random", nodes, links)
    run = simulate(drawn, trace.all_at_once(), LeastTokens())
    assert sum(run.counts.values()) == len(trace)
    served = float(run.finished.mean())
    found = bound(question)
    assert found is not None
    if served > 0:
        assert run.finished.sum() / run.span_s <= found.rps(served) * (1 + 1e-9)
        most = deployment_rps(drawn, trace.take(np.flatnonzero(run.finished)))
        assert most is not None
        assert run.finished.sum() / run.span_s <= most * (1 + 1e-9)
        check_targets(question, run)


def check_targets(question: Question, run: Run) -> None:
    """At any target no more requests per second are served than where so many may keep it."""
    done = run.finished
    tpot_s = np.where(np.isnan(run.tpot_s), 0.0, run.tpot_s)[done]
    trace = question.trace.all_at_once().take(np.flatnonzero(done))
    for q in (0.5, 1.0):
        target_s = float(max(np.quantile(tpot_s, q), 1e-9))
        goal = float((tpot_s <= target_s).mean())
        asked = replace(question, trace=trace, slo=Slo(tpot_s=target_s), goal=goal)
        most = bounds.goodput_bound(asked)
        assert most is not None
        assert done.sum() / run.span_s <= most * (1 + 1e-6)


@pytest.mark.parametrize("engine", ["any", "vllm"])
def test_it_is_not_far_from_what_a_good_plan_reaches(engine: EngineName) -> None:
    """A bound that is never near says nothing: short prompts, one GPU each, flooded."""
    question = as_in_papers(
        fleet(("A100-SXM-80GB", 2)), EIGHT, MORE, 1.0, engine=EngineSpec(name=engine)
    )
    costs = ground.costs(question)
    nodes = tuple(
        compared_replica(costs.pipeline([PipelineStage(0, 1, EIGHT.layers)]), f"r{k}")
        for k in range(2)
    )
    many = Trace(np.zeros(4000), np.full(4000, 500), np.full(4000, 100))
    run = simulate(Deployment("two", nodes), many, LeastTokens())
    found = bound(replace(question, trace=many))
    assert found is not None
    assert 0.8 < 4000 / run.span_s / found.rps() <= 1.0


def test_costs_of_a_type_in_several_machines_take_the_better() -> None:
    slow = replace(catalog.gpu("L40S"), mem_bw_gbs=400.0)
    machines = (Machine("a", catalog.gpu("L40S")), Machine("b", slow))
    link = catalog.links().find("Ethernet-100G")
    both = Cluster("both", machines, Network(within_region=link))
    found = bounds.bound(as_in_papers(both, EIGHT, MORE, 1.0))
    alone = bounds.bound(as_in_papers(fleet(("L40S", 2)), EIGHT, MORE, 1.0))
    assert found is not None
    assert alone is not None
    assert found.rps() == pytest.approx(alone.rps(), rel=1e-9)
