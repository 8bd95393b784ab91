"""What the replicas of a run hold at regular times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hetero.arrays import Floats
from hetero.engine import state
from hetero.engine.snapshot import snapshot


@dataclass(frozen=True, slots=True)
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
    kv_use
        Share of each KV cache that is held, prefix cache not included; shape (T, M).
    busy_s
        Time spent in steps so far [s]; shape (T, M).
    """

    replicas: tuple[str, ...]
    time_s: Floats
    waiting: NDArray[np.int64]
    decoding: NDArray[np.int64]
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
        _, engines, self.replicas, self.floats, self.integers = arrays
        self.engines = engines
        paged = engines["admission"] == state.PAGED
        self.capacity = engines["kv_tokens"] // np.where(paged, engines["block_tokens"], 1)
        self.start_s, self.step_s = start_s, step_s
        self.rows: list[tuple[NDArray[Any], ...]] = []

    @property
    def next_s(self) -> float:
        """Time of the next sample."""
        return self.start_s + len(self.rows) * self.step_s

    def take(self) -> None:
        """Note how the replicas stand at the time of the next sample."""
        used, busy_s = np.empty(len(self.replicas), np.int64), np.empty(len(self.replicas))
        snapshot(self.engines, self.replicas, self.integers, self.next_s, used, busy_s)
        waiting, decoding = self.replicas["waiting"].copy(), self.replicas["running"].copy()
        self.rows.append((waiting, decoding, used, busy_s))

    def samples(self, names: tuple[str, ...]) -> Samples:
        """All that was noted."""
        waiting, decoding, used, busy_s = map(np.array, zip(*self.rows, strict=True))
        time_s = np.arange(len(self.rows), dtype=np.float64) * self.step_s
        return Samples(names, time_s, waiting, decoding, used / self.capacity, busy_s)
