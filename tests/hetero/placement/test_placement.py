"""What holds for every placement and every small cluster."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.catalog import llm
from hetero.cluster import cluster
from hetero.errors import InfeasibleError, ParameterError
from hetero.placement import FlowNetwork, Links, Placement, Problem, machine_kind
from hetero.placement.throughput import OperatingPoint, throughput
from hetero.planners.helix.bound import flow_bound
from hetero.workload import datasets
from pipelines.studies import helix_tables as tables
from pipelines.studies.helix_artifact import geo_links, placement, problem, published, solver_log
from pipelines.studies.placement_examples import three_nodes, two_regions
from tests import committed
from tests.hetero.placement.small_placements import random_problem

GPUS = {
    "A100": ("A100-SXM-40GB", 1),
    "V100": ("V100-16GB", 1),
    "L4": ("L4", 1),
    "L4x2": ("L4", 2),
    "T4": ("T4", 1),
    "T4x2": ("T4", 2),
    "T4x4": ("T4", 4),
}
COMPOSITIONS = {
    "single24": {"A100": 4, "L4": 8, "T4": 12},
    "hetero42": {"A100": 4, "V100": 6, "L4": 8, "L4x2": 4, "T4": 10, "T4x2": 6, "T4x4": 4},
    "small10": {"L4": 4, "T4": 6},
    "a100_only": {"A100": 4},
    "l4_only": {"L4": 8},
    "t4_only": {"T4": 12},
}
MODELS = {"LLaMa30B": ("LLaMA-1-30B", 60), "LLaMa70B": ("Llama-2-70B", 80)}


# Throughput ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_throughput_is_that_of_the_published_model_manager(model, composition, need) -> None:
    need("helix_node_throughput")
    frame = pd.read_csv(datasets.path("helix_node_throughput"))
    rows = frame[(frame["model"] == model) & (frame["cluster"] == composition)]
    name, layers = MODELS[model]
    kinds = [
        machine_kind(GPUS[kind][0], name, GPUS[kind][1])
        for kind, count in COMPOSITIONS[composition].items()
        for _ in range(count)
    ]
    found = throughput(kinds, layers)
    for row in rows.itertuples():
        kind = machine_kind(GPUS[row.machine][0], name, GPUS[row.machine][1])
        assert found[kind.name][row.layers_on_node] == pytest.approx(
            row.tokens_per_s_compute, rel=1e-6
        )
    assert len(rows)


def test_throughput_of_helix_clusters_without_raw_data() -> None:
    # Notes on the artifact: L4 and A100 of the 24-node cluster, T4 of the small one (30B), whose
    # throughput grows from five to six layers because Helix rounds tokens.
    single, small = problem("single-24", "70B"), problem("small-10", "30B")
    a100 = single.nodes[single.index("a100-1")].tokens_per_s
    assert a100[[8, 9, 10, 11, 12]].round(1).tolist() == [2045.6, 1754.4, 1392.6, 1212.2, 952.1]
    l4 = single.nodes[single.index("l4-1")].tokens_per_s
    assert l4[[1, 7]].round(1).tolist() == [7557.9, 531.7]
    t4 = small.nodes[small.index("t4-1")].tokens_per_s
    assert t4[[5, 6]].round().tolist() == [285.0, 331.0]


def test_throughput_follows_the_operating_point() -> None:
    kinds = [machine_kind("L4", "Llama-2-70B")] * 12
    usual = throughput(kinds, 80)["L4"]
    fuller = throughput(kinds, 80, point=OperatingPoint(kv_share=0.6))["L4"]
    # Larger decode batches share the reading of the weights.
    assert (fuller[1:] > usual[1:]).all()
    with pytest.raises(ParameterError, match="kv_share is 0"):
        OperatingPoint(kv_share=0)


def test_kv_cache_beyond_the_table_is_on_the_line() -> None:
    kind = machine_kind("A100-SXM-40GB", "Llama-2-70B")
    steps = np.diff([kind.kv_entries(k) for k in range(10, 16)])
    assert np.ptp(steps) <= 16 * 12  # blocks are whole
    with pytest.raises(InfeasibleError, match="30 layers of Llama-2-70B leave no KV cache"):
        kind.kv_entries(30)


# Flow ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, one in published().items() if one.tokens_per_s])
def test_maximum_flow_is_the_published_objective(name: str) -> None:
    flow = FlowNetwork(placement(name)).max_flow()
    assert flow.tokens_per_s == pytest.approx(published()[name].tokens_per_s, rel=1e-3)


def test_maximum_flow_of_the_parts_of_30b() -> None:
    # Notes on the artifact: L4 214.98, T4 397.69, A100 1044.53.
    values = [
        FlowNetwork(placement(f"single-24 30B helix-{kind}")).max_flow().tokens_per_s
        for kind in ("l4", "t4", "a100")
    ]
    assert values == pytest.approx([214.98, 397.69, 1044.53], abs=0.01)


@pytest.mark.parametrize("name", ["geo-24 70B helix", "hetero-42 70B petals"])
@pytest.mark.parametrize("partial", [False, True])
def test_maximum_flow_equals_networkx(name: str, partial: bool) -> None:
    network = FlowNetwork(placement(name), partial)
    whole = network.placement.problem
    n = len(whole.nodes)
    graph: nx.DiGraph = nx.DiGraph()
    for k, capacity in enumerate(network.node_tokens_per_s()):
        graph.add_edge(("in", k), ("out", k), capacity=capacity)
    for a, b in np.argwhere(network.valid()):
        tail = "source" if a == n else ("out", int(a))
        head = "sink" if b == n else ("in", int(b))
        graph.add_edge(tail, head, capacity=whole.link_tokens_per_s[a, b])
    flow = network.max_flow()
    assert flow.tokens_per_s == pytest.approx(
        nx.maximum_flow_value(graph, "source", "sink"), rel=1e-7
    )
    # Conservation, capacities, and a cut of the same size.
    moved = flow.link_tokens_per_s
    assert moved[:, :-1].sum(axis=0) == pytest.approx(moved[:-1].sum(axis=1))
    assert (flow.utilisation <= 1 + 1e-9).all()
    assert (moved <= whole.link_tokens_per_s * (1 + 1e-9)).all()
    cut = sum(
        network.node_tokens_per_s()[a] if a == b else whole.link_tokens_per_s[a, b]
        for a, b in np.argwhere(flow.cut)
    )
    assert cut == pytest.approx(flow.tokens_per_s, rel=1e-6)


def test_pipelines_add_up_to_the_flow() -> None:
    flow = FlowNetwork(placement("hetero-42 70B helix")).max_flow()
    paths_found = flow.paths()
    assert sum(p.tokens_per_s for p in paths_found) == pytest.approx(flow.tokens_per_s)
    ranges = flow.network.placement.ranges
    for path in paths_found:
        held = [ranges[k] for k in path.nodes]
        assert held[0][0] == 0
        assert held[-1][1] == 80
        assert all(a[1] == b[0] for a, b in itertools.pairwise(held))
    depth = sum(len(p.nodes) * p.tokens_per_s for p in paths_found) / flow.tokens_per_s
    assert flow.depth == pytest.approx(depth)


def test_partial_inference_lets_a_node_begin_in_the_middle() -> None:
    whole = problem("single-24", "70B")
    ranges = {f"a100-{k + 1}": (12 * k, 12 * k + 12) for k in range(4)}
    ranges |= {f"l4-{k + 1}": (46 + 6 * k, 52 + 6 * k) for k in range(5)}
    ranges |= {f"l4-{6 + k}": (76 - 2 * k, 80 - 2 * k) for k in range(1)}
    both = Placement.of(whole, ranges)
    with pytest.raises(InfeasibleError, match="goes on where 'a100-4' stops"):
        FlowNetwork(both).max_flow()
    # l4-1 holds 46 to 51; from a100-4, which stops at 48, it computes only 48 to 51.
    assert FlowNetwork(both, True).max_flow().tokens_per_s == pytest.approx(747.785, abs=0.01)


def test_example_of_figure_1_gains_from_the_network() -> None:
    _, three = two_regions()
    values = [FlowNetwork(one).max_flow().tokens_per_s for one in three.values()]
    assert values == sorted(values)
    assert FlowNetwork(three_nodes()).max_flow().bottleneck == "A100 to L4, T4"


# Links and errors ---------------------------------------------------------------------------


def test_links_of_the_cluster_file_and_as_drawn() -> None:
    fleet = cluster("helix-geo-24")
    mean, drawn = Links.of(fleet), geo_links()
    assert mean.bandwidth_bytes_s[0, 1] == 1.25e9
    assert mean.bandwidth_bytes_s[0, 10] == 12.5e6
    far = drawn.bandwidth_bytes_s[:4, 4:24]
    assert far.mean() == pytest.approx(12.5e6, rel=0.05)
    assert np.array_equal(drawn.bandwidth_bytes_s[:24, :24], drawn.bandwidth_bytes_s[:24, :24].T)


def test_errors_name_the_node_or_the_link() -> None:
    whole = problem("single-24", "70B")
    with pytest.raises(InfeasibleError, match="Node 't4-3' cannot hold 5 layers"):
        Placement.of(whole, {"t4-3": (0, 5)})
    with pytest.raises(ParameterError, match="no node 'x-1'"):
        Placement.of(whole, {"x-1": (0, 5)})
    with pytest.raises(ParameterError, match=r"Node 'a100-1' holds the layers \[78, 82\)"):
        Placement.of(whole, {"a100-1": (78, 82)})
    with pytest.raises(InfeasibleError, match="holds layer 12 of Llama-2-70B"):
        FlowNetwork(Placement.of(whole, {"a100-1": (0, 12)})).max_flow()
    with pytest.raises(ParameterError, match="Node 'a100-1' of helix-single-24: No time per layer"):
        Problem.of(cluster("helix-single-24"), llm("Llama-3-8B"))
    bandwidth = whole.links.bandwidth_bytes_s.copy()
    bandwidth[0] = 0.0
    cut = Problem(
        whole.name, whole.llm, whole.nodes, Links(bandwidth, whole.links.latency_s), whole.point
    )
    chain = {f"a100-{k + 1}": (12 * k, 12 * k + 12) for k in range(4)}
    chain |= {f"l4-{k + 1}": (48 + 4 * k, 52 + 4 * k) for k in range(8)}
    with pytest.raises(InfeasibleError, match=r"link from 'a100-1' to 'a100-2' .* no bandwidth"):
        FlowNetwork(Placement.of(cut, chain)).max_flow()


# Tables of our own --------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(tables.FILES))
def test_committed_tables_are_what_comes_out(name: str, need) -> None:
    for raw in ("placements", "config", "machine_model_limits", "gurobi_traces"):
        need(f"helix_{raw}")
    committed.same(tables.FILES[name](), f"{name}.csv")


def test_solver_logs_rise_and_fall() -> None:
    time_s, incumbent, bound = solver_log("geo-24", start="none")
    assert incumbent.max() == pytest.approx(1212.18, abs=0.01)
    assert (np.diff(time_s) >= 0).all()
    assert (np.diff(bound) <= 0).all()
    with pytest.raises(ParameterError, match="no solver log"):
        solver_log("single-24", start="none")


SETTINGS = settings(max_examples=8)


@SETTINGS
@given(seed=st.integers(0, 10_000), nodes=st.integers(3, 7), slow=st.booleans())
def test_no_placement_exceeds_the_bound(seed: int, nodes: int, slow: bool) -> None:
    small = random_problem(seed, nodes, 6, 4, slow=slow)
    draws = np.random.default_rng(seed)
    bound = flow_bound(small).tokens_per_s
    for _ in range(20):
        ranges = []
        for node in small.nodes:
            held = int(draws.integers(1, node.max_layers + 1))
            start = int(draws.integers(0, 6 - held + 1))
            ranges.append((start, start + held))
        placement = Placement(small, tuple(ranges))
        for partial in (False, True):
            try:
                flow = FlowNetwork(placement, partial).max_flow()
            except InfeasibleError:
                continue
            assert flow.tokens_per_s <= bound * (1 + 1e-9)
            # Flow is conserved, and its pipelines add up to it.
            moved = flow.link_tokens_per_s
            assert moved[:, :-1].sum(axis=0) == pytest.approx(moved[:-1].sum(axis=1), abs=1e-6)
            assert sum(p.tokens_per_s for p in flow.paths()) == pytest.approx(
                flow.tokens_per_s, rel=1e-6
            )
