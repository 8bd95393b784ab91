"""Exhaustive search over the tensor-parallel degree of every machine (Xiong et al. section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero.catalog import Gpu, KvFormula, Link, Llm
from hetero.cluster import Cluster, Machine
from hetero.display import Column, Shown, Table
from hetero.engines import StepSource, roofline_steps
from hetero.errors import InfeasibleError
from hetero.latency.models.affine import Affine
from hetero.latency.models.fitting import Weights
from hetero.latency.models.phase import fit_phase
from hetero.memory import Budget, OverheadPer, Room, RoomSource
from hetero.planners.xiong import estimate
from hetero.planners.xiong.estimate import BatchEstimate, BatchLatency, Padded, Scaling
from hetero.workload import Trace

LatencySource = Callable[[Gpu, Llm, int], BatchLatency]
"""Batch times of an instance of a model on some GPUs of one type: ``(gpu, llm, degree)``."""


def roofline_source(*, link: Link | None = None, **efficiency: Any) -> LatencySource:
    """Batch times from the calibrated roofline, the default source, or a variation of it.

    Parameters
    ----------
    link
        Link between the GPUs of a machine instead of the catalog's.
    efficiency
        Values of :class:`hetero.latency.models.roofline.Efficiency` to set instead of the
        calibrated ones, such as ``step_overhead_s=5e-3``.
    """
    return padded(roofline_steps(link=link, **efficiency))


def padded(steps: StepSource) -> LatencySource:
    """Batch times of a source of step times, batches padded to their longest input."""
    return lambda gpu, llm, tensor_parallel: Padded(steps(gpu, llm, tensor_parallel))


def profiled(
    source: LatencySource,
    *,
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
    lengths_tokens: Sequence[int] = (16, 32, 64, 128, 256, 512, 1024),
    bounded: bool = True,
) -> LatencySource:
    """Profile a source and fit p1 to p8 to it, as Xiong et al. do with a running engine.

    Prefill is profiled at every batch size and input length, decode at every batch size and
    cached length; both are fitted with relative weights and no negative coefficient, or, where not
    ``bounded``, as ``scipy.optimize.curve_fit`` does unless told otherwise: neither.

    Parameters
    ----------
    batches
        Batch sizes of the profile [requests].
    lengths_tokens
        Input lengths of the prefill, cached lengths of the decode [tokens].

    Notes
    -----
    Source: Xiong et al., section 3.1: lightweight profiling; p1 to p8.
    """

    def latency(gpu: Gpu, llm: Llm, tensor_parallel: int) -> BatchLatency:
        times = source(gpu, llm, tensor_parallel)
        points = [(b, length) for b in batches for length in lengths_tokens]
        batch, length = (np.array(column, np.float64) for column in zip(*points, strict=True))
        prefill_s = np.array([float(times.prefill_batch_s(b, n)) for b, n in points])
        # One decode step: the difference of two sums would lose digits.
        decode_s = np.array([float(times.decode_batch_s(b, n - 1, 1)) for b, n in points])
        weights: Weights = "relative" if bounded else "none"
        prefill, decode = (
            fit_phase(
                batch, length, seconds, decode=of_decode, weights=weights, non_negative=bounded
            )
            for of_decode, seconds in ((False, prefill_s), (True, decode_s))
        )
        name = f"{llm.name} on {tensor_parallel} x {gpu.name}"
        return Affine.from_fits(prefill, decode, source=f"p1 to p8 fitted to a profile of {name}")

    return latency


@dataclass(frozen=True, slots=True, repr=False)
class Degree(Shown):
    """One machine at one tensor-parallel degree: its estimate, or why there is none."""

    machine: Machine
    tensor_parallel: int
    kv_capacity_bytes: float
    estimate: BatchEstimate | None
    reason: str = ""

    @property
    def instances(self) -> int:
        """Number of instances on the machine."""
        return self.machine.count // self.tensor_parallel

    @property
    def system_tps(self) -> float:
        """Estimated tokens per second of the machine, 0 where infeasible."""
        return self.estimate.system_tps if self.estimate else 0.0

    def table(self) -> Table:
        """Instances, their KV cache and the estimate, or why there is none."""
        return Table.figures(
            f"{self.machine.name}, tensor-parallel degree {self.tensor_parallel}",
            ("instances", self.instances, ""),
            ("KV cache of each", self.kv_capacity_bytes / 2**30, "GiB"),
            ("estimate of the machine", self.system_tps if self.estimate else None, "tokens/s"),
            notes=(f"{self.reason}." if self.reason else "",),
        )


@dataclass(frozen=True, slots=True)
class DegreeSearch(Shown):
    """Every degree of every machine, feasible or not, and the best of each.

    Instances never span machines, so the throughput of a cluster is the sum over its machines and
    the best combination is the best degree of each: the search is exhaustive over the product.
    """

    degrees: tuple[Degree, ...]
    llm: Llm

    @property
    def best(self) -> tuple[Degree, ...]:
        """Best degree of each machine that can serve the model at all."""
        found: dict[str, Degree] = {}
        for degree in self.degrees:
            if degree.estimate is None:
                continue
            held = found.get(degree.machine.name)
            if held is None or degree.system_tps > held.system_tps:
                found[degree.machine.name] = degree
        return tuple(found.values())

    @property
    def system_tps(self) -> float:
        """Estimated tokens per second of the cluster with the best degree on each machine."""
        return sum(degree.system_tps for degree in self.best)

    def ranking(self, machine: str) -> str:
        """Feasible degrees of a machine from the fastest to the slowest, as ``"2>4>1>8"``."""
        feasible = [d for d in self.degrees if d.machine.name == machine and d.estimate]
        order = sorted(feasible, key=lambda degree: -degree.system_tps)
        return ">".join(str(degree.tensor_parallel) for degree in order)

    def table(self) -> Table:
        """One row per machine and degree."""
        best = {(d.machine.name, d.tensor_parallel) for d in self.best}

        def remark(degree: Degree) -> str:
            known = (degree.machine.name, degree.tensor_parallel) in best
            return ", ".join(filter(None, ("best" if known else "", degree.reason)))

        return Table.of(
            f"Tensor-parallel degrees for {self.llm.name}: "
            f"{self.system_tps:,.0f} tokens/s with the best of each machine (estimate)",
            (
                Column("machine", of="machine.name"),
                Column("GPU", of="machine.gpu.name"),
                Column("degree", of="tensor_parallel"),
                Column("instances"),
                Column("KV cache", "GiB", 3, lambda degree: degree.kv_capacity_bytes / 2**30),
                Column("largest batch", "requests", of="estimate.largest_batch"),
                Column("instance", "tokens/s", of="estimate.instance_tps"),
                Column("machine total", "tokens/s", of="estimate.system_tps"),
                Column("remark", of=remark),
            ),
            self.degrees,
        )


def search(
    cluster: Cluster,
    llm: Llm,
    trace: Trace,
    *,
    latency: LatencySource | None = None,
    scaling: Scaling = "instances",
    kv_formula: KvFormula = "model",
    memory_fraction: float = 0.9,
    overhead_gib: float = 2.0,
    overhead_per: OverheadPer = "gpu",
    room: RoomSource | None = None,
    weight_precision: str = "fp16",
    kv_precision: str = "fp16",
    require_longest: bool = True,
    divides: Callable[[int], bool] | None = None,
) -> DegreeSearch:
    r"""Estimate every tensor-parallel degree of every machine and keep the best of each.

    For machine i with u GPUs and each degree t that divides u and the attention heads, the KV
    cache of an instance is eq. 1,

    .. math:: KV = t\,d\,\phi - \delta - \Phi\,b^{bytes},

    the memory constraint is eq. 2 (one request of the longest input and output must fit), and
    the throughput is Algorithm 1 on ``trace``.

    Parameters
    ----------
    trace
        Sample of requests that each instance serves; two samples of 200 in the paper.
    latency
        Where batch times come from; by default :func:`roofline_source`.
    scaling, kv_formula, overhead_per
        Readings where the paper contradicts itself: see
        :data:`hetero.planners.xiong.estimate.Scaling` and :mod:`hetero.memory`.
    room
        Share of the memory and overhead by GPU, model and degree, in place of those for all.
    require_longest
        Eq. 2: a degree is valid only if a request of the longest input and the longest output of
        the sample fits. With False, requests that fit nowhere are left out and counted instead.
    divides
        Whether an engine can divide the model by a degree; by default by what divides the heads.

    Raises
    ------
    InfeasibleError
        If no machine can serve the model at any degree; the text names what binds.

    Notes
    -----
    Source: Xiong et al., section 3.2: search of the tensor-parallel degree of every machine; t_i.
    """
    longest = int(trace.input_tokens.max()) + int(trace.output_tokens.max())
    latency = latency or roofline_source()
    degrees: list[Degree] = []
    for machine in cluster.machines:
        for t in (t for t in range(1, machine.count + 1) if machine.count % t == 0):
            own = room(machine.gpu, llm, t) if room else Room(memory_fraction, overhead_gib)
            budget = Budget(
                llm,
                machine.gpu,
                tensor_parallel=t,
                memory_fraction=own.memory_fraction,
                overhead_gib=own.overhead_gib,
                overhead_per=overhead_per,
                weight_precision=weight_precision,
                kv_precision=kv_precision,
                kv_formula=kv_formula,
            )
            if llm.heads % t or not (divides is None or divides(t)):
                reason = f"{llm.heads} attention heads cannot be divided by {t}"
            else:
                reason = budget.why_not(longest if require_longest else 1) or ""
            result = None
            if not reason:
                try:
                    result = estimate.throughput(
                        trace,
                        latency(machine.gpu, llm, t),
                        kv_capacity_bytes=budget.kv_capacity_bytes,
                        kv_bytes_per_token=budget.kv_bytes_per_token,
                        tensor_parallel=t,
                        gpus=machine.count,
                        scaling=scaling,
                    )
                except InfeasibleError as error:
                    reason = error.what
                else:
                    reason = f"{len(result.too_long)} too long" if result.too_long else ""
            degrees.append(Degree(machine, t, budget.kv_capacity_bytes, result, reason))
    found = DegreeSearch(tuple(degrees), llm)
    if not found.best:
        # Machines alike fail alike, and more GPUs fall less short: one line per kind says it.
        kinds = {(d.machine.gpu.name, d.machine.count): d for d in degrees}
        why = "; ".join(
            f"{d.machine.name} t={d.tensor_parallel}: {d.reason.rstrip('.')}"
            for d in kinds.values()
        )
        raise InfeasibleError(
            f"No machine of {cluster.name} can serve {llm.name} ({why}).",
            resolve="add GPUs with more memory, lower the precision of weights or KV cache, or "
            "cap the request lengths.",
        )
    return found
