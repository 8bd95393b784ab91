r"""SLO attainment of every pair of a prefill and a decode replica, from the load they carry.

Prefill is an M/G/1 queue whose service time S is the occupancy of its pipeline, or what its memory
allows if that is longer: a cache of s tokens stays from the start of its prefill to the end of its
transfer, and the next needs room, :math:`(s + E[s] / 2) / M` of the M tokens. With arrival rate
:math:`\lambda` and :math:`\rho = \lambda E[S] < 1` the waiting time W has the mean of
Pollaczek and Khinchine and is taken as exponential beyond its atom at 0 (exact for M/M/1):

.. math:: E[W] = \frac{\lambda E[S^2]}{2 (1 - \rho)}, \qquad
          P(W > w) = \rho\, e^{-\rho w / E[W]}

Decode is a batch in equilibrium: requests arrive at rate :math:`\mu`, stay :math:`(o - 1) T(b)`
and so fill a batch of mean :math:`b = \mu E[o - 1] T(b)`; the cached tokens spread as a compound
Poisson variable, :math:`b\, E[c^2] / E[c]^2` in units of a mean request. Of a batch beyond the
largest B that memory holds the rest waits, :math:`V = (b - B) E[o - 1] T(B) / B`. A request of
input s and output o meets its targets if

.. math::
    W + latency(s) \le TTFT, \quad T(b) + (T_{ij}(s) + V) / (o - 1) \le TPOT, \quad
    W + latency(s) + T_{ij}(s) + V + (o - 1) T(b) \le E2E

with the transfer :math:`T_{ij}` of :mod:`hetero.costs.transfer`; the first token comes
from the prefill replica, so what comes before the second counts to the time per token.
ThunderServe (section 3.3) takes DistServe's simulator; the queue is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtri

from hetero.arrays import Flags, Floats
from hetero.costs.demand import Demand
from hetero.costs.pipeline import Pipeline
from hetero.simulator.metrics import Slo

MOST_LOAD = 0.95
"""Largest utilisation of a prefill replica, a link or a batch that a plan may count on."""

_LEVELS = np.asarray(ndtri((np.arange(12) + 0.5) / 12))  # the batch, in standard deviations


@dataclass(frozen=True, eq=False, slots=True)
class Prefill:
    """A pipeline that prefills a demand: times per kind of request, shape (K,).

    Attributes
    ----------
    latency_s
        From the start of a prefill to its first token; infinite where its cache has no room.
    busy_s
        Occupancy.
    share
        Share of the memory that a prompt takes, and what is lost beside it.
    """

    latency_s: Floats
    busy_s: Floats
    share: Floats

    @classmethod
    def of(cls, pipeline: Pipeline, demand: Demand) -> Prefill:
        """Figures of a pipeline for a demand; kinds longer than its KV cache are never served."""
        busy = pipeline.prefill_occupancy_s(demand.input_tokens)
        latency = pipeline.prefill_latency_s(demand.input_tokens)
        latency = np.where(demand.input_tokens > pipeline.kv_tokens, np.inf, latency)
        share = (demand.input_tokens + demand.mean_input / 2.0) / max(pipeline.kv_tokens, 1)
        return cls(latency, busy, np.minimum(share, 1.0))

    def service_s(self, transfer_s: Floats) -> Floats:
        """Service times S for given times of transfer, shape (K,)."""
        held = np.where(np.isinf(self.latency_s), 0.0, self.latency_s) + transfer_s
        return np.asarray(np.maximum(self.busy_s, held * self.share))


@dataclass(frozen=True, eq=False, slots=True)
class Decode:
    """A pipeline that decodes a demand.

    Attributes
    ----------
    batch, token_s
        Batches from 1 to the largest and the time per token at each, shape (G,).
    rate_rps
        Requests per second that keep each batch filled, shape (G,), increasing.
    most_batch
        Largest batch that memory and the engine allow.
    most_rps
        Requests per second that leave room for the spread of the batch.
    """

    batch: Floats
    token_s: Floats
    rate_rps: Floats
    most_batch: float
    most_rps: float
    kv_tokens: int

    @classmethod
    def of(cls, pipeline: Pipeline, demand: Demand) -> Decode:
        """Figures of a pipeline for a demand; no capacity where not even one request fits."""
        context = demand.context_tokens
        most = min(float(pipeline.max_batch), pipeline.kv_tokens / context)
        batch = np.unique(np.append(np.geomspace(1.0, max(most, 1.0), 16), max(most, 1.0)))
        token = pipeline.decode_step_s(batch, batch * context)
        rate = np.maximum.accumulate(batch / (max(demand.mean_output - 1.0, 1e-9) * token))
        # The mean batch whose standard deviation above still fits: b + sqrt(v b) = most.
        spread = demand.context_spread
        mean = (np.sqrt(most + spread / 4.0) - np.sqrt(spread) / 2.0) ** 2
        room = float(np.interp(mean, batch, rate)) * min(1.0, mean)
        return cls(
            batch, token, rate, most, MOST_LOAD * room if most >= 1 else 0.0, pipeline.kv_tokens
        )

    def mean_batch(self, rate_rps: float) -> float:
        """Mean batch at a rate of requests."""
        if rate_rps <= self.rate_rps[0]:
            return float(rate_rps / self.rate_rps[0] * self.batch[0])
        return float(np.interp(rate_rps, self.rate_rps, self.batch))


@dataclass(frozen=True, eq=False)
class Pairs:
    """Prefill and decode replicas, and what a transfer between each two takes.

    Attributes
    ----------
    fixed_s, per_token_s
        Transfer from prefill replica i to decode replica j, shape (m, n).
    """

    demand: Demand
    slo: Slo
    prefill: tuple[Prefill, ...]
    decode: tuple[Decode, ...]
    fixed_s: Floats
    per_token_s: Floats

    @cached_property
    def prefill_share(self) -> Floats:
        """Largest share of the requests per prefill replica, shape (m,)."""
        return np.asarray(MOST_LOAD / (self._moments[0] * self.demand.rate_rps))

    @cached_property
    def decode_share(self) -> Floats:
        """Largest share per decode replica, shape (n,)."""
        return np.array([one.most_rps for one in self.decode]) / self.demand.rate_rps

    @cached_property
    def pair_share(self) -> Floats:
        """Largest share per pair, whose link carries one transfer at a time; shape (m, n)."""
        mean = self.fixed_s + self.per_token_s * self.demand.mean_input
        return np.asarray(MOST_LOAD / (mean * self.demand.rate_rps))

    @cached_property
    def _transfer_s(self) -> Floats:
        """Transfer of every kind, shape (m, n, K)."""
        return self.fixed_s[..., None] + self.per_token_s[..., None] * self.demand.input_tokens

    @cached_property
    def _latency_s(self) -> Floats:
        return np.array([one.latency_s for one in self.prefill])

    @cached_property
    def _moments(self) -> Floats:
        """Mean [s] and mean square [s^2] of the service times, shape (2, m)."""
        transfer = self._transfer_s.mean(axis=1)
        times = [one.service_s(t) for one, t in zip(self.prefill, transfer, strict=True)]
        return np.array([[self.demand.mean(t**power) for t in times] for power in (1, 2)])

    @cached_property
    def _room(self) -> Flags:
        """Kinds that fit the cache of each decode replica, shape (n, K)."""
        longest = self.demand.input_tokens + self.demand.output_tokens
        return np.array([longest <= one.kv_tokens for one in self.decode])

    def attainment(self, prefill_rps: Floats, decode_rps: Floats) -> Floats:
        """SLO attainment D of every pair at given loads; shape (m, n).

        Source: ThunderServe, section 3.3: SLO attainment of every pair; D_ij.

        Parameters
        ----------
        prefill_rps, decode_rps
            Requests per second of each prefill replica, shape (m,), and decode replica, (n,).
        """
        later = np.maximum(self.demand.output_tokens - 1.0, 0.0)
        token, wait = self._token_s(decode_rps)  # (n, Q) each
        transfer = self._transfer_s  # (m, n, K)
        # What is left for waiting, by pair, kind and level of the batch: shape (m, n, K, Q).
        left = np.full((*transfer.shape, token.shape[1]), np.inf)
        latency = self._latency_s[:, None, :, None]
        if self.slo.ttft_s is not None:
            left = np.minimum(left, self.slo.ttft_s - latency)
        if self.slo.e2e_s is not None:
            decoding = token[:, None, :] * later[:, None] + wait[:, None, :]  # (n, K, Q)
            left = np.minimum(left, self.slo.e2e_s - latency - transfer[..., None] - decoding[None])
        if self.slo.tpot_s is not None:
            before = transfer[..., None] + wait[None, :, None, :]
            each = token[None, :, None, :] + before / np.maximum(later, 1.0)[:, None]
            left = np.where((each > self.slo.tpot_s) & (later > 0)[:, None], -np.inf, left)
        left = np.where(np.isinf(latency), -np.inf, left)
        met = self._in_time(left, prefill_rps).mean(axis=3)
        met = np.where(self._room[None], met, 0.0)
        return np.asarray((met * self.demand.share).sum(axis=-1))

    def _in_time(self, left: Floats, prefill_rps: Floats) -> Floats:
        """P(W <= left) of each prefill replica."""
        mean, square = self._moments
        load = np.minimum(prefill_rps * mean, 1.0 - 1e-9)
        wait = prefill_rps * square / (2.0 * (1.0 - load))
        decay = np.where(wait > 0, load / np.maximum(wait, 1e-300), np.inf)
        shape = (-1, 1, 1, 1)
        with np.errstate(invalid="ignore", over="ignore"):
            tail = load.reshape(shape) * np.exp(-np.maximum(left, 0.0) * decay.reshape(shape))
        tail = np.where(np.isnan(tail), 0.0, tail)
        return np.asarray(np.where(left >= 0, 1.0 - tail, 0.0))

    def _token_s(self, decode_rps: Floats) -> tuple[Floats, Floats]:
        """Time per token and wait of each decode replica at the levels of its batch, (n, Q)."""
        token = np.empty((len(self.decode), len(_LEVELS)))
        wait = np.empty_like(token)
        for j, (one, rate) in enumerate(zip(self.decode, decode_rps, strict=True)):
            mean = one.mean_batch(float(rate))
            batch = np.maximum(mean + np.sqrt(self.demand.context_spread * mean) * _LEVELS, 1.0)
            token[j] = np.interp(batch, one.batch, one.token_s)
            excess = np.maximum(batch / max(one.most_batch, 1e-9) - 1.0, 0.0)
            wait[j] = excess * (self.demand.mean_output - 1.0) * one.token_s[-1]
        return token, wait
