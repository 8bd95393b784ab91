"""Throughput of a deployment from batch times alone: Algorithm 1 of Xiong et al.

The estimate packs a sample of requests into static batches as large as the KV cache allows and
adds up the time of each batch, padded to its longest input and longest output as printed in the
paper. It ranks deployments without running them; what an engine with continuous batching reaches
is the simulator's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, SupportsFloat, TypeAlias

import numpy as np

from hetero.display import Shown, Table
from hetero.errors import InfeasibleError, require
from hetero.latency.step import StepModel
from hetero.workload import Trace

Scaling: TypeAlias = Literal["instances", "line 17"]
"""How the throughput of one instance becomes that of the machine.

``"instances"``: times the number of instances u / t (Xiong et al., section 3.2; the default).
``"line 17"``: times the degree t, as the last line of Xiong et al.'s Algorithm 1 prints; it ranks
the degrees in nearly the opposite way and is kept to show so.
"""


class BatchLatency(Protocol):
    """Times of a static batch, padded to its longest input and longest output."""

    def prefill_batch_s(self, batch: int, longest_input_tokens: int) -> SupportsFloat:
        """Time [s] to prefill ``batch`` requests padded to ``longest_input_tokens``."""

    def decode_batch_s(
        self, batch: int, longest_input_tokens: int, longest_output_tokens: int
    ) -> SupportsFloat:
        """Time [s] of ``longest_output_tokens`` decode steps of the padded batch."""


@dataclass(frozen=True, slots=True)
class Padded:
    r"""A step model seen as static padded batches (Xiong et al. eq. 3-4 for any latency source).

    .. math::
        T_{prefill} = step(n = bI,\; pairs = bI^2/2), \quad
        T_{decode} = \sum_{k=1}^{O} step(n = b,\; c = b (I + k))

    with batch ``b``, longest input ``I`` and longest output ``O`` in tokens.

    Examples
    --------
    >>> model = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> round(Padded(model).decode_batch_s(2, 100, 10), 6)
    0.202211
    """

    step: StepModel

    def prefill_batch_s(self, batch: int, longest_input_tokens: int) -> float:
        """Time [s] of one prefill of the padded batch."""
        tokens = batch * longest_input_tokens
        return float(self.step.seconds(tokens, 0, 0.0, tokens * longest_input_tokens / 2.0))

    def decode_batch_s(
        self, batch: int, longest_input_tokens: int, longest_output_tokens: int
    ) -> float:
        """Time [s] of all decode steps of the padded batch."""
        length = longest_input_tokens + np.arange(1, longest_output_tokens + 1)
        return float(self.step.seconds(batch, batch, batch * length.astype(np.float64)).sum())


@dataclass(frozen=True, slots=True)
class Batch:
    """One static batch: the indices of its requests in the sample, and its times."""

    requests: tuple[int, ...]
    longest_input_tokens: int
    longest_output_tokens: int
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class BatchEstimate(Shown):
    """Outcome of Xiong et al.'s Algorithm 1 for one instance and for the machine it stands on.

    Attributes
    ----------
    batches
        The greedy packing, in order.
    instance_tps, system_tps
        Tokens in and out per second of one instance, and of the machine after scaling.
    requests_per_s
        Requests per second of the machine, with the same scaling.
    too_long
        Indices of requests whose KV cache exceeds the instance's; they are left out of the
        estimate (Xiong et al.'s Algorithm 1 as printed would repeat forever on them).
    """

    batches: tuple[Batch, ...]
    tokens: int
    time_s: float
    instance_tps: float
    system_tps: float
    requests_per_s: float
    scaling: Scaling
    too_long: tuple[int, ...]

    @property
    def largest_batch(self) -> int:
        """Most requests in one batch."""
        return max(len(batch.requests) for batch in self.batches)

    @property
    def prefill_share(self) -> float:
        """Share of the time spent in prefill."""
        return sum(batch.prefill_s for batch in self.batches) / self.time_s

    def table(self) -> Table:
        """The figures a reader asks for first."""
        note = ""
        if self.too_long:
            note = (
                f"{len(self.too_long)} requests exceed the KV cache of one instance and are "
                f"left out (first: request {self.too_long[0]})."
            )
        return Table.figures(
            "Estimate by static batches (Xiong et al., Algorithm 1)",
            ("batches", len(self.batches), ""),
            ("largest batch", self.largest_batch, "requests"),
            ("time of one instance", self.time_s, "s"),
            ("share of prefill", self.prefill_share, ""),
            ("throughput of one instance", self.instance_tps, "tokens/s"),
            ("throughput of the machine", self.system_tps, "tokens/s"),
            ("requests of the machine", self.requests_per_s, "requests/s"),
            notes=(note,),
        )


def pack(
    input_tokens: Sequence[int],
    output_tokens: Sequence[int],
    *,
    kv_capacity_bytes: float,
    kv_bytes_per_token: float,
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    r"""Greedy packing of consecutive requests into static batches (Algorithm 1, lines 4-15).

    A batch of requests r..s is admitted while

    .. math:: \kappa \Big(\sum_{i=r}^{s} I_i + (s - r + 1) \max_{r \le i \le s} O_i\Big) \le KV

    with inputs ``I`` and outputs ``O`` in tokens, ``kappa`` the KV cache of one token [bytes] and
    ``KV`` the capacity of the instance [bytes].

    Source: Xiong et al., Algorithm 1, lines 4-15: requests grouped into static batches.

    Returns
    -------
    batches, too_long
        Indices of the requests of each batch, and of the requests that fit nowhere.

    Examples
    --------
    >>> pack([10, 10, 90], [10, 10, 20], kv_capacity_bytes=50, kv_bytes_per_token=1)
    ([(0, 1)], (2,))
    """
    limit = kv_capacity_bytes / kv_bytes_per_token
    batches: list[tuple[int, ...]] = []
    too_long: list[int] = []
    members: list[int] = []
    inputs = longest_output = 0
    for index, (i, o) in enumerate(zip(input_tokens, output_tokens, strict=True)):
        if i + o > limit:
            too_long.append(index)
            continue
        if members and inputs + i + (len(members) + 1) * max(longest_output, o) > limit:
            batches.append(tuple(members))
            members, inputs, longest_output = [], 0, 0
        members.append(index)
        inputs += i
        longest_output = max(longest_output, o)
    if members:
        batches.append(tuple(members))
    return batches, tuple(too_long)


def throughput(
    trace: Trace,
    latency: BatchLatency,
    *,
    kv_capacity_bytes: float,
    kv_bytes_per_token: float,
    tensor_parallel: int,
    gpus: int,
    scaling: Scaling = "instances",
) -> BatchEstimate:
    r"""Estimated throughput of a machine that runs ``gpus / tensor_parallel`` equal instances.

    .. math::
        TP_s = \frac{\sum_r (I_r + O_r)}{\sum_{\mathcal B} T_{prefill} + T_{decode}}, \qquad
        TP_{system} = TP_s \cdot u / t

    Parameters
    ----------
    trace
        Requests that one instance serves, in this order; arrival times are not used.
    latency
        Batch times of one instance; :class:`Padded` makes them from any step model.
    kv_capacity_bytes
        KV cache of one instance [bytes] (eq. 1, :attr:`hetero.memory.Budget.kv_capacity_bytes`).
    kv_bytes_per_token
        KV cache of one token [bytes].
    tensor_parallel, gpus
        Degree t of an instance, and accelerators u of the machine.
    scaling
        ``"instances"`` multiplies by u / t (section 3.2), ``"line 17"`` by t as printed in the
        algorithm's last line.

    Raises
    ------
    InfeasibleError
        If no request fits the KV cache of an instance.

    Notes
    -----
    Source: Xiong et al., Algorithm 1: throughput estimation; TP_s, TP_system.
    Its ``until batchedReqNum > q`` is read as "until all q requests are batched".
    """
    require(
        tensor_parallel >= 1 and gpus % tensor_parallel == 0,
        f"{gpus} GPUs cannot be divided into instances of {tensor_parallel}.",
        resolve="choose a tensor-parallel degree that divides the number of GPUs.",
    )
    inputs, outputs = trace.input_tokens.tolist(), trace.output_tokens.tolist()
    groups, too_long = pack(
        inputs,
        outputs,
        kv_capacity_bytes=kv_capacity_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
    )
    if not groups:
        shortest = min(i + o for i, o in zip(inputs, outputs, strict=True))
        raise InfeasibleError(
            f"No request fits: the KV cache holds {kv_capacity_bytes / kv_bytes_per_token:,.0f} "
            f"tokens and the shortest request needs {shortest:,}.",
            resolve="use a higher tensor-parallel degree, a GPU with more memory, or a lower "
            "precision of weights or KV cache.",
        )
    batches: list[Batch] = []
    for members in groups:
        longest_input = max(inputs[r] for r in members)
        longest_output = max(outputs[r] for r in members)
        batches.append(
            Batch(
                members,
                longest_input,
                longest_output,
                float(latency.prefill_batch_s(len(members), longest_input)),
                float(latency.decode_batch_s(len(members), longest_input, longest_output)),
            )
        )
    served = [r for batch in batches for r in batch.requests]
    tokens = sum(inputs[r] + outputs[r] for r in served)
    time_s = sum(batch.prefill_s + batch.decode_s for batch in batches)
    factor = gpus // tensor_parallel if scaling == "instances" else tensor_parallel
    return BatchEstimate(
        batches=tuple(batches),
        tokens=tokens,
        time_s=time_s,
        instance_tps=tokens / time_s,
        system_tps=factor * tokens / time_s,
        requests_per_s=factor * len(served) / time_s,
        scaling=scaling,
        too_long=too_long,
    )
