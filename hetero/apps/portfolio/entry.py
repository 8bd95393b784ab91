"""What every planner answers: groups of GPUs, and a way to play requests on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from hetero.apps.portfolio.case import Case
from hetero.costs.pipeline import Pipeline
from hetero.deployment import Deployment
from hetero.display import Column, Shown, Table
from hetero.routers import Builtin, Router
from hetero.simulator.run import Run
from hetero.workload import Trace


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
    """

    name: str
    phase: str
    stages: tuple[tuple[str, str, int, int], ...]
    share: float = float("nan")
    words: str = ""

    @property
    def gpus(self) -> dict[str, int]:
        """Number of GPUs by type."""
        found: dict[str, int] = {}
        for _, gpu, count, _ in self.stages:
            found[gpu] = found.get(gpu, 0) + count
        return found

    @property
    def parallelism(self) -> str:
        """Degrees in words, such as ``TP 4`` or ``TP 4+2, PP 2``."""
        if self.words:
            return self.words
        degrees = [str(count) for _, _, count, _ in self.stages]
        tensor = degrees[0] if len(set(degrees)) == 1 else "+".join(degrees)
        return f"TP {tensor}" if len(degrees) == 1 else f"TP {tensor}, PP {len(degrees)}"


@dataclass(frozen=True, eq=False, repr=False)
class Entry(Shown):
    """A plan in the arena.

    Attributes
    ----------
    planner
        Name of the planner.
    groups
        Which GPUs hold what.
    routing
        The routing rule in words.
    play
        Serves a trace (arrivals as they are) with a seed, and gives the run.
    usd_per_h
        Price of the GPUs that are used [$/h]; None if one has none.
    bound_rps, bound
        Proven upper bound on what any plan of this kind carries [requests/s], and in words whose;
        None where the planner proves none.
    deployment, router
        Replicas and a maker of their router, where it is a deployment of replicas; None for
        pipelines over a network, which only ``play`` knows.
    pipelines
        Configuration of each replica of the deployment, in their order, where they are costed.
    notes
        What a reader should know: readings taken, GPUs left idle and why.
    options
        What it was made with, where that can be told in a number or a word.
    """

    planner: str
    groups: tuple[Group, ...]
    routing: str
    play: Callable[[Trace, int], Run]
    usd_per_h: float | None
    bound_rps: float | None = None
    bound: str = ""
    deployment: Deployment | None = None
    router: Callable[[], Router | Builtin] | None = None
    pipelines: tuple[Pipeline, ...] = ()
    notes: tuple[str, ...] = ()
    options: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs in use by type."""
        found: dict[str, int] = {}
        for group in self.groups:
            for name, count in group.gpus.items():
                found[name] = found.get(name, 0) + count
        return found

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
        notes = (f"Routing: {self.routing}.", *self.notes)
        return Table(self.planner, columns, rows, notes)


@runtime_checkable
class Planner(Protocol):
    """A planner in the arena."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    def unfit(self, case: Case) -> str | None:
        """Why it cannot take a case, in one sentence; None if it can."""
        ...

    def plan(self, case: Case) -> Entry:
        """Its best plan.

        Raises
        ------
        InfeasibleError
            If no plan of its kind serves the case; the text names what binds.
        """
        ...
