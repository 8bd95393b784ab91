"""Equal ground: every kind of plan is simulated with the same step times and memory."""

from __future__ import annotations

import numpy as np
import pytest

from hetero import catalog, workload
from hetero.cluster import cluster
from hetero.costs.cost import PipelineStage
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import compared_replica
from hetero.engines import EngineSpec, replicated, roofline_steps
from hetero.errors import InfeasibleError
from hetero.planners import ground
from hetero.planners.helix.nodes import Means, degrees, kind, latency, nodes
from hetero.question import MOST_REQUESTS, Question
from hetero.simulator import Slo
from tests.hetero.engine_plans import as_in_papers

SEVENTY = catalog.llm("Llama-3.1-70B")
EIGHT = catalog.llm("Llama-3.1-8B")
CHATS = workload.load("azure2023_conv").sample(400, np.random.default_rng(3))
MIXED = cluster("current-mixed-32")


@pytest.fixture(scope="module", params=["Llama-3.1-70B", "gpt-oss-120b"])
def mixed(request: pytest.FixtureRequest) -> Question:
    return as_in_papers(MIXED, catalog.llm(request.param), CHATS, 5.0)


@pytest.fixture(scope="module")
def question() -> Question:
    return as_in_papers(MIXED, SEVENTY, CHATS, 5.0)


@pytest.mark.parametrize(("machine", "degree"), [("h200", 2), ("h100", 4), ("a100", 8)])
def test_replicas_are_those_of_the_roofline(question: Question, machine: str, degree: int) -> None:
    costs = ground.costs(question)
    number = [m.name for m in MIXED.machines].index(machine)
    here = compared_replica(costs.pipeline([PipelineStage(number, degree, SEVENTY.layers)]), "r")
    steps = roofline_steps()
    papers = EngineSpec(name="any", steps=steps)
    there = replicated(MIXED, SEVENTY, {machine: (degree,)}, papers).replicas[0]
    n = np.array([1.0, 17.0, 300.0, 2048.0])
    for one in ((n, n, 900.0 * n, 0.0), (n, 0, 0.0, n * n / 2)):
        assert here.step.seconds(*one) == pytest.approx(there.step.seconds(*one), rel=1e-8)
    assert here.kv_tokens == there.kv_tokens
    assert here.usd_per_h == there.usd_per_h


def test_no_stage_of_a_mixed_pipeline_is_slower_than_the_pipeline(mixed: Question) -> None:
    costs = ground.costs(mixed)
    held = (mixed.llm.layers - 20, 15, 5) if mixed.llm.experts else (40, 30, 10)
    stages = [
        PipelineStage(m, t, n) for (m, t), n in zip(((0, 2), (2, 4), (3, 4)), held, strict=True)
    ]
    pipeline = Pipeline(costs, tuple(stages))
    both, prefill = (compared_replica(pipeline, "r", role) for role in ("both", "prefill"))
    n = np.unique(np.geomspace(1, 60_000, 200).round())
    third = 3.0 * pipeline.stage_seconds(n / 3.0).max(axis=0)
    assert both.step.pieces[0].seconds(n, 0, 0.0, 0.0) == pytest.approx(third, rel=1e-7)
    whole = pipeline.stage_seconds(n).max(axis=0)
    assert prefill.step.seconds(n) == pytest.approx(whole, rel=1e-7)
    # With cached tokens and pairs it is never below any stage.
    decode = 3.0 * pipeline.stage_seconds(n / 3.0, 900.0 * n / 3.0)
    assert (both.step.seconds(n, n, 900.0 * n) >= decode.max(axis=0) * (1 - 1e-7)).all()


def test_equal_stages_are_simulated_as_they_are_planned(question: Question) -> None:
    pipeline = ground.costs(question).pipeline([PipelineStage(1, 2, 40), PipelineStage(1, 2, 40)])
    from hetero.costs.replicas import step_model

    n = np.array([1.0, 64.0, 2000.0])
    simulated = compared_replica(pipeline, "r").step.seconds(n, n, 500 * n)
    assert simulated == pytest.approx(step_model(pipeline).seconds(n, n, 500 * n), rel=1e-12)


def test_layers_of_a_node_take_what_a_replica_takes(question: Question) -> None:
    """All layers on one node: a step of mean contexts as long as the replica's, and its cache."""
    costs, means = ground.costs(question), Means.of(question)
    alone = compared_replica(costs.pipeline([PipelineStage(1, 4, SEVENTY.layers)]), "r")
    table = latency(costs, 1, 4, means)
    for b in (1.0, 40.0, 256.0):
        layer_ms = float(table.decode_layer_ms(b))
        step_s = float(alone.step.seconds(b, int(b), b * means.context_tokens))
        assert SEVENTY.layers * layer_ms / 1e3 == pytest.approx(step_s, rel=1e-6)
    for n in (1.0, 500.0, 2048.0):
        layer_ms = float(table.prompt_layer_ms(n))
        step_s = float(alone.step.seconds(n, 0, 0.0, n * means.pairs_per_token))
        assert SEVENTY.layers * layer_ms / 1e3 == pytest.approx(step_s, rel=1e-6)
    found = kind(costs, 1, 4, means, weights=1.0)
    assert found is not None
    assert found.kv_tokens(SEVENTY.layers) == pytest.approx(alone.kv_tokens, abs=16)


def test_means_of_a_workload_are_sums_over_its_requests() -> None:
    two = workload.Trace([0.0, 0.0], [10, 30], [3, 2])
    found = Means.of(as_in_papers(MIXED, SEVENTY, two, 1.0))
    assert found.pairs_per_token == pytest.approx((10**2 + 30**2) / 2 / 40)
    assert found.context_tokens == pytest.approx((10 + 11 + 30) / 3)
    assert (found.input_tokens, found.output_tokens) == (20.0, 2.5)


def test_nodes_divide_machines_and_take_more_weights_where_they_must() -> None:
    question = as_in_papers(MIXED, SEVENTY, CHATS, 5.0)
    assert degrees(question) == (8, 4, 2, 1)
    halves = nodes(question, 4)
    assert halves.gpus == (4,) * 8
    assert [node.name for node in halves.problem.nodes][:2] == ["h200/0", "h200/1"]
    small = as_in_papers(cluster("helix-10"), catalog.llm("LLaMA-1-30B"), CHATS, 1.0)
    assert sum(node.max_layers for node in nodes(small, 1).problem.nodes) >= 60
    with pytest.raises(InfeasibleError, match=r"hold \d+ of the \d+ layers"):
        nodes(as_in_papers(cluster("helix-10"), catalog.llm("Llama-3.1-405B"), CHATS, 1.0), 1)


def test_who_cannot_take_part_says_why() -> None:
    sparse = as_in_papers(MIXED, catalog.llm("DeepSeek-V3"), CHATS, 1.0)
    assert "mixture of experts" in (ground.unfit(sparse) or "")
    low = as_in_papers(MIXED, SEVENTY, CHATS, 1.0, engine=EngineSpec(name="any", precision="fp8"))
    assert ground.unfit(low) == ("A100-SXM-80GB of current-mixed-32 do not compute in fp8.")
    priced = as_in_papers(cluster("xiong-8xv100"), EIGHT, CHATS, 1.0, budget_usd_per_h=10.0)
    assert "machine v100 has none" in (ground.unfit(priced) or "")
    apart = as_in_papers(cluster("heteroserve-8"), EIGHT, CHATS, 1.0)
    assert "states no network" in (ground.unfit_network(apart) or "")
    assert ground.unfit(apart) is None


def test_planners_get_targets_where_a_case_has_none(question: Question) -> None:
    given = as_in_papers(MIXED, SEVENTY, CHATS, 5.0, Slo(ttft_s=1.0))
    assert ground.targets(given) == Slo(ttft_s=1.0)
    found = ground.targets(question).e2e_s
    assert found is not None
    # Ten times some 230 tokens at 10 to 30 ms each.
    assert 10.0 < found < 100.0


def test_arrivals_last_long_enough_with_the_same_gaps() -> None:
    question = as_in_papers(MIXED, SEVENTY, CHATS, 5.0, least_s=100.0)
    slow, fast = question.arrivals(2.0), question.arrivals(40.0)
    assert (len(slow), len(fast)) == (400, 4000)
    assert fast.arrival_s[:400] == pytest.approx(slow.arrival_s / 20.0)
    assert (fast.input_tokens[400:800] == CHATS.input_tokens).all()
    assert len(question.arrivals(1e6)) == MOST_REQUESTS
