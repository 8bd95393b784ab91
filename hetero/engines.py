"""Serving engines as they are asked for, and the replicas that they make of GPUs.

An :class:`EngineSpec` says which engine serves a model and what it is told. On some GPUs it gives
an :class:`Instance`: step times, room for caches and limits, and replicas with them.
:func:`replicated` divides the machines of a cluster into instances. Whatever plans, simulates or
compares makes its replicas here, so that one question has one answer everywhere.

What is not said follows from the engine: limits from the GPU, scheduling ahead and the prefix cache
from the release, step times by the order of :mod:`hetero.latency.resolve`, memory from what the
release takes and leaves (:func:`hetero.memory.engine_room`). The engine ``"any"`` stands for the
papers' systems: prompts first, a paged cache of what 90 % of the memory leave beside weights and 2
GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

from hetero.catalog import EngineName, Gpu, KvFormula, Link, Llm, ServingEngine, serving_engine
from hetero.catalog.engines import Sampler
from hetero.catalog.precision import bytes_of
from hetero.cluster import Cluster, Machine
from hetero.deployment import Batching, Deployment, Engine, Replica, Role
from hetero.errors import InfeasibleError, require, require_not_negative, require_share
from hetero.latency import for_gpu
from hetero.latency.resolve import ResolvedSteps, resolve
from hetero.latency.speculation import Speculation
from hetero.latency.step import StepModel
from hetero.memory import Budget, Room, engine_room
from hetero.workload import Trace

StepSource: TypeAlias = Callable[[Gpu, Llm, int], StepModel]
"""Step times of an instance of a model on some GPUs of one type: ``(gpu, llm, degree)``."""

_GIB = 2**30
_PROMPTS_FIRST = 8192  # tokens of a step where an engine is told to put prompts first


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Which engine serves a model, and what it is told.

    Attributes
    ----------
    name, release
        The engine, see :mod:`hetero.catalog.engines`, and its release; empty for the newest known.
    precision, kv_precision
        Data types of weights and KV cache.
    memory_fraction, overhead_gib
        Share of each GPU's memory that it may use, by default its own; and what it holds of it
        [GiB], by default what its profiling run finds.
    kv_tokens
        KV caches that engines print, as (GPU, number of GPUs, tokens): what is held of such GPUs
        follows from them.
    batching, max_batch, max_step_tokens, schedule_ahead, prefix_cache, poll_steps
        See :class:`hetero.deployment.Engine`; by default as the engine starts on a GPU.
    speculation, held_gib
        Drafts of decoding, and what every stage holds beside the model's weights [GiB].
    expert_ranks
        Ranks of an instance that share out the experts, each of its tensor-parallel degree; 1
        spreads whole experts over the GPUs of one rank, 0 divides each.
    sampler
        ``flashinfer`` where FlashInfer's is installed; by default that of the release.
    own
        Step models of one's own by GPU type, which count first.
    rules, steps, kv_formula
        What a paper states in place of an engine's batches, step times and KV cache of a token.

    Examples
    --------
    >>> from hetero.catalog import gpu, llm
    >>> found = EngineSpec().on(gpu("H100-SXM"), llm("Llama-3.1-8B"))
    >>> found.limits.max_step_tokens, found.kv_tokens, found.label[:10]
    (8192, 455780, 'operators:')
    """

    name: EngineName = "vllm"
    release: str = ""
    precision: str = "fp16"
    kv_precision: str = "fp16"
    memory_fraction: float | None = None
    overhead_gib: float | None = None
    kv_tokens: tuple[tuple[str, int, int], ...] = ()
    batching: Batching | None = None
    max_batch: int | None = None
    max_step_tokens: int | None = None
    schedule_ahead: bool | None = None
    prefix_cache: bool | None = None
    poll_steps: int = 1
    speculation: Speculation | None = None
    held_gib: float = 0.0
    expert_ranks: int = 0
    sampler: Sampler = ""
    own: tuple[tuple[str, StepModel], ...] = ()
    rules: Engine | None = None
    steps: StepSource | None = None
    kv_formula: KvFormula = "model"

    def __post_init__(self) -> None:
        require_share(memory_fraction=self.memory_share)
        require_not_negative(overhead_gib=self.overhead_gib or 0.0, held_gib=self.held_gib)
        for precision in (self.precision, self.kv_precision):
            bytes_of(1, precision)
        self.serving.ahead(self.release)

    @property
    def serving(self) -> ServingEngine:
        """The engine of the catalog."""
        return serving_engine(self.name)

    @property
    def memory_share(self) -> float:
        """Share of each GPU's memory that it may use."""
        own = self.memory_fraction
        return self.serving.share(self.release) if own is None else own

    @property
    def ranks(self) -> int:
        """Ranks of an instance."""
        return max(1, self.expert_ranks)

    def limits(self, *gpus: Gpu, piped: bool = False) -> Engine:
        """How one rank forms its steps, within the smallest limits of the GPUs of an instance.

        A pipeline of several stages is ``piped``.

        Source: the documentation of the engines, see ``data/engines``.

        Examples
        --------
        >>> from hetero.catalog import gpu
        >>> [EngineSpec().limits(gpu(one)).max_batch for one in ("H100-SXM", "L4")]
        [1024, 256]
        """
        if self.rules is not None:
            return self.rules
        known = self.serving
        own = [known.batches_on(gpu) for gpu in gpus]
        batching = self.batching or ("chunked" if known.limited else "prefill first")
        tokens = min(one.max_step_tokens for one in own)
        if self.batching == "prefill first":
            tokens = _PROMPTS_FIRST
        ahead, caches = self.schedule_ahead, self.prefix_cache
        by_default = batching == "chunked" and known.ahead(self.release, piped=piped)
        return Engine(
            batching=batching,
            admission="known" if batching == "static" else "paged",
            max_batch=self.max_batch or min(one.max_batch for one in own),
            max_step_tokens=self.max_step_tokens or tokens,
            schedule_ahead=by_default if ahead is None else ahead,
            prefix_cache=known.caches(self.release) if caches is None else caches,
            poll_steps=self.poll_steps,
        )

    def resolved(
        self, gpu: Gpu, llm: Llm, tensor_parallel: int = 1, trace: Trace | None = None
    ) -> ResolvedSteps:
        """Step times of an instance without drafts, and which kind of source they are from.

        Parameters
        ----------
        trace
            See :func:`hetero.latency.resolve.resolve`.
        """
        return resolve(
            gpu,
            llm,
            tensor_parallel,
            engine=self.name,
            release=self.release,
            ahead=self.limits(gpu).schedule_ahead,
            precision=self.precision,
            kv_precision=self.kv_precision,
            own=dict(self.own),
            trace=trace,
            expert_ranks=self.expert_ranks,
        )

    def drafting(self, step: StepModel, *gpus: Gpu) -> StepModel:
        """Step times with the drafts that it is told to make."""
        if self.speculation is None:
            return step
        return self.speculation.applied(step, self.limits(*gpus).max_batch)

    def source(self, trace: Trace | None = None) -> StepSource:
        """Step times as a function of GPU, model and degree."""
        return lambda gpu, llm, degree: self.on(gpu, llm, degree, trace).step

    def room(self, gpu: Gpu, llm: Llm, tensor_parallel: int) -> Room:
        """What it takes of the memory of so many GPUs, and holds beside weights and caches.

        Raises
        ------
        InfeasibleError
            If a KV cache that it is said to print does not fit.
        """
        share, overhead_gib = self._assumed(gpu, llm, tensor_parallel)
        for name, number, tokens in self.kv_tokens:
            if name == gpu.name:
                return self._printed(gpu, llm, number, tokens, share)
        return Room(share, overhead_gib + self.held_gib / tensor_parallel)

    def room_error_gib(self, gpu: Gpu) -> float:
        """Deviation to expect of what it holds of a GPU [GiB]; 0 where that is given."""
        rule, given = self.serving.memory_of(self.release), self.overhead_gib is not None
        known = given or any(name == gpu.name for name, *_ in self.kv_tokens)
        return rule.error_gib if rule and not known else 0.0

    def _assumed(self, gpu: Gpu, llm: Llm, tensor_parallel: int) -> Room:
        rule = self.serving.memory_of(self.release)
        if rule is None or self.overhead_gib is not None:
            held = 2.0 if self.overhead_gib is None else self.overhead_gib
            return Room(self.memory_share, held)
        limits = self.limits(gpu)
        return engine_room(
            rule,
            gpu,
            llm,
            tensor_parallel,
            max_batch=limits.max_batch,
            max_step_tokens=limits.max_step_tokens,
            share=self.memory_fraction,
            sampler=self.sampler,
        )

    def _printed(self, gpu: Gpu, llm: Llm, gpus: int, tokens: int, share: float) -> Room:
        empty = Budget(
            llm,
            gpu,
            tensor_parallel=gpus,
            memory_fraction=share,
            overhead_gib=0.0,
            weight_precision=self.precision,
            kv_precision=self.kv_precision,
        )
        held = empty.kv_capacity_bytes - tokens * empty.kv_bytes_per_token
        require(
            held >= 0,
            f"No KV cache of {tokens:,} tokens fits {gpus} x {gpu.name} beside the weights of "
            f"{llm.name}: {empty.max_tokens:,} do.",
            resolve="check the data types, and the share of the memory.",
        )
        return Room(share, held / gpus / _GIB)

    def on(
        self, gpu: Gpu, llm: Llm, tensor_parallel: int = 1, trace: Trace | None = None
    ) -> Instance:
        """An instance of a model on some GPUs of one type.

        Parameters
        ----------
        gpu
            With the link of its machine, see :attr:`hetero.cluster.Machine.linked_gpu`.
        trace
            See :func:`hetero.latency.resolve.resolve`.
        """
        if self.steps is not None:
            step, label = self.steps(gpu, llm, tensor_parallel), ""
        else:
            found = self.resolved(gpu, llm, tensor_parallel, trace)
            step, label = self.drafting(found.step, gpu), found.label
        room = self.room(gpu, llm, tensor_parallel)
        mean = float((trace.input_tokens + trace.output_tokens).mean()) if trace else 0.0
        return Instance(self, gpu, llm, tensor_parallel, step, label, room, mean)


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An engine with a model on some GPUs of one type; see :meth:`EngineSpec.on`.

    Attributes
    ----------
    step, label
        Its step times, and their kind and source in words.
    room
        What it takes of the memory of each GPU, and holds beside weights and caches.
    request_tokens
        Length of the mean request that is known of.
    """

    spec: EngineSpec
    gpu: Gpu
    llm: Llm
    tensor_parallel: int
    step: StepModel
    label: str
    room: Room
    request_tokens: float = 0.0

    @property
    def limits(self) -> Engine:
        """How it forms steps, all ranks together."""
        one, ranks = self.spec.limits(self.gpu), self.spec.ranks
        tokens = ranks * one.max_step_tokens
        return replace(one, max_batch=ranks * one.max_batch, max_step_tokens=tokens)

    @property
    def budget(self) -> Budget:
        """Where the memory goes."""
        return Budget(
            self.llm,
            self.gpu,
            tensor_parallel=self.tensor_parallel,
            memory_fraction=self.room.memory_fraction,
            overhead_gib=self.room.overhead_gib,
            weight_precision=self.spec.precision,
            kv_precision=self.spec.kv_precision,
            kv_formula=self.spec.kv_formula,
            ranks=self.spec.ranks,
            request_tokens=self.request_tokens,
        )

    @property
    def kv_tokens(self) -> int:
        """Tokens that its KV cache holds; 0 if the weights do not fit."""
        return self.budget.max_tokens

    def replicas(
        self,
        name: str,
        count: int = 1,
        *,
        role: Role = "both",
        usd_per_gpu_h: float | None = None,
        network_s: float = 0.0,
    ) -> list[Replica]:
        """Equal replicas, with the KV cache that memory leaves them.

        Raises
        ------
        InfeasibleError
            If the weights leave no room for a KV cache.

        Notes
        -----
        KV cache of a replica: Xiong et al. eq. 1.
        """
        budget = self.budget
        if reason := budget.why_not():
            raise InfeasibleError(
                reason,
                resolve="use more GPUs per replica, a lower precision, or a larger memory "
                "fraction.",
            )
        price = self.gpu.usd_per_h if usd_per_gpu_h is None else usd_per_gpu_h
        made = Replica(
            name=name,
            step=self.step,
            kv_tokens=budget.max_tokens,
            kv_bytes_per_token=budget.kv_bytes_per_token,
            kv_error_tokens=budget.gpus
            * self.spec.room_error_gib(self.gpu)
            * _GIB
            / budget.kv_bytes_per_token,
            engine=self.limits,
            role=role,
            gpu=self.gpu,
            gpus=budget.gpus,
            usd_per_h=None if price is None else price * budget.gpus,
            network_s=network_s,
        )
        return [replace(made, name=f"{name}/{k}") for k in range(count)] if count > 1 else [made]


PAPERS: Final = EngineSpec(name="any")
"""The papers' systems: pipelines of mixed GPUs, prompts first."""


def roofline_steps(*, link: Link | None = None, **efficiency: Any) -> StepSource:
    """Step times from the calibrated roofline, or a variation of it.

    Parameters
    ----------
    link
        Link between the GPUs of a machine instead of the one it has.
    efficiency
        Values of :class:`hetero.latency.models.roofline.Efficiency` to set instead of the
        calibrated ones, such as ``step_overhead_s=5e-3``.
    """
    return partial(_roofline_step, link=link, efficiency=efficiency)


def _roofline_step(
    gpu: Gpu, llm: Llm, tensor_parallel: int, *, link: Link | None, efficiency: Mapping[str, Any]
) -> StepModel:
    model = for_gpu(gpu if link is None else gpu.linked(link), llm, tensor_parallel)
    if efficiency:
        model = replace(model, efficiency=replace(model.efficiency, **efficiency))
    return model.step_model()


def replicated(
    cluster: Cluster,
    llm: Llm,
    degrees: Mapping[str, int | Sequence[int]],
    engine: EngineSpec | None = None,
    *,
    trace: Trace | None = None,
) -> Deployment:
    """Whole replicas on the machines of a cluster; no instance spans machines.

    Parameters
    ----------
    degrees
        By machine: the tensor-parallel degree of all its instances, which must divide its GPUs,
        or the degrees of its instances one by one, such as ``(4, 1)``. Machines not named stay
        unused.
    engine
        Engine of every replica, by default vLLM as it starts.
    trace
        See :func:`hetero.latency.resolve.resolve`.

    Raises
    ------
    CatalogError
        If the cluster has no machine of a name.
    InfeasibleError
        If the model leaves an instance no room for a KV cache.

    Examples
    --------
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> found = replicated(cluster("xiong-8xv100"), llm("Llama-3-8B"), {"v100": (4, 1)})
    >>> [(replica.name, replica.gpus) for replica in found.replicas]
    [('v100 t=4', 4), ('v100 t=1', 1)]
    """
    require(
        bool(degrees),
        f"No machine of {cluster.name} is to serve {llm.name}.",
        resolve="give the degree of at least one machine.",
    )
    spec = engine or EngineSpec()
    found: list[Replica] = []
    for name, wanted in degrees.items():
        machine, ranks = cluster.machine(name), spec.ranks
        whole = wanted * ranks if isinstance(wanted, int) else [t * ranks for t in wanted]
        chosen = [size // ranks for size in _instances(machine, whole)]
        price = None if machine.usd_per_h is None else machine.usd_per_h / machine.count
        for t in dict.fromkeys(chosen):
            require(
                llm.heads % t == 0,
                f"{llm.name} has {llm.heads} attention heads, which {t} GPUs of machine "
                f"{name} cannot share equally.",
                resolve="choose a degree that divides the heads.",
            )
            found += spec.on(machine.linked_gpu, llm, t, trace).replicas(
                f"{name} t={t}",
                chosen.count(t),
                usd_per_gpu_h=price,
                network_s=cluster.reach_s(name),
            )
    return Deployment(cluster.name, tuple(found))


def _instances(machine: Machine, wanted: int | Sequence[int]) -> list[int]:
    if isinstance(wanted, int):
        require(
            wanted >= 1 and machine.count % wanted == 0,
            f"Machine {machine.name} has {machine.count} GPUs, which instances of {wanted} "
            "cannot share out.",
            resolve=f"choose a degree that divides {machine.count}.",
        )
        return [wanted] * (machine.count // wanted)
    chosen = list(wanted)
    require(
        bool(chosen) and min(chosen) >= 1 and sum(chosen) <= machine.count,
        f"Instances of {chosen} GPUs do not fit machine {machine.name} of {machine.count}.",
        resolve="give degrees of 1 or more that add up to no more than its GPUs.",
    )
    return chosen
