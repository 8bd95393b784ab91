"""How much the planners of the arena try: counts, so that results are the same bytes every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hetero.cluster import Cluster

_DOZEN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Counts only; seconds are nobody's business here.

    Attributes
    ----------
    requests
        Requests that planners simulate with while they plan.
    rates
        Offered loads that planners of a given load plan for: the case's, then shares of the bound.
    tabu_steps, tabu_neighbours
        Of phase splitting; the search ends after a third of the steps without a better design.
    generations, population
        Of HexGen's genetic search; twice as many children as kept.
    layouts
        Layouts that the Bayesian search over islands evaluates.
    node_degrees
        Degrees that machines are divided into for layer placement, the largest first.
    exchanges, variety, exact_nodes, keep, proof
        Of layer placement.
    parts
        Parts of an offer within a budget that each planner plans for, those of the highest bound
        first.
    improved
        Planners' plans that the search begins with, the best first.
    designs
        Designs that the search races on up to a dozen GPUs; fewer on more, which take longer to
        simulate, about as the square of their number.
    """

    requests: int = 800
    rates: int = 3
    tabu_steps: int = 30
    tabu_neighbours: int = 6
    generations: int = 8
    population: int = 8
    layouts: int = 64
    node_degrees: int = 3
    exchanges: int = 300
    variety: int = 15
    exact_nodes: int = 500
    keep: int = 6
    proof: bool = False
    parts: int = 3
    improved: int = 3
    designs: int = 6_000

    def designs_for(self, cluster: Cluster) -> int:
        """Designs that the search races on a cluster."""
        return self.designs * _DOZEN**2 // max(_DOZEN, sum(cluster.gpu_counts.values())) ** 2


QUICK: Final = Effort(
    requests=400,
    rates=2,
    tabu_steps=9,
    tabu_neighbours=4,
    generations=3,
    population=6,
    layouts=24,
    node_degrees=2,
    exchanges=60,
    variety=5,
    exact_nodes=50,
    keep=3,
    parts=1,
    improved=3,
    designs=1_200,
)
"""Some seconds for some tens of GPUs, for people who wait."""

NORMAL: Final = Effort()
"""Some tens of seconds."""

THOROUGH: Final = Effort(
    requests=2_000,
    rates=4,
    tabu_steps=100,
    tabu_neighbours=10,
    generations=30,
    population=12,
    layouts=240,
    node_degrees=8,
    exchanges=1_000,
    variety=30,
    exact_nodes=5_000,
    keep=12,
    proof=True,
    parts=8,
    improved=5,
    designs=40_000,
)
"""The counts of the papers."""

EFFORTS: Final = {"quick": QUICK, "normal": NORMAL, "thorough": THOROUGH}
