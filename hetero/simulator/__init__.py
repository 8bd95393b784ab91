"""Exact, compiled simulation of deployments: :func:`simulate`, its :class:`Run` and metrics."""

from hetero.simulator.metrics import Metrics, Slo, metrics
from hetero.simulator.replicas import Event, simulate
from hetero.simulator.run import Run

__all__ = ["Event", "Metrics", "Run", "Slo", "metrics", "simulate"]
