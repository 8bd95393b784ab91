"""What a plan runs where, in the terms that serving tools share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, TypedDict, Unpack

from hetero import catalog
from hetero.apps.cards.card import PlanCard
from hetero.catalog import Llm
from hetero.catalog.engines import EngineName, EnginePlatform, EngineStage, serving_engine
from hetero.deployment import Deployment, Engine, Replica
from hetero.display import Column, Shown, Table
from hetero.errors import CatalogError, ExportError, require
from hetero.naming import host, one_line, slug
from hetero.plans import Plan
from hetero.routers import Builtin, Router


class EngineOptions(TypedDict, total=False):
    """What engines are started with, see :class:`Service`."""

    weights: str
    precision: str
    kv_precision: str
    memory_fraction: float
    engine: EngineName
    longest_tokens: int


VLLM: Final = serving_engine("vllm")
"""The engine whose commands are written."""

# Of a KV cache that no engine has printed, such a share may be missing whatever is said of it.
_ROUGH: Final = 0.01
FIRST_PORT = 8000
"""Port of the first engine on a machine; further ones take the next."""


@dataclass(frozen=True, slots=True)
class Part:
    """One pipeline stage of an engine.

    Attributes
    ----------
    machine
        Name of the machine, which is taken as its host name; empty where the plan leaves it open.
    gpu, gpus
        Type and number of its GPUs: the tensor-parallel degree.
    layers
        Layers of the model that it holds; 0 where the plan does not say.
    first_gpu
        Index on its machine of the first GPU that it takes.
    vendor
        Of its GPUs; by default as the catalog has it.
    tensor
        GPUs that share every layer, where these are not all, see :class:`hetero.plans.Group`.
    """

    machine: str
    gpu: str
    gpus: int
    layers: int
    first_gpu: int = 0
    vendor: str = ""
    tensor: int = 0

    @property
    def degrees(self) -> tuple[int, int]:
        """Tensor-parallel degree, and number of copies of the attention."""
        tensor = self.tensor or self.gpus
        return tensor, self.gpus // tensor

    @property
    def platform(self) -> EnginePlatform | None:
        """What vLLM is on these GPUs; None where it does not run on them."""
        return VLLM.platform(self.gpu, self.vendor or _vendor(self.gpu))

    @property
    def seen(self) -> EngineStage:
        """The stage as rules of engines see it."""
        return EngineStage(self.machine, self.gpu, self.vendor or _vendor(self.gpu), self.gpus)

    def __str__(self) -> str:
        return f"{self.gpus} x {self.gpu} of {self.machine}"


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """One engine: a whole copy of the model.

    Attributes
    ----------
    phase
        ``"both"``, ``"prefill"`` or ``"decode"``.
    parts
        Pipeline stages, the first layers first.
    port
        Port that it listens on where machines are shared.
    share
        Share of the requests, NaN where the router decides as it goes.
    engine, kv_tokens, kv_error_tokens
        How the plan took it to form batches, the size of its KV cache [tokens], and the deviation
        of that; None where the plan says neither.
    precision, kv_precision
        Data types of its weights and cache; empty for those of the service.
    """

    name: str
    phase: str
    parts: tuple[Part, ...]
    port: int = FIRST_PORT
    share: float = float("nan")
    engine: Engine | None = None
    kv_tokens: int | None = None
    precision: str = ""
    kv_precision: str = ""
    kv_error_tokens: float = 0.0

    @property
    def sure_tokens(self) -> int | None:
        """Tokens that its KV cache holds even where the estimate is high by two deviations."""
        if self.kv_tokens is None:
            return None
        return max(1, int(self.kv_tokens - max(2 * self.kv_error_tokens, _ROUGH * self.kv_tokens)))

    @property
    def machines(self) -> tuple[str, ...]:
        """Machines in the order of their stages."""
        return tuple(dict.fromkeys(part.machine for part in self.parts))

    @property
    def gpus(self) -> int:
        """GPUs of all stages."""
        return sum(part.gpus for part in self.parts)

    def on(self, machine: str) -> tuple[Part, ...]:
        """Its stages on a machine."""
        return tuple(part for part in self.parts if part.machine == machine)


@dataclass(frozen=True, eq=False, repr=False)
class Service(Shown):
    """A plan, ready to be written for a tool.

    Attributes
    ----------
    weights
        Hugging Face name or path that engines load; by default the model's name.
    precision, kv_precision
        Data types of weights and KV cache.
    longest_tokens
        Of a request of the workload, prompt and answer; 0 where it is not known.
    memory_fraction
        Share of the GPU memory that an engine may take.
    routing
        The routing rule in words.
    router
        The router itself, where there is one.
    engine
        Engine that the plan was made for.

    Examples
    --------
    >>> from hetero import catalog, cluster
    >>> from hetero.engines import replicated
    >>> llm = catalog.llm("Llama-3-8B")
    >>> plan = replicated(cluster.cluster("xiong-8xv100"), llm, {"v100": (4, 1)})
    >>> service = Service.of_deployment(plan, llm)
    >>> [(serving.name, serving.gpus, serving.port) for serving in service.servings]
    [('v100 t=4', 4, 8000), ('v100 t=1', 1, 8000)]
    """

    name: str
    llm: Llm
    servings: tuple[ServedEngine, ...]
    weights: str = ""
    precision: str = "fp16"
    kv_precision: str = "fp16"
    memory_fraction: float = 0.9
    routing: str = ""
    router: Router | Builtin | None = None
    deployment: Deployment | None = None
    engine: EngineName = "vllm"
    longest_tokens: int = 0

    def __post_init__(self) -> None:
        require(
            bool(self.servings),
            f"The plan of {self.name} has no engines.",
            resolve="export a plan that has some.",
            error=ExportError,
        )
        # Both are words of the commands, which cannot be spelt in another way.
        for what, text in (("model", self.llm.name), ("weights", self.weights)):
            require(
                text.isprintable(),
                f"The {what} '{one_line(text)}' holds a line break or another control character.",
                resolve="name it in one line of plain text.",
                error=ExportError,
            )
            require(
                not text.startswith("-"),
                f"The {what} '{text}' begins with a dash, and engines would take it for an option.",
                resolve="give a Hugging Face name, or a path such as ./-model.",
                error=ExportError,
            )
        require(
            0 < self.memory_fraction <= 1,
            f"A memory fraction of {self.memory_fraction:g} starts no engine.",
            resolve="give a share above 0 and up to 1, such as 0.9.",
            error=ExportError,
        )
        for serving in self.servings:
            require(
                bool(serving.parts)
                and all(
                    part.gpus > 0 and part.gpus % max(1, part.tensor) == 0 for part in serving.parts
                )
                and serving.phase in ("both", "prefill", "decode"),
                one_line(f"Group {serving.name} ({serving.phase}) has no phase or no whole GPUs."),
                resolve="take the card as `hetero plan` wrote it, or plan anew.",
                error=ExportError,
            )
            held = sum(part.layers for part in serving.parts)
            require(
                held in (0, self.llm.layers),
                f"Group {serving.name} holds {held} of the {self.llm.layers} layers of "
                f"{self.llm.name}: requests pass from node to node on chains of their own, "
                "and an engine of vLLM holds a whole model in fixed stages.",
                resolve="export a plan of whole replicas, such as one of `hetero plan phases`.",
                error=ExportError,
            )

    @classmethod
    def of_card(
        cls, card: PlanCard, llm: Llm | None = None, **how: Unpack[EngineOptions]
    ) -> Service:
        """Service of a plan card, fresh or read back; model and weights by default as it says."""
        asked = card.question
        how = {
            "precision": card.precision,
            "kv_precision": asked.kv_precision,
            "memory_fraction": asked.memory_fraction,
            "engine": asked.engine,
            "longest_tokens": asked.longest_tokens,
            **how,
        }
        if not how.get("weights") and not asked.checkpoint.endswith(".json"):
            how["weights"] = asked.checkpoint
        known = llm or catalog.find_llm(asked.checkpoint or asked.model)
        return cls.of_plan(card.plan, known, asked.cluster, **how)

    def beside(self, others: Iterable[Service]) -> Service:
        """The same on the GPUs and ports that engines of others leave on machines they share."""
        before = [serving for one in others for serving in one.servings]
        return replace(self, servings=placed(self.servings, before))

    @classmethod
    def of_plan(cls, plan: Plan, llm: Llm, name: str, **how: Unpack[EngineOptions]) -> Service:
        """Service of a plan of the arena for a model on a cluster called ``name``."""
        deployment = plan.deployment
        known = {r.name: r for r in deployment.replicas} if deployment else {}
        servings = (
            _engine(
                group.name,
                group.phase,
                group.stages,
                # The groups of an island that prefills are one engine.
                known.get(group.name) or known.get(f"{group.name}.1"),
                group.share,
                group.tensor,
            )
            for group in plan.groups
        )
        router = plan.router if isinstance(plan.router, Builtin) else None
        return cls(
            name,
            llm,
            placed(servings),
            routing=plan.routing,
            router=router,
            deployment=deployment,
            **how,
        )

    @classmethod
    def of_deployment(
        cls,
        deployment: Deployment,
        llm: Llm,
        router: Router | Builtin | None = None,
        **how: Unpack[EngineOptions],
    ) -> Service:
        """Service of a deployment of whole replicas, each on a host of its own name."""
        servings = []
        for one in deployment.replicas:
            if one.gpu is None:
                raise ExportError(
                    f"Replica {one.name} of {deployment.name} names no GPU.",
                    resolve="give its gpu, or export a plan that has one.",
                )
            stage = (slug(one.name), one.gpu.name, one.gpus, llm.layers)
            servings.append(_engine(one.name, one.role, [stage], one))
        return cls(
            deployment.name,
            llm,
            placed(servings),
            routing=router.name if router is not None else "",
            router=router,
            deployment=deployment,
            **how,
        )

    @property
    def model(self) -> str:
        """What engines load."""
        return self.weights or self.llm.name

    @property
    def disaggregated(self) -> bool:
        """Whether prefill and decode run on engines of their own."""
        return any(serving.phase != "both" for serving in self.servings)

    def bound_to(self, one: ServedEngine) -> str:
        """Machine on which an engine and others exchange KV caches; empty if on none."""
        phases = {other.phase for other in self.servings if other.machines == one.machines}
        apart = one.phase != "both" and {"prefill", "decode"} <= phases
        return one.machines[0] if apart and len(one.machines) == 1 else ""

    @property
    def hosts(self) -> dict[str, str]:
        """What hosts and files are called by machine: its name where they can be, no two alike."""
        names = list(dict.fromkeys(one for serving in self.servings for one in serving.machines))
        found = {name: name for name in names if host(name) == name}
        taken = {name.lower() for name in found}
        for name in names:
            label, k = host(name), 1
            while name not in found and label.lower() in taken:
                k += 1
                label = f"{host(name)}-{k}"
            found.setdefault(name, label)
            taken.add(label.lower())
        return found

    def families(self) -> dict[str, tuple[ServedEngine, ...]]:
        """Engines that differ in nothing but their machines, by a name fit for tools.

        Those that exchange KV caches within a machine are of one family on one machine only.

        Examples
        --------
        >>> from hetero import catalog, cluster
        >>> from hetero.engines import replicated
        >>> llm = catalog.llm("Llama-3-8B")
        >>> plan = replicated(cluster.cluster("xiong-v100-a800"), llm, {"v100": 2, "a800": 1})
        >>> {name: len(same) for name, same in Service.of_deployment(plan, llm).families().items()}
        {'v100-sxm2-32gb-tp2': 4, 'a800-pcie-80gb-tp1': 1}
        """
        alike: dict[object, list[ServedEngine]] = {}
        for one in self.servings:
            shape = tuple(
                (one.machines.index(p.machine), p.gpu, p.gpus, p.layers, p.tensor)
                for p in one.parts
            )
            own = (one.engine, one.kv_tokens, one.precision, one.kv_precision, self.bound_to(one))
            alike.setdefault((one.phase, shape, own), []).append(one)
        found: dict[str, tuple[ServedEngine, ...]] = {}
        for same in alike.values():
            label = _label(same[0])
            taken = sum(name == label or name.startswith(f"{label}-v") for name in found)
            found[f"{label}-v{taken + 1}" if taken else label] = tuple(same)
        return found

    def table(self) -> Table:
        """One row per engine."""
        columns = (
            Column("engine", of="name"),
            Column("phase"),
            Column("GPUs", of=lambda one: ", ".join(map(str, one.parts))),
            Column("port", of=lambda one: str(one.port)),
        )
        routing = f"Routing: {self.routing}." if self.routing else ""
        return Table.of(f"{self.llm.name} on {self.name}", columns, self.servings, routing)


def _engine(
    name: str,
    phase: str,
    stages: Iterable[tuple[str, str, int, int]],
    replica: Replica | None,
    share: float = float("nan"),
    tensor: int = 0,
) -> ServedEngine:
    """An engine with what its replica says of batches and cache."""
    vendor = replica.gpu.vendor if replica is not None and replica.gpu is not None else ""
    parts = tuple(Part(*stage, vendor=vendor, tensor=tensor) for stage in stages)
    made = ServedEngine(name, phase, parts, share=share)
    said = ("engine", "kv_tokens", "precision", "kv_precision", "kv_error_tokens")
    return replace(made, **{one: getattr(replica, one) for one in said}) if replica else made


@lru_cache
def _vendor(gpu: str) -> str:
    """Vendor of a GPU of the catalog; empty for others."""
    try:
        return catalog.gpu(gpu).vendor
    except CatalogError:
        return ""


def placed(
    servings: Iterable[ServedEngine], before: Iterable[ServedEngine] = ()
) -> tuple[ServedEngine, ...]:
    """The same engines with ports and GPUs of their own on the machines that they share.

    Parameters
    ----------
    before
        Engines, placed already, that have the first GPUs and ports.
    """
    ports: dict[str, int] = {}
    used: dict[str, int] = {}
    for one in before:
        for part in one.parts:
            place = part.machine or one.name
            used[place] = max(used.get(place, 0), part.first_gpu + part.gpus)
            ports[place] = max(ports.get(place, 0), one.port + 1)
    found = []
    for one in servings:
        parts = []
        for part in one.parts:
            place = part.machine or one.name
            parts.append(replace(part, first_gpu=used.get(place, 0)))
            used[place] = used.get(place, 0) + part.gpus
        places = [machine or one.name for machine in one.machines]
        port = max((ports.get(place, FIRST_PORT) for place in places), default=FIRST_PORT)
        ports.update(dict.fromkeys(places, port + 1))
        found.append(replace(one, parts=tuple(parts), port=port))
    return tuple(found)


def _label(one: ServedEngine) -> str:
    gpus = "-".join(dict.fromkeys(slug(part.gpu) for part in one.parts))
    depth = f"-pp{len(one.parts)}" if len(one.parts) > 1 else ""
    phase = "" if one.phase == "both" else f"-{one.phase}"
    return f"{slug(gpus)[:34]}-tp{one.parts[0].gpus}{depth}{phase}"
