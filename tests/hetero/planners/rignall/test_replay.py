"""Plans of islands, simulated."""

from __future__ import annotations

import numpy as np
import pytest

from hetero.cluster import cluster
from hetero.deployment import Engine
from hetero.errors import InfeasibleError
from hetero.planners.rignall.inner import solve
from hetero.planners.rignall.model import IslandModel, layout_of
from hetero.planners.rignall.parallelism import READINGS
from hetero.planners.rignall.rates import IslandClass
from hetero.planners.rignall.replay import deployment, router
from hetero.simulator import simulate
from hetero.simulator.sustained import saturation
from hetero.workload import Trace

H200, H800, H20 = IslandClass("H200-SXM", 8), IslandClass("H800-SXM", 16), IslandClass("H20", 16)
LAYOUT = {H200: 2, H800: 2, H20: 1}


def fixed(count: int, input_tokens: int, output_tokens: int) -> Trace:
    """Equal requests at one per second; rescaled by who plays them."""
    ones = np.ones(count, np.int32)
    return Trace(np.arange(count, dtype=float), input_tokens * ones, output_tokens * ones)


def mixed(count: int = 4000) -> Trace:
    """Every length is the middle of a range of 500, so a plan knows the lengths exactly."""
    rng = np.random.default_rng(0)
    lengths = rng.choice([250, 750, 3250], size=count, p=[0.5, 0.3, 0.2])
    return Trace(np.arange(float(count)), lengths, rng.integers(20, 60, count))


def test_a_plan_carries_what_it_promises() -> None:
    trace = mixed(20_000)  # fewer are over before the decode batch has filled
    model = IslandModel.of_trace(trace, 500)
    plan = solve(model.rates(LAYOUT), LAYOUT)
    assert {g.phase for g in plan.groups} == {"prefill", "decode"}
    simulated = deployment(model, plan)
    for among in ("shares", "load"):
        found = saturation(simulated, trace, router(model, plan, among=among))  # type: ignore[arg-type]
        assert found == pytest.approx(plan.served_rps, rel=0.03)
    # Each prefill group is as busy as planned.
    run = simulate(simulated, trace.rescale(rate_rps=plan.served_rps), router(model, plan))
    span_s = len(trace) / plan.served_rps
    busy = [
        b / span_s
        for b, r in zip(run.replicas["busy_s"], simulated.replicas, strict=True)
        if r.role == "prefill"
    ]
    assert busy == pytest.approx([1.0] * len(busy), abs=0.01)


def test_replicas_are_the_groups_of_the_chosen_parallelism() -> None:
    model = IslandModel.of_trace(mixed(), 500)
    plan = solve(model.rates(LAYOUT), LAYOUT)
    simulated = deployment(model, plan, engine=Engine(admission="paged"))
    gpus = dict.fromkeys(("prefill", "decode"), 0)
    for replica in simulated.replicas:
        gpus[replica.role] += replica.gpus
        assert replica.kv_bytes_per_token == 61 * 576
    for phase in ("prefill", "decode"):
        used = [g for g in plan.of(phase) if g.share.any()]  # type: ignore[arg-type]
        assert gpus[phase] == sum(g.count * g.island.size for g in used)
    decode = next(r for r in simulated.replicas if r.role == "decode")
    island = next(g.island for g in plan.of("decode"))
    latency = model.latency(island.gpu)
    # tp1 dp1: every GPU holds what its weights leave, and up to 1,024 requests.
    assert model.benchmark(island.gpu, island.size, "decode").choice == "tp1 dp1"
    assert decode.engine.max_batch == 1024 * island.size
    assert decode.engine.admission == "paged"
    free = float(latency.free_bytes(tp=1, gpus=island.size))
    assert decode.kv_tokens == int(island.size * free / (61 * 576))
    assert decode.usd_per_h == {"H200-SXM": 4, "H800-SXM": 2, "H20": 1}[island.gpu] * island.size


def test_one_request_takes_the_time_of_the_latency_model() -> None:
    model = IslandModel.of_trace(fixed(10, 1000, 100), 2000)
    plan = solve(model.rates(LAYOUT), LAYOUT)
    simulated = deployment(model, plan)
    run = simulate(simulated, fixed(1, 1000, 100), router(model, plan))
    row = run.requests[0]
    first, last = (simulated.replicas[row[k]] for k in ("node", "decode_node"))
    assert first.gpu is not None
    assert last.gpu is not None
    found = model.benchmark(
        first.gpu.name,
        next(g.island.size for g in plan.of("prefill") if g.island.gpu == first.gpu.name),
        "prefill",
    )
    tp, dp = found.tp[found.chosen], found.dp[found.chosen]
    exact = model.latency(first.gpu.name).prefill(1000, tp=tp, dp=dp).total_ms
    assert 1e3 * float(row["first_token_s"]) == pytest.approx(float(exact))
    step = model.latency(last.gpu.name).decode_step(
        *np.broadcast_arrays(1000 + np.arange(1.0, 100.0), 1 / last.gpus, 1.0, float(last.gpus))
    )
    took = float(row["finish_s"] - row["first_token_s"] - row["transfer_s"])
    assert took == pytest.approx(1e-3 * float(step["tpot_ms"].sum()), rel=1e-6)


def test_requests_stay_with_the_islands_of_their_range() -> None:
    trace = mixed()
    model = IslandModel.of_trace(trace, 500)
    plan = solve(model.rates(LAYOUT), LAYOUT)
    simulated = deployment(model, plan)
    run = simulate(simulated, trace.rescale(rate_rps=0.9 * plan.served_rps), router(model, plan))
    assert run.counts == {"finished": 4000, "rejected": 0}
    ranges = model.ranges.index(trace.input_tokens)
    flow = plan.flow_rps("prefill")
    names = [f"prefill {g.island.size}x{g.island.gpu}" for g in plan.of("prefill")]
    went = np.array([simulated.replicas[k].name.rsplit(" ", 1)[0] for k in run.requests["node"]])
    for j in range(len(model.ranges)):
        share = flow[:, j] / flow[:, j].sum()
        found = [float(np.mean(went[ranges == j] == name)) for name in names]
        np.testing.assert_allclose(found, share, atol=0.02)


def test_equal_islands_in_separate_groups_have_names_of_their_own() -> None:
    model = IslandModel.of_trace(mixed(), 500)
    plan = solve(model.rates(LAYOUT), LAYOUT, "flow")
    simulated = deployment(model, plan)
    assert len({r.name for r in simulated.replicas}) == len(simulated.replicas)
    run = simulate(simulated, mixed().head(100), router(model, plan))
    assert run.counts["finished"] == 100


def test_islands_that_cannot_hold_the_weights_are_named() -> None:
    model = IslandModel.of_trace(mixed(), 500, reading=READINGS["thesis"])
    layout = {IslandClass("H200-SXM", 2): 2, H20: 2}
    plan = solve(model.rates(layout), layout)
    with pytest.raises(InfeasibleError, match=r"2 x H200-SXM cannot prefill with tp2 dp1: the wei"):
        deployment(model, plan)


def test_layouts_of_clusters() -> None:
    layout = layout_of(cluster("rignall-islands-d"))
    assert layout[IslandClass("B300-SXM", 4)] == 2
    assert layout[IslandClass("H20", 8)] == 4
    assert sum(c.size * n for c, n in layout.items()) == 256
