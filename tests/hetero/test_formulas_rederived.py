"""Formulas worked out again from the papers' text, in loops, on random inputs.

Nothing here shares code with the library beyond what states the input; each test names the place in
its paper. Agreement is to 1e-7 of the value or better.
"""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest
from scipy.optimize import linprog

from hetero import catalog, workload
from hetero.cluster import cluster
from hetero.costs.cost import IN_PAPERS, CostModel, PipelineStage
from hetero.costs.demand import Demand
from hetero.costs.parallel import Configurations
from hetero.latency.models.affine import Affine
from hetero.placement import FlowNetwork, Placement
from hetero.planners.rignall.divider import divide
from hetero.planners.rignall.inner import Deviations, solve
from hetero.planners.rignall.rates import IslandClass, RateTable
from hetero.planners.rignall.search import Objective
from hetero.planners.thunderserve.evaluate import transport
from hetero.planners.xiong.estimate import throughput
from hetero.routers.pipelines import FlowRouter
from hetero.simulator.pipelines import simulate_pipelines
from hetero.workload import Trace
from hetero.workload.lengths import LengthRanges
from tests.hetero.simulator.pipeline_oracle import small_problem


def coefficients(rng: np.random.Generator) -> tuple[float, ...]:
    """p1 to p8 of an instance."""
    return tuple(
        (rng.uniform(0.5, 2, 8) * (3e-5, 1e-4, 2e-6, 4e-3, 2e-7, 2e-4, 3e-7, 8e-3)).tolist()
    )


def batch_s(p: tuple[float, ...], b: float, inputs: int, outputs: int) -> float:
    """Xiong et al. eq. 3 and 4: a prefill, then one term for every token."""
    total = p[0] * b * inputs + p[1] * b + p[2] * inputs + p[3]
    for k in range(1, outputs + 1):
        total += p[4] * b * (inputs + k) + p[5] * b + p[6] * (inputs + k) + p[7]
    return total


# Xiong et al. ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_xiong_algorithm_1(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q, layers, hidden = coefficients(rng), 60, 32, 4096
    inputs, outputs = rng.integers(1, 900, q).tolist(), rng.integers(1, 300, q).tolist()
    per_token = 2 * layers * hidden * 2  # keys and values of two bytes
    size = per_token * int(rng.integers(2500, 8000))
    # Lines 3 to 15; "until batchedReqNum > q" read as until every request is batched.
    total, begin = 0.0, 0
    while begin < q:
        batch: list[int] = []
        for r in range(begin, q):
            held = sum(inputs[begin : r + 1]) + (r - begin + 1) * max(outputs[begin : r + 1])
            if per_token * held > size:
                break
            batch = list(range(begin, r + 1))
        longest = max(inputs[r] for r in batch), max(outputs[r] for r in batch)
        total += batch_s(p, len(batch), *longest)
        begin = batch[-1] + 1
    estimate = throughput(
        Trace(np.zeros(q), inputs, outputs),
        Affine(*p),
        kv_capacity_bytes=size,
        kv_bytes_per_token=per_token,
        tensor_parallel=2,
        gpus=8,
    )
    # Section 3.2: TP_system = TP_s u / t.
    assert estimate.instance_tps == pytest.approx(sum(inputs + outputs) / total, rel=1e-12)
    assert estimate.system_tps == pytest.approx(sum(inputs + outputs) / total * 8 / 2, rel=1e-12)


# HeteroServe ----------------------------------------------------------------------------------


# Rignall --------------------------------------------------------------------------------------


def program(
    prefill: np.ndarray,
    decode: np.ndarray,
    p: np.ndarray,
    z: tuple[int, ...],
    tau: float,
    big: float,
) -> tuple[float, float]:
    """Section 4.8.1 with the phases fixed, every constraint written out; -inf if infeasible.

    Variables: x_prefill, x_decode by island and range, then the three deviations by range. Beside
    the optimum, E[R] of its x by 4.4.2 and 4.4.1.
    """
    islands, width = prefill.shape
    cells = islands * width
    at = {name: 2 * cells + k * width for k, name in enumerate(("prefill", "decode", "match"))}
    count = 2 * cells + 3 * width
    rates = {"prefill": np.zeros((width, count)), "decode": np.zeros((width, count))}
    for i, j in product(range(islands), range(width)):
        rates["prefill"][j, i * width + j] = prefill[i, j]
        rates["decode"][j, cells + i * width + j] = decode[i, j]
    upper: list[tuple[np.ndarray, float]] = []
    value = np.zeros(count)
    for phase, rate in rates.items():
        whole = rate.sum(axis=0)
        value += whole
        upper.append((-whole, -0.01))  # 3
        for j in range(width):
            delta = np.zeros(count)
            delta[at[phase] + j] = 1.0
            upper.append((rate[j] - p[j] * whole - delta, 0.0))  # 4, 5
            upper.append((p[j] * whole - rate[j] - delta, 0.0))
            upper.append((delta - tau * p[j] * whole, 0.0))
            value -= big / (1 + p[j]) * delta
    for j in range(width):
        delta = np.zeros(count)
        delta[at["match"] + j] = 1.0
        upper.append((rates["decode"][j] - rates["prefill"][j] - delta, 0.0))  # 6
        upper.append((rates["prefill"][j] - rates["decode"][j] - delta, 0.0))
        value -= big / (1 + p[j]) * delta
    equal = np.zeros((islands, count))  # 1
    bounds = [(0.0, None)] * count
    for i, j in product(range(islands), range(width)):
        equal[i, i * width + j] = equal[i, cells + i * width + j] = 1.0
        bounds[i * width + j] = 0.0, 1.0 - z[i]  # 2
        bounds[cells + i * width + j] = 0.0, float(z[i])
    rows, limits = zip(*upper, strict=True)
    found = linprog(-value, np.array(rows), limits, equal, np.ones(islands), bounds)
    if not found.success:
        return -math.inf, 0.0
    expected = {
        phase: sum(p[j] * (rates[phase][j] @ found.x) for j in range(width)) for phase in rates
    }
    return -found.fun, min(expected["prefill"], expected["decode"])


@pytest.mark.parametrize("seed", range(12))
def test_rignall_inner_program_by_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    islands, width = int(rng.integers(2, 5)), int(rng.integers(2, 4))
    p = rng.dirichlet(np.ones(width))
    tau, big = float(rng.uniform(0.05, 0.9)), float(rng.choice([1.0, 20.0, 1000.0]))
    prefill, decode = rng.uniform(0.5, 8.0, (2, islands, width))
    best, expected = max(
        program(prefill, decode, p, z, tau, big) for z in product((0, 1), repeat=islands)
    )
    named = tuple(IslandClass(f"gpu{k}", 2) for k in range(islands))
    edges = np.arange(width + 1) * 100
    table = RateTable(
        named, LengthRanges(edges[:-1], edges[1:], edges[:-1] + 50, p), prefill, decode
    )
    for form in ("thesis", "sparse", "aggregated"):
        made = solve(table, dict.fromkeys(named, 1), form, deviations=Deviations(tau, big))
        assert made.objective == pytest.approx(best, rel=1e-7, abs=1e-7), form
        assert made.expected_rps == pytest.approx(expected, rel=1e-5), form
    objective = Objective(table, "aggregated", Deviations(tau, big))
    assert objective(dict.fromkeys(named, 1)) == pytest.approx(expected, rel=1e-5)


def test_rignall_divider() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        total, target, minimum = (
            int(rng.integers(0, 300)),
            int(rng.integers(0, 40)),
            rng.integers(1, 20),
        )
        skew = float(rng.choice([0.0, rng.uniform(-5, 5)]))
        actual = min(target, total // int(minimum))
        sizes = [int(minimum)] * actual
        rest = total - sum(sizes)
        if actual and rest:
            weights = [k**skew for k in range(1, actual + 1)]
            ideal = [w / sum(weights) * rest for w in weights]
            whole = [math.floor(s) for s in ideal]
            # The largest remainders, of equal ones the first.
            by_remainder = sorted(range(actual), key=lambda k: whole[k] - ideal[k])
            for k in by_remainder[: round(rest - sum(whole))]:
                whole[k] += 1
            sizes = [s + extra for s, extra in zip(sizes, whole, strict=True)]
        assert divide(total, target, skew, int(minimum)) == tuple(sizes)


# Helix ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_helix_valid_links_and_maximum_flow(seed: int, partial: bool) -> None:
    rng = np.random.default_rng(seed)
    depth, n = 6, 5
    problem = small_problem([(depth, int(f)) for f in rng.integers(1, 5, n)], depth)
    ranges = [(0, 3), (3, 6)]
    while len(ranges) < n:
        start = int(rng.integers(0, depth))
        ranges.append((start, int(rng.integers(start + 1, depth + 1))))
    placement = Placement(problem, tuple(ranges))
    network = FlowNetwork(placement, partial)
    valid = network.valid()
    capacity = np.zeros((2 * n + 2, 2 * n + 2))
    source, sink = 2 * n, 2 * n + 1
    # Section 4.3: a node is two vertices, with its throughput between them; 4.4, constraint 4.
    for i, (s_i, e_i) in enumerate(ranges):
        capacity[2 * i, 2 * i + 1] = network.node_tokens_per_s()[i]
        assert valid[n, i] == (s_i == 0)
        assert valid[i, n] == (e_i == depth)
        if s_i == 0:
            capacity[source, 2 * i] = problem.link_tokens_per_s[n, i]
        if e_i == depth:
            capacity[2 * i + 1, sink] = problem.link_tokens_per_s[i, n]
        for j, (s_j, e_j) in enumerate(ranges):
            follows = s_j <= e_i < e_j if partial else e_i == s_j
            assert valid[i, j] == (follows and i != j)
            if follows and i != j:
                capacity[2 * i + 1, 2 * j] = problem.link_tokens_per_s[i, j]
    # The maximum flow is the smallest of all cuts.
    least = math.inf
    for size in range(2 * n + 1):
        for inside in combinations(range(2 * n), size):
            kept = [*inside, source]
            out = [k for k in range(2 * n + 2) if k not in kept]
            least = min(least, capacity[np.ix_(kept, out)].sum())
    assert network.max_flow().tokens_per_s == pytest.approx(least, rel=1e-7)


def test_helix_interleaved_weighted_round_robin() -> None:
    rng = np.random.default_rng(1)
    problem = small_problem([(3, f) for f in (1, 2, 3, 5)] + [(3, 1)] * 3, 6)
    network = FlowNetwork(Placement(problem, ((0, 3),) * 4 + ((3, 6),) * 3))
    flow = rng.uniform(1.0, 6.0, 4)
    links = np.zeros((8, 8))
    links[7, :4] = flow
    links[:4, 4:7], links[4:7, 7] = flow[:, None] / 3, flow.sum() / 3
    count = 1500
    served = Trace(np.arange(count) * 10.0, np.full(count, 64), np.full(count, 1))
    run = simulate_pipelines(network, served, FlowRouter(flow=links))
    taken = run.requests["node"]
    # Section 5.1: a candidate is chosen as often as its weight says, without bursts. By hand: each
    # turn goes to the one that would then have had the fewest turns for its weight.
    turns = [0] * 4
    for node in taken.tolist():
        expected = min(range(4), key=lambda v: (turns[v] + 1) / flow[v])
        assert node == expected
        turns[expected] += 1
    assert np.array(turns) / count == pytest.approx(flow / flow.sum(), abs=1.5 / count)


# ThunderServe ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_thunderserve_transport_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, n = rng.integers(1, 5, 2).tolist()
    gain = rng.random((m, n))
    # With Z_ij = X_i Y_ij and capacities, by another solver.
    prefill, decode = rng.random(m), rng.random(n)
    rows, limits = [np.ones(m * n)], [1.0]
    for i in range(m):
        rows.append(np.repeat(np.arange(m) == i, n).astype(float))
        limits.append(prefill[i])
    for j in range(n):
        rows.append(np.tile(np.arange(n) == j, m).astype(float))
        limits.append(decode[j])
    best = -linprog(-gain.ravel(), np.array(rows), limits).fun
    share = transport(gain, prefill, decode)
    assert (share.sum(axis=1) <= prefill + 1e-9).all()
    assert (share.sum(axis=0) <= decode + 1e-9).all()
    assert share.sum() <= 1 + 1e-9
    assert (gain * share).sum() == pytest.approx(best, rel=1e-9)


def test_thunderserve_algorithm_2_the_parallel_configuration() -> None:
    model = CostModel(cluster("thunderserve-cloud-32"), catalog.llm("LLaMA-1-30B"), IN_PAPERS)
    demand = Demand.of(workload.load("azure2023_conv"), rate_rps=5.0)
    layers = model.llm.layers
    for machine, gpus in ((4, 4), (4, 2), (0, 4), (5, 4)):
        plans = {"prefill": {}, "decode": {}}
        for tp in range(1, gpus + 1):  # TP within one type of GPU, PP the rest
            if gpus % tp or not model.divides(tp):
                continue
            pp = gpus // tp
            held = [layers // pp + (k < layers % pp) for k in range(pp)]
            most = [
                model.most_layers(machine, tp, first=k == 0, last=k == pp - 1) for k in range(pp)
            ]
            if any(few > limit for few, limit in zip(held, most, strict=True)):
                continue
            made = model.pipeline([PipelineStage(machine, tp, few) for few in held])
            plans["prefill"][tp, pp] = -float(made.prefill_latency_s(demand.mean_input))
            plans["decode"][tp, pp] = float(made.decode_tps(demand.context_tokens))
        for phase, values in plans.items():
            found = Configurations(model, demand).best(((machine, gpus),), phase)
            if not values:
                assert found is None
                continue
            best = max(values, key=values.__getitem__)
            stages = found.stages
            assert (stages[0].gpus, len(stages)) == best, (machine, gpus, phase)
