"""The routing table: which engines there are, and which requests each of them gets, as JSON.

A dispatcher reads it; its form is that of :class:`RoutingTable`, whose JSON schema
:func:`schema` gives. ``format`` names the version: a reader refuses another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetero.apps.export.service import ServedEngine, Service
from hetero.apps.serving import deployment_file
from hetero.errors import DataError, ParameterError
from hetero.routers import Builtin, PairShares, RangeShares

FORMAT: Literal["hetero routing table 1"] = "hetero routing table 1"
Share = Annotated[float, Field(ge=0, le=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Stage(_Strict):
    """GPUs that hold consecutive layers of the model."""

    machine: str = Field(description="Machine, as the cluster file calls it.")
    gpu: str = Field(description="GPU type.")
    gpus: int = Field(ge=1, description="Number of GPUs: the tensor-parallel degree.")
    layers: int = Field(ge=0, description="Layers held; 0 where the plan does not say.")


class EngineRow(_Strict):
    """One engine."""

    name: str = Field(description="Its name in the plan.")
    url: str = Field(description="Address; /v1 is added to it.")
    phase: Literal["both", "prefill", "decode"] = Field(description="What it serves.")
    stages: tuple[Stage, ...] = Field(min_length=1, description="Pipeline, first layers first.")
    share: Share | None = Field(
        None, description="Share of the requests; null where the rule decides as it goes."
    )
    kv_tokens: int | None = Field(None, ge=1, description="Size of its KV cache [tokens].")
    max_requests: int | None = Field(None, ge=1, description="Requests that decode together.")


class Pair(_Strict):
    """A prefill engine, the decode engine that pulls its caches, and their share."""

    prefill: str
    decode: str
    share: Share


class Range(_Strict):
    """Requests by input length, and the share of each engine among them."""

    below_tokens: float | None = Field(
        description="Holds inputs shorter than this that no earlier range holds; null: all others."
    )
    prefill: dict[str, Share] = Field(description="Share by engine that prefills.")
    decode: dict[str, Share] = Field(description="Share by engine that decodes.")


class Rule(_Strict):
    """The routing rule."""

    name: str | None = Field(None, description="Router of `hetero serve`, where it is one.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Its parameters, where they are not the defaults."
    )
    words: str = Field(description="The rule in words.")


class RoutingTable(_Strict):
    """A routing table."""

    format: Literal["hetero routing table 1"] = FORMAT
    model: str = Field(description="Name of the model that clients ask for.")
    rule: Rule
    engines: tuple[EngineRow, ...] = Field(min_length=1)
    pairs: tuple[Pair, ...] = Field((), description="Where the rule divides requests by pairs.")
    ranges: tuple[Range, ...] = Field((), description="Where it divides them by input length.")


def table(service: Service, addresses: Mapping[str, str]) -> RoutingTable:
    """Routing table of a service whose engines have these addresses.

    Examples
    --------
    >>> from hetero import catalog, cluster
    >>> from hetero.engines import replicated
    >>> from hetero.routers import Predictive
    >>> llm = catalog.llm("Llama-3-8B")
    >>> plan = replicated(cluster.cluster("xiong-8xv100"), llm, {"v100": 4})
    >>> service = Service.of_deployment(plan, llm, Predictive())
    >>> found = table(service, {one.name: "http://host:1" for one in service.servings})
    >>> found.rule.name, len(found.engines)
    ('hetero', 2)
    """
    name, options = named(service)
    return RoutingTable(
        model=service.llm.name,
        rule=Rule(name=name, options=options, words=service.routing or name or "any engine"),
        engines=tuple(_engine(one, addresses[one.name]) for one in service.servings),
        pairs=tuple(_pairs(service)),
        ranges=tuple(_ranges(service)),
    )


def to_json(found: RoutingTable) -> str:
    """Text of a routing table."""
    return found.model_dump_json(indent=1) + "\n"


def from_json(text: str, path: str = "routing table") -> RoutingTable:
    """Routing table of a JSON text; ``path`` names the file in errors.

    Raises
    ------
    DataError
        If the text is none of this version; the first offending field is named.
    """
    try:
        return RoutingTable.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the text as a whole"
        raise DataError(
            f"{where}: {first['msg']}.",
            path=path,
            resolve=f'give a file with "format": "{FORMAT}", as hetero export writes it.',
        ) from None


def schema() -> dict[str, Any]:
    """JSON schema of a routing table."""
    return RoutingTable.model_json_schema()


def named(service: Service) -> tuple[str | None, dict[str, Any]]:
    """Name and parameters under which ``hetero serve`` knows the router; None if it does not."""
    if not isinstance(service.router, Builtin) or service.deployment is None:
        return None, {}
    try:
        found = deployment_file.named(service.router, service.deployment)
    except ParameterError:
        return None, {}
    options = {"name": found} if isinstance(found, str) else dict(found)
    return str(options.pop("name")), options


def _engine(one: ServedEngine, url: str) -> EngineRow:
    return EngineRow(
        name=one.name,
        url=url,
        phase=one.phase,  # type: ignore[arg-type]  # pydantic checks it
        stages=tuple(
            Stage(machine=part.machine, gpu=part.gpu, gpus=part.gpus, layers=part.layers)
            for part in one.parts
        ),
        share=min(one.share, 1.0) if math.isfinite(one.share) else None,
        kv_tokens=one.kv_tokens,
        max_requests=one.engine.max_batch if one.engine is not None else None,
    )


def _pairs(service: Service) -> list[Pair]:
    router = service.router
    if not isinstance(router, PairShares) or service.deployment is None:
        return []
    order = [replica.name for replica in service.deployment.replicas]
    weights: Any = router.weights
    if not isinstance(weights, Mapping):
        matrix = np.asarray(weights, dtype=float)
        weights = {
            (order[i], order[j]): float(matrix[i, j])
            for i, j in zip(*matrix.nonzero(), strict=True)
        }
    total = sum(weights.values())
    return [
        Pair(prefill=first, decode=second, share=weight / total)
        for (first, second), weight in weights.items()
        if weight > 0
    ]


def _ranges(service: Service) -> list[Range]:
    router = service.router
    if not isinstance(router, RangeShares) or service.deployment is None:
        return []
    engines = {one.name for one in service.servings}
    # The groups of an island are replicas of the plan, and may be one engine.
    order = [
        replica.name if replica.name in engines else replica.name.rpartition(".")[0]
        for replica in service.deployment.replicas
    ]
    ends = np.asarray(router.end_tokens, dtype=float)
    # The last range takes what is longer still, too.
    limits = [*map(float, ends[:-1]), None]
    return [
        Range(
            below_tokens=limit,
            prefill=_shares(order, np.asarray(router.prefill_weight, dtype=float)[k]),
            decode=_shares(order, np.asarray(router.decode_weight, dtype=float)[k]),
        )
        for k, limit in enumerate(limits)
    ]


def _shares(order: list[str], weights: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, weight in zip(order, weights, strict=True):
        if weight > 0:
            found[name] = found.get(name, 0.0) + float(weight / weights.sum())
    return {name: min(share, 1.0) for name, share in found.items()}
