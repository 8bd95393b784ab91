"""One order of sources of step times, for every command and planner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetero import cluster
from hetero.catalog import gpu, link, llm, serving_engine
from hetero.costs.cost import IN_PAPERS, CostModel, CostSettings, PipelineStage
from hetero.costs.replicas import replica
from hetero.deployment import Deployment
from hetero.engines import EngineSpec, replicated
from hetero.latency import for_gpu
from hetero.latency.calibration.expected import error_of
from hetero.latency.resolve import resolve
from hetero.latency.sources.profiles import profiled_step
from hetero.latency.step import StepModel
from hetero.planners.bound import bound
from hetero.plans import Plan
from hetero.question import Question, drawn, step_error
from hetero.routers import Predictive, RoundRobin
from hetero.simulator import simulate
from hetero.simulator.uncertainty import JudgedPlan, propagate
from hetero.workload import Trace, load

PRO, EIGHT = gpu("RTX-PRO-6000-Server"), llm("Llama-3.1-8B")
OWN = StepModel.affine(floor_s=1.0, per_token_s=1e-3, per_cached_token_s=0.0)
FLEET = """
machines:
  - {name: big, gpu: H100-SXM, count: 2}
  - {name: small, gpu: A40, count: 1}
network:
  within_region: {bandwidth_gbit_s: 25, latency_ms: 0.1}
"""


@pytest.fixture
def fleet(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return cluster.find(str(path))


def times(step: StepModel) -> list[float]:
    n = np.array([1.0, 100.0, 2048.0])
    return step.seconds(n, [1, 8, 0], 500.0 * n).tolist()


def test_the_nearest_source_counts() -> None:
    own = resolve(PRO, EIGHT, own={PRO.name: OWN})
    assert (own.kind, times(own.step)) == ("own file", times(OWN))
    profile = resolve(PRO, EIGHT)
    assert times(profile.step) == times(profiled_step(PRO.name, EIGHT.name).model)
    # Not profiled with four: the sums of operators.
    four = resolve(PRO, EIGHT, 4)
    assert (four.kind, "vllm 0.24.0" in four.step.source) == ("operators", True)
    # No table of three.
    three = resolve(PRO, llm("Llama-3.1-70B"), 1)
    assert three.kind == "calibrated"
    assert times(three.kernels) == times(for_gpu(PRO, llm("Llama-3.1-70B")).step_model())


def test_models_of_one_shape_share_a_table_and_others_do_not() -> None:
    other = replace(EIGHT, name="my tune", source="config.json", max_position=4096)
    assert resolve(PRO, other).kind == "layer profile"
    assert resolve(PRO, replace(other, intermediate=14337)).kind == "calibrated"
    assert resolve(PRO, replace(other, biases="qkv")).kind == "calibrated"


def test_a_table_is_of_its_engine_precision_and_link() -> None:
    assert "sglang 0.5.14" in resolve(PRO, EIGHT, engine="sglang").step.source
    assert resolve(PRO, EIGHT, engine="any").kind == "calibrated"
    assert resolve(PRO, EIGHT, precision="fp8").kind == "calibrated"
    assert resolve(PRO, EIGHT, kv_precision="fp8").kind == "calibrated"
    slow = gpu("H100-SXM").linked(link("PCIe4-x16"))
    assert resolve(slow, EIGHT, 2).kind == "calibrated"
    assert resolve(slow, EIGHT, 1).kind == "operators"
    assert resolve(replace(PRO, mem_bw_gbs=999.0), EIGHT).kind == "calibrated"


def test_one_source_is_one_engine_generation() -> None:
    """Splitwise measured Llama-2-70B on these GPUs under an engine of 2023."""
    found = resolve(gpu("A100-SXM-80GB"), llm("Llama-2-70B"), 4)
    assert found.kind == "calibrated"
    assert "2023" not in found.step.source
    sglang = resolve(gpu("A100-SXM-80GB"), llm("Llama-2-70B"), 4, engine="sglang")
    assert "sglang" in sglang.step.source


def test_what_holds_for_one_host_alone_is_not_taken() -> None:
    assert resolve(gpu("L40S"), EIGHT, 2).kind == "operators"
    assert resolve(gpu("L40S"), EIGHT, 4).kind == "calibrated"


def test_a_table_that_is_estimated_counts_as_calibrated() -> None:
    found = resolve(PRO, llm("Qwen3-32B"), 2)
    assert found.kind == "layer profile"
    assert found.error == error_of("calibrated")


def test_the_nearest_roofline_is_near() -> None:
    for name, degree in (("H100-SXM", 2), ("RTX-4090", 1)):
        found = resolve(gpu(name), EIGHT, degree)
        near = replace(for_gpu(gpu(name), EIGHT, degree), efficiency=found.efficiency)
        for batch in (1, 16, 64):
            table = float(found.kernels.decode_seconds([1024] * batch))
            assert float(near.step_model().decode_seconds([1024] * batch)) == pytest.approx(
                table, rel=0.1
            )
        table = float(found.kernels.prefill_seconds([1024]))
        assert float(near.step_model().prefill_seconds([1024])) == pytest.approx(table, rel=0.15)


def test_the_expected_error_is_that_of_the_source() -> None:
    assert resolve(PRO, EIGHT).error == error_of("measured")
    assert resolve(gpu("A40"), EIGHT).error == error_of("carried")
    step = resolve(PRO, EIGHT).step
    assert step_error(PRO, step.level) == error_of("measured")
    assert step_error(PRO) == error_of("calibrated")


def test_an_engine_takes_its_time_around_its_kernels() -> None:
    newest = serving_engine("vllm").overheads_of()
    for name in ("H100-SXM", "A40"):  # operators, roofline
        found = resolve(gpu(name), EIGHT)
        more = found.step.decode_seconds([100] * 20) - found.kernels.decode_seconds([100] * 20)
        assert more == pytest.approx(newest.step_s + 20 * newest.decoding_s)
        assert found.step.request_s == newest.request_s > 0.0
        assert newest.releases in found.label
        old = resolve(gpu(name), EIGHT, release="0.5").step
        assert "0.4-0.6" in old.source
    # A profile has what its own release takes; older ones prepare a step when the last has ended.
    assert resolve(PRO, EIGHT).step.request_s == resolve(PRO, EIGHT, release="0.19").step.request_s
    early = resolve(PRO, EIGHT, release="0.12")
    assert early.step.decode_seconds([9]) > early.kernels.decode_seconds([9])
    for engine in ("any", "sglang"):  # nothing was fitted to it
        found = resolve(gpu("H100-SXM"), EIGHT, engine=engine)
        assert times(found.step) == times(found.kernels)


def test_ragged_batches_take_longer_where_the_profile_knows_it() -> None:
    trace = load("azure2023_conv").head(2000)
    ragged, equal = resolve(PRO, EIGHT, trace=trace).step, resolve(PRO, EIGHT).step
    assert ragged.decode_seconds([1000] * 64) > equal.decode_seconds([1000] * 64)


def test_replicas_have_the_table_by_default(fleet) -> None:
    one = replicated(fleet, EIGHT, {"big": 2}).replicas[0]
    assert times(one.step) == times(resolve(gpu("H100-SXM"), EIGHT, 2).step)
    assert one.step.level == "measured"


def test_costs_follow_the_table_of_the_engine(fleet) -> None:
    vllm = CostModel(fleet, EIGHT, CostSettings(engine=EngineSpec()))
    stage = PipelineStage(0, 2, EIGHT.layers)
    made = replica(vllm.pipeline([stage]), "one")
    table = resolve(gpu("H100-SXM"), EIGHT, 2).step
    assert times(made.step) == times(table)
    own = float(vllm.pipeline([stage]).decode_step_s(32, 32 * 1024.0))
    assert own == pytest.approx(float(table.decode_seconds([1024] * 32)), rel=0.1)
    prompt = float(vllm.pipeline([stage]).prefill_latency_s(1024.0))
    assert prompt == pytest.approx(float(table.prefill_seconds([1024])), rel=0.1)
    paper = CostModel(fleet, EIGHT, IN_PAPERS)
    assert replica(paper.pipeline([stage]), "one").step.source.startswith("roofline")
    a40 = [PipelineStage(1, 1, EIGHT.layers)]
    for costs, engine in ((vllm, "vllm"), (paper, "any")):
        made = replica(costs.pipeline(a40), "one").step
        roofline = resolve(gpu("A40"), EIGHT, engine=engine).step
        assert times(made) == pytest.approx(times(roofline), rel=1e-9)
        assert made.request_s == roofline.request_s


def test_no_run_with_measured_steps_exceeds_the_bound(fleet) -> None:
    chats = load("azure2023_conv").sample(400, np.random.default_rng(0)).all_at_once()
    question = Question(fleet, EIGHT, chats, 1.0, engine=EngineSpec())
    costs = CostModel(fleet, EIGHT, CostSettings(engine=EngineSpec()))
    most = bound(question).rps()
    for degree in (1, 2):
        stages = [PipelineStage(0, degree, EIGHT.layers)] * (2 // degree)
        nodes = [replica(costs.pipeline([one]), str(k)) for k, one in enumerate(stages)]
        plan = Plan("by hand", (), _deployment(nodes), RoundRobin(), "in turn", None)
        run = simulate(plan.deployment, chats, RoundRobin())
        assert len(chats) / run.span_s < most


def test_measured_steps_are_drawn_nearer_than_calibrated_ones(fleet) -> None:
    plans = {}
    for name, engine in (("table", "vllm"), ("roofline", "any")):
        costs = CostModel(fleet, EIGHT, CostSettings(engine=EngineSpec(name=engine)))
        node = replica(costs.pipeline([PipelineStage(0, 1, EIGHT.layers)]), "one")
        plans[name] = Plan("by hand", (), _deployment([node]), Predictive(), "hetero", None)
    question = Question(fleet, EIGHT, Trace([0.0], [100], [10]), 1.0)
    logs = {}
    for name, plan in plans.items():
        own = plan.deployment.replicas[0].step.decode_seconds([500])
        found = drawn(plan, question, 40)
        steps = [one.deployment.replicas[0].step.decode_seconds([500]) for one in found]
        logs[name] = np.log(np.array(steps) / own)
    ratio = error_of("measured").decode_sd / error_of("calibrated").decode_sd
    assert logs["table"].std() == pytest.approx(ratio * logs["roofline"].std(), rel=0.1)
    judge = {name: JudgedPlan(p.deployment, _first_token) for name, p in plans.items()}
    spread = propagate(judge, draws=40).values[:, :, 0].std(axis=1)
    assert spread[0] < spread[1]


def _first_token(deployment):
    return {"s": float(deployment.replicas[0].step.prefill_seconds([1000]))}


def _deployment(nodes):
    return Deployment("by hand", tuple(nodes))


def test_a_plan_keeps_the_level_of_its_steps(fleet) -> None:
    node = replicated(fleet, EIGHT, {"big": 1}).replicas
    plan = Plan("by hand", (), _deployment(node), Predictive(), "hetero", None)
    again = Plan.from_json(plan.to_json())
    assert [one.step.level for one in again.deployment.replicas] == ["measured"] * 2
