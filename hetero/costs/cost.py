r"""What a group of mixed GPUs does for a model: latency, throughput and memory of a pipeline.

A group serves one copy of a model as a pipeline of stages. A stage is ``t`` GPUs of one machine
that share every one of its layers (tensor parallelism); stages may have other machines, types,
degrees and numbers of layers. One stage with ``l`` layers takes

.. math::
    T_s(n, c, q) = l \big[\max(p\,(n + n_{pad}), w) + x(n) + k\,c + a\,q + r\,n + f\big] + o

for ``n`` new tokens, ``c`` cached tokens read and ``q`` prefill query-key pairs, with the terms per
layer of the calibrated roofline (:mod:`hetero.latency.models.roofline`): products ``p``, weights
``w``, routed experts ``x`` (straight between knots, 0 in dense models), KV cache ``k``, attention
``a``, all-reduce ``r`` and fixed ``f`` (launches, hops of the all-reduce); ``o`` is the time per
step of the engine on the first stage and the logits on the last. Layers count alike: one of a
mixture of experts is the mean of those with experts and those without.
Between stages activations move in :math:`\alpha + 2 h n / \beta`.

- Prefill latency: :math:`\sum_s T_s + \sum hops`; occupancy, which bounds its throughput: the
  slowest stage or hop.
- Decode with S stages: S microbatches of ``b / S`` requests rotate; a request gets its next token
  every :math:`\max(\sum_s T_s(b/S) + hops,\; S \max_s T_s(b/S))`.
- Memory: the stage that fills first decides, :math:`l \min_s (free_s / l_s)`.

Where a table of the engine was measured for a machine's GPUs and the model
(:mod:`hetero.latency.resolve`), a group of one stage takes its times, and the terms above have
efficiencies fitted to it alone, so that all groups are compared on equal terms.

ThunderServe (section 3.3 and appendix B) takes the cost model of HexGen; this one has its form,
with the roofline's efficiencies in place of its constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hetero import memory
from hetero.arrays import Floats
from hetero.catalog import Llm, ServingEngine
from hetero.catalog.engines import EngineOverheads, EngineStage, Misfit
from hetero.cluster import Cluster, Machine
from hetero.costs.pipeline import IN_PAPERS, CostSettings, Pipeline, PipelineStage, Rates
from hetero.errors import InfeasibleError, require
from hetero.latency.models import efficiencies
from hetero.latency.models.roofline import Roofline
from hetero.latency.resolve import ResolvedSteps, calibration_of, measured
from hetero.workload import Trace

__all__ = ["IN_PAPERS", "CostModel", "CostSettings", "Pipeline", "PipelineStage", "Rates"]

_GIB = 2**30


@dataclass(frozen=True, eq=False)
class CostModel:
    """Costs of a model on the machines of a cluster; rates are computed once per kind of stage.

    Source: ThunderServe, section 3.3: cost model of a group, in the form of HexGen's.

    Parameters
    ----------
    cluster
        Machines and links; stages name machines by their number in ``cluster.machines``.
    llm
        The model that groups serve.
    trace
        Requests whose ragged batches measured tables account for; without it they are equal.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> model = CostModel(cluster("thunderserve-a40-3090ti-40gbit"), llm("LLaMA-1-30B"))
    >>> a40s = model.pipeline([PipelineStage(0, 4, 60)])
    >>> mixed = model.pipeline([PipelineStage(0, 2, 36), PipelineStage(1, 2, 24)])
    >>> bool(0.3 < a40s.prefill_latency_s(1024) < mixed.prefill_latency_s(1024) < 1.2)
    True
    >>> bool(mixed.prefill_occupancy_s(1024) < mixed.prefill_latency_s(1024))
    True
    """

    cluster: Cluster
    llm: Llm
    settings: CostSettings = field(default_factory=CostSettings)
    trace: Trace | None = None
    _rates: dict[tuple[object, ...], Rates] = field(default_factory=dict, repr=False)

    @property
    def machines(self) -> tuple[Machine, ...]:
        """Machines of the cluster; a stage names one by its number."""
        return self.cluster.machines

    @cached_property
    def bandwidth_gbs(self) -> Floats:
        """What transfers reach between machines and, on the diagonal, inside [GB/s]."""
        if len(self.machines) == 1:
            line = np.array([[self.machines[0].gpu_link.bandwidth_gbs]])
        else:
            line = self.cluster.bandwidth_gbs()
        share = np.full_like(line, self.settings.network_share)
        np.fill_diagonal(share, self.settings.inside_share)
        return np.asarray(line * share)

    @cached_property
    def latency_s(self) -> Floats:
        """Latency between machines and, on the diagonal, inside [s]."""
        if len(self.machines) == 1:
            return np.array([[self.machines[0].gpu_link.latency_s]])
        return self.cluster.latency_s()

    def measured(self, machine: Machine, gpus: int) -> ResolvedSteps | None:
        """Table of the engine for so many GPUs of a machine and the whole model; None without."""
        spec = self.settings.engine
        if self.settings.efficiency is not None:
            return None
        return measured(
            machine.linked_gpu,
            self.llm,
            gpus,
            engine=spec.name,
            release=spec.release,
            ahead=spec.limits(machine.gpu).schedule_ahead,
            precision=spec.precision,
            kv_precision=spec.kv_precision,
            trace=self.trace,
        )

    def overheads(self, machine: Machine, piped: bool = False) -> EngineOverheads | None:
        """What the engine takes around the kernels of a stage; None where they are given."""
        if self.settings.efficiency is not None:
            return None
        spec = self.settings.engine
        ahead = spec.limits(machine.gpu, piped=piped).schedule_ahead
        return self.engine.overheads_of(spec.release, ahead)

    def reach_s(self, machine: int) -> float:
        """Way of a request from the coordinator to a machine [s], see `Cluster.reach_s`."""
        return self.cluster.reach_s(self.machines[machine].name)

    @cached_property
    def engine(self) -> ServingEngine:
        """Engine whose rules groups keep."""
        return self.settings.engine.serving

    def divides(self, gpus: int) -> bool:
        """Whether every layer can be shared equally by so many GPUs, as the engine does it."""
        return self.engine.divides(self.llm, gpus)

    def misfit(self, stages: Sequence[PipelineStage], phase: str = "both") -> Misfit | None:
        """Which rule of the engine a pipeline over ``stages`` breaks; None if it can run it.

        The one place that says which groups of GPUs a search may propose.
        """
        if not self.engine.limited:  # asked thousands of times
            return None
        seen = [self._seen(one.machine, one.gpus) for one in stages]
        return self.engine.misfit("A replica", seen, phase)

    def joins(self, parts: Sequence[tuple[int, int]]) -> bool:
        """Whether GPUs, as (machine, number) pairs, may serve together whatever their stages."""
        return not self.engine.limited or self.engine.joins([self._seen(*one) for one in parts])

    def splits(self, prefill: PipelineStage, decode: PipelineStage) -> bool:
        """Whether KV caches can be sent from the GPUs of one stage to those of another."""
        ends = (self._seen(one.machine, one.gpus) for one in (prefill, decode))
        return self.engine.splits(*ends)

    def _seen(self, machine: int, gpus: int) -> EngineStage:
        gpu = self.machines[machine].gpu
        return EngineStage(machine, gpu.name, gpu.vendor, gpus)

    def rates(self, machine: int, gpus: int, piped: bool = False) -> Rates:
        """Rates of ``gpus`` GPUs of a machine that share every layer, ``piped`` as one stage."""
        where = self.machines[machine]
        key = (where.gpu, where.link, gpus, piped)
        if key not in self._rates:
            self._rates[key] = self._compute(where, gpus, piped)
        return self._rates[key]

    def _compute(self, machine: Machine, gpus: int, piped: bool) -> Rates:
        require(
            self.divides(gpus),
            f"{self.llm.name} has {self.llm.heads} attention heads in layers that {gpus} GPUs "
            "cannot share equally.",
            resolve="choose a degree that divides the heads.",
        )
        s, llm = self.settings.engine, self.llm
        table = self.measured(machine, gpus)
        plain = not self.llm.experts and s.precision in ("fp16", "bf16")
        source = calibration_of(machine.gpu, s.name, s.release, gpus, plain=plain)
        known = table.efficiency if table else efficiencies.efficiency(machine.gpu, source)
        roofline = Roofline(
            gpu=machine.linked_gpu,
            llm=llm,
            efficiency=self.settings.efficiency or known,
            tensor_parallel=gpus,
            precision=s.precision,
            kv_precision=s.kv_precision,
            layers=1,
            experts=efficiencies.expert_efficiency(llm, machine.gpu, s.name, s.precision),
        )
        terms = roofline.terms([0.0, 1.0], 0, [0.0, 1.0], [0.0, 1.0])
        zero = {name: float(values[0]) for name, values in terms.items()}
        slope = {name: float(values[1] - values[0]) for name, values in terms.items()}
        lengths = None if self.trace is None else self.trace.input_tokens + self.trace.output_tokens
        whole = memory.Budget(
            llm,
            machine.gpu,
            tensor_parallel=gpus,
            weight_precision=s.precision,
            kv_precision=s.kv_precision,
            request_tokens=0.0 if lengths is None else float(lengths.mean()),
        )
        ends = llm.end_bytes(s.precision, first=True, last=True)
        around = self.overheads(machine, piped)
        around_s = around.step_s + (around.worker_s if gpus > 1 else 0.0) if around else 0.0
        room = s.room(machine.gpu, llm, gpus)
        usable = machine.gpu.mem_bytes * room.memory_fraction - room.overhead_gib * _GIB
        return Rates(
            product_s=slope["products"],
            padding_tokens=roofline.padding_tokens,
            weights_s=zero["weights"],
            cached_s=slope["kv cache"],
            pair_s=slope["attention"],
            reduce_s=slope["all-reduce"],
            fixed_s=zero["all-reduce"] + zero["overhead"],
            logits_s=float(replace(roofline, layers=None).terms(0.0)["logits"]),
            step_s=roofline.efficiency.step_overhead_s + around_s,
            usable_bytes=gpus * usable,
            layer_bytes=(whole.weight_bytes - ends) / llm.layers,
            kv_layer_bytes=whole.held_bytes_per_token / llm.layers,
            max_batch=s.limits(machine.gpu).max_batch,
            experts=roofline.experts_by_tokens() if llm.experts else None,
        )

    def end_bytes(self, *, first: bool, last: bool) -> int:
        """Weights outside the layers that a stage holds: embedding first, logits last [bytes]."""
        return self.llm.end_bytes(self.settings.engine.precision, first=first, last=last)

    def most_layers(self, machine: int, gpus: int, *, first: bool, last: bool) -> int:
        """Layers whose weights fit a stage beside what its place in the pipeline adds."""
        rates = self.rates(machine, gpus)
        free = rates.usable_bytes - self.end_bytes(first=first, last=last)
        # A stage needs room for a cache as well, so weights that fill it exactly do not fit.
        return max(0, int(np.ceil(free / rates.layer_bytes)) - 1)

    def pipeline(self, stages: Sequence[PipelineStage]) -> Pipeline:
        """A pipeline over ``stages``, in order.

        Raises
        ------
        InfeasibleError
            If a stage cannot hold its weights.
        """
        self._check(stages)
        return Pipeline(self, tuple(stages))

    def _check(self, stages: Sequence[PipelineStage]) -> None:
        held = [stage.layers for stage in stages]
        require(
            bool(stages) and sum(held) == self.llm.layers and min(held) >= 1,
            f"Stages of {held} layers do not hold the {self.llm.layers} layers of {self.llm.name}.",
            resolve="give every stage one layer or more, and all of them together once.",
        )
        used = np.zeros(len(self.machines), np.int64)
        for k, stage in enumerate(stages):
            used[stage.machine] += stage.gpus
            machine = self.machines[stage.machine]
            require(
                used[stage.machine] <= machine.count,
                f"Stages take {used[stage.machine]} GPUs of machine {machine.name}, which has "
                f"{machine.count}.",
                resolve="use each GPU once.",
            )
            most = self.most_layers(
                stage.machine, stage.gpus, first=k == 0, last=k == len(stages) - 1
            )
            if stage.layers > most:
                raise InfeasibleError(
                    f"{stage.layers} layers of {self.llm.name} do not fit {stage.gpus} x "
                    f"{machine.gpu.name} of machine {machine.name}, which hold {most}.",
                    resolve="move layers to other stages, or use more GPUs.",
                )
