"""What ``hetero bench simulate`` measures: CPU time by router, and other costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hetero.display import Column, Shown, Table
from pipelines.bench import peers

TRACE = "azure2023_conv"
"""Trace whose lengths the requests have."""


@dataclass(frozen=True, slots=True)
class Speed:
    """One router on one fleet at one load.

    Attributes
    ----------
    load
        Share of saturation that was offered; NaN where arrivals are those of the trace.
    """

    router: str
    replicas: int
    engine: str
    requests: int
    load: float
    rate_rps: float
    cpu_s: float

    @property
    def requests_per_cpu_s(self) -> float:
        """Requests simulated per CPU second."""
        return self.requests / self.cpu_s


@dataclass(frozen=True, slots=True)
class SimulatorBench(Shown):
    """What ``hetero bench simulate`` measures.

    Attributes
    ----------
    speeds
        Built-in routers.
    plain
        A router written in Python.
    recorded, source
        The conversation trace at its own rate, as the peers ran it: the real one where it is at
        hand, or its twin.
    decision_us
        Median time of one decision by router, called from Python, at eight replicas.
    bytes_per_request
        Peak of the memory that the largest run and its trace take, over its requests.
    exponent
        Of the cost over the number of requests: 1 is linear.
    first_call
        CPU seconds of a fresh process: imports, first simulation, all of it.
    """

    speeds: tuple[Speed, ...]
    plain: Speed
    recorded: Speed
    source: str
    decision_us: dict[str, float]
    bytes_per_request: float
    exponent: float
    first_call: dict[str, float]

    def table(self) -> Table:
        """Requests per CPU second."""
        rows = tuple(
            (
                one.router,
                one.engine,
                one.replicas,
                one.requests,
                "as recorded" if one.load != one.load else f"{one.load:.0%}",
                one.rate_rps,
                one.cpu_s,
                round(one.requests_per_cpu_s),
            )
            for one in (*self.speeds, self.plain, self.recorded)
        )
        columns = (
            Column("router"),
            Column("engine"),
            Column("replicas"),
            Column("requests"),
            Column("load"),
            Column("arrivals", "requests/s"),
            Column("CPU time", "s", 3),
            Column("speed", "requests/CPU s"),
        )
        notes = (f"As recorded: {self.source}.",)
        return Table(f"Simulator: requests like {TRACE} on mixed fleets", columns, rows, notes)

    def other_table(self) -> Table:
        """Memory, growth, decisions and the first call."""
        slowest = max(self.decision_us, key=self.decision_us.__getitem__)
        rows = (
            ("memory per request, trace included", self.bytes_per_request, "bytes"),
            ("growth of the cost with requests", self.exponent, "exponent; 1 is linear"),
            (f"slowest decision, 8 replicas ({slowest})", self.decision_us[slowest], "µs"),
            ("fresh process: imports", self.first_call["import_s"], "CPU s"),
            ("fresh process: first simulation", self.first_call["first_call_s"], "CPU s"),
            ("fresh process: all", self.first_call["process_s"], "CPU s"),
        )
        return Table("Other costs", (Column("what"), Column("value", "", 3), Column("unit")), rows)

    def tables(self) -> tuple[Table, ...]:
        """All tables, the peers last."""
        return self.table(), self.other_table(), peers.table(self.recorded.requests_per_cpu_s)

    def record(self) -> dict[str, object]:
        """Everything as JSON values."""

        def plain(one: Speed) -> dict[str, object]:
            load = None if one.load != one.load else one.load
            return asdict(one) | {"load": load, "requests_per_cpu_s": one.requests_per_cpu_s}

        own = self.recorded.requests_per_cpu_s
        return {
            "speeds": [plain(one) for one in self.speeds],
            "plain": plain(self.plain),
            "recorded": plain(self.recorded) | {"source": self.source},
            "decision_us": self.decision_us,
            "bytes_per_request": self.bytes_per_request,
            "exponent": self.exponent,
            "first_call": self.first_call,
            "peers": [
                asdict(peer)
                | {
                    "requests_per_cpu_s": peer.requests_per_cpu_s,
                    "times_as_fast": own / peer.marginal_per_cpu_s,
                }
                for peer in peers.peers()
            ],
        }
