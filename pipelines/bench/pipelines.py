"""How fast pipelines over layers are simulated."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hetero.display import Column, Table
from hetero.placement import FlowNetwork
from hetero.routers.pipelines import FlowRouter
from hetero.simulator.pipeline_run import OFFLINE_S
from hetero.timings import Timing
from pipelines.bench.measured import Measured, stopwatch
from pipelines.studies.helix import run_offline
from pipelines.studies.helix_artifact import placement

SETTINGS = ("single-24 70B", "geo-24 70B", "hetero-42 70B")
_COLUMNS = (
    Column("setting"),
    Column("CPU time", "s", 3, of="seconds"),
    Column("events"),
    Column("events", "10^6/s", 3, of=lambda one: one.events / one.seconds / 1e6),
    Column("faster than real time", "x", of="speed"),
)


@dataclass(frozen=True, slots=True)
class PipelineSpeed:
    """One setting: CPU time [s] and events of 660 simulated seconds."""

    setting: str
    seconds: float
    events: int

    @property
    def speed(self) -> float:
        """Simulated seconds per second."""
        return OFFLINE_S[1] / self.seconds


@dataclass(frozen=True, slots=True, repr=False)
class PipelinesBench(Measured):
    """Times of all settings, each the best of ``repeats`` runs."""

    rows: tuple[PipelineSpeed, ...]
    repeats: int

    def record(self) -> dict[str, object]:
        """For JSON."""
        return {"rows": [asdict(row) | {"speed": row.speed} for row in self.rows]}

    @property
    def timings(self) -> tuple[Timing, ...]:
        """CPU time of every setting."""
        return tuple(
            Timing.here(
                f"pipelines.{row.setting}",
                row.seconds,
                command="hetero bench pipelines --record",
                statistic="best",
                repeats=self.repeats,
            )
            for row in self.rows
        )

    def table(self) -> Table:
        """One row per setting."""
        title = "660 simulated seconds, Helix's placement kept full"
        return Table.of(title, _COLUMNS, self.rows)


def bench(repeats: int = 3) -> PipelinesBench:
    """Time every setting; the first run compiles and does not count."""
    rows = []
    for setting in SETTINGS:
        network = FlowNetwork(placement(f"{setting} helix"))
        router = FlowRouter.offline(network.max_flow().link_tokens_per_s)
        run = run_offline(network, router, "twin", window_s=(1.0, 5.0))
        spent: list[float] = []
        for _ in range(repeats):
            with stopwatch(spent):
                run = run_offline(network, router, "twin")
        rows.append(PipelineSpeed(setting, min(spent), run.events))
    return PipelinesBench(tuple(rows), repeats)
