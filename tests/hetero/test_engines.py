"""Engines as data, and that every planner proposes only what the engine can run."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from hetero import catalog, memory
from hetero.apps.cards.request import request
from hetero.apps.export import Service, kubernetes, routing, vllm
from hetero.catalog import serving_engine
from hetero.catalog.engines import EngineStage, serving_engines
from hetero.catalog.precision import PRECISION_BITS
from hetero.cluster import Cluster, Machine, Network
from hetero.costs.cost import IN_PAPERS, CostModel, CostSettings, PipelineStage
from hetero.costs.groups import Fleet
from hetero.costs.replicas import replica
from hetero.engines import EngineSpec
from hetero.errors import ExportError, ParameterError
from hetero.planners import ground
from hetero.planners.bound import bound
from hetero.plans import Plan
from hetero.question import Question
from hetero.search.portfolio import Tried, ask, planner, planners, portfolio
from hetero.simulator import Slo
from tests.hetero.apps.export.test_vllm import flags
from tests.hetero.engine_plans import (
    CHATS,
    LITTLE,
    MORE,
    OF_GROUPS,
    SEEDS,
    as_in_papers,
    planned,
    services,
)
from tests.hetero.engine_plans import fleet as drawn

THIRTY = catalog.llm("LLaMA-1-30B")
VLLM, ANY = serving_engine("vllm"), serving_engine("any")


def stage(gpu: str, gpus: int = 2, machine: str = "m") -> EngineStage:
    return EngineStage(machine, gpu, catalog.gpu(gpu).vendor, gpus)


def fleet(*machines: tuple[str, int]) -> Cluster:
    """Machines of one region on 100 Gbit/s."""
    found = tuple(
        Machine(f"{gpu}-{k}", catalog.gpu(gpu), n, usd_per_h=2.0 * n)
        for k, (gpu, n) in enumerate(machines)
    )
    return Cluster("a mix", found, Network(within_region=catalog.link("Ethernet-100G")))


MIXED = fleet(
    ("A100-SXM-80GB", 2), ("L40S", 4), ("L40S", 4), ("A10G", 2), ("A10G", 2), ("MI300X", 2)
)


def asked_of(asked: Question, **how: Any) -> Question:
    """A question with other options of its engine, or of its own."""
    own = {name: how.pop(name) for name in [*how] if name in Question.__dataclass_fields__}
    name = own.pop("engine", "vllm")
    return replace(asked, engine=EngineSpec(name=name, **how), **own)


def question(cluster: Cluster = MIXED, **how: object) -> Question:
    asked = as_in_papers(cluster, THIRTY, CHATS, 2.0, Slo(ttft_s=4.0, tpot_s=0.3), least_s=10.0)
    return asked_of(asked, **how)


@lru_cache(maxsize=16)
def tried(name: str) -> Tried:
    return ask(planner(name, LITTLE), question())


def keeps_the_rules(plan: Plan, cluster: Cluster, engine: str = "vllm") -> None:
    """Every group is one that the engine runs, and both ends of a transfer are of one platform."""
    rules = serving_engine(engine)
    makers = {machine.gpu.name: machine.gpu.vendor for machine in cluster.machines}
    ends: dict[str, list[EngineStage]] = {"prefill": [], "decode": [], "both": []}
    for group in plan.groups:
        stages = [EngineStage(m, gpu, makers[gpu], n) for m, gpu, n, _ in group.stages]
        assert rules.misfit(group.name, stages, group.phase) is None
        assert len({one.gpu for one in stages}) == 1
        ends[group.phase].append(stages[0])
    assert all(rules.splits(a, b) for a in ends["prefill"] for b in ends["decode"])


def test_rows_name_known_data_types_and_every_engine_has_sources() -> None:
    assert serving_engines().names == ("any", "vllm", "sglang", "trtllm")
    for engine in serving_engines():
        assert engine.source
        assert engine.limited is (engine.name != "any")
        for row in engine.platforms:
            assert row.source
            assert row.date
            assert row.image
            assert row.resource
            assert row.devices
            assert set(row.weights) | set(row.kv_caches) <= set(PRECISION_BITS)
    with pytest.raises(ParameterError, match="no engine 'tgi'"):
        serving_engine("tgi")


@pytest.mark.parametrize(
    ("stages", "phase", "sentence"),
    [
        ([stage("H100-SXM"), stage("L40S", machine="n")], "both", "GPUs of one type"),
        ([stage("H100-SXM"), stage("MI300X", machine="n")], "both", "GPUs of one type"),
        ([stage("L40S", 4), stage("L40S", 2)], "both", "one tensor-parallel degree"),
        ([stage("L40S"), stage("L40S", machine="n"), stage("L40S")], "both", "has left"),
        ([stage("L40S"), stage("L40S"), stage("L40S", machine="n")], "both", "same number"),
        ([stage("L40S"), stage("L40S")], "decode", "engines of one stage"),
        ([stage("Gaudi3"), stage("Gaudi3")], "both", "has none there"),
        ([stage("Arc-Pro-B60"), stage("Arc-Pro-B60", machine="n")], "both", "none across machines"),
        ([stage("Gaudi3")], "prefill", "no connector"),
        ([EngineStage("m", "X1", "Groq", 1)], "both", "does not run on it"),
        ([stage("L40S"), stage("L40S")], "prefill", ""),
        ([stage("Arc-Pro-B60"), stage("Arc-Pro-B60")], "both", ""),
        ([stage("MI300X")], "decode", ""),
        ([EngineStage("m", "own", "", 2)], "both", ""),
    ],
)
def test_each_rule_has_its_sentence(stages: list[EngineStage], phase: str, sentence: str) -> None:
    found = VLLM.misfit("pair", stages, phase)
    assert sentence in found.what if found is not None else not sentence
    assert ANY.misfit("pair", stages, phase) is None


def test_degrees_divide_heads_kv_heads_and_width() -> None:
    assert [t for t in range(1, 53) if ANY.divides(THIRTY, t)] == [1, 2, 4, 13, 26, 52]
    assert [t for t in range(1, 53) if VLLM.divides(THIRTY, t)] == [1, 2, 4]
    qwen = catalog.llm("Qwen2.5-7B")  # 28 heads, 4 KV heads
    assert [t for t in (1, 2, 4, 7, 14) if ANY.divides(qwen, t)] == [1, 2, 4, 7, 14]
    assert [t for t in (1, 2, 4, 7, 14) if VLLM.divides(qwen, t)] == [1, 2, 4]


def test_what_an_engine_does_not_run_on() -> None:
    assert "does not run on V100" in VLLM.lacks(catalog.gpu("V100-16GB"))
    assert VLLM.lacks(catalog.gpu("MI300X"), "fp8") == ANY.lacks(catalog.gpu("V100-16GB")) == ""
    assert "no int8 on MI300X" in VLLM.lacks(catalog.gpu("MI300X"), "int8")
    assert "does not run on MI300X" in serving_engine("trtllm").lacks(catalog.gpu("MI300X"))
    assert VLLM.splits(stage("H100-SXM"), stage("L40S"))
    assert not VLLM.splits(stage("H100-SXM"), stage("MI300X"))


def test_groups_of_a_fleet_keep_the_rules() -> None:
    settings = CostSettings(engine=EngineSpec())
    model = CostModel(MIXED, THIRTY, settings)
    free = Fleet(CostModel(MIXED, THIRTY, IN_PAPERS))
    held = Fleet(model)
    mixed, uneven, equal = ((0, 2), (1, 4)), ((1, 4), (2, 2)), ((3, 2), (4, 2))
    assert free.fits(mixed)
    assert free.fits(uneven)
    assert free.fits(equal)
    assert not held.fits(mixed)
    assert not held.fits(uneven)
    assert held.fits(equal)
    assert free.joined(((3, 2), (4, 2), (5, 1))) == [((3, 2), (4, 2), (5, 1))]
    assert held.joined(((3, 2), (4, 2), (5, 1))) == [((5, 1),), equal][::-1]
    assert model.misfit([PipelineStage(1, 2, 30), PipelineStage(1, 2, 30)]) is None
    assert model.misfit([PipelineStage(0, 2, 30), PipelineStage(1, 2, 30)]) is not None


@pytest.mark.parametrize("name", [one.name for one in planners()])
def test_every_planner_keeps_the_rules_or_says_that_it_cannot(name: str) -> None:
    found = tried(name)
    if name not in OF_GROUPS:
        assert found.plan is None
        assert "hold the whole model" in found.reason or "is dense" in found.reason
        return
    assert found.plan is not None, found.reason
    keeps_the_rules(found.plan, MIXED)
    service = Service.of_plan(found.plan, THIRTY, "a mix")
    assert all(vllm.commands(service, one) for one in service.servings)


def test_any_engine_may_mix() -> None:
    free = question(engine="any")
    small = fleet(("L40S", 1), ("A10G", 2))  # neither holds the model alone
    found = ask(planner("HexGen", LITTLE), replace(free, cluster=small, rate_rps=0.1))
    assert found.plan is not None
    assert len(found.plan.groups[0].gpus) == 2
    refused = ask(planner("HexGen", LITTLE), question(small, rate_rps=0.1))
    assert refused.plan is None
    assert "fits no GPUs of one type of a mix" in refused.reason
    assert "vLLM runs a replica on GPUs of one type" in refused.reason


def test_improvements_keep_the_rules() -> None:
    asked = [planner(name, LITTLE) for name in ("tensor-parallel search", "phase splitting")]
    found = portfolio(question(), effort=LITTLE, planners=asked)
    assert len(found.tried) > 2  # a plan that was improved is beside the two
    keeps_the_rules(found.plan, MIXED)


def test_kv_caches_travel_as_the_engine_sends_them() -> None:
    assert question().transfer_bits == 16
    assert question(engine="any").transfer_bits == 4
    assert question(engine="any", kv_transfer_bits=8).transfer_bits == 8
    with pytest.raises(ParameterError, match="in 16 bits or more between engines of vLLM"):
        question(kv_transfer_bits=4)
    plan = tried("phase splitting").plan
    assert plan is not None
    assert plan.deployment is not None
    assert {link.compression for *_, link in plan.deployment.links} == {1.0}
    assert "KV caches travel in 16 bits." in plan.notes


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE)]
)
def test_every_plan_of_a_fleet_for_vllm_exports(seed: int) -> None:
    question, tried = planned(seed)
    engine = serving_engine("vllm")
    assert not any(engine.lacks(gpu) for gpu in question.cluster.gpu_types.values())
    for one in tried:
        assert one.plan is not None
        keeps_the_rules(one.plan, question.cluster)
    for service in services(seed):
        assert kubernetes.manifests(service)
        for serving in service.servings:
            where = serving.parts[0].platform
            assert where is not None
            for command in vllm.commands(service, serving):
                assert command.env[0][0] == where.devices
                words = flags(command.argv)
                assert words["--tensor-parallel-size"] == serving.parts[0].degrees[0]


def test_fleets_are_of_many_kinds() -> None:
    vendors = {machine.gpu.vendor for seed in SEEDS for machine in drawn(seed).machines}
    assert {"NVIDIA", "AMD"} <= vendors


def test_mixtures_of_experts_are_judged_by_one_source_of_step_times() -> None:
    """Islands of the thesis's model for the papers' systems alone, replicas for engines."""
    here = question(fleet(("H200-SXM", 8)), llm=catalog.llm("Mixtral-8x7B"))
    assert "analytic model" in ask(planner("islands exact", LITTLE), here).reason
    found = ask(planner("tensor-parallel search", LITTLE), here)
    assert found.plan is not None
    assert found.score is not None
    keeps_the_rules(found.plan, here.cluster)
    limit = bound(here)
    assert limit is not None
    assert 0 < found.score.goodput_rps.mean <= limit.rps(here.goal)
    service = Service.of_plan(found.plan, here.llm, "experts", precision="fp16")
    words = flags(vllm.commands(service, service.servings[0])[0].argv)
    assert words["--tensor-parallel-size"] == service.servings[0].gpus
    assert "--enable-expert-parallel" not in words
    papers = asked_of(here, engine="any")
    assert "analytic model" in ask(planner("tensor-parallel search", LITTLE), papers).reason
    assert ask(planner("islands exact", LITTLE), papers).plan is not None
    # The thesis has no other models: pipelines of them are anybody's.
    others = replace(papers, llm=catalog.llm("Qwen3-30B-A3B"))
    assert not ground.analytic(others)
    assert ground.unfit_layers(others) is None


def test_quantised_experts_are_served_as_they_ship() -> None:
    here = question(fleet(("H200-SXM", 2)), llm=catalog.llm("gpt-oss-120b"))
    assert ground.unfit(here) is None
    assert "as it is" in (ground.unfit(asked_of(here, precision="fp8")) or "")
    found = ask(planner("tensor-parallel search", LITTLE), here)
    assert found.plan is not None
    service = Service.of_plan(found.plan, here.llm, "experts", precision="fp16")
    assert flags(vllm.commands(service, service.servings[0])[0].argv)["--dtype"] == "auto"


def test_a_device_of_ones_own_exports_as_its_vendors() -> None:
    own = replace(catalog.gpu("MI300X"), name="X1", aliases=())
    here = Cluster("own", (Machine("m", own, 2),))
    found = ask(planner("tensor-parallel search", LITTLE), question(here))
    assert found.plan is not None
    service = Service.of_plan(found.plan, THIRTY, "own")
    env = dict(vllm.commands(service, service.servings[0])[0].env)
    assert "HIP_VISIBLE_DEVICES" in env
    assert serving_engine("trtllm").lacks(own) == "TensorRT-LLM does not run on X1"


def test_a_plan_for_another_engine_is_written_as_a_routing_table() -> None:
    nvidia = fleet(("L40S", 4), ("L40S", 4))
    found = ask(planner("Mélange", LITTLE), question(nvidia, engine="sglang"))
    assert found.plan is not None
    keeps_the_rules(found.plan, nvidia, "sglang")
    service = Service.of_plan(found.plan, THIRTY, "two", engine="sglang")
    table = routing.table(service, {one.name: "http://host" for one in service.servings})
    assert len(table.engines) == len(service.servings)
    with pytest.raises(ExportError, match="is for SGLang"):
        kubernetes.manifests(service)


PAIR = fleet(("RTX-A5000", 2))


def a_question(**more: Any) -> Question:
    return asked_of(as_in_papers(PAIR, catalog.llm("Llama-3-8B"), CHATS, 1.0), **more)


def kv_tokens(question: Question, gpus: int = 2) -> int:
    costs = ground.costs(question)
    return costs.pipeline([PipelineStage(0, gpus, question.llm.layers)]).kv_tokens


def test_caches_of_plans_are_what_the_engine_leaves() -> None:
    llm, card = catalog.llm("Llama-3-8B"), PAIR.machines[0].gpu
    rule = serving_engine("vllm").memory_of()
    assert rule is not None
    room = memory.engine_room(rule, card, llm, 2, max_batch=256, max_step_tokens=2048)
    own = memory.Budget(llm, card, tensor_parallel=2, **room._asdict())
    assert kv_tokens(a_question()) == pytest.approx(own.max_tokens, abs=1)
    # An older release takes less of the memory, and a larger step holds more of it.
    assert kv_tokens(a_question(release="0.19")) != kv_tokens(a_question())
    assert kv_tokens(a_question(max_step_tokens=16384)) < kv_tokens(a_question())
    assert kv_tokens(a_question(memory_fraction=0.8)) < kv_tokens(a_question())
    # The papers' systems: 90 % of the memory less 2 GiB.
    plain = memory.Budget(llm, card, tensor_parallel=2)
    assert kv_tokens(a_question(engine="any")) == pytest.approx(plain.max_tokens, abs=1)


def test_printed_caches_take_the_place_of_assumed_ones() -> None:
    asked = request(
        PAIR, model="Llama-3-8B", trace=CHATS, slo="ttft=1s", kv_tokens={"2xRTX-A5000": 123_456}
    ).question
    assert asked.engine.kv_tokens == (("RTX-A5000", 2, 123_456),)
    assert kv_tokens(asked) == pytest.approx(123_456, abs=1)
    alias = request(PAIR, model="Llama-3-8B", trace=CHATS, slo="ttft=1s", kv_tokens={"A5000": 9000})
    assert kv_tokens(alias.question, 1) == pytest.approx(9000, abs=1)
    for wrong in ({"L4": 9000}, {"0xA5000": 9000}, {"A5000": 0}):
        with pytest.raises(ParameterError, match="is none of"):
            request(PAIR, model="Llama-3-8B", trace=CHATS, slo="ttft=1s", kv_tokens=wrong)
    with pytest.raises(ParameterError, match="No KV cache of 999,999 tokens"):
        kv_tokens(a_question(kv_tokens=(("RTX-A5000", 1, 999_999),)))


def test_engines_of_plans_are_as_asked() -> None:
    made = a_question().engine.limits(PAIR.machines[0].gpu)
    assert (made.max_step_tokens, made.schedule_ahead, made.prefix_cache) == (2048, True, True)
    own = a_question(max_step_tokens=512, schedule_ahead=False, prefix_cache=False)
    made = own.engine.limits(PAIR.machines[0].gpu)
    assert (made.max_step_tokens, made.schedule_ahead, made.prefix_cache) == (512, False, False)
    old = a_question(release="0.6.3").engine.limits(PAIR.machines[0].gpu)
    assert (old.schedule_ahead, old.prefix_cache) == (False, False)
    assert not a_question(engine="any").engine.limits(PAIR.machines[0].gpu).prefix_cache


def test_no_bound_holds_where_prompts_are_found_in_a_cache() -> None:
    assert bound(a_question()) is not None
    shared = CHATS.with_prefix(0.5)
    assert bound(replace(a_question(), trace=shared)) is None
    assert bound(replace(a_question(prefix_cache=False), trace=shared)) is not None


def test_vllm_0_14_prepares_no_steps_ahead_in_pipelines() -> None:
    fleet = Cluster("two", (Machine("a", catalog.gpu("L4"), 2),))
    alone, piped = [], []
    for release in ("0.14.1", "0.15", ""):
        costs = CostModel(
            fleet, catalog.llm("Llama-3-8B"), CostSettings(engine=EngineSpec(release=release))
        )
        for found, layers in ((alone, (32,)), (piped, (18, 14))):
            made = replica(costs.pipeline([PipelineStage(0, 1, n) for n in layers]), "r")
            found.append((made.engine.schedule_ahead, float(made.step.decode_seconds([500]))))
    assert alone[0] == alone[1] == alone[2] == (True, alone[0][1])
    assert piped[1] == piped[2] == (True, piped[1][1])
    assert not piped[0][0]
    assert piped[0][1] > piped[1][1] + 1.4e-3
