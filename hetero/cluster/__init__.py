"""Clusters: machines with GPUs of one type each, regions, links and prices."""

from hetero.cluster.machine import Machine
from hetero.cluster.network import Network
from hetero.cluster.shipped import cluster, clusters, find
from hetero.cluster.topology import Cluster

__all__ = ["Cluster", "Machine", "Network", "cluster", "clusters", "find"]
