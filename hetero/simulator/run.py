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
from hetero.engine.gaps import gap_edges
from hetero.errors import ParameterError
from hetero.simulator.samples import Samples
from hetero.workload import Trace

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


@dataclass(frozen=True)
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
        Histogram of inter-token times of all replicas; edges in :attr:`gap_edges_s`.
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

    @property
    def gap_edges_s(self) -> Floats:
        """Edges of the inter-token histogram [s]; shape (bins + 1,)."""
        return gap_edges()

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
