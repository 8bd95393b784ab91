r"""How an island is divided: one parallelism per phase, chosen over all lengths of a workload.

Every configuration c of an island is timed on every length s, and the one with the smallest
weighted deviation from the best at each length,

.. math::
    \tilde\delta(c) = \sum_s p(s) \frac{R^*(s) - R(s, c)}{R^*(s)}, \qquad R^*(s) = \max_c R(s, c),

is taken (Rignall, sections 4.6.1 and 4.6.2). What R counts is a matter of reading, see
:class:`Reading`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Floats, Ints
from hetero.display import Column, Shown, Table
from hetero.errors import require
from hetero.latency.models.moe import MoeModel
from hetero.planners.rignall.rates import Phase

Batch: TypeAlias = Literal["one", "group", "gpu"]
"""Requests that a decode step advances: one, a batch per tensor-parallel group, or per GPU."""

#: Step, smallest and largest of the batch rule of section 4.6.2.
BATCH_STEP, BATCH_LEAST, BATCH_MOST = 8, 8, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the throughput of an island counts; the thesis leaves it open.

    Attributes
    ----------
    name
        Name of the reading in :data:`READINGS`.
    prefill_groups
        Whether each of the dp groups prefills a prompt of its own. R = 1000 / t as printed has
        one prompt per island.
    decode_batch
        See :data:`Batch`. R = 1000 / sum t as printed has one request per expert group. With
        tensor parallelism the latency model's batch is that of the group in attention, and that
        of a GPU in memory and experts: ``"group"`` is the cautious side, ``"gpu"`` the other.
    weights_must_fit
        Whether an island that prefills must hold the weights, and the cache of a prompt per
        group. Nothing in the thesis asks for it; decode is always checked.
    """

    name: str
    prefill_groups: bool
    decode_batch: Batch
    weights_must_fit: bool

    @property
    def text(self) -> str:
        """The reading in one sentence."""
        prompts = "a prompt per group" if self.prefill_groups else "one prompt per island"
        batch = {
            "one": "one request per expert group",
            "group": "a batch per tensor-parallel group",
            "gpu": "a batch per GPU",
        }[self.decode_batch]
        memory = "must" if self.weights_must_fit else "need not"
        return (
            f"Reading '{self.name}': prefill counts {prompts}, decode {batch}; "
            f"weights {memory} fit to prefill."
        )


#: Readings by name. ``printed`` takes the formulas of 4.2.3 to the letter, ``thesis`` is what its
#: results most likely rest on, ``whole`` counts all that an island does, and ``fitting`` also
#: asks that it can: the one to plan with.
READINGS = {
    reading.name: reading
    for reading in (
        Reading(name="printed", prefill_groups=False, decode_batch="one", weights_must_fit=False),
        Reading(name="thesis", prefill_groups=False, decode_batch="gpu", weights_must_fit=False),
        Reading(name="whole", prefill_groups=True, decode_batch="group", weights_must_fit=False),
        Reading(name="fitting", prefill_groups=True, decode_batch="group", weights_must_fit=True),
    )
}


def reading(name: str) -> Reading:
    """Reading of that name.

    Examples
    --------
    >>> reading("fitting").weights_must_fit
    True
    """
    require(
        name in READINGS,
        f"No reading is called '{name}'.",
        resolve=f"use one of {', '.join(READINGS)}.",
    )
    return READINGS[name]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Benchmark(Shown):
    """Throughput of every configuration of an island on every length.

    Attributes
    ----------
    gpu, size, phase
        The island, and what it does.
    length_tokens, share
        Shape (J,); lengths and the share of requests that each stands for.
    tp, dp
        Shape (K,); GPUs of a tensor-parallel group, and independent groups: of prompts in
        prefill, of experts in decode, where each has size / dp GPUs.
    batch
        Shape (K, J); requests per GPU in decode, 1 in prefill; 0 where nothing fits.
    rps
        Shape (K, J); throughput of the island [requests/s], 0 where it cannot.
    """

    gpu: str
    size: int
    phase: Phase
    length_tokens: Floats
    share: Floats
    tp: Ints
    dp: Ints
    batch: Ints
    rps: Floats

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the configurations, such as ``"tp8 dp2"``."""
        return tuple(f"tp{t} dp{d}" for t, d in zip(self.tp, self.dp, strict=True))

    def deviation(self, *, weighted: bool = True) -> Floats:
        """Mean relative distance of each configuration from the best, shape (K,).

        Weighted by the shares, or with each length counted alike; a length that no configuration
        serves counts for none.

        Source: Rignall, section 4.6.1: mean deviation from the best parallelism; delta(c).
        """
        best = self.rps.max(axis=0)
        apart = np.where(best > 0, (best - self.rps) / np.where(best > 0, best, 1.0), 0.0)
        weight = self.share if weighted else np.full(len(self.share), 1.0 / len(self.share))
        return np.asarray(apart @ weight)

    @property
    def chosen(self) -> int:
        """The configuration of least weighted deviation; of several, the least divided."""
        return int(np.argmin(self.deviation().round(12)))

    @property
    def choice(self) -> str:
        """Name of the chosen configuration, ``"-"`` where none serves anything."""
        return self.names[self.chosen] if self.rps[self.chosen].any() else "-"

    @property
    def winners(self) -> Ints:
        """Shape (J,); the best configuration at each length, -1 where none serves it."""
        return np.where(self.rps.max(axis=0) > 0, self.rps.argmax(axis=0), -1)

    def table(self) -> Table:
        """One row per configuration: deviations, and throughput at a few lengths."""
        shown = np.unique(np.linspace(0, len(self.length_tokens) - 1, 4).round().astype(int))
        names, weighted, plain = self.names, self.deviation(), self.deviation(weighted=False)

        def rate(j: int) -> Callable[[int], float]:
            return lambda k: float(self.rps[k, j])

        columns = (
            Column("parallelism", of=lambda k: names[k] + (" *" if k == self.chosen else "")),
            Column("deviation, weighted", "%", 3, lambda k: 100 * float(weighted[k])),
            Column("deviation, uniform", "%", 3, lambda k: 100 * float(plain[k])),
            *(
                Column(f"{self.length_tokens[j]:,.0f} tokens", "requests/s", of=rate(j))
                for j in shown
            ),
        )
        title = f"{self.phase.capitalize()} on {self.size} x {self.gpu}"
        return Table.of(title, columns, range(len(names)), "* chosen")


def benchmark_prefill(
    model: MoeModel, size: int, length_tokens: ArrayLike, share: ArrayLike, how: Reading
) -> Benchmark:
    """Prefill throughput of all (tp, dp) with tp dp = size (section 4.6.1).

    R = 1000 / t, times dp where the reading counts every group.

    Source: Rignall, section 4.6.1: prefill throughput of every parallelism; R_prefill(s, c).
    """
    lengths, weights = np.asarray(length_tokens, np.float64), np.asarray(share, np.float64)
    tp = _divisors(size)
    dp = size // tp
    columns = {"tp": tp[:, None], "dp": dp[:, None]}
    rate = 1000.0 / model.prefill(lengths, **columns).total_ms
    if how.prefill_groups:
        rate = rate * dp[:, None]
    if how.weights_must_fit:
        # All GPUs of a group hold what of the cache cannot be divided.
        free = model.free_bytes(tp=columns["tp"], gpus=size)
        held = lengths * model.cached_bytes_per_token(columns["tp"]) / columns["tp"]
        rate = np.where(free > np.maximum(held, 0.0), rate, 0.0)
    batch = (rate > 0).astype(np.int64)
    return Benchmark(model.device.name, size, "prefill", lengths, weights, tp, dp, batch, rate)


def benchmark_decode(
    model: MoeModel,
    size: int,
    length_tokens: ArrayLike,
    share: ArrayLike,
    how: Reading,
    *,
    output_tokens: int | Ints,
    max_output_tokens: int,
) -> Benchmark:
    """Decode throughput of all (tp, dp), each of dp expert groups having size / dp GPUs (4.6.2).

    R = dp * 1000 / sum t times the requests that a step advances, see :data:`Batch`; tp divides
    the GPUs of a group, since attention cannot spread over more than it has. ``output_tokens``
    is one mean for all lengths, or one per length.

    Source: Rignall, section 4.6.2: decode throughput of every parallelism; G_sim, ep, R_decode.
    """
    lengths, weights = np.asarray(length_tokens, np.float64), np.asarray(share, np.float64)
    pairs = [(t, size // e) for e in _divisors(size)[::-1] for t in _divisors(int(e))]
    tp, dp = (np.array(column, np.int64) for column in zip(*sorted(pairs), strict=True))
    t, gpus = tp[:, None], (size // dp)[:, None]
    batch = batch_rule(model.max_batch(lengths, tp=t, gpus=gpus, output_tokens=max_output_tokens))
    time = model.request_ms(
        lengths,
        batch,
        tp=t,
        gpus=gpus,
        output_tokens=output_tokens,
        max_output_tokens=max_output_tokens,
    )
    fits = np.isfinite(time)
    if not model.quirks.large_batch_dropped:
        most = np.floor(model.max_batch(lengths, tp=t, gpus=gpus, output_tokens=max_output_tokens))
        batch = np.minimum(batch, np.maximum(most, 0.0).astype(np.int64))
    advanced = decoding(model, how, batch, t, gpus)
    rate = np.where(fits, dp[:, None] * advanced * 1000.0 / np.where(fits, time, 1.0), 0.0)
    batch = np.where(fits, batch, 0)
    return Benchmark(model.device.name, size, "decode", lengths, weights, tp, dp, batch, rate)


def decoding(
    model: MoeModel, how: Reading, batch: ArrayLike, tp: ArrayLike, gpus: ArrayLike
) -> Floats:
    """Requests that one step of an expert group advances."""
    b, t, e = (np.asarray(a, np.float64) for a in (batch, tp, gpus))
    if how.decode_batch == "one":
        return np.ones(np.broadcast_shapes(b.shape, t.shape, e.shape))
    # Without quirk j the batch is that of a GPU everywhere.
    groups = how.decode_batch == "group" and model.quirks.group_batch_mixed
    return b * e / t if groups else np.asarray(b * e)


def batch_rule(most: ArrayLike) -> Ints:
    """Batch of a decode step: whole, rounded down to a multiple of 8, within 8 and 1,024.

    Where fewer than 8 fit the rule still says 8, and the latency model then has no result.

    Source: Rignall, section 4.6.2: batch size of the decode; bs(s, c).

    Examples
    --------
    >>> batch_rule([-3.0, 5.0, 31.9, 4000.0]).tolist()
    [8, 8, 24, 1024]
    """
    whole = np.floor(np.asarray(most, np.float64)).astype(np.int64)
    return np.asarray(np.clip(whole - whole % BATCH_STEP, BATCH_LEAST, BATCH_MOST))


def _divisors(number: int) -> Ints:
    found = np.arange(1, number + 1, dtype=np.int64)
    return np.asarray(found[number % found == 0])
