"""Cost of very long replays: time and memory over requests and replicas, and what follows from it.

Every measurement is a process of its own that replays a Parquet trace shard by shard on one core,
so that its peak memory is that of the replay and of nothing before it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from hetero.display import Column, Table
from pipelines.bench.measured import Measured, Say, silent
from pipelines.bench.simulator import requests

DAY_S = 86_400.0
PLANNED_REQUESTS, PLANNED_REPLICAS = 44_000_000, 10_000
"""A day of requests over a fleet of one-GPU replicas, planned on paper."""

_CHUNK = 1_000_000
_CHILD = """
import json, resource, sys, time
from pathlib import Path
from pipelines.bench.simulator import fleet, requests
from hetero.routers import RoundRobin
from hetero.simulator.shards import replay
from hetero.simulator import simulate
path, replicas, shards = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
simulate(fleet(8), requests(1000, 10.0), RoundRobin())  # kernels are read from their cache
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cpu, wall = time.process_time(), time.perf_counter()
found = replay(fleet(replicas), path, shards=shards)
print(json.dumps({
    "cpu_s": time.process_time() - cpu,
    "wall_s": time.perf_counter() - wall,
    "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    "start_gb": before * 1024 / 1e9,
    "exact": found.exact,
    "finished": found.totals.counts["finished"],
}))
"""


@dataclass(frozen=True, slots=True)
class ShardedReplay:
    """One replay on one core.

    Attributes
    ----------
    cpu_s, wall_s
        Time of the replay, reading included [s].
    peak_gb, start_gb
        Largest memory of the process, and its memory before the replay [GB].
    exact
        Whether every request was served as without shards.
    """

    requests: int
    replicas: int
    shards: int
    cpu_s: float
    wall_s: float
    peak_gb: float
    start_gb: float
    exact: bool
    finished: int


@dataclass(frozen=True, slots=True)
class ScaleBench(Measured):
    """What ``hetero bench scale`` measures: the whole, a part of the requests, fewer replicas."""

    whole: ShardedReplay
    fewer_requests: ShardedReplay
    fewer_replicas: ShardedReplay

    @property
    def s_per_million(self) -> float:
        """CPU time per million further requests [s]."""
        a, b = self.fewer_requests, self.whole
        return (b.cpu_s - a.cpu_s) / (b.requests - a.requests) * 1e6

    @property
    def s_per_replica(self) -> float:
        """CPU time per further replica [s]."""
        a, b = self.fewer_replicas, self.whole
        return max(b.cpu_s - a.cpu_s, 0.0) / (b.replicas - a.replicas)

    @property
    def gb_per_million(self) -> float:
        """Memory per million further requests of one shard [GB]."""
        a, b = self.fewer_requests, self.whole
        return (b.peak_gb - a.peak_gb) / (b.requests - a.requests) * 1e6 * b.shards

    def planned(self, shards: int) -> tuple[float, float]:
        """CPU time [s] and peak memory [GB] of the planned replay on one core, by the slopes."""
        more = PLANNED_REQUESTS - self.whole.requests
        cpu = self.whole.cpu_s + self.s_per_million * more / 1e6
        cpu += self.s_per_replica * (PLANNED_REPLICAS - self.whole.replicas)
        in_shard = PLANNED_REQUESTS / shards - self.whole.requests / self.whole.shards
        return cpu, self.whole.peak_gb + self.gb_per_million * in_shard / 1e6

    @property
    def points(self) -> tuple[ShardedReplay, ...]:
        """What was measured."""
        return self.whole, self.fewer_requests, self.fewer_replicas

    def table(self) -> Table:
        """Measurements, slopes, and the plan."""
        rows: list[tuple[object, ...]] = [
            (p.requests, p.replicas, p.shards, p.cpu_s, p.wall_s, p.peak_gb, p.exact, "measured")
            for p in self.points
        ]
        for shards in (10, 40):
            cpu, gb = self.planned(shards)
            rows.append(
                (PLANNED_REQUESTS, PLANNED_REPLICAS, shards, cpu, None, gb, True, "by the slopes")
            )
        columns = (
            *(Column("requests"), Column("replicas"), Column("shards")),
            *(Column("CPU time", "s", 3), Column("elapsed", "s", 3)),
            *(Column("peak memory", "GB", 3), Column("exact"), Column("how")),
        )
        notes = (
            f"{self.s_per_million:.3g} CPU s per million requests, "
            f"{1e3 * self.s_per_replica:.3g} ms per replica, "
            f"{self.gb_per_million:.3g} GB per million requests of a shard; one core.",
        )
        return Table("A day of requests, round robin, Parquet in", columns, tuple(rows), notes)

    def record(self) -> dict[str, object]:
        """Everything as JSON values."""
        return {
            "points": [asdict(one) for one in self.points],
            "s_per_million": self.s_per_million,
            "s_per_replica": self.s_per_replica,
            "gb_per_million": self.gb_per_million,
            "planned": {str(shards): self.planned(shards) for shards in (10, 40)},
        }


def write_day(path: Path, count: int) -> None:
    """Write a day of Poisson arrivals with the lengths of conversations, some at a time."""
    writer: pyarrow.parquet.ParquetWriter | None = None
    end_s, left, seed = 0.0, count, 0
    try:
        while left:
            part = requests(min(left, _CHUNK), count / DAY_S, seed)
            arrivals = part.arrival_s + end_s
            table = pa.table(
                {
                    "arrival_s": arrivals,
                    "input_tokens": part.input_tokens,
                    "output_tokens": part.output_tokens,
                }
            )
            writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
            end_s, left, seed = float(arrivals[-1]), left - len(part), seed + 1
    finally:
        if writer is not None:
            writer.close()


def _measure(path: Path, count: int, replicas: int, shards: int) -> ShardedReplay:
    run = [sys.executable, "-c", _CHILD, str(path), str(replicas), str(shards)]
    done = subprocess.run(run, check=True, capture_output=True, text=True)
    return ShardedReplay(count, replicas, shards, **json.loads(done.stdout))


def bench(
    *,
    count: int = 10_000_000,
    replicas: int = 1_000,
    shards: int = 10,
    progress: Say = silent,
) -> ScaleBench:
    """Replay a day of requests, a fifth of them, and all of them over half the replicas.

    Parameters
    ----------
    count, replicas
        Size of the whole; the shards divide the replicas and half of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        day, part = Path(folder) / "day.parquet", Path(folder) / "part.parquet"
        progress("writing the traces")
        write_day(day, count)
        write_day(part, count // 5)
        progress(f"{count:,} requests, {replicas:,} replicas")
        whole = _measure(day, count, replicas, shards)
        progress("a fifth of the requests")
        fewer_requests = _measure(part, count // 5, replicas, shards)
        progress("half the replicas")
        fewer_replicas = _measure(day, count, replicas // 2, shards)
    return ScaleBench(whole, fewer_requests, fewer_replicas)
