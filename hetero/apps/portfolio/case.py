"""What every planner is asked: a cluster, a model, requests at a rate, targets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hetero.catalog import Llm
from hetero.cluster import Cluster
from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError
from hetero.simulator import Slo
from hetero.streams import stream
from hetero.workload import Trace

MOST_REQUESTS: Final = 30_000
"""Requests that a trace is repeated to at most."""


@dataclass(frozen=True, eq=False, repr=False)
class Case(Shown):
    """One question, the same for every planner.

    Attributes
    ----------
    cluster
        GPUs that may be used, with prices where they are known.
    llm
        The model.
    trace
        Requests whose lengths and gaps are played.
    rate_rps
        Offered load that plans are made for [requests/s].
    slo
        Targets; goodput counts the requests that meet all of them.
    goal
        Share of the requests that must meet the targets for a rate to count as carried.
    budget_usd_per_h
        What may be spent; None where the whole cluster may be used.
    precision
        Data type of weights, such as ``"fp16"`` or ``"fp8"``.
    least_s
        Time that arrivals last at least: the requests of the trace come again, in their order,
        until they do. A burst shorter than the life of a request shows no load that can go on.
    seed
        Of everything random.
    """

    cluster: Cluster
    llm: Llm
    trace: Trace
    rate_rps: float
    slo: Slo = field(default_factory=Slo)
    goal: float = 0.9
    budget_usd_per_h: float | None = None
    precision: str = "fp16"
    least_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate_rps < float("inf"):
            raise ParameterError(
                f"A rate of {self.rate_rps:g} requests/s cannot be planned for.",
                resolve="give a number above 0.",
            )
        if not 0 < self.goal <= 1:
            raise ParameterError(
                f"A goal of {self.goal:g} is no share of the requests.",
                resolve="give a number above 0, and 1 at most.",
            )
        if self.budget_usd_per_h is not None and not self.budget_usd_per_h > 0:
            raise ParameterError(
                f"A budget of {self.budget_usd_per_h:g} $/h rents nothing.",
                resolve="give a number above 0.",
            )

    @property
    def name(self) -> str:
        """Model, cluster and workload in words."""
        return f"{self.llm.name} on {self.cluster.name}, {self.trace.name}"

    def arrivals(
        self, rate_rps: float | None = None, *, seed: int | None = None, requests: int | None = None
    ) -> Trace:
        """The requests with Poisson arrivals: the same gaps at every rate, only stretched.

        Parameters
        ----------
        requests
            How many; the trace comes again where it has fewer. By default as many as it has or,
            where they last less than ``least_s`` so, as last that long, at most
            :data:`MOST_REQUESTS` for that.
        """
        chosen = self.seed if seed is None else seed
        rate = rate_rps or self.rate_rps
        wanted = requests or max(
            len(self.trace), min(math.ceil(rate * self.least_s), MOST_REQUESTS)
        )
        trace = self.trace
        if wanted != len(trace):
            trace = trace.all_at_once().take(np.arange(wanted) % len(trace))
        return trace.poisson(rate, stream(chosen, "arrivals"))

    def table(self) -> Table:
        """What is asked."""
        slo = self.slo
        rows: list[tuple[object, ...]] = [
            ("requests", len(self.trace), ""),
            ("offered load", self.rate_rps, "requests/s"),
            *(
                (f"target {name}", seconds, "s")
                for name, seconds in (
                    ("TTFT", slo.ttft_s),
                    ("TPOT", slo.tpot_s),
                    ("E2E", slo.e2e_s),
                )
                if seconds is not None
            ),
            ("goal", 100 * self.goal, "% of requests within all targets"),
            ("precision", self.precision, ""),
            ("seed", self.seed, ""),
        ]
        if self.budget_usd_per_h is not None:
            rows.append(("budget", self.budget_usd_per_h, "$/h"))
        columns = (Column("what is asked"), Column("value"), Column("unit"))
        return Table(self.name, columns, tuple(rows))
