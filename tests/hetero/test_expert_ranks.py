"""Experts spread over GPUs, and ranks in lockstep: closed forms, and a slow truth beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetero import catalog, workload
from hetero.apps.export import Service, vllm
from hetero.cluster import Cluster, Machine
from hetero.deployment import Deployment, Engine, Replica
from hetero.engines import EngineSpec, replicated
from hetero.errors import ParameterError
from hetero.latency import for_gpu
from hetero.latency.models.roofline import Roofline
from hetero.latency.overheads import with_overheads
from hetero.memory import Budget
from hetero.planners.bound import bound
from hetero.plans import Plan
from hetero.routers import LeastTokens
from hetero.search.portfolio import ask, planner
from hetero.simulator import Slo, simulate
from hetero.simulator.sustained import arrivals
from tests.hetero.apps.export.test_vllm import flags
from tests.hetero.engine_plans import as_in_papers
from tests.hetero.ranks_oracle import Group, run

H200, DEEPSEEK = catalog.gpu("H200-SXM"), catalog.llm("DeepSeek-V3")
CHATS = workload.load("azure2023_conv").sample(600, np.random.default_rng(0))
LLAMA = catalog.llm("Llama-3.1-8B")
SMALL = Machine("small", catalog.gpu("L40S"), 2)
OTHERS = ("tensor-parallel search", "Mélange")
N = np.array([1.0, 5.0, 8.0, 64.0, 777.0, 4096.0])


def spread(ranks: int, gpus: int = 1, **more: float) -> Roofline:
    found = for_gpu(H200, DEEPSEEK, gpus, precision="fp8", expert_ranks=ranks)
    return replace(found, **more)  # type: ignore[arg-type]


def group(ranks: int) -> Group:
    found = spread(ranks)
    return Group(H200, DEEPSEEK, found.efficiency, found.experts, ranks)


def test_experts_spread_over_one_gpu_are_those_of_one() -> None:
    for case in ((N, 0, 0.0, N * N / 2), (N, N, 900.0 * N, 0.0), (N + 3, 3, 900.0, N)):
        assert (spread(1).seconds(*case) == spread(0).seconds(*case)).all()


def test_experts_spread_in_one_rank_wait_for_the_busiest_gpu() -> None:
    """All else is tensor parallelism's; many tokens visit all GPUs alike."""
    whole, shared = (spread(k, 8).terms(np.array([16.0, 1e7])) for k in (1, 0))
    extra = whole.pop("experts") / shared.pop("experts")
    assert extra[0] > 1.0
    assert extra[1] == pytest.approx(1.0, rel=0.01)
    assert "exchange" not in whole
    assert all((whole[name] == shared[name]).all() for name in shared)


def test_tokens_travel_as_in_an_all_gather_and_a_reduce_scatter() -> None:
    """Seven eighths of all hidden states arrive at each of 8 GPUs, and go back; free at no cost."""
    real = spread(8)
    free = replace(real.efficiency, link_efficiency=1e300, hop_latency_s=0.0)
    for e in (real.efficiency, free):
        sent = 7 / 8 * 4096 * 2 * DEEPSEEK.hidden
        want = 2 * 58 * (sent / (H200.link_gbs * 1e9 * e.link_efficiency) + 7 * e.hop_latency_s)
        assert replace(real, efficiency=e).terms(4096.0)["exchange"] == pytest.approx(want)


def test_steps_are_those_of_the_truth_where_ranks_are_alike() -> None:
    for ranks in (2, 8):
        model, truth = spread(ranks), group(ranks)
        for b in (1, 4, 40):
            own = truth.step_s([(b, 1000.0 * b, 0.0)] * ranks)
            every = ranks * b
            assert model.seconds(every, every, 1000.0 * every) == pytest.approx(own)
            step = model.step_model().seconds(every, every, 1000.0 * every)
            assert step == pytest.approx(own, rel=0.01)
        prompts = truth.step_s([(1200.0, 0.0, 1200.0**2 / 2)] * ranks)
        alike = replace(model, prompt_tokens=1200.0)
        n = 1200.0 * ranks
        assert alike.seconds(n, 0, 0.0, ranks * 1200.0**2 / 2) == pytest.approx(prompts)


def test_two_unequal_ranks_run_at_the_slower() -> None:
    truth, model = group(2), spread(2, prompt_tokens=1000.0)
    lone = [(1000.0, 0.0, 1000.0**2 / 2), (0.0, 0.0, 0.0)]
    assert truth.step_s(lone) == truth.rank_s(*lone[0]) + truth.shared_s(1000.0, 0.0)
    assert model.seconds(1000.0, 0, 0.0, 1000.0**2 / 2) == pytest.approx(truth.step_s(lone))
    odd = truth.step_s([(3.0, 3000.0, 0.0), (2.0, 2000.0, 0.0)])
    assert model.seconds(5.0, 5, 5000.0) == pytest.approx(odd)


@pytest.mark.parametrize("tokens", [16, 256])
def test_the_busiest_gpu_is_about_that_of_drawn_visits(tokens: int) -> None:
    """8 GPUs of 32 experts; 8 different experts to a token: within 15 % of the drawn mean."""
    rng = np.random.default_rng(1)
    drawn, read = [], []
    for _ in range(300):
        picks = np.argsort(rng.random((tokens, 256)), axis=1)[:, :8]
        drawn.append(np.bincount(picks.ravel() // 32, minlength=8).max())
        read.append(max(len(np.unique(picks[picks // 32 == g])) for g in range(8)))
    missed = (1 - 8 / 256) ** tokens
    own = 32 * (1 - missed)
    assert tokens + np.sqrt(2 * tokens * np.log(8)) == pytest.approx(np.mean(drawn), rel=0.15)
    bound = min(own + np.sqrt(2 * own * missed * np.log(8)), 32.0)
    assert bound == pytest.approx(np.mean(read), rel=0.15)


@pytest.mark.parametrize(("rate", "tpot", "ttft"), [(4.0, 0.05, 0.2), (16.0, 0.05, 0.2)])
def test_balanced_ranks_beside_ranks_in_lockstep(rate: float, tpot: float, ttft: float) -> None:
    """Means within these shares; ranks balanced to the token are off by far more."""
    trace = arrivals(CHATS, 500, rate, 0, "poisson")
    first, later = run(group(8), trace, chunk=2048)
    several = trace.output_tokens > 1
    inputs = trace.input_tokens.astype(np.float64)
    limits = Engine(batching="chunked", admission="paged", max_batch=8192, max_step_tokens=8 * 2048)
    seen = {}
    for name, prompt in (("whole", (inputs**2).sum() / inputs.sum()), ("shared", 0.0)):
        step = spread(8, prompt_tokens=float(prompt)).step_model()
        one = Replica("r", step, 10**7, 1.0, limits, gpu=H200, gpus=8)
        simulated = simulate(Deployment("one", (one,)), trace, LeastTokens())
        error = float(np.nanmean(simulated.tpot_s[several]) / later[several].mean() - 1)
        seen[name] = error, float(simulated.ttft_s.mean() / first.mean() - 1)
    assert abs(seen["whole"][0]) < tpot
    assert abs(seen["whole"][1]) < ttft
    assert seen["shared"][0] < -0.15
    assert seen["shared"][1] < -0.4


def test_ranks_hold_a_cache_each_and_share_the_experts() -> None:
    one, eight = (Budget(DEEPSEEK, H200, 8 // d, weight_precision="fp8", ranks=d) for d in (1, 8))
    assert one.gpus == eight.gpus == 8
    # On each GPU an eighth of the experts, and all of the rest.
    experts = DEEPSEEK.moe_layers * DEEPSEEK.experts * DEEPSEEK.expert_params
    missing = DEEPSEEK.weight_bytes("fp8") - eight.weight_bytes
    assert missing == pytest.approx(experts * 8.002 / 8 * 7 / 8, abs=2)
    # A latent cache is held once by a rank, and by each GPU of tensor parallelism.
    assert eight.max_tokens > 4 * one.max_tokens
    assert eight.max_tokens == 8 * int(eight.kv_capacity_bytes / eight.kv_bytes_per_token)
    machine = Cluster("one", (Machine("m", H200, 8),))
    spread = EngineSpec(precision="fp8", expert_ranks=4)
    found = replicated(machine, DEEPSEEK, {"m": 2}, spread).replicas
    assert [(replica.gpus, replica.name) for replica in found] == [(8, "m t=2")]


def test_what_an_engine_takes_per_request_is_shared_out() -> None:
    overheads = replace(catalog.serving_engine("vllm").overheads_of(), decoding_s=1e-3)
    kernels = spread(8).step_model()
    alone, shared = (with_overheads(kernels, overheads, DEEPSEEK, 1, k) for k in (1, 8))
    b = np.array([8, 17, 64])
    more = alone.seconds(b, b, 0.0) - shared.seconds(b, b, 0.0)
    assert more == pytest.approx(1e-3 * (b - np.ceil(b / 8)))


def test_only_experts_are_spread() -> None:
    with pytest.raises(ParameterError, match="not spread"):
        for_gpu(H200, LLAMA, expert_ranks=2)
    with pytest.raises(ParameterError, match="8 experts"):
        for_gpu(H200, catalog.llm("Mixtral-8x7B"), 2, expert_ranks=8)


def test_simulate_takes_the_flags_of_vllm(said, refused) -> None:
    words = "simulate rignall-budget-c --model gpt-oss-120b --degree 1 --data-parallel-size 2"
    few = ["--requests", "20", "--router", "hetero", "--rate", "1"]
    assert "2 ranks spread no experts" in refused(*words.split(), *few)
    spread = said(*words.split(), "--enable-expert-parallel", *few)
    assert "experts spread by 2 ranks" in spread


def test_a_planner_spreads_experts_where_that_carries_more() -> None:
    """DeepSeek-V3 on one machine: all its ranks are costed, none beyond the bound, and exported."""
    fleet = Cluster("one", (Machine("m", H200, 8, usd_per_h=32.0), Machine("n", H200, 1)))
    asked = as_in_papers(
        fleet,
        DEEPSEEK,
        CHATS,
        5.0,
        Slo(3.0, 0.2),
        engine=EngineSpec(precision="fp8"),
        least_s=10.0,
    )
    found = {name: ask(planner(name), asked) for name in ("expert parallelism", *OTHERS)}
    best = found["expert parallelism"]
    assert best.plan is not None
    assert best.score is not None
    for name in OTHERS:
        other = found[name].score
        assert other is not None
        assert best.score.goodput_rps.mean > 1.05 * other.goodput_rps.mean
    limit = bound(asked)
    assert limit is not None
    assert best.score.goodput_rps.mean < limit.rps(asked.goal)
    assert Plan.from_json(best.plan.to_json()) == best.plan
    (one,) = best.plan.groups
    copies = 8 // one.tensor
    service = Service.of_plan(best.plan, DEEPSEEK, "one", precision="fp8")
    words = flags(vllm.commands(service, service.servings[0])[0].argv)
    assert words["--tensor-parallel-size"] * words["--data-parallel-size"] == 8
    assert words["--enable-expert-parallel"]
    assert words["--max-num-seqs"] * copies == best.plan.deployment.replicas[0].engine.max_batch
    assert words["--max-num-batched-tokens"] == 8192


def test_who_has_no_experts_to_spread_says_so() -> None:
    dense = as_in_papers(
        Cluster("one", (Machine("m", H200, 8),)), LLAMA, CHATS, 5.0, engine=EngineSpec()
    )
    assert "experts of a mixture" in ask(planner("expert parallelism"), dense).reason
    few = replace(dense, llm=catalog.llm("Mixtral-8x22B"), cluster=Cluster("c", (SMALL,)))
    assert "fits no machine" in ask(planner("expert parallelism"), few).reason
