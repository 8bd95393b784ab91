"""A plan as a value: what stands on which GPUs, and the rule that sends requests there.

A :class:`Plan` holds no closure. It can be simulated on any trace, written as JSON and read back as
the same plan, compared, drawn, exported and served.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from hetero.deployment import Deployment, Engine, KvLink, Replica
from hetero.display import Column, Shown, Table
from hetero.encoding import Decoder, Encoder, EncodingError
from hetero.errors import DataError, ParameterError, require
from hetero.files import writing
from hetero.grouping import summed
from hetero.placement import FlowNetwork, Placement
from hetero.routers import Builtin, Oracle, Predictor, Router, fresh, router_of
from hetero.routers.base import DEFAULT
from hetero.routers.pipelines import PipelineRouter
from hetero.simulator import Event, simulate
from hetero.simulator.drivers import Watch
from hetero.simulator.pipelines import simulate_pipelines
from hetero.simulator.run import Run
from hetero.simulator.sustained import life_s
from hetero.workload import Trace

FORMAT: Final = "hetero plan"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Group:
    """GPUs that hold one copy of the model, or in a pipeline over a network some of its layers.

    Attributes
    ----------
    name
        Its name in the deployment.
    phase
        ``"both"``, ``"prefill"`` or ``"decode"``.
    stages
        Per pipeline stage: machine, GPU type, number of GPUs (the tensor-parallel degree), layers.
    share
        Share of the requests that it serves, 0 to 1; NaN where the router decides as it goes.
    words
        Its parallelism in words, where that is not of tensors and pipelines.
    tensor
        GPUs that share every layer, where these are not all of a stage: the others hold copies of
        the attention, and together they divide the experts. 0 where they are all.
    """

    name: str
    phase: str
    stages: tuple[tuple[str, str, int, int], ...]
    share: float = float("nan")
    words: str = ""
    tensor: int = 0

    @property
    def gpus(self) -> dict[str, int]:
        """Number of GPUs by type."""
        return summed((gpu, count) for _, gpu, count, _ in self.stages)

    @property
    def parallelism(self) -> str:
        """Degrees in words, such as ``TP 4`` or ``TP 4+2, PP 2``."""
        if self.words:
            return self.words
        degrees = [str(count) for _, _, count, _ in self.stages]
        tensor = degrees[0] if len(set(degrees)) == 1 else "+".join(degrees)
        return f"TP {tensor}" if len(degrees) == 1 else f"TP {tensor}, PP {len(degrees)}"


@dataclass(frozen=True)
class Layers:
    """Layers placed over the nodes of a network.

    Attributes
    ----------
    placement
        Which node holds which layers.
    partial_inference
        Whether a node may compute a part of the layers that it holds.
    prompt_tokens
        Tokens of one prompt step of a node, per request that its batch may hold.
    """

    placement: Placement
    partial_inference: bool = False
    prompt_tokens: float = 8.0

    @cached_property
    def network(self) -> FlowNetwork:
        """The flow network of the placement."""
        return FlowNetwork(self.placement, self.partial_inference)


Serving: TypeAlias = Deployment | Layers
"""What a plan sets up: replicas that hold the whole model, or layers over a network."""


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Shown):
    """How a fleet serves a model.

    Attributes
    ----------
    planner
        Name of the planner.
    groups
        Which GPUs hold what.
    serving
        Replicas with their engines and links, or layers over a network.
    router
        The rule that sends requests to them, a value too: every run keeps records of its own. With
        ``replace(plan, router=Mine())`` it is one of plain Python, which no file can hold.
    routing
        The rule in words.
    usd_per_h
        Price of the GPUs that are used [$/h]; None if one has none.
    bound_rps, bound
        Proven upper bound on what any plan of this kind sustains [requests/s], and in words whose;
        None where the planner proves none.
    notes
        What a reader should know: readings taken, GPUs left idle and why.
    options
        What it was made with, where that can be told in a number or a word.
    pipelines
        How the planner costed each replica, in their order, for searches that change the plan; no
        part of its value.
    evidence
        What the planner found on the way, in words of its own; no part of its value.

    Examples
    --------
    >>> from hetero import catalog, cluster, workload
    >>> from hetero.engines import replicated
    >>> from hetero.routers import Predictive
    >>> fleet, model = cluster.cluster("thunderserve-a5000-pair"), catalog.llm("Llama-3-8B")
    >>> pair = replicated(fleet, model, {"a5000-1": 1, "a5000-2": 1})
    >>> plan = Plan("by hand", (), pair, Predictive(), "hetero", None)
    >>> Plan.from_json(plan.to_json()) == plan
    True
    >>> chats = workload.load("azure2023_conv").head(50)
    >>> bool(plan.simulate(chats).finished.all())
    True
    """

    planner: str
    groups: tuple[Group, ...]
    serving: Serving
    router: Builtin | Router | PipelineRouter
    routing: str
    usd_per_h: float | None
    bound_rps: float | None = None
    bound: str = ""
    notes: tuple[str, ...] = ()
    options: Mapping[str, float | str] = field(default_factory=dict)
    pipelines: tuple[Any, ...] = field(default=(), compare=False)
    evidence: Any = field(default=None, compare=False)

    @property
    def deployment(self) -> Deployment | None:
        """Its replicas; None where layers stand on a network."""
        return self.serving if isinstance(self.serving, Deployment) else None

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs in use by type."""
        return summed(item for group in self.groups for item in group.gpus.items())

    @property
    def rule(self) -> str:
        """How requests are routed in words; of a router of plain Python, its name."""
        known = isinstance(self.router, Builtin | PipelineRouter)
        return self.routing if known else router_of(self.router).name

    def simulate(
        self,
        trace: Trace,
        seed: int = 0,
        *,
        sample_s: float | None = None,
        events: Sequence[Event] = (),
        progress: Callable[[int], None] | None = None,
        watch: Watch | None = None,
        predictor: Predictor | None = None,
    ) -> Run:
        """What becomes of every request of a trace, arrivals as they are.

        Parameters
        ----------
        seed
            Of the draws of the router and of the predictor.
        sample_s, events, progress, watch, predictor
            For plans of replicas, see :func:`hetero.simulator.simulate`.
        """
        if isinstance(self.serving, Deployment):
            return simulate(
                self.serving, trace, fresh(router_of(self.router)), events=events, seed=seed,
                sample_s=sample_s, progress=progress, watch=watch, predictor=predictor,
            )  # fmt: skip
        require(
            isinstance(self.router, PipelineRouter),
            f"{self.planner} places layers over a network, where '{self.rule}' routes nothing.",
            resolve="keep its router, or change that of a plan of replicas.",
        )
        assert isinstance(self.router, PipelineRouter)
        return simulate_pipelines(
            self.serving.network,
            trace,
            self.router,
            copy_bytes_s=float("inf"),
            prompt_tokens=self.serving.prompt_tokens,
            context_tokens=1e9,
            seed=seed,
        )

    def life_s(self, trace: Trace) -> float:
        """Time that a median request of a trace takes where all are as full as they can be [s].

        See :func:`hetero.simulator.sustained.life_s`; of layers over a network, the slowest node
        that holds a layer counts.
        """
        inputs, outputs = _median_tokens(trace)
        if isinstance(self.serving, Deployment):
            return life_s(self.serving, inputs, outputs)
        placement = self.serving.placement
        prompt_ms = decode_ms = np.zeros(placement.problem.llm.layers)
        for k, node, (start, stop) in placement.nodes():
            prompts, batch = node.kind.batch_limits(placement.layers(k))
            held = np.zeros_like(prompt_ms)
            held[start:stop] = 1.0
            slowest = float(node.kind.latency.prompt_layer_ms(inputs * min(prompts, 1)))
            prompt_ms = np.maximum(prompt_ms, held * slowest)
            slowest = float(node.kind.latency.decode_layer_ms(batch))
            decode_ms = np.maximum(decode_ms, held * slowest)
        return float(prompt_ms.sum() + outputs * decode_ms.sum()) / 1e3

    def on(self, serving: Serving) -> Plan:
        """The same plan and rule with replicas of other step times, caches or links."""
        return replace(self, serving=serving)

    def table(self) -> Table:
        """One row per group."""
        rows = tuple(
            (
                group.name,
                ", ".join(f"{n} x {gpu}" for gpu, n in group.gpus.items()),
                group.parallelism,
                group.phase,
                100.0 * group.share,
            )
            for group in self.groups
        )
        columns = (
            Column("group"),
            Column("GPUs"),
            Column("parallelism"),
            Column("phase"),
            Column("requests", "%", 3),
        )
        notes = (f"Routing: {self.rule}.", *self.notes)
        return Table(self.planner, columns, rows, notes)

    # In and out -----------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self is other or self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.planner, self.routing, tuple(group.name for group in self.groups)))

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values, as :mod:`hetero.encoding` describes them."""
        encoder = Encoder(_known(), _shared())
        try:
            plan = encoder.encode(self)
        except TypeError as error:
            raise ParameterError(
                f"The plan cannot be written: {error}.",
                resolve="write it with a router of hetero.routers; keep your own as code.",
            ) from None
        return {"format": FORMAT, "version": VERSION, "plan": plan, "shared": encoder.shared}

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(self.to_dict(), ensure_ascii=False) + "\n"

    @classmethod
    def of_dict(cls, values: object, path: Path | str = "plan") -> Plan:
        """Plan of JSON values that :meth:`to_dict` gave.

        Raises
        ------
        DataError
            If they are no plan, or one of another version.
        """
        again = "write it again with this version of hetero."
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise DataError("The file holds no plan.", path=path, resolve=again)
        if values.get("version") != VERSION:
            raise DataError(
                f"The plan has version {values.get('version')!r}; this hetero reads {VERSION}.",
                path=path,
                resolve=again,
            )
        shared = values.get("shared")
        try:
            decoder = Decoder(_known(), shared if isinstance(shared, list) else ())
            plan = decoder.decode(values.get("plan"), "plan")
        except (EncodingError, RecursionError) as error:
            raise DataError(
                f"The plan cannot be read: {error}.", path=path, resolve=again
            ) from None
        if not isinstance(plan, Plan):
            raise DataError("The file holds no plan.", path=path, resolve=again)
        return plan

    @classmethod
    def from_json(cls, text: str, path: Path | str = "plan") -> Plan:
        """Plan that :meth:`to_json` wrote.

        Raises
        ------
        DataError
            If the text is no plan.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            raise DataError(
                "The file is not JSON.", path=path, resolve="write the plan again."
            ) from None
        return cls.of_dict(values, path)

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Write the plan as a JSON file, whole or not at all."""
        with writing(path, force=force) as part:
            part.write_text(self.to_json(), encoding="utf-8")


@cache
def _shared() -> tuple[type, ...]:
    """Classes of values that many replicas or nodes have in common."""
    from hetero.catalog import Gpu, Llm
    from hetero.latency.step import StepModel
    from hetero.placement.machines import MachineKind

    return (StepModel, Gpu, Llm, Engine, MachineKind)


@cache
def _known() -> tuple[type, ...]:
    """Classes that a plan is made of; a file can name no others."""
    from hetero import routers
    from hetero.latency.models.affine import Affine
    from hetero.latency.models.layers import LayerLatency
    from hetero.latency.step import Bends, Mixed, Piece
    from hetero.placement import Links, Problem
    from hetero.placement.problem import Node
    from hetero.placement.throughput import OperatingPoint
    from hetero.routers.pipelines import FlowRouter

    of_replicas = [
        one
        for one in (getattr(routers, name) for name in routers.__all__)
        if isinstance(one, type) and issubclass(one, Builtin) and one is not Builtin
    ]
    return (
        *_shared(),
        *(Plan, Group, Layers, Deployment, Replica, KvLink, Piece, Mixed, Bends, Affine),
        *(Placement, Problem, Node, LayerLatency, Links, OperatingPoint, FlowRouter),
        *of_replicas,
    )


@lru_cache(maxsize=16)  # searches ask for those of one trace at every rate
def _median_tokens(trace: Trace) -> tuple[float, float]:
    return float(np.median(trace.input_tokens)), float(np.median(trace.output_tokens))


def footing(
    replicas: Iterable[Replica],
    came: str,
    seeds: Iterable[int],
    predictor: Predictor | None = None,
) -> str:
    """Predictor, engine, arrivals, order of the requests and seeds in a line."""
    ways = dict.fromkeys(f"{r.engine.batching}, {r.engine.admission} admission" for r in replicas)
    told, engine = predictor or DEFAULT, " or ".join(ways) or "layers over a network"
    truth = ", the true lengths" if isinstance(told, Oracle) else ""
    numbered = ", ".join(map(str, seeds))
    return f"Predictor {told}{truth}; engine {engine}; {came}; seeds {numbered}."
