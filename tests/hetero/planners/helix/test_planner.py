from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetero.catalog import Link, gpu, llm
from hetero.cluster import Cluster, Machine, Network, cluster
from hetero.errors import InfeasibleError, ParameterError
from hetero.placement import Links, Placement, Problem
from hetero.placement.pruning import all_links, pruned
from hetero.planners.helix import PlacementEffort, place, search, with_partial_inference
from hetero.planners.helix.blocks import Pool, line
from hetero.planners.helix.bound import flow_bound, simple_bound
from hetero.planners.helix.groups import groups
from hetero.planners.helix.heuristics import petals, separate, swarm
from hetero.planners.helix.milp import Milp, judge
from hetero.planners.helix.regions import chain
from hetero.programs import SolverLimits
from hetero.streams import stream
from pipelines.studies.helix_artifact import placement, problem
from tests.hetero.placement.small_placements import exhaustive, random_problem, two_slow_regions

# Our planner --------------------------------------------------------------------------------


def test_single_and_small_cluster_are_proven_optimal() -> None:
    one, small = search(problem("single-24", "70B")), search(problem("small-10", "30B"))
    assert one.proven
    assert small.proven
    # The notes' optimum of an aggregated program; 1289.56 in the paper.
    assert one.tokens_per_s == pytest.approx(2045.641, abs=1e-3)
    # Proven by the paper's solver after 3803 s.
    assert small.tokens_per_s == pytest.approx(286.5874, abs=1e-3)


def test_42_nodes_with_a_bound_of_one_per_cent() -> None:
    effort = PlacementEffort(shallow=(0.6,), exchanges=50)
    found = search(problem("hetero-42", "70B"), effort=effort)
    assert found.tokens_per_s >= 5950
    assert found.gap < 0.012
    assert found.bound.tokens_per_s < 0.94 * found.bound.simple_tokens_per_s
    # Candidates are distinct, fall in flow, and are judged by the exact flow on all links.
    values = [one.tokens_per_s for one in found.best]
    assert values == sorted(values, reverse=True)
    assert len({round(v, 3) for v in values}) > 3
    for one in found.best[:3]:
        assert judge(one.placement) == one.tokens_per_s
    assert [step.bound >= step.tokens_per_s for step in found.steps]


def test_regions_with_slow_links() -> None:
    whole = problem("geo-24", "70B")
    effort = PlacementEffort(shallow=(), exchanges=300, precision=5e-3)
    found = search(whole, effort=effort)
    # The notes' constructive pattern; 1212.18 in the paper. No node of an A100 carries more with 9
    # layers, and with 8 each none is left for a crossing between regions.
    assert found.tokens_per_s == pytest.approx(1754.382, abs=1e-3)
    assert found.proven
    assert found.bound.simple_tokens_per_s == pytest.approx(2045.641, abs=1e-3)


@pytest.mark.parametrize(
    ("seed", "nodes", "layers", "most", "slow"),
    [(0, 5, 7, 4, True), (3, 5, 6, 4, False), (15, 4, 6, 4, True), (21, 4, 7, 4, True),
     (9, 7, 5, 3, False), pytest.param(1, 8, 5, 3, False, marks=pytest.mark.slow),
     pytest.param(5, 6, 7, 4, False, marks=pytest.mark.slow)],
)  # fmt: skip
def test_matches_an_exhaustive_search(
    seed: int, nodes: int, layers: int, most: int, slow: bool
) -> None:
    small = random_problem(seed, nodes, layers, most, slow=slow)
    if sum(node.max_layers for node in small.nodes) < layers:
        pytest.fail("this seed has no placement")
    best = exhaustive(small)
    found = search(small)
    assert found.tokens_per_s == pytest.approx(best, rel=1e-6)
    assert found.bound.tokens_per_s >= best * (1 - 1e-9)


def test_a_node_that_starts_in_the_middle_of_its_layers_gets_around_a_slow_link() -> None:
    small = random_problem(0, 4, 5, 4, slow=True)
    tables = [(1200, 1200, 800, 500), (1200, 800, 800, 300), (2500, 1200, 300, 300),
              (1700, 800, 300, 300)]  # fmt: skip
    nodes = tuple(
        replace(node, tokens_per_s=np.array([0.0, *table]))
        for node, table in zip(small.nodes, tables, strict=True)
    )
    bandwidth = np.full((5, 5), 1e9)
    bandwidth[:4, :4] = 1e6 * np.array(
        [[0, 4, 0, 0], [30, 0, 10, 10], [10, 0, 0, 30], [10, 0, 10, 0]]
    )
    four = Problem("four", small.llm, nodes, Links(bandwidth, 0 * bandwidth))
    found = search(four)
    gone_on = with_partial_inference(found)
    # Two links of 10^7 bytes/s; with partial inference one of them beside a node of 800 tokens/s.
    assert found.tokens_per_s == pytest.approx(exhaustive(four)) == pytest.approx(2e7 / 16384)
    assert gone_on.tokens_per_s == pytest.approx(800 + 1e7 / 16384)
    assert gone_on.tokens_per_s == pytest.approx(exhaustive(four, partial=True))
    assert gone_on.gap < 2e-5
    assert judge(gone_on.best[0].placement, True) == gone_on.tokens_per_s


def test_same_seed_same_plan() -> None:
    small = random_problem(0, 5, 7, 4, slow=True)
    one, two = search(small), search(small)
    assert [c.placement.ranges for c in one.best] == [c.placement.ranges for c in two.best]
    assert one.steps == two.steps


def test_plan_of_a_cluster_is_the_search_of_its_problem() -> None:
    fleet, model = cluster("helix-10"), llm("LLaMA-1-30B")
    assert place(fleet, model).tokens_per_s == search(Problem.of(fleet, model)).tokens_per_s


def test_errors_name_what_is_too_small_and_what_has_no_bandwidth() -> None:
    fleet = cluster("helix-10")
    with pytest.raises(InfeasibleError, match=r"hold at most 52 of the 80 layers .*'l4-1' with 7"):
        place(fleet, llm("Llama-2-70B"))
    whole = Problem.of(fleet, llm("LLaMA-1-30B"))
    none = Links(np.zeros_like(whole.links.bandwidth_bytes_s), whole.links.latency_s)
    with pytest.raises(InfeasibleError, match="coordinator of helix-10"):
        search(Problem(whole.name, whole.llm, whole.nodes, none))
    inner = whole.links.bandwidth_bytes_s.copy()
    inner[:10, :10] = 0.0
    with pytest.raises(InfeasibleError, match="slowest link is from 'l4-1' to 'l4-2' with 0"):
        search(Problem(whole.name, whole.llm, whole.nodes, Links(inner, whole.links.latency_s)))
    # Two halves with links inside each: neither holds the model.
    halves = np.arange(10) % 2
    inner[:10, :10] = 1e9 * (halves[:, None] == halves[None, :])
    with pytest.raises(InfeasibleError, match=r"part its nodes into groups .*'l4-1' to 'l4-2'"):
        search(Problem(whole.name, whole.llm, whole.nodes, Links(inner, whole.links.latency_s)))


@pytest.mark.parametrize(
    ("times", "gap"), [(2, 0.03), pytest.param(4, 0.01, marks=pytest.mark.slow)]
)
def test_a_large_region_is_one_line_close_to_its_bound(times: int, gap: float) -> None:
    one = problem("hetero-42", "70B")
    nodes = tuple(node for node in one.nodes for _ in range(times))
    bandwidth = np.full((len(nodes) + 1, len(nodes) + 1), 1e9)
    many = Problem("many nodes", one.llm, nodes, Links(bandwidth, 0 * bandwidth), one.point)
    found = search(many, effort=PlacementEffort(precision=5e-3, variety=5, exchanges=0, shallow=()))
    copies = times * judge(placement("hetero-42 70B helix-no-prune"))
    assert copies < found.tokens_per_s <= found.bound.tokens_per_s
    assert found.gap < gap


def test_a_flow_of_many_links_crosses_between_regions_that_hold_copies_of_their_own() -> None:
    # Helix's seven kinds of nodes, drawn evenly, 100 Mbit/s between regions.
    kinds = (("A100-SXM-40GB", 1), ("V100-16GB", 1), *(("L4", n) for n in (1, 2)))
    kinds = (*kinds, *(("T4", n) for n in (1, 2, 4)))
    draws = stream(0, "cluster")
    machines = tuple(
        Machine(f"node-{k + 1}", gpu(name), count, f"region-{int(draws.integers(2)) + 1}")
        for k in range(70)
        for name, count in (kinds[int(draws.integers(len(kinds)))],)
    )
    inside = Link(name="inside", bandwidth_gbs=1.25, latency_s=0.001)
    between = Link(name="between", bandwidth_gbs=0.0125, latency_s=0.05)
    drawn = Cluster("random-70", machines, Network(inside, between, coordinator=between))
    fleet = Problem.of(drawn, llm("Llama-2-70B"))
    effort = PlacementEffort(precision=2e-3, variety=8, exchanges=0, shallow=(), proof=False)
    found = search(fleet, effort=effort)
    members = [[k for k, node in enumerate(fleet.nodes) if node.region == r] for r in fleet.regions]
    # Copies side by side carry no more than this, and nearly as much.
    apart = sum(flow_bound(fleet.only(nodes)).tokens_per_s for nodes in members)
    copies = max(one.tokens_per_s for one in found.best if one.method == "copies by region")
    assert 0.98 * apart < copies <= apart
    best = found.best[0]
    assert best.tokens_per_s > 1.05 * apart
    moved = best.flow.link_tokens_per_s
    assert sum((moved[np.ix_(a, b)] > 0).sum() for a, b in (members, members[::-1])) > 10


# Bound, chain, blocks -----------------------------------------------------------------------


def test_bound_is_above_every_published_placement_and_below_the_simple_one() -> None:
    whole = problem("hetero-42", "70B")
    found = flow_bound(whole)
    assert found.simple_tokens_per_s == pytest.approx(6528.9, abs=0.1)  # the notes
    assert 5993.7 < found.tokens_per_s < 6060
    for method in ("helix", "helix-no-prune", "petals", "swarm"):
        assert judge(placement(f"hetero-42 70B {method}"), True) < found.tokens_per_s
    assert found.simple_tokens_per_s <= whole.compute_bound_tokens_per_s


@pytest.mark.parametrize("seed", [11, 14, 18, 35, 47, 62, 65, 68, 74])
def test_slow_links_between_regions_lower_the_bound_but_not_below_a_placement(seed: int) -> None:
    small = two_slow_regions(seed, 3 + seed % 3)
    wide = np.full_like(small.links.bandwidth_bytes_s, 1e9)
    best = max(exhaustive(small), exhaustive(small, partial=True))
    found = flow_bound(small).tokens_per_s
    without = flow_bound(replace(small, links=Links(wide, 0 * wide))).tokens_per_s
    assert best - 1e-6 <= found < 0.99 * without  # capacities are whole steps of 1e-6
    assert found < 1.15 * best


def test_work_that_just_suffices_is_not_lost_to_rounding() -> None:
    # Every node has one layer's work from 768 tokens/s on, for five layers.
    small = random_problem(122, 5, 5, 3, slow=False)
    assert simple_bound(small) == pytest.approx(exhaustive(small))


def test_chain_of_the_notes() -> None:
    kinds = groups(problem("hetero-42", "70B"), by_region=False)
    found = chain(kinds, 80)
    assert found is not None
    assert found[0] == pytest.approx(5441.14, abs=0.01)
    assert sum(k for _, k in found[1]) == 80
    assert len(found[1]) == 40


def test_blocks_carry_what_they_were_sought_for() -> None:
    kinds = groups(problem("hetero-42", "70B"), by_region=False)
    found = line([Pool(tuple(range(len(kinds))))], kinds, 80, 5500.0, variety=2)
    assert found is not None
    (blocks,) = found
    assert sum(block.layers for block in blocks) == 80
    used = sum(block.counts(len(kinds)) for block in blocks)
    assert (used <= [g.count for g in kinds]).all()
    for block in blocks:
        for layer in range(block.layers):
            here = [kinds[t].tokens_per_s[k] for t, s, k in block.parts if s <= layer < s + k]
            assert sum(here) >= 5500.0


# Helix's program ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "model", "prune", "variables", "constraints"),
    [
        ("geo-24", "70B", True, 876, 1122),
        ("geo-24", "70B", False, 1376, 1848),
        ("hetero-42", "70B", True, 2144, 2772),
        ("hetero-42", "70B", False, 4004, 5502),
        ("small-10", "30B", False, 316, 350),
    ],
)
def test_program_has_the_size_of_table_8(
    name: str, model: str, prune: bool, variables: int, constraints: int
) -> None:
    whole = problem(name, model)
    size = Milp(whole, links=pruned(whole) if prune else all_links(whole)).size
    assert (size.total_variables, size.total_constraints) == (variables, constraints)


@pytest.mark.parametrize("partial", [False, True])
def test_program_finds_the_optimum_of_a_small_cluster(partial: bool) -> None:
    small = random_problem(12, 4, 4, 3, slow=False)
    result = Milp(small, partial_inference=partial).solve(SolverLimits(gap=1e-6))
    assert result.status == "optimal"
    assert result.tokens_per_s == pytest.approx(result.judged_tokens_per_s, rel=1e-4)
    if partial:
        assert result.tokens_per_s >= search(small).tokens_per_s * (1 - 1e-6)
    else:
        assert result.tokens_per_s == pytest.approx(exhaustive(small), rel=1e-5)


def test_program_in_whole_numbers_has_the_same_optimum() -> None:
    small, log = random_problem(12, 4, 4, 3, slow=False), list[str]()
    start = search(small).best[0].placement
    result = Milp(small, whole=True).solve(solver="cp_sat", start=start, log=log.extend)
    assert result.status == "optimal"
    # Rates are rounded down, so that the flow of its placement is the optimum or just below.
    best = exhaustive(small)
    assert best - len(small.nodes) <= result.tokens_per_s <= result.judged_tokens_per_s
    assert result.judged_tokens_per_s <= best * (1 + 1e-9)
    assert any(line.startswith("#1 ") for line in log)
    with pytest.raises(ParameterError, match="whole numbers alone"):
        Milp(small).solve(solver="cp_sat")


def test_program_starts_from_a_placement() -> None:
    start = placement("small-10 30B helix")
    program = Milp(problem("small-10", "30B"))
    result = program.solve(SolverLimits(nodes=1), start=start)
    assert result.tokens_per_s >= 286.58
    assert result.bound >= result.tokens_per_s
    # Good enough is where the search ends: within half a per cent of the work of all nodes.
    early = Milp(problem("small-10", "30B"), early_stop=0.5)
    assert early.size.constraints["early stop"] == 1


def test_pruning_keeps_the_fastest_links() -> None:
    whole = problem("geo-24", "70B")
    kept = pruned(whole)
    assert int(kept.sum()) == 350
    assert kept[24, :24].sum() == kept[:24, 24].sum() == 12
    assert (kept[:24, :24].sum(axis=1) >= 12).all()
    # Links to other regions that remain are faster than those that go, node by node.
    assert judge(placement("geo-24 70B helix"), links=kept) == pytest.approx(1212.18, abs=0.01)


# Heuristics ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "objective"), [("single-24", 757.853), ("geo-24", 616.455), ("hetero-42", 4892.242)]
)
def test_swarm_is_the_published_one(name: str, objective: float) -> None:
    ours = swarm(problem(name, "70B"))
    assert judge(ours) == pytest.approx(objective, abs=1e-3)
    theirs = placement(f"{name} 70B swarm")
    assert (ours.copies == theirs.copies).all() or name == "geo-24"


def test_petals_covers_every_layer_and_needs_partial_inference() -> None:
    for seed in range(3):
        found = petals(problem("single-24", "70B"), seed)
        assert found.copies.min() >= 1
        assert all(found.layers(k) == node.max_layers for k, node in enumerate(found.problem.nodes))
        assert judge(found, True) >= judge(found)
    assert petals(problem("single-24", "70B"), 1).ranges != found.ranges


def test_separate_pipelines_keep_kinds_apart() -> None:
    whole = problem("single-24", "30B")
    found = separate(whole)
    for kind in {node.kind.name for node in whole.nodes}:
        own = [held for node, held in zip(whole.nodes, found.ranges, strict=True)
               if node.kind.name == kind]  # fmt: skip
        edges = {0} | {stop for _, stop in own}
        assert {start for start, _ in own} | {60} == edges
    with pytest.raises(InfeasibleError, match="No kind of node of helix-single-24"):
        separate(problem("single-24", "70B"))


def test_swarm_refuses_stages_that_do_not_fit() -> None:
    with pytest.raises(InfeasibleError, match=r"into 16 equal stages .* 't4-1' holds at most 4"):
        swarm(problem("single-24", "70B"), stages=16)


# Command line -------------------------------------------------------------------------------


def test_plan_layers_command(tmp_path: Path, said, told, refused) -> None:
    picture = tmp_path / "plan.png"
    small = ("plan", "layers", "helix-10", "--model", "LLaMA-1-30B")
    found = told(*small, "--figure", picture)
    assert found["tokens_per_s"] == pytest.approx(286.587, abs=1e-2)
    assert sum(stop - start for start, stop in found["layers"].values()) == 60
    assert picture.stat().st_size > 10_000
    text = said(*small)
    assert "proven optimal" in text
    assert min(found["tokens_per_s_in_draws"]) < found["tokens_per_s"]
    assert "tokens/s in 90 % of 24 draws of step times; the bound is for these" in text
    assert "at most 52 of the 80 layers" in refused(*small[:-1], "Llama-2-70B")
    assert "exists already" in refused(*small, "--figure", picture)


def test_own_cluster_of_three_regions(tmp_path: Path, said) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        """
machines:
  - {name: big, gpu: A100-SXM-40GB, copies: 4, region: eu}
  - {name: mid, gpu: L4, count: 2, copies: 3, region: us}
  - {name: small, gpu: T4, count: 4, copies: 2, region: asia}
network:
  within_region: {bandwidth_gbit_s: 10, latency_ms: 0.5}
  between_regions: {bandwidth_gbit_s: 0.2, latency_ms: 80}
  coordinator: {region: eu}
""",
        encoding="utf-8",
    )
    assert "Bottleneck:" in said("plan", "layers", file, "--model", "Llama-2-70B")


def test_a_plan_shows_itself_and_says_which_nodes_it_leaves_out() -> None:
    found = search(problem("small-10", "30B"))
    assert isinstance(found.best[0].placement, Placement)
    assert "Idle" not in str(found.best[0].placement)
    assert "bottleneck" in str(found.best[0].flow)
    assert "leaves out" not in str(found)
    assert "Too small" not in str(found)
    nodes = list(found.problem.nodes)
    nodes[0] = replace(nodes[0], tokens_per_s=np.zeros(1))
    fewer = search(replace(found.problem, nodes=tuple(nodes)))
    assert f"Too small for a layer and its KV cache: {nodes[0].name}." in str(fewer)
    idle = replace(fewer, problem=found.problem)
    assert f"Plan 1 leaves out {nodes[0].name}" in str(idle)
