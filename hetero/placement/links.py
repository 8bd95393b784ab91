"""Links of a placement: bandwidth and latency between nodes and to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero.arrays import Floats
from hetero.cluster import Cluster
from hetero.errors import CatalogError


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Directed links between n nodes and the coordinator, which has the last index n.

    Attributes
    ----------
    bandwidth_bytes_s, latency_s
        From row to column, shapes (n + 1, n + 1); 0 bandwidth where there is no link.
    """

    bandwidth_bytes_s: Floats
    latency_s: Floats

    def __post_init__(self) -> None:
        shape = self.bandwidth_bytes_s.shape
        if len(shape) != 2 or shape[0] != shape[1] or self.latency_s.shape != shape:
            raise CatalogError(
                f"Links have the shapes {shape} and {self.latency_s.shape}.",
                resolve="give two square arrays with a row per node and one for the coordinator.",
            )

    @classmethod
    def of(cls, cluster: Cluster) -> Links:
        """Links that a cluster file states.

        Raises
        ------
        CatalogError
            If it states none between two machines or to the coordinator.
        """
        n = len(cluster.machines)
        stated = cluster.network
        if n > 1 and stated is None:
            cluster.link(cluster.machines[0].name, cluster.machines[1].name)  # says what is missing
        bandwidth, latency = np.zeros((n + 1, n + 1)), np.zeros((n + 1, n + 1))
        for i, a in enumerate(cluster.machines):
            to_coordinator = cluster.coordinator_link(a.name)
            bandwidth[i, n] = bandwidth[n, i] = 1e9 * to_coordinator.bandwidth_gbs
            latency[i, n] = latency[n, i] = to_coordinator.latency_s
            for j, b in enumerate(cluster.machines[:i]):
                link = stated.between(a, b) if stated is not None else None
                assert link is not None, "clusters state a link between any two machines"
                bandwidth[i, j] = bandwidth[j, i] = 1e9 * link.bandwidth_gbs
                latency[i, j] = latency[j, i] = link.latency_s
        return cls(bandwidth, latency)

    def subset(self, nodes: list[int]) -> Links:
        """Links among some of the nodes and the coordinator."""
        kept = np.array([*nodes, len(self.bandwidth_bytes_s) - 1])
        grid = np.ix_(kept, kept)
        return Links(self.bandwidth_bytes_s[grid], self.latency_s[grid])
