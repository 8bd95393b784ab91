from __future__ import annotations

import numpy as np
import pytest

from hetero.catalog import llm
from hetero.cluster import cluster
from hetero.costs.cost import IN_PAPERS, CostModel, CostSettings, PipelineStage
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import lag, replica, step_model
from hetero.engines import EngineSpec
from hetero.errors import InfeasibleError, ParameterError
from hetero.latency import for_gpu
from hetero.latency.resolve import resolve
from hetero.memory import Budget

MODEL = llm("LLaMA-1-30B")


@pytest.fixture(scope="module")
def pair() -> CostModel:
    return CostModel(cluster("thunderserve-a40-3090ti-40gbit"), MODEL, IN_PAPERS)


def test_one_stage_is_the_roofline_of_the_whole_model(pair):
    whole = for_gpu(pair.machines[0].gpu, MODEL, 4)
    alone = pair.pipeline([PipelineStage(0, 4, MODEL.layers)])
    for n in (1, 100, 1024, 5000):
        assert alone.prefill_latency_s(n) == pytest.approx(float(whole.seconds(n, 0, 0, n * n / 2)))
    assert alone.prefill_occupancy_s(1024) == pytest.approx(float(alone.prefill_latency_s(1024)))
    for b, c in ((1, 1024), (40, 50_000)):
        assert alone.decode_step_s(b, c) == pytest.approx(float(whole.seconds(b, b, c)))


@pytest.mark.parametrize("engine", ["any", "vllm", "sglang"])
@pytest.mark.parametrize(
    ("model", "precision"),
    [("gpt-oss-120b", "fp16"), ("Qwen3-30B-A3B", "fp16"), ("DeepSeek-V3", "fp8")],
)
def test_one_stage_of_a_mixture_is_what_simulate_plays(engine, model, precision):
    n = np.unique(np.geomspace(1, 500_000, 80).round())
    settings = CostSettings(engine=EngineSpec(name=engine, precision=precision))
    costs = CostModel(cluster("current-mixed-32"), llm(model), settings)
    for t in (1, 2, 4, 8):
        group = Pipeline(costs, (PipelineStage(0, t, costs.llm.layers),))
        own = step_model(group)
        there = resolve(
            group.machines[0].linked_gpu, costs.llm, t, engine=engine, precision=precision
        ).step
        for one in ((n, 0, 0.0, n * n / 2), (n, n, 700.0 * n, 0.0), (n, 7, 900.0, n)):
            assert own.seconds(*one) == pytest.approx(there.seconds(*one), rel=1e-8)


def test_experts_of_all_stages_are_those_of_the_model():
    """Shares of the layers on equal GPUs add up, and beyond the knots the last slope goes on."""
    costs = CostModel(cluster("thunderserve-a100-8"), llm("Qwen3-30B-A3B"), IN_PAPERS)
    whole = Pipeline(costs, (PipelineStage(0, 2, 48),))
    parts = Pipeline(costs, (PipelineStage(0, 2, 11), PipelineStage(0, 2, 37)))
    n = np.array([0.0, 1.0, 37.0, 5000.0, 1e6, 2e6])
    assert parts.stage_seconds(n).sum(axis=0) == pytest.approx(whole.stage_seconds(n)[0])
    roofline = for_gpu(costs.machines[0].linked_gpu, costs.llm, 2, layers=1)
    rates = costs.rates(0, 2)
    exact = roofline.terms(n)["experts"]
    assert rates.experts_s(n) == pytest.approx(exact, rel=0.01)
    assert rates.experts_s(rates.bends) == pytest.approx(roofline.terms(rates.bends)["experts"])


def test_memory_of_equal_stages_is_the_budget_of_an_instance(pair):
    for gpus, stages in ((2, 1), (4, 1), (2, 2), (1, 4)):
        budget = Budget(MODEL, pair.machines[0].gpu, tensor_parallel=gpus, pipeline_parallel=stages)
        layers = [stage.layers for stage in budget.stages]
        found = pair.pipeline([PipelineStage(0, gpus, held) for held in layers])
        assert found.kv_tokens == budget.max_tokens


def test_two_stages_add_up_to_latency_and_the_slower_one_is_the_occupancy(pair):
    mixed = pair.pipeline([PipelineStage(0, 2, 30), PipelineStage(1, 2, 30)])
    parts = mixed.stage_seconds(1024.0, 0.0, 1024.0**2 / 2)[:, 0]
    hop = 1e-4 + 1024 * MODEL.activation_bytes_per_token("fp16") / (5e9 * 0.56)
    assert mixed.prefill_latency_s(1024) == pytest.approx(parts.sum() + hop)
    assert mixed.prefill_occupancy_s(1024) == pytest.approx(parts.max())
    # Two microbatches of 5 requests rotate: the slower stage works all the time, or the rest waits.
    half = mixed.stage_seconds(5.0, 5000.0)[:, 0]
    turn = half.sum() + 2e-4 + 5 * MODEL.activation_bytes_per_token("fp16") / (5e9 * 0.56)
    assert mixed.decode_step_s(10, 10_000) == pytest.approx(max(turn, 2 * half.max()))


def test_the_replica_takes_the_times_of_its_pipeline(pair):
    mixed = pair.pipeline([PipelineStage(0, 2, 36), PipelineStage(1, 2, 24)])
    decode = step_model(mixed, "decode")
    for b, each in ((1, 500), (8, 1000), (20, 1200)):
        assert decode.decode_seconds([each] * b) == pytest.approx(
            float(mixed.decode_step_s(b, b * each)), rel=1e-9
        )
    prefill = step_model(mixed, "prefill")
    fixed, per_token = lag(mixed)
    for n in (256, 700, 2048):
        first = float(prefill.prefill_seconds([n])) + fixed + per_token * n
        assert first == pytest.approx(float(mixed.prefill_latency_s(n)), rel=0.02)
    assert lag(pair.pipeline([PipelineStage(0, 4, 60)])) == (0.0, 0.0)


def test_price_and_gpus_of_a_mixed_replica(pair):
    mixed = replica(
        pair.pipeline([PipelineStage(0, 2, 36), PipelineStage(1, 2, 24)]), "m", "decode"
    )
    assert mixed.usd_per_h == pytest.approx(2 * 0.403 + 2 * 0.307)
    assert (mixed.gpu, mixed.gpus) == (None, 4)


def test_what_cannot_be_is_refused(pair):
    with pytest.raises(InfeasibleError, match="do not fit 2 x RTX-3090Ti"):
        pair.pipeline([PipelineStage(1, 2, 60)])
    with pytest.raises(ParameterError, match="do not hold the 60 layers"):
        pair.pipeline([PipelineStage(0, 2, 30)])
    with pytest.raises(ParameterError, match="which has 4"):
        pair.pipeline([PipelineStage(0, 4, 30), PipelineStage(0, 2, 30)])
    with pytest.raises(ParameterError, match="cannot share"):
        CostModel(cluster("thunderserve-a100-8"), MODEL, IN_PAPERS).rates(0, 8)  # 52 heads


def test_most_layers_leave_room_for_a_cache(pair):
    for machine, gpus in ((0, 1), (1, 1), (1, 2)):
        most = pair.most_layers(machine, gpus, first=True, last=False)
        rates = pair.rates(machine, gpus)
        ends = pair.end_bytes(first=True, last=False)
        free = rates.usable_bytes - ends - most * rates.layer_bytes
        assert 0 < free <= rates.layer_bytes


def test_bandwidths_are_shares_of_the_line_rate():
    model = CostModel(
        cluster("thunderserve-a40-3090ti-40gbit"), MODEL, CostSettings(network_share=0.5)
    )
    assert model.bandwidth_gbs == pytest.approx(np.array([[24.0, 2.5], [2.5, 24.0]]))
