"""Replay of very long traces in shards: groups of replicas that are simulated one by one.

Request ``k`` goes to shard ``k mod S``, and replica ``m`` belongs to shard ``m mod S``, with ``S``
a divisor of the ``M`` replicas. Round robin serves request ``k`` at replica ``k mod M`` with the
shards as without them, as long as no request has to skip a replica that is too small for it: then
nothing that happens in one shard can be seen in another, and the replay is exact. That no request
skipped its turn is checked on every one. Any other router decides by fewer replicas than it would;
the result says so.

The trace is read in chunks, and what is kept of a shard is counts, sums and histograms, so memory
is that of one shard's requests and not of the whole trace's records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pyarrow as pa
import pyarrow.parquet

from hetero.arrays import Floats, Ints
from hetero.deployment import Deployment
from hetero.display import Shown, Table
from hetero.engine.gaps import gap_edges
from hetero.errors import DataError, require
from hetero.routers import Builtin, RoundRobin
from hetero.rows import reading
from hetero.simulator import Run, simulate
from hetero.simulator.metrics import METRIC_COLUMNS, PERCENTILES, percentile_rows
from hetero.workload import Trace

COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
CHUNK_ROWS = 1 << 20
"""Rows of a Parquet file that are held at once while it is read."""

QUANTITIES = ("ttft_s", "tpot_s", "e2e_s", "gap_s")
RESOLUTION = 1 / 32
"""Widest bin of the histograms, as a share of the value: percentiles are at most this too high."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What is kept of the requests of one shard, or of several together.

    Attributes
    ----------
    counts
        Requests ``arrived``, ``finished`` and ``rejected``, tokens ``input`` and ``output`` of
        finished ones, and ``preemptions``.
    histograms
        Counts by bin of :func:`hetero.engine.gaps.gap_edges`; inter-token times too.
    first_s, last_s
        First arrival and last finish [s].
    busy_s
        Time that replicas spent in steps [s].
    in_turn
        Whether each request was served by the replica whose turn it was.
    """

    counts: dict[str, int]
    histograms: dict[str, Ints]
    first_s: float
    last_s: float
    busy_s: float
    in_turn: bool

    @classmethod
    def of(cls, run: Run) -> Totals:
        """Totals of a run."""
        done, records = run.finished, run.requests
        values = {"ttft_s": run.ttft_s, "tpot_s": run.tpot_s, "e2e_s": run.e2e_s}
        histograms = {key: _histogram(one[np.isfinite(one)]) for key, one in values.items()}
        return cls(
            counts=run.counts
            | {
                "arrived": len(records),
                "input_tokens": int(records["input_tokens"][done].sum(dtype=np.int64)),
                "output_tokens": int(records["output_tokens"][done].sum(dtype=np.int64)),
                "preemptions": int(records["preemptions"].sum(dtype=np.int64)),
            },
            histograms=histograms | {"gap_s": run.gap_counts},
            first_s=float(records["arrival_s"][0]),
            last_s=float(records["finish_s"][done].max()) if done.any() else -np.inf,
            busy_s=float(np.sum(run.replicas["busy_s"])),
            in_turn=bool(
                np.array_equal(records["node"], np.arange(len(records)) % len(run.replicas))
            ),
        )

    def __add__(self, other: Totals) -> Totals:
        """Totals of both."""

        def both(mine: dict[str, Any], yours: dict[str, Any]) -> dict[str, Any]:
            return {key: mine[key] + yours[key] for key in mine}

        return Totals(
            counts=both(self.counts, other.counts),
            histograms=both(self.histograms, other.histograms),
            first_s=min(self.first_s, other.first_s),
            last_s=max(self.last_s, other.last_s),
            busy_s=self.busy_s + other.busy_s,
            in_turn=self.in_turn and other.in_turn,
        )


@dataclass(frozen=True, eq=False, repr=False)
class Replay(Shown):
    """A trace replayed in shards.

    Attributes
    ----------
    shards
        Number of shards.
    exact
        Whether every request was served as without shards.
    totals
        Of all shards together.
    """

    deployment: Deployment
    router: str
    source: str
    shards: int
    exact: bool
    totals: Totals

    @property
    def span_s(self) -> float:
        """First arrival to last finish [s]."""
        return max(self.totals.last_s - self.totals.first_s, 0.0)

    @cached_property
    def percentiles_s(self) -> dict[str, dict[int, float]]:
        """Upper edge of the bin that holds each percentile [s], by quantity."""
        # The outermost bin takes all that is longer.
        edges = np.append(gap_edges()[:-1], np.inf)
        found = {}
        for key in QUANTITIES:
            cumulative = np.cumsum(self.totals.histograms[key])
            if not cumulative[-1]:
                found[key] = dict.fromkeys(PERCENTILES, float("nan"))
                continue
            bins = np.searchsorted(cumulative, np.array(PERCENTILES) / 100 * cumulative[-1])
            found[key] = {p: float(edges[k + 1]) for p, k in zip(PERCENTILES, bins, strict=True)}
        return found

    def table(self) -> Table:
        """Counts, rates, and percentiles with their resolution."""
        counts, span = self.totals.counts, max(self.span_s, 1e-300)
        rows: list[tuple[object, ...]] = [
            ("requests arrived", counts["arrived"], ""),
            ("requests finished", counts["finished"], ""),
            ("requests rejected", counts["rejected"], ""),
            ("preemptions", counts["preemptions"], ""),
            ("throughput, inputs", counts["input_tokens"] / span, "tokens/s"),
            ("throughput, outputs", counts["output_tokens"] / span, "tokens/s"),
            (
                "mean utilisation",
                100 * self.totals.busy_s / span / len(self.deployment.replicas),
                "%",
            ),
        ]
        rows += percentile_rows(self.percentiles_s)
        how = (
            "exact: every request is served as without shards"
            if self.exact
            else "approximate: the router saw only the replicas of a request's own shard"
        )
        return Table(
            f"{self.deployment.name}, {self.router}, {self.source}",
            METRIC_COLUMNS,
            tuple(rows),
            (
                f"{self.shards} shards; {how}.",
                f"Percentiles are read off histograms: at most {RESOLUTION:.1%} too high.",
            ),
        )


def replay(
    deployment: Deployment,
    trace: Trace | Path | str,
    router: Builtin | None = None,
    *,
    shards: int,
    workers: int = 1,
    seed: int = 0,
) -> Replay:
    """Serve a trace shard by shard, ``workers`` of them at once.

    Parameters
    ----------
    trace
        A trace, or the Parquet file of one, which every shard reads in chunks.
    router
        By default round robin.
    shards
        Groups into which replicas and requests are dealt in turn.
    workers
        Processes; each holds the requests of one shard.

    Raises
    ------
    DataError
        If the file is no Parquet file of a trace.

    Examples
    --------
    >>> from hetero import workload
    >>> from hetero.deployment import Replica
    >>> from hetero.latency.step import StepModel
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> four = Deployment("four", tuple(Replica(n, step, kv_tokens=50_000) for n in "abcd"))
    >>> found = replay(four, workload.load("azure2023_conv").head(1000), shards=2)
    >>> found.exact, found.totals.counts["finished"]
    (True, 1000)
    """
    chosen = router if router is not None else RoundRobin()
    count = len(deployment.replicas)
    require(
        shards >= 1 and count % shards == 0,
        f"{shards} shards do not divide {count} replicas.",
        resolve="use a divisor of the number of replicas.",
    )
    require(
        not deployment.links and all(one.role == "both" for one in deployment.replicas),
        f"{deployment.name} has prefill and decode replicas, which belong together.",
        resolve="simulate it whole, or pass one deployment per group.",
    )
    require(
        shards == 1 or not isinstance(trace, Trace) or not trace.clients,
        "Clients of a closed loop wait for answers of all replicas.",
        resolve="use one shard, or give the trace arrivals.",
    )
    jobs = (
        joblib.delayed(_shard)(deployment, trace, chosen, s, shards, seed) for s in range(shards)
    )
    totals: Totals | None = None
    parts = joblib.Parallel(n_jobs=workers, return_as="generator", pre_dispatch="n_jobs")(jobs)
    for part in parts:
        totals = part if totals is None else totals + part
    assert totals is not None  # there is a shard
    return Replay(
        deployment,
        chosen.name,
        trace.source if isinstance(trace, Trace) else Path(trace).name,
        shards,
        shards == 1 or (isinstance(chosen, RoundRobin) and totals.in_turn),
        totals,
    )


def group(deployment: Deployment, shard: int, shards: int) -> Deployment:
    """Replicas of one shard: every ``shards``-th from ``shard`` on."""
    return replace(
        deployment,
        name=f"{deployment.name}, shard {shard + 1} of {shards}",
        replicas=deployment.replicas[shard::shards],
    )


def _shard(
    deployment: Deployment,
    trace: Trace | Path | str,
    router: Builtin,
    shard: int,
    shards: int,
    seed: int,
) -> Totals:
    part = (
        _every(trace, shard, shards)
        if isinstance(trace, Trace)
        else read_shard(Path(trace), shard, shards)
    )
    return Totals.of(simulate(group(deployment, shard, shards), part, router, seed=seed))


def _every(trace: Trace, shard: int, shards: int) -> Trace:
    _require_enough(len(trace), shards)
    return trace.take(np.arange(shard, len(trace), shards))


def _require_enough(count: int, shards: int) -> None:
    require(
        count >= shards,
        f"{count} requests cannot be dealt to {shards} shards.",
        resolve="use fewer shards.",
    )


def chunks(path: Path, rows: int = CHUNK_ROWS) -> Iterator[tuple[Floats, Ints, Ints]]:
    """Arrivals, inputs and outputs of a Parquet trace, some rows at a time.

    Raises
    ------
    DataError
        If the file cannot be read, or lacks a column.
    """
    with reading(path), pyarrow.parquet.ParquetFile(path) as file:
        missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
        if missing:
            raise DataError(
                f"it has no column {' and '.join(missing)}.",
                path=path,
                resolve="write it with Trace.to_parquet.",
            )
        for batch in file.iter_batches(batch_size=rows, columns=list(COLUMNS)):
            columns = [batch.column(name) for name in COLUMNS]
            if any(one.null_count or not _numeric(one.type) for one in columns):
                raise DataError(
                    "arrival_s, input_tokens and output_tokens hold gaps or text.",
                    path=path,
                    resolve="write it with Trace.to_parquet.",
                )
            yield tuple(one.to_numpy(zero_copy_only=False) for one in columns)


def _numeric(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def read_shard(path: Path, shard: int, shards: int, rows: int = CHUNK_ROWS) -> Trace:
    """Requests ``shard``, ``shard + shards``, ... of a Parquet trace, read in chunks.

    Raises
    ------
    DataError
        If the file cannot be read, or lacks a column.
    """
    seen, parts = 0, []
    for columns in chunks(path, rows):
        mine = slice((shard - seen) % shards, None, shards)
        # Copies, so that a chunk can be let go.
        parts.append([one[mine].copy() for one in columns])
        seen += len(columns[0])
    _require_enough(seen, shards)
    arrival, inputs, outputs = (np.concatenate(one) for one in zip(*parts, strict=True))
    return Trace(arrival, inputs, outputs, name=path.stem, source=f"parquet:{path.name}")


def _histogram(values_s: Floats) -> Ints:
    """Counts of times by the bins of the inter-token histogram; the outer bins take the rest."""
    edges = gap_edges()
    bins = np.clip(np.searchsorted(edges, values_s, side="right") - 1, 0, len(edges) - 2)
    return np.bincount(bins, minlength=len(edges) - 1).astype(np.int64)
