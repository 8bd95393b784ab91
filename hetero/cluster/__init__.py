"""Clusters: machines with GPUs of one type each, regions, links and prices."""

from hetero.cluster.topology import Cluster, Machine, Network, cluster, clusters, find

__all__ = ["Cluster", "Machine", "Network", "cluster", "clusters", "find"]
