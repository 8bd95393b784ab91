"""What a simulation leaves behind: one row per request, one per replica, one histogram."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hetero.arrays import Floats
from hetero.deployment import Deployment
from hetero.display import Shown, Table
from hetero.engine import state
from hetero.engine.replica import snapshot
from hetero.errors import ParameterError
from hetero.workload import Trace


@dataclass(frozen=True, slots=True, repr=False)
class Samples:
    """The replicas at regular times, after all that happens at each and before batches form.

    Attributes
    ----------
    replicas
        Their names.
    time_s
        From the first arrival on [s]; shape (T,).
    waiting, decoding
        Requests in the queue of each replica, and those that decode; shape (T, M).
    held
        Requests that wait at the dispatcher; shape (T,).
    kv_use
        Share of each KV cache that is held, prefix cache not included; shape (T, M).
    busy_s
        Time spent in steps so far [s]; shape (T, M).
    """

    replicas: tuple[str, ...]
    time_s: Floats
    waiting: NDArray[np.int64]
    decoding: NDArray[np.int64]
    held: NDArray[np.int64]
    kv_use: Floats
    busy_s: Floats

    def frame(self) -> pd.DataFrame:
        """One row per time and replica."""
        times, count = len(self.time_s), len(self.replicas)
        return pd.DataFrame(
            {
                "time_s": np.repeat(self.time_s, count),
                "replica": np.tile(np.array(self.replicas, object), times),
                "waiting": self.waiting.ravel(),
                "decoding": self.decoding.ravel(),
                "kv_use": self.kv_use.ravel(),
                "busy_s": self.busy_s.ravel(),
            }
        )


class Sampler:
    """Collects samples of a running simulation every ``step_s``."""

    def __init__(self, arrays: tuple[Any, ...], start_s: float, step_s: float) -> None:
        self.requests, engines, self.replicas, self.floats, self.integers = arrays
        self.engines = engines
        paged = engines["admission"] == state.PAGED
        self.capacity = engines["kv_tokens"] // np.where(paged, engines["block_tokens"], 1)
        self.start_s, self.step_s = start_s, step_s
        self.rows: list[tuple[Any, ...]] = []

    @property
    def next_s(self) -> float:
        """Time of the next sample."""
        return self.start_s + len(self.rows) * self.step_s

    def take(self) -> None:
        """Note how the replicas stand at the time of the next sample."""
        used, busy_s = np.empty(len(self.replicas), np.int64), np.empty(len(self.replicas))
        snapshot(self.engines, self.replicas, self.integers, self.next_s, used, busy_s)
        waiting, decoding = self.replicas["waiting"].copy(), self.replicas["running"].copy()
        held = np.count_nonzero(self.requests["status"] == state.HELD)
        self.rows.append((waiting, decoding, held, used, busy_s))

    def samples(self, names: tuple[str, ...]) -> Samples:
        """All that was noted."""
        waiting, decoding, held, used, busy_s = map(np.array, zip(*self.rows, strict=True))
        time_s = np.arange(len(self.rows), dtype=np.float64) * self.step_s
        return Samples(names, time_s, waiting, decoding, held, used / self.capacity, busy_s)


# By the number of the reason, see hetero.engine.state.
_REASONS = np.array(
    [
        "",
        "longer than the KV cache of every replica",
        "every replica that could hold it was down, and none came back",
        "the router chose no replica that could take it",
        "the router held it until nothing was left to wait for",
        "the server did not answer it in full",
    ],
    object,
)


@dataclass(frozen=True, repr=False)
class Run(Shown):
    """A served trace.

    Attributes
    ----------
    deployment, trace, router, seed
        What was simulated.
    requests
        Records in order of arrival, shape (N,); see :meth:`frame` for the same in words.
    replicas
        Records of the replicas at the end, shape (M,).
    gap_counts
        Histogram of inter-token times of all replicas; edges: :func:`hetero.engine.gaps.gap_edges`.
    samples
        What replicas held over time, where it was asked for.
    """

    deployment: Deployment
    trace: Trace
    router: str
    requests: Any
    replicas: Any
    gap_counts: NDArray[np.int64]
    seed: int
    samples: Samples | None = field(default=None, kw_only=True)

    @classmethod
    def of(
        cls,
        deployment: Deployment,
        trace: Trace,
        router: str,
        requests: Any,
        replicas: Any,
        integers: NDArray[np.int64],
        seed: int,
        samples: Samples | None = None,
    ) -> Run:
        """A run from the arrays of the simulator."""
        gaps = integers[: state.GAP_BINS].copy()
        for records in (requests, replicas, gaps):
            records.setflags(write=False)
        return cls(deployment, trace, router, requests, replicas, gaps, seed, samples=samples)

    @cached_property
    def finished(self) -> NDArray[np.bool_]:
        """Which requests finished; shape (N,)."""
        return np.asarray(self.requests["status"] == state.FINISHED)

    @cached_property
    def ttft_s(self) -> Floats:
        """Time to first token: first token minus arrival [s]; NaN where there is none."""
        return np.asarray(self.requests["first_token_s"] - self.requests["arrival_s"])

    @cached_property
    def e2e_s(self) -> Floats:
        """End-to-end time: last token minus arrival [s]; NaN where it did not finish."""
        return np.where(
            self.finished, self.requests["finish_s"] - self.requests["arrival_s"], np.nan
        )

    @cached_property
    def tpot_s(self) -> Floats:
        """Time per output token after the first [s]; NaN for fewer than two tokens."""
        later = self.requests["output_tokens"] - 1
        span = self.requests["finish_s"] - self.requests["first_token_s"]
        return np.where(self.finished & (later > 0), span / np.maximum(later, 1), np.nan)

    @property
    def counts(self) -> dict[str, int]:
        """Requests by how they ended; together they are all that arrived."""
        done = int(self.finished.sum())
        rejected = int((self.requests["status"] == state.REJECTED).sum())
        return {"finished": done, "rejected": rejected}

    @property
    def span_s(self) -> float:
        """First arrival to last finish [s]; 0 if nothing finished."""
        if not self.finished.any():
            return 0.0
        end = self.requests["finish_s"][self.finished].max()
        return float(end - self.requests["arrival_s"][0])

    def completion_s(self) -> Floats:
        """When each replica finished its last request, from the first arrival [s]; shape (M,)."""
        where = np.where(
            self.requests["decode_node"] >= 0, self.requests["decode_node"], self.requests["node"]
        )
        ends = np.full(len(self.replicas), -np.inf)
        np.maximum.at(ends, where[self.finished], self.requests["finish_s"][self.finished])
        return np.where(np.isfinite(ends), ends - self.requests["arrival_s"][0], np.nan)

    def utilisation(self) -> Floats:
        """Share of the run that each replica spent in steps; shape (M,)."""
        busy = np.asarray(self.replicas["busy_s"])
        # Steps lost to failures may end after the last request has finished.
        return busy / max(self.span_s, float(busy.max()), 1e-300)

    def timeline(self) -> pd.DataFrame:
        """Queue, decoding requests, KV use and time spent in steps of each replica over time.

        One row per sample and replica, see :class:`Samples`.
        """
        if self.samples is None:
            raise ParameterError(
                "This run has no samples over time.",
                resolve="simulate(..., sample_s=1.0) notes every second what replicas hold.",
            )
        return self.samples.frame()

    def frame(self) -> pd.DataFrame:
        """One row per request, with replica names and the reason of a rejection."""
        names = np.array([*(replica.name for replica in self.deployment.replicas), ""], object)
        r = self.requests
        return pd.DataFrame(
            {
                "arrival_s": r["arrival_s"],
                "input_tokens": r["input_tokens"],
                "output_tokens": r["output_tokens"],
                "replica": names[r["node"]],
                "decode_replica": names[r["decode_node"]],
                "status": np.where(self.finished, "finished", "rejected"),
                "reason": _REASONS[r["reason"]],
                "first_token_s": r["first_token_s"],
                "finish_s": r["finish_s"],
                "ttft_s": self.ttft_s,
                "tpot_s": self.tpot_s,
                "e2e_s": self.e2e_s,
                "transfer_s": r["transfer_s"],
                "hit_tokens": r["hit_tokens"],
                "preemptions": r["preemptions"],
                "retries": r["retries"],
                **({} if self.trace.priorities is None else {"priority": r["priority"]}),
            }
        )

    def table(self) -> Table:
        """The metrics of the whole run."""
        from hetero.simulator.metrics import metrics

        return metrics(self).table()
