r"""What a replica that serves both phases sustains for requests of one size under targets.

With a constant batch of b requests of I input and O output tokens, in which prefills interrupt
decode steps, the replica completes

.. math:: r(b) = \frac{b}{O\,d(b) + b\,p}, \qquad TPOT(b) = d(b) + \frac{b\,p}{O}

requests per second, with p the prefill of one request [s] and d(b) a decode step of b requests
at their mean context I + O/2 [s]. The best batch is the largest r(b) among those that fit the KV
cache, b (I + O) <= capacity, and meet the targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hetero.deployment import Replica

if TYPE_CHECKING:
    from hetero.simulator import Slo
    from hetero.workload import Trace


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests of similar size.

    Attributes
    ----------
    input_tokens, output_tokens
        Their mean lengths.
    share
        Share of all requests.
    input_range
        Inputs that belong to it, lower end included.
    """

    input_tokens: float
    output_tokens: float
    share: float
    input_range: tuple[float, float]

    @property
    def label(self) -> str:
        """Mean lengths in words."""
        return f"{self.input_tokens:.0f} + {self.output_tokens:.0f} tokens"


def buckets(trace: Trace, *, inputs: int = 6, outputs: int = 4) -> tuple[Bucket, ...]:
    """Buckets of a trace between quantiles of its inputs and, within each, of its outputs.

    Every bucket holds about the same number of requests, so that none is a rarity.

    Examples
    --------
    >>> from hetero import workload
    >>> found = buckets(workload.load("azure2023_conv").head(2000), inputs=3, outputs=2)
    >>> len(found), round(sum(bucket.share for bucket in found), 6)
    (6, 1.0)
    """
    x, y = trace.input_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
    found = []
    edges = np.unique(np.quantile(x, np.linspace(0, 1, inputs + 1)))
    edges[-1] = np.inf
    edges = edges if len(edges) > 1 else np.array([x[0], np.inf])
    for low, high in pairwise(edges):
        inside = (x >= low) & (x < high)
        cuts = np.unique(np.quantile(y[inside], np.linspace(0, 1, outputs + 1)))
        cuts[-1] = np.inf
        cuts = cuts if len(cuts) > 1 else np.array([y[inside][0], np.inf])
        for least, most in pairwise(cuts):
            cell = inside & (y >= least) & (y < most)
            if cell.any():
                found.append(
                    Bucket(
                        float(x[cell].mean()),
                        float(y[cell].mean()),
                        float(cell.mean()),
                        (float(low), float(high)),
                    )
                )
    return tuple(found)


def capacity_rps(replica: Replica, bucket: Bucket, slo: Slo | None = None) -> float:
    """Requests of a bucket per second that a replica for both phases sustains; 0 if it cannot.

    Parameters
    ----------
    slo
        Targets on TPOT, TTFT (the prefill alone; queueing is the dispatcher's) and E2E.

    Examples
    --------
    >>> from hetero.latency.step import StepModel
    >>> from hetero.simulator import Slo
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> one = Replica("a", step, kv_tokens=50_000)
    >>> free = capacity_rps(one, Bucket(500, 100, 1.0, (0, 1e9)))
    >>> free > capacity_rps(one, Bucket(500, 100, 1.0, (0, 1e9)), Slo(tpot_s=0.05)) > 0
    True
    """
    inputs, outputs = bucket.input_tokens, max(bucket.output_tokens, 1.0)
    most = min(int(replica.kv_tokens / (inputs + outputs)), replica.engine.max_batch)
    if most < 1:
        return 0.0
    batch = np.arange(1, most + 1, dtype=np.float64)
    prefill_s = float(replica.step.prefill_seconds([inputs]))
    decode_s = replica.step.seconds(batch, batch.astype(np.int64), batch * (inputs + outputs / 2))
    # The first token comes with the prefill.
    steps = outputs - 1.0
    rate = batch / (steps * decode_s + batch * prefill_s)
    tpot_s = decode_s + batch * prefill_s / max(steps, 1.0) if steps > 0 else 0.0 * batch
    good = np.full(most, slo is None or slo.ttft_s is None or prefill_s <= slo.ttft_s)
    if slo is not None and slo.tpot_s is not None:
        good &= tpot_s <= slo.tpot_s
    if slo is not None and slo.e2e_s is not None:
        good &= prefill_s + steps * tpot_s <= slo.e2e_s
    return float(rate[good].max(initial=0.0))
