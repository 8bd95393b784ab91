"""What a serving engine can run: the groups of GPUs it allows, and what its devices are called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, TypeAlias

from hetero import paths
from hetero.catalog.gpus import Gpu
from hetero.catalog.models import Llm
from hetero.catalog.tables import Records, read_table
from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError, require_not_negative, require_share
from hetero.grouping import summed

EngineName: TypeAlias = Literal["vllm", "sglang", "trtllm", "any"]
"""Engine that has to be able to run a plan; ``"any"`` for what the papers' own systems do."""

Reach: TypeAlias = Literal["machines", "machine", "none"]
"""How far the stages of a pipeline may stand apart."""


Sampler: TypeAlias = Literal["", "flashinfer"]
"""Sampler of an engine; empty for that of its release."""

Bits: TypeAlias = Literal[16, 8, 4]
"""Bits per value in which KV caches travel; they are computed in 16."""


class EngineStage(NamedTuple):
    """Stage of a pipeline as an engine sees it: machine, type and vendor of its GPUs, number."""

    machine: object
    gpu: str
    vendor: str
    gpus: int


class Misfit(NamedTuple):
    """Which rule of an engine a group of GPUs breaks, and what to do."""

    what: str
    resolve: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlatform:
    """An engine on the devices of a vendor; a row of ``platforms.csv``.

    Attributes
    ----------
    only, without
        Beginnings of the names of the GPUs that are meant, and of those among them that the image
        is not built for.
    image, resource, devices
        Container image, resource of Kubernetes, and environment variable of the device numbers.
    weights, kv_caches
        Data types.
    weight_only
        Those of the weights that it reads, to compute in 16 bits, where a GPU does not compute in
        them.
    connector
        What moves KV caches between engines; empty where phases are not split.
    prefill_pipelines, decode_pipelines
        Whether engines of that phase may have several stages.
    """

    engine: str
    vendor: str
    image: str
    resource: str
    devices: str
    weights: tuple[str, ...]
    kv_caches: tuple[str, ...]
    pipelines: Reach
    source: str
    date: str
    weight_only: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    connector: str = ""
    prefill_pipelines: bool = False
    decode_pipelines: bool = False
    notes: str = ""

    def has(self, gpu: str, vendor: str) -> bool:
        """Whether a GPU is one of these; one without a vendor counts as NVIDIA's."""
        same = (vendor or "NVIDIA").lower() == self.vendor.lower()
        return same and (not self.only or gpu.startswith(self.only))

    def built_for(self, gpu: str) -> bool:
        """Whether the image is."""
        return not gpu.startswith(self.without)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBatches:
    """Limits that an engine starts with on some GPUs; a row of ``batches.csv``.

    Attributes
    ----------
    least_gib, without
        GPUs of at least so much memory, but for those whose names begin so.
    max_batch
        Requests that decode together, at most.
    max_step_tokens
        Tokens of a step, at most.
    """

    engine: str
    max_batch: int
    max_step_tokens: int
    source: str
    date: str
    least_gib: float = 0.0
    without: tuple[str, ...] = ()
    notes: str = ""

    def has(self, gpu: Gpu) -> bool:
        """Whether a GPU is one of these."""
        return gpu.mem_gib >= self.least_gib and not gpu.name.startswith(self.without)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """How releases of an engine divide the memory of a GPU; a row of ``memory.csv``.

    :func:`hetero.memory.engine_room` has the equation.

    Attributes
    ----------
    since
        First release that it holds for.
    share
        Share of the visible memory that it takes by default.
    live_factor
        Bytes held by the profiling run over those of the activations that it needs at once.
    logit_bytes
        Bytes that its sampler holds per logit.
    engine_gib, several_gib
        What it holds per GPU beside weights and activations, and on top where several GPUs share
        the layers [GiB].
    layer_graphs_gib
        CUDA graphs of a layer, where it counts them within its share [GiB].
    error_gib
        Deviation of what it holds from what engines print, per GPU [GiB].
    flashinfer_bytes
        As ``logit_bytes``, of FlashInfer's sampler where that is installed.
    """

    engine: str
    since: str
    share: float
    live_factor: float
    logit_bytes: float
    engine_gib: float
    several_gib: float
    layer_graphs_gib: float
    source: str
    error_gib: float = 0.0
    flashinfer_bytes: float | None = None
    notes: str = ""

    def __post_init__(self) -> None:
        require_share(share=self.share)
        require_not_negative(
            live_factor=self.live_factor,
            logit_bytes=self.logit_bytes,
            engine_gib=self.engine_gib,
            several_gib=self.several_gib,
            layer_graphs_gib=self.layer_graphs_gib,
            error_gib=self.error_gib,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOverheads:
    """What releases of an engine take beside the kernels of a step; a row of ``overheads.csv``.

    :mod:`hetero.latency.overheads` has the equation.

    Attributes
    ----------
    releases
        The releases that it holds for, such as ``0.4-0.6``.
    step_s, worker_s
        Per step, and on top where several GPUs share the layers [s].
    decoding_s
        Per decoding request and step [s]. These three pass while a step runs, and take none,
        where the next one is prepared ahead.
    launch_s
        Per layer: no step is faster than its launches [s].
    whole_from
        First release that launches all layers at once and has no ``launch_s``; empty: none has.
    request_s, prompt_token_s
        Of a request before its first step and after its first token, together, and under a mixture
        of experts on top for each token of its prompt [s].
    """

    engine: str
    releases: str
    step_s: float = 0.0
    worker_s: float = 0.0
    decoding_s: float = 0.0
    launch_s: float = 0.0
    whole_from: str = ""
    request_s: float = 0.0
    prompt_token_s: float = 0.0
    source: str
    notes: str = ""

    def __post_init__(self) -> None:
        require_not_negative(
            step_s=self.step_s,
            worker_s=self.worker_s,
            decoding_s=self.decoding_s,
            launch_s=self.launch_s,
            request_s=self.request_s,
            prompt_token_s=self.prompt_token_s,
        )

    @property
    def name(self) -> str:
        """Engine and releases."""
        return f"{self.engine} {self.releases}"

    def of(self, release: str = "", ahead: bool = False) -> EngineOverheads:
        """What a release, by default the newest, has of them where it prepares steps ahead."""
        found = replace(self, launch_s=0.0) if _has(self.whole_from, release) else self
        return replace(found, step_s=0.0, worker_s=0.0, decoding_s=0.0) if ahead else found


@dataclass(frozen=True, kw_only=True)
class ServingEngine(Shown):
    """An engine with its rules; a row of ``engines.csv``, whose columns its README describes.

    Examples
    --------
    >>> engine = serving_engine("vllm")
    >>> mixed = [EngineStage("a", "H100-SXM", "NVIDIA", 2), EngineStage("b", "MI300X", "AMD", 2)]
    >>> print(engine.misfit("pair", mixed).what)
    pair joins H100-SXM and MI300X, and vLLM runs a replica on GPUs of one type.
    >>> serving_engine("any").misfit("pair", mixed) is None
    True
    """

    name: str
    title: str
    mixed_pipelines: bool
    unequal_stages: bool
    uneven_machines: bool
    layers_over_network: bool
    divides_weights: bool
    transfer_bits: int
    source: str
    ahead_from: str = ""
    piped_ahead_from: str = ""
    caches_from: str = ""
    version: str = ""
    notes: str = ""
    platforms: tuple[EnginePlatform, ...] = ()
    batches: tuple[EngineBatches, ...] = ()
    overheads: tuple[EngineOverheads, ...] = ()
    memory: tuple[EngineMemory, ...] = ()

    def batches_on(self, gpu: Gpu) -> EngineBatches:
        """Limits that it starts with on a GPU.

        Examples
        --------
        >>> from hetero.catalog import gpu
        >>> engine = serving_engine("vllm")
        >>> [engine.batches_on(gpu(one)).max_batch for one in ("H100-SXM", "A100-SXM-80GB", "L4")]
        [1024, 256, 256]
        """
        return next(one for one in self.batches if one.has(gpu))

    def ahead(self, release: str = "", *, piped: bool = False) -> bool:
        """Whether a release, by default the newest, prepares the next step while one runs.

        Examples
        --------
        >>> [serving_engine("vllm").ahead(one) for one in ("", "0.19", "0.13.1")]
        [True, True, False]
        >>> [serving_engine("vllm").ahead(one, piped=True) for one in ("", "0.15", "0.14.1")]
        [True, True, False]
        """
        return _has(self.piped_ahead_from if piped else self.ahead_from, release)

    def caches(self, release: str = "") -> bool:
        """Whether a release, by default the newest, keeps KV blocks for prompts that share them.

        Examples
        --------
        >>> [serving_engine("vllm").caches(one) for one in ("", "0.6.3")]
        [True, False]
        """
        return _has(self.caches_from, release)

    def overheads_of(self, release: str = "", ahead: bool | None = None) -> EngineOverheads | None:
        """What a release takes beside the kernels of a step, as every command takes it.

        It is that of the newest releases fitted that are not newer, else of the oldest; None where
        nothing was fitted to the engine.

        Parameters
        ----------
        release
            By default the newest.
        ahead
            Whether it prepares the next step while one runs, by default as the release does.

        Examples
        --------
        >>> engine = serving_engine("vllm")
        >>> [engine.overheads_of(one).releases for one in ("", "0.19.1", "0.6", "0.2")]
        ['0.8-0.15', '0.8-0.15', '0.4-0.6', '0.4-0.6']
        >>> [engine.overheads_of("0.13", ahead).step_s > 0.0 for ahead in (False, True)]
        [True, False]
        >>> serving_engine("any").overheads_of() is None
        True
        """
        if not self.overheads:
            return None
        wanted = release_numbers(release) if release else (math.inf,)
        by_age = sorted(
            self.overheads, key=lambda one: release_numbers(one.releases.partition("-")[0])
        )
        older = [one for one in by_age if release_numbers(one.releases.partition("-")[0]) <= wanted]
        found = (older or by_age[:1])[-1]
        return found.of(release, self.ahead(release) if ahead is None else ahead)

    def memory_of(self, release: str = "") -> EngineMemory | None:
        """How a release, by default the newest, divides the memory; None for the papers' systems.

        Examples
        --------
        >>> [serving_engine("vllm").memory_of(one).since for one in ("", "0.19.1", "0.2")]
        ['0.21', '0.17', '0.4']
        """
        wanted = release_numbers(release) if release else (math.inf,)
        older = [one for one in self.memory if release_numbers(one.since) <= wanted]
        return (older or self.memory[:1] or (None,))[-1]

    def share(self, release: str = "") -> float:
        """Share of a GPU's memory that a release takes by default.

        Examples
        --------
        >>> [serving_engine(name).share() for name in ("vllm", "any")]
        [0.92, 0.9]
        """
        found = self.memory_of(release)
        return found.share if found else 0.9

    @property
    def aliases(self) -> tuple[str, ...]:
        """Engines have no other names."""
        return ()

    @cached_property
    def limited(self) -> bool:
        """Whether there is anything that it cannot run."""
        return bool(self.platforms)

    def platform(self, gpu: str, vendor: str) -> EnginePlatform | None:
        """Its row for a GPU, the first that fits; None without one."""
        return next((one for one in self.platforms if one.has(gpu, vendor)), None)

    def lacks(self, gpu: Gpu, precision: str = "fp16") -> str:
        """Why it cannot serve weights of a data type on a GPU; empty where it can.

        Examples
        --------
        >>> from hetero.catalog import gpu
        >>> serving_engine("vllm").lacks(gpu("MI300X"), "int8")
        'vLLM has no int8 on MI300X'
        >>> serving_engine("trtllm").lacks(gpu("MI300X"))
        'TensorRT-LLM does not run on MI300X'
        """
        if not self.limited:
            return ""
        found = self.platform(gpu.name, gpu.vendor)
        if found is None or not found.built_for(gpu.name):
            return f"{self.title} does not run on {gpu.name}"
        if precision not in found.weights:
            return f"{self.title} has no {precision} on {gpu.name}"
        return ""

    def serves(self, gpu: Gpu, precision: str) -> bool:
        """Whether it serves weights of a data type on a GPU: as the GPU computes, or read alone.

        Examples
        --------
        >>> from hetero.catalog import gpu
        >>> engine = serving_engine("vllm")
        >>> [engine.serves(gpu(one), "fp8") for one in ("H100-SXM", "A100-SXM-80GB", "Gaudi2")]
        [True, True, False]
        >>> serving_engine("any").serves(gpu("A100-SXM-80GB"), "fp8")
        False
        """
        if self.lacks(gpu, precision):
            return False
        found = self.platform(gpu.name, gpu.vendor)
        return precision in (*gpu.precisions, *(found.weight_only if found else ()))

    def divides(self, llm: Llm, gpus: int) -> bool:
        """Whether so many GPUs can share every layer of a model.

        The attention heads are divided by all, and where ``divides_weights`` is set the
        feed-forward width; the KV heads too, or each is held by several GPUs.
        """
        if llm.heads % gpus:
            return False
        if not self.divides_weights:
            return True
        shared = llm.latent or llm.kv_heads % gpus == 0 or gpus % llm.kv_heads == 0
        return shared and llm.intermediate % gpus == 0

    def joins(self, stages: Sequence[EngineStage]) -> bool:
        """Whether GPUs may form a group at all, whatever its stages: its types and machines."""
        if not self.limited:
            return True
        counts = summed((one.machine, one.gpus) for one in stages)
        kinds = {(one.gpu, one.vendor) for one in stages}
        where = {self.platform(*kind) for kind in kinds}
        if len(where) > 1 or (len(kinds) > 1 and not self.mixed_pipelines):
            return False
        if len(set(counts.values())) > 1 and not self.uneven_machines:
            return False
        found = where.pop()
        return found is not None and (len(counts) == 1 or found.pipelines == "machines")

    def splits(self, prefill: EngineStage, decode: EngineStage) -> bool:
        """Whether KV caches of one device can be sent to another."""
        if not self.limited:
            return True
        source = self.platform(prefill.gpu, prefill.vendor)
        target = self.platform(decode.gpu, decode.vendor)
        return source is not None and bool(source.connector) and source is target

    def misfit(
        self, name: str, stages: Sequence[EngineStage], phase: str = "both"
    ) -> Misfit | None:
        """Which of its rules a replica breaks; None if it can run it.

        Parameters
        ----------
        name
            What the replica is called in the sentence.
        stages
            Of its pipeline, the first layers first.
        phase
            ``"both"``, ``"prefill"`` or ``"decode"``.
        """
        if not self.limited:
            return None
        kinds = dict.fromkeys(one.gpu for one in stages)
        degrees = [one.gpus for one in stages]
        order = [one.machine for one in stages]
        turns = sum(a != b for a, b in zip(order, [None, *order], strict=False))
        machines = dict.fromkeys(order)
        counts = [sum(one.gpus for one in stages if one.machine == m) for m in machines]
        where = [self.platform(one.gpu, one.vendor) for one in stages]
        first = where[0]
        if first is None or None in where:
            gpu = stages[where.index(None)].gpu
            return Misfit(
                f"{name} stands on {gpu}, and {self.title} does not run on it.",
                "plan for the GPUs that the engine runs on, or for another engine.",
            )
        piped = len(stages) > 1
        reach = first.pipelines
        of_phase = {"prefill": first.prefill_pipelines, "decode": first.decode_pipelines}
        rules = (
            (
                len(kinds) == 1 or (self.mixed_pipelines and len(set(where)) == 1),
                f"{name} joins {' and '.join(kinds)}, and {self.title} runs a replica on GPUs of "
                "one type.",
                "plan with one GPU type per replica.",
            ),
            (
                self.unequal_stages or len(set(degrees)) == 1,
                f"The stages of {name} have {', '.join(map(str, degrees))} GPUs, and {self.title} "
                "gives every pipeline stage of an engine one tensor-parallel degree.",
                "plan with one degree for all stages of a replica.",
            ),
            (
                self.uneven_machines or len(machines) == turns,
                f"The pipeline of {name} comes back to a machine that it has left, and "
                f"{self.title} numbers its stages machine by machine.",
                "plan with stages of one machine side by side.",
            ),
            (
                self.uneven_machines or len(set(counts)) == 1,
                f"{name} takes {', '.join(map(str, counts))} GPUs of its machines, and "
                f"{self.title} wants the same number on every machine of an engine.",
                "plan with equal numbers of GPUs on the machines of a replica.",
            ),
            (
                not piped or reach == "machines" or (reach == "machine" and len(machines) == 1),
                f"{name} is a pipeline over {len(machines)} machine(s) of {stages[0].gpu}, and "
                f"{self.title} has {'none across machines' if reach == 'machine' else 'none'} "
                "there.",
                "plan with replicas of one stage on these GPUs.",
            ),
            (
                phase == "both" or bool(first.connector),
                f"{name} serves {phase} alone on {stages[0].gpu}, where {self.title} has no "
                "connector that moves KV caches.",
                "plan replicas of these GPUs for both phases.",
            ),
            (
                phase == "both" or not piped or of_phase[phase],
                f"{name} serves {phase} alone in {len(degrees)} pipeline stages, and the "
                f"connector {first.connector} of {self.title} {self.version} expects engines of "
                "one stage there.",
                "plan such replicas of one stage, or without phases; the routing table can be "
                "exported all the same.",
            ),
        )
        return next((Misfit(what, how) for good, what, how in rules if not good), None)

    @classmethod
    def columns(cls) -> tuple[Column, ...]:
        """What a list of engines shows of each."""
        return (
            Column("engine", of="name"),
            Column("release", of="version"),
            Column("KV transfer", "bits", of="transfer_bits"),
            Column("runs on", of=lambda one: ", ".join(dict.fromkeys(one.vendors))),
        )

    @property
    def vendors(self) -> tuple[str, ...]:
        """Vendors whose devices it runs on; empty for all."""
        return tuple(one.vendor for one in self.platforms)

    def table(self) -> Table:
        """The engine as one line, with where its rules come from."""
        return Table.of("", self.columns(), [self], f"Source: {self.source}.", self.notes)


@lru_cache(maxsize=1)
def serving_engines() -> Records[ServingEngine]:
    """All engines of ``data/engines``."""
    path = paths.data("engines", "platforms.csv")
    from hetero.rows import read_records

    known = [EnginePlatform(**row) for row in read_records(path, EnginePlatform)]  # type: ignore[arg-type]
    path = paths.data("engines", "batches.csv")
    limits = [EngineBatches(**row) for row in read_records(path, EngineBatches)]  # type: ignore[arg-type]
    path = paths.data("engines", "overheads.csv")
    fitted = [EngineOverheads(**row) for row in read_records(path, EngineOverheads)]  # type: ignore[arg-type]
    path = paths.data("engines", "memory.csv")
    rooms = [EngineMemory(**row) for row in read_records(path, EngineMemory)]  # type: ignore[arg-type]
    found = read_table(paths.data("engines", "engines.csv"), "engine", ServingEngine)
    return Records(
        "engine",
        [
            replace(
                one,
                platforms=tuple(row for row in known if row.engine == one.name),
                batches=tuple(row for row in limits if row.engine == one.name),
                overheads=tuple(row for row in fitted if row.engine == one.name),
                memory=tuple(row for row in rooms if row.engine == one.name),
            )
            for one in found
        ],
    )


def serving_engine(name: str) -> ServingEngine:
    """Engine of that name."""
    for one in serving_engines():
        if one.name == name:
            return one
    raise ParameterError(
        f"There is no engine '{name}'.", resolve=f"use {', '.join(serving_engines().names)}."
    )


def _has(since: str, release: str) -> bool:
    """Whether a release, the newest if empty, has what came with another; none if that is empty."""
    return bool(since) and (not release or release_numbers(release) >= release_numbers(since))


def release_numbers(release: str) -> tuple[float, ...]:
    """Numbers of a release, by which releases are in order.

    Examples
    --------
    >>> release_numbers("0.9") < release_numbers("0.12.1")
    True
    """
    try:
        return tuple(float(int(part)) for part in release.split("."))
    except ValueError:
        raise ParameterError(
            f"'{release}' is no release of an engine.", resolve="give numbers, such as 0.19."
        ) from None
