"""Which step times a replica gets: measured ones where they exist, else the next best.

In this order:

1. a file of one's own (``hetero fit``, ``hetero profile --fit``),
2. a layer profile of the engine with that GPU, model and degree
   (:mod:`~hetero.latency.sources.profiles`),
3. operators measured under the engine and added up (:mod:`~hetero.latency.sources.measured`),
4. the roofline calibrated on that GPU,
5. the roofline calibrated on another variant of its chip,
6. the roofline with the medians over all calibrated GPUs.

Models of one shape share their tables, whatever they are called. A replica has the times of one
source, and so of one engine generation. Tables of 2023 (Splitwise, Helix) are older than any engine
that is planned for and serve their own studies alone, and aiconfigurator's all-reduce among four
and more L40S is that of one host. The engine ``"any"`` stands for the papers' systems, which no
table is of: it begins with 4.

All but files of one's own are kernels; what the engine takes around them
(:mod:`hetero.latency.overheads`) is added where it was fitted to servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np

from hetero.catalog import EngineName, Gpu, Llm, llms, serving_engine
from hetero.catalog import gpu as find_gpu
from hetero.catalog.engines import EngineOverheads
from hetero.display import Column, Shown, Table
from hetero.errors import CatalogError
from hetero.latency.calibration.expected import (
    Level,
    StepError,
    error_of,
    level_named,
    level_of,
)
from hetero.latency.calibration.roofline_fit import efficiency_of_step, of_one_host
from hetero.latency.models.efficiencies import expert_efficiency, for_gpu, sources
from hetero.latency.models.roofline import Efficiency, ExpertEfficiency
from hetero.latency.overheads import with_overheads
from hetero.latency.sources.measured import aiconfigurator_step_models
from hetero.latency.sources.profiles import ProfiledStep, profiled_steps
from hetero.latency.sources.raggedness import longest_over_mean
from hetero.latency.step import StepModel
from hetero.workload import Trace

SourceKind: TypeAlias = Literal[
    "own file", "layer profile", "operators", "calibrated", "same chip", "assumed"
]
"""Kind of source of step times, the nearest to the replica first."""

_LEVELS: dict[SourceKind, Level] = {
    "own file": "measured",
    "layer profile": "measured",
    "operators": "measured",
    "calibrated": "calibrated",
    "same chip": "same chip",
    "assumed": "carried",
}
# What two models may differ in and still take the same time.
_NAMES = {"name", "max_position", "params_nominal_b", "aliases", "in_papers", "source"}
_NAMES |= {"checked", "notes", "other_bytes"}
_FIGURES = ("mem_bw_gbs", "fp16_tflops")
_OF_TABLES = ("fp16", "bf16")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ResolvedSteps(Shown):
    """Step times of a replica, and which kind of source they are from.

    Attributes
    ----------
    step
        The step model; its ``source`` names table, engine and release.
    kind
        Which of the six.
    kernels, equal
        The step model without what the engine takes around its kernels, and that for requests of
        equal length.
    key
        GPU, model and degree of the catalog that a measured table is of.
    engine, vendor, experts
        Engine that serves, maker of the GPU, and whether the model is a mixture of experts.
    """

    step: StepModel
    kind: SourceKind
    kernels: StepModel
    equal: StepModel
    key: tuple[str, str, int] = ("", "", 0)
    engine: EngineName = "vllm"
    vendor: str = ""
    experts: bool = False

    @property
    def error(self) -> StepError:
        """Error to expect of them."""
        level = level_named(self.step.level)
        return error_of(level, self.engine, self.vendor, experts=self.experts)

    @property
    def efficiency(self) -> Efficiency:
        """Efficiencies of the roofline that comes nearest to a measured table, fitted to it alone.

        For what the table does not say: parts of the layers, in pipelines.
        """
        return _nearest(self.equal.source, self.key, self.equal)

    @property
    def label(self) -> str:
        """Kind and source in words."""
        return f"{self.kind}: {self.step.source}"

    def table(self) -> Table:
        """Source, and the error to expect of nine steps of ten."""
        rows = (
            ("source", self.step.source, ""),
            ("kind", self.kind, ""),
            ("prefill +-", self.error.prefill_p90_percent, "%"),
            ("decode +-", self.error.decode_p90_percent, "%"),
            ("seen on servers of", self.error.servers, ""),
        )
        columns = (Column("step times"), Column("value", digits=2), Column("unit"))
        return Table("Step times", columns, rows)


def resolve(
    gpu: Gpu,
    llm: Llm,
    tensor_parallel: int = 1,
    *,
    engine: EngineName = "vllm",
    release: str = "",
    ahead: bool | None = None,
    precision: str = "fp16",
    kv_precision: str = "fp16",
    own: Mapping[str, StepModel] | None = None,
    trace: Trace | None = None,
    experts: ExpertEfficiency | None = None,
    expert_ranks: int = 0,
) -> ResolvedSteps:
    """Step times of a model on some GPUs of one type under an engine, by the order of this module.

    Parameters
    ----------
    gpu
        With the link of its machine, see :attr:`hetero.cluster.Machine.linked_gpu`. Tables hold for
        the catalog's figures, and for several GPUs for its link.
    release
        Release of the engine whose overheads count, by default the newest known.
    ahead
        Whether it prepares the next step while one runs, by default as the release does.
    own
        One's own step models by GPU type; they count first.
    trace
        Requests whose ragged batches a layer profile is to account for; without it they are equal.
        Ranks that share experts take prompts as long as the one that its mean token is of.
    experts
        What routed experts reach, by default what runs of servers show.
    expert_ranks
        See :class:`~hetero.latency.models.roofline.Roofline`; no table was measured with any.

    Examples
    --------
    >>> from hetero.catalog import gpu, llm
    >>> resolve(gpu("RTX-PRO-6000-Server"), llm("Llama-3-8B")).label[:50]
    'layer profile: Llama-3.1-8B on RTX-PRO-6000-Server'
    >>> resolve(gpu("H100-SXM"), llm("Llama-3.1-70B"), 4, engine="sglang").kind
    'operators'
    >>> [resolve(gpu(name), llm("Qwen2.5-14B")).kind for name in ("H100-SXM", "H100-NVL", "A40")]
    ['calibrated', 'same chip', 'assumed']
    """
    if own and gpu.name in own:
        return replace(_resolved(own[gpu.name], "own file"), engine=engine, vendor=gpu.vendor)
    if not expert_ranks and (
        found := measured(
            gpu,
            llm,
            tensor_parallel,
            engine=engine,
            release=release,
            ahead=ahead,
            precision=precision,
            kv_precision=kv_precision,
            trace=trace,
        )
    ):
        return replace(found, engine=engine, vendor=gpu.vendor)
    plain = not llm.experts and precision in _OF_TABLES
    source = calibration_of(gpu, engine, release, tensor_parallel, plain=plain)
    roofline = for_gpu(
        gpu,
        llm,
        tensor_parallel,
        source=source,
        precision=precision,
        kv_precision=kv_precision,
        experts=experts or (llm.experts and expert_efficiency(llm, gpu, engine, precision)) or None,
        expert_ranks=expert_ranks,
    )
    if expert_ranks > 1 and trace is not None:
        inputs = trace.input_tokens.astype(np.float64)
        roofline = replace(roofline, prompt_tokens=float((inputs**2).sum() / inputs.sum()))
    kinds = {level: kind for kind, level in _LEVELS.items()}
    level = level_of(gpu.name, tensor_parallel=tensor_parallel, parts=source is not None)
    found = _resolved(roofline.step_model(), kinds[level])
    found = replace(found, engine=engine, vendor=gpu.vendor, experts=bool(llm.experts))
    around = serving_engine(engine).overheads_of(release, ahead)
    return _under(found, around, llm, tensor_parallel, max(1, expert_ranks))


def calibration_of(
    gpu: Gpu,
    engine: EngineName,
    release: str = "",
    tensor_parallel: int = 1,
    *,
    plain: bool = True,
) -> str | None:
    """The calibration of a GPU under an engine; None for the one that is known best.

    Those of runs of one generation hold under its releases, for dense models in fp16 (``plain``).

    Examples
    --------
    >>> from hetero.catalog import gpu
    >>> calibration_of(gpu("MI300X"), "vllm", "0.6"), calibration_of(gpu("MI300X"), "vllm")
    ('servers/vllm 0.4-0.6', None)
    """
    around, known = serving_engine(engine).overheads_of(release), sources(gpu.name, parts=True)
    wanted = ["several"] if tensor_parallel > 1 else []
    wanted += [f"servers/{around.name}"] if around and plain else []
    wanted += [f"aiconfigurator/{engine}"] if engine not in ("any", "vllm") else []
    return next((one for one in wanted if one in known), None)


@lru_cache(maxsize=256)  # cost models ask for that of a GPU and degree at every pipeline
def measured(
    gpu: Gpu,
    llm: Llm,
    tensor_parallel: int = 1,
    *,
    engine: EngineName = "vllm",
    release: str = "",
    ahead: bool | None = None,
    precision: str = "fp16",
    kv_precision: str = "fp16",
    trace: Trace | None = None,
) -> ResolvedSteps | None:
    """The measured table of a replica, None without one; arguments as of :func:`resolve`."""
    if engine == "any" or {precision, kv_precision} - set(_OF_TABLES):
        return None
    if not _as_catalogued(gpu, tensor_parallel):
        return None
    key = (gpu.name, _shape(llm), tensor_parallel)
    around = serving_engine(engine).overheads_of(release, ahead)
    if found := _profiles(engine).get(key):
        step = found.model
        if trace is not None:
            step = found.ragged(longest_over_mean(trace, int(step.max_decoding)))
        kernels = _resolved(step, "layer profile", (gpu.name, found.llm, tensor_parallel))
        return _under(replace(kernels, equal=found.model), around, llm, tensor_parallel)
    if operators := _operators(engine).get(key):
        name, step = operators
        kernels = _resolved(step, "operators", (gpu.name, name, tensor_parallel))
        return _under(kernels, around, llm, tensor_parallel)
    return None


def _resolved(
    step: StepModel, kind: SourceKind, key: tuple[str, str, int] = ("", "", 0)
) -> ResolvedSteps:
    level = _LEVELS[kind]
    if step.provenance == "estimated" and key[0]:  # two GPUs from one: no measurement
        level, step = "calibrated", replace(step, source=f"{step.source}, estimated from one GPU")
    step = replace(step, level=level)
    return ResolvedSteps(step, kind, step, step, key)


def _under(
    found: ResolvedSteps,
    overheads: EngineOverheads | None,
    llm: Llm,
    tensor_parallel: int,
    ranks: int = 1,
) -> ResolvedSteps:
    """The same under an engine, which takes time around its kernels."""
    if overheads is None:  # of the papers' systems
        return found
    return replace(
        found, step=with_overheads(found.kernels, overheads, llm, tensor_parallel, ranks)
    )


_FITTED: dict[tuple[object, ...], Efficiency] = {}


def _nearest(source: str, key: tuple[str, str, int], step: StepModel) -> Efficiency:
    if (source, key) not in _FITTED:
        _FITTED[source, key] = efficiency_of_step(step, *key)
    return _FITTED[source, key]


def _shape(llm: Llm) -> tuple[object, ...]:
    """What the times of a model depend on."""
    return tuple(getattr(llm, one.name) for one in fields(llm) if one.name not in _NAMES)


def _as_catalogued(gpu: Gpu, tensor_parallel: int) -> bool:
    try:
        known = find_gpu(gpu.name)
    except CatalogError:
        return False
    names = _FIGURES if tensor_parallel == 1 else (*_FIGURES, "link_type", "link_gbs")
    return all(getattr(gpu, name) == getattr(known, name) for name in names)


def _shapes() -> dict[str, tuple[object, ...]]:
    return {one.name: _shape(one) for one in llms()}


@lru_cache(maxsize=8)
def _profiles(engine: EngineName) -> dict[tuple[object, ...], ProfiledStep]:
    shapes = _shapes()
    return {
        (one.gpu, shapes[one.llm], one.tensor_parallel): one
        for one in profiled_steps()
        if one.engine.lower().startswith(f"{engine} ")
    }


@lru_cache(maxsize=8)
def _operators(engine: EngineName) -> dict[tuple[object, ...], tuple[str, StepModel]]:
    shapes = _shapes()
    return {
        (name, shapes[llm], degree): (llm, step)
        for (name, of, llm, degree), step in aiconfigurator_step_models().items()
        if of.startswith(f"{engine} ") and not of_one_host(name, degree)
    }
