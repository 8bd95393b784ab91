"""How fast pipelines over layers are simulated."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from hetero.display import Column, Shown, Table
from hetero.placement import FlowNetwork
from hetero.routers.pipelines import FlowRouter
from hetero.simulator.pipeline_run import OFFLINE_S
from pipelines.studies.helix import run_offline
from pipelines.studies.helix_artifact import placement

SETTINGS = ("single-24 70B", "geo-24 70B", "hetero-42 70B")


@dataclass(frozen=True, slots=True)
class Row:
    """One setting: CPU time [s] and events of 660 simulated seconds."""

    setting: str
    seconds: float
    events: int

    @property
    def speed(self) -> float:
        """Simulated seconds per second."""
        return OFFLINE_S[1] / self.seconds


@dataclass(frozen=True, slots=True, repr=False)
class Bench(Shown):
    """Times of all settings."""

    rows: tuple[Row, ...]

    def record(self) -> dict[str, object]:
        """For JSON."""
        return {"rows": [asdict(row) | {"speed": row.speed} for row in self.rows]}

    def table(self) -> Table:
        """One row per setting."""
        columns = (
            Column("setting"),
            Column("CPU time", "s", 3),
            Column("events"),
            Column("events", "10^6/s", 3),
            Column("faster than real time", "x"),
        )
        rows = tuple(
            (row.setting, row.seconds, row.events, row.events / row.seconds / 1e6, row.speed)
            for row in self.rows
        )
        return Table("660 simulated seconds, Helix's placement kept full", columns, rows)


def bench(repeats: int = 3) -> Bench:
    """Time every setting; the first run compiles and does not count."""
    rows = []
    for setting in SETTINGS:
        network = FlowNetwork(placement(f"{setting} helix"))
        router = FlowRouter.offline(network.max_flow().link_tokens_per_s)
        run = run_offline(network, router, "twin", window_s=(1.0, 5.0))
        best = float("inf")
        for _ in range(repeats):
            start = time.process_time()
            run = run_offline(network, router, "twin")
            best = min(best, time.process_time() - start)
        rows.append(Row(setting, best, run.events))
    return Bench(tuple(rows))
