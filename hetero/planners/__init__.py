"""Planners: each turns a cluster, a model and a workload into a deployment."""
