"""The small clusters that Helix explains itself with (Fig. 1 and 2), with measured throughput."""

from __future__ import annotations

from dataclasses import replace

from hetero.catalog import Link, gpu, llm
from hetero.cluster import Cluster, Machine, Network
from hetero.placement.placement import Placement
from hetero.placement.problem import Problem


def _link(gbs: float, latency_s: float) -> Link:
    return Link(name="link", bandwidth_gbs=gbs, latency_s=latency_s, kind="network")


def three_nodes() -> Placement:
    """An A100, an L4 and a T4 that hold twelve layers of Llama-2-70B (as Helix's Fig. 2a).

    The figure's numbers are not in the text of the paper: throughputs here are the measured ones.

    Examples
    --------
    >>> from hetero.placement import FlowNetwork
    >>> round(FlowNetwork(three_nodes(), partial_inference=True).max_flow().tokens_per_s)
    5534
    """
    cluster = Cluster(
        "three nodes",
        (Machine("A100", gpu("A100-SXM-40GB")), Machine("L4", gpu("L4")), Machine("T4", gpu("T4"))),
        Network(within_region=_link(0.05, 0.001)),
    )
    problem = Problem.of(cluster, replace(llm("Llama-2-70B"), layers=12))
    return Placement.of(problem, {"A100": (0, 8), "L4": (8, 12), "T4": (8, 12)}, "Fig. 2")


def two_regions() -> tuple[Problem, dict[str, Placement]]:
    """Helix's Fig. 1: an A100, and an L4 with three T4 behind slow links, twelve layers.

    Returns
    -------
    problem
        Links of 50 Mbit/s between the regions.
    placements
        The three of the figure: equal stages, balanced compute, and aware of the network.
    """
    cluster = Cluster(
        "two regions",
        (
            Machine("A100", gpu("A100-SXM-40GB"), 1, "region 1"),
            Machine("L4", gpu("L4"), 1, "region 2"),
            *(Machine(f"T4-{k}", gpu("T4"), 1, "region 2") for k in (1, 2, 3)),
        ),
        Network(
            within_region=_link(1.25, 0.001),
            between_regions=_link(0.00625, 0.05),
            coordinator=_link(0.0125, 0.05),
        ),
    )
    problem = Problem.of(cluster, replace(llm("Llama-2-70B"), layers=12))
    ranges = {
        "equal stages (Fig. 1b)": {
            "A100": (0, 4),
            "T4-1": (4, 8),
            "T4-2": (4, 8),
            "L4": (8, 12),
            "T4-3": (8, 12),
        },
        "balanced compute (Fig. 1c)": {
            "A100": (0, 8),
            "L4": (8, 12),
            "T4-1": (8, 12),
            "T4-2": (8, 12),
            "T4-3": (8, 12),
        },
        "aware of the network (Fig. 1d)": {
            "A100": (0, 8),
            "T4-1": (0, 4),
            "T4-2": (4, 8),
            "L4": (8, 12),
            "T4-3": (8, 12),
        },
    }
    return problem, {name: Placement.of(problem, held, name) for name, held in ranges.items()}
