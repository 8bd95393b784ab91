"""Plans of a phase-split service: groups, phases, pipelines, orchestration and attainment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from hetero.catalog import Llm
from hetero.cluster import Cluster
from hetero.cluster.fleets import within
from hetero.costs.cost import CostModel, CostSettings
from hetero.costs.demand import Demand
from hetero.costs.groups import PHASES, Design, Group, Phase, design, other
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import split
from hetero.costs.transfer import KvTransfer
from hetero.deployment import Deployment, Engine
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError, ParameterError, require
from hetero.planners.thunderserve.evaluate import Evaluator, Orchestration, Value, weights
from hetero.planners.thunderserve.exact import enumerate_all, phase_choices
from hetero.planners.thunderserve.patterns import polish, starts
from hetero.planners.thunderserve.tabu import MOVES, TabuSearch, TabuSettings, TabuStep
from hetero.routers.pairs import PairShares
from hetero.simulator.metrics import Slo

_MOST_ALL = 7  # groups of which all choices of phases are tried
Search: TypeAlias = Literal["tabu", "patterns", "exact"]
"""``"tabu"``: ThunderServe's Algorithm 1. ``"patterns"``: our integer program, then local search.
``"exact"``: every design, for small fleets."""


@dataclass(frozen=True, eq=False, repr=False)
class PhasePlan(Shown):
    """A design with its lower level solved.

    Attributes
    ----------
    design
        Groups and phases.
    orchestration
        Share of the requests per pair of a prefill and a decode replica.
    search, tried
        How it was found, and how many designs were evaluated.
    history
        Best score after every step of the search; empty where there were no steps.
    """

    evaluator: Evaluator
    design: Design
    value: Value
    orchestration: Orchestration
    search: str = ""
    tried: int = 0
    history: tuple[TabuStep, ...] = ()

    @classmethod
    def of(
        cls,
        evaluator: Evaluator,
        design: Design,
        *,
        search: str = "",
        history: tuple[TabuStep, ...] = (),
    ) -> PhasePlan:
        """The plan of a design.

        Raises
        ------
        InfeasibleError
            If it cannot serve: a group cannot hold the model, or a phase is missing.
        """
        found = evaluator.orchestration(design)
        if found is None:
            raise InfeasibleError(
                f"The design {describe(evaluator, design)} cannot serve "
                f"{evaluator.model.llm.name}: a group cannot hold it, or a phase has none.",
                resolve="give every group enough memory, and each phase a group.",
            )
        value = evaluator.value(design)
        return cls(evaluator, design, value, found, search, evaluator.evaluated, history)

    # Parts ----------------------------------------------------------------------------------

    @cached_property
    def _built(self) -> tuple[list[Pipeline], list[Pipeline]]:
        built = self.evaluator.pipelines(self.design)
        if built is None:
            raise AssertionError("a plan is made of designs that can serve")
        return built

    @property
    def prefill(self) -> list[Pipeline]:
        """Prefill pipelines, in the order of the rows of the orchestration."""
        return self._built[0]

    @property
    def decode(self) -> list[Pipeline]:
        """Decode pipelines, in the order of its columns."""
        return self._built[1]

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """Names of the prefill and of the decode replicas in the deployment."""
        first, second = ([name for name, _, at in self.parts if at == phase] for phase in PHASES)
        return first, second

    @property
    def parts(self) -> list[tuple[str, Pipeline, Phase]]:
        """Name, pipeline and phase of every replica, those that prefill first."""
        return self.evaluator.parts(self.design)

    @property
    def usd_per_h(self) -> float | None:
        """Price of the cluster [$/h]; None if unknown."""
        return self.evaluator.model.cluster.usd_per_h

    def gpu_share(self, gpu: str, phase: str = "prefill") -> float:
        """Share of the GPUs of a type that serve a phase."""
        require(
            phase in PHASES, f"There is no phase '{phase}'.", resolve="use 'prefill' or 'decode'."
        )
        counts: dict[str, int] = {
            name: sum(one.gpu_counts.get(gpu, 0) for one in built)
            for name, built in zip(PHASES, self._built, strict=True)
        }
        return counts[phase] / max(sum(counts.values()), 1)

    # Simulation -----------------------------------------------------------------------------

    def deployment(self, *, engine: Engine | None = None, name: str = "") -> Deployment:
        """The flow network of the plan."""
        llm, fleet = self.evaluator.model.llm.name, self.evaluator.model.cluster.name
        label = name or f"{llm} on {fleet}"
        return split(label, self.parts, self.evaluator.transfer, engine=engine)

    def router(self, *, drawn: bool = False) -> PairShares:
        """The orchestration as a router of the deployment.

        Raises
        ------
        InfeasibleError
            If no pair has a share, because no replica has any capacity.
        """
        shares = weights(self.parts, self.orchestration)
        require(
            bool(shares),
            f"No pair of replicas of {self.evaluator.model.cluster.name} can serve a request "
            "within its memory.",
            resolve="use larger groups, or shorter requests.",
            error=InfeasibleError,
        )
        return PairShares(shares, drawn=drawn)

    # Display --------------------------------------------------------------------------------

    def table(self) -> Table:
        """One row per replica: its GPUs, degrees, layers and share of the requests."""
        share = self.orchestration.share
        loads = np.concatenate([share.sum(axis=1), share.sum(axis=0)])
        parts = [(*part, load) for part, load in zip(self.parts, loads, strict=True)]
        demand = self.evaluator.demand
        notes = [
            f"{demand.rate_rps:g} requests/s {demand.name}: {100 * self.value.attainment:.1f} % "
            f"meet their targets by estimate; capacities are {self.value.headroom:.2f} times the "
            "demand.",
            f"Found by {self.search}, {self.tried:,} designs evaluated." if self.search else "",
        ]
        if self.usd_per_h is not None:
            tokens = (demand.mean_input + demand.mean_output) * demand.rate_rps * 3600.0
            cost = self.usd_per_h / (tokens * max(self.orchestration.served, 1e-9)) * 1e6
            notes.append(f"{self.usd_per_h:,.3f} $/h, {cost:,.3f} $ per 10^6 tokens served.")
        columns = (
            Column("replica", of=lambda part: part[0]),
            Column("phase", of=lambda part: part[2]),
            Column("(TP, PP)", of=lambda part: "({}, {})".format(*part[1].degrees)),
            Column("machines", of=lambda part: part[1].where),
            Column("layers", of=lambda part: "-".join(str(s.layers) for s in part[1].stages)),
            Column("KV cache", "tokens", of=lambda part: part[1].kv_tokens),
            Column("requests", "%", 3, lambda part: 100.0 * float(part[3])),
        )
        llm, fleet = self.evaluator.model.llm.name, self.evaluator.model.cluster.name
        return Table.of(f"{llm} on {fleet}", columns, parts, *notes)


def describe(evaluator: Evaluator, design: Design) -> str:
    """A design in words, such as ``prefill 4 a40, decode 4 3090ti``."""
    machines = evaluator.model.machines
    parts = [
        f"{phase} " + " and ".join(f"{n} of {machines[m].name}" for m, n in members)
        for members, phase in design
    ]
    return ", ".join(parts)


def phases(
    cluster: Cluster,
    llm: Llm,
    demand: Demand,
    slo: Slo,
    *,
    search: Search = "patterns",
    settings: CostSettings | None = None,
    transfer: KvTransfer | None = None,
    tabu: TabuSettings | None = None,
    seed: int = 0,
    jobs: int = 1,
    progress: Callable[[TabuStep], None] | None = None,
) -> PhasePlan:
    """Plan how a cluster serves a model with prefill and decode on different groups of GPUs.

    Source: ThunderServe, section 3.1: the scheduling problem of two levels.

    Parameters
    ----------
    search
        See :data:`Search`.
    tabu
        Parameters of the tabu search, or of both searches that follow the integer program.
    jobs
        Processes that evaluate neighbours; the plan is the same.

    Raises
    ------
    InfeasibleError
        If the cluster cannot hold the model twice, once per phase.

    Examples
    --------
    >>> from hetero import workload
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> from hetero.costs.demand import reference, scaled
    >>> model, demand = llm("LLaMA-1-30B"), Demand.of(workload.load("azure2023_conv"), 0.5)
    >>> target = scaled(reference(model, demand), 8.0)
    >>> fleet = cluster("thunderserve-a40-3090ti-40gbit")
    >>> found = phases(fleet, model, demand, target, search="exact")
    >>> bool(0.5 < found.value.attainment <= 1.0)
    True
    """
    model = CostModel(cluster, llm, settings or CostSettings())
    evaluator = Evaluator(model, demand, slo, transfer or KvTransfer())
    if search == "exact":
        return PhasePlan.of(evaluator, enumerate_all(evaluator, jobs=jobs).best, search=search)
    if search == "patterns":
        found = polish(evaluator, tabu, seed=seed, jobs=jobs, progress=progress)
    elif search == "tabu":
        found = TabuSearch.start(evaluator, tabu, seed=seed)
        found.run(jobs=jobs, progress=progress)
    else:
        raise ParameterError(
            f"There is no search '{search}'.", resolve="use 'tabu', 'patterns' or 'exact'."
        )
    return PhasePlan.of(evaluator, found.best, search=search, history=tuple(found.history))


def replan(
    evaluator: Evaluator,
    current: Design,
    *,
    moves: Literal["flip", "all"] = "flip",
    tabu: TabuSettings | None = None,
    seed: int = 0,
) -> PhasePlan:
    """Light rescheduling: new phases and orchestration for groups that stay as they are.

    Up to seven groups take all choices of phases; more are searched by flips, as in the paper.

    Source: ThunderServe, section 3.4: lightweight rescheduling.

    Parameters
    ----------
    evaluator
        For the new demand or what is left of the cluster. With ``fixed`` pipelines no weights are
        loaded again; :func:`keep` gives them.
    current
        Groups that are left, with their phases.
    moves
        ``"flip"`` for light rescheduling.

    Raises
    ------
    InfeasibleError
        If fewer than two groups are left.
    """
    if len(current) < 2:
        raise InfeasibleError(
            f"{len(current)} group of GPUs is left, and each phase needs one.",
            resolve="reschedule in full, which may divide the group.",
        )
    if moves == "flip" and tabu is None and len(current) <= _MOST_ALL:
        options = phase_choices([members for members, _ in current])
        best = max(options, key=lambda one: evaluator.value(one).score)
        return PhasePlan.of(evaluator, best, search="light rescheduling")
    chosen = tabu or TabuSettings(steps=20, stall=8, moves=("flip",) if moves == "flip" else MOVES)
    found = TabuSearch.start(evaluator, chosen, seed=seed, start=_both_phases(current))
    found.run()
    return PhasePlan.of(
        evaluator, found.best, search="light rescheduling", history=tuple(found.history)
    )


def _both_phases(current: Design) -> Design:
    """The design, its first group flipped where all serve the same phase."""
    if len({phase for _, phase in current}) == 2:
        return current
    (members, phase), *rest = current
    return design([(members, other(phase)), *rest])


def keep(plan: PhasePlan) -> tuple[tuple[Group, Pipeline], ...]:
    """The pipelines of a plan by group, as :class:`Evaluator` takes them for rescheduling."""
    built = {"prefill": iter(plan.prefill), "decode": iter(plan.decode)}
    return tuple((group, next(built[phase])) for group, phase in plan.design)


def best_part(
    offer: Cluster,
    usd_per_h: float,
    llm: Llm,
    demand: Demand,
    slo: Slo,
    *,
    settings: CostSettings | None = None,
    transfer: KvTransfer | None = None,
    progress: Callable[[str], None] | None = None,
) -> Cluster:
    """The part of an offer within a budget whose best design of the integer program attains most.

    Raises
    ------
    InfeasibleError
        If no part that the budget pays for serves the model in both phases.
    """
    best, value, reason = None, -1.0, ""
    for part in within(offer, usd_per_h):
        model = CostModel(part, llm, settings or CostSettings())
        evaluator = Evaluator(model, demand, slo, transfer or KvTransfer())
        try:
            found = max((evaluator.value(one).score for one in starts(evaluator)), default=-1.0)
        except InfeasibleError as error:
            reason = error.what
            continue
        if progress:
            progress(f"{part.gpu_counts}: {found:.3f}")
        if found > value:
            best, value = part, found
    if best is None:
        raise InfeasibleError(
            f"No choice of machines of {offer.name} for {usd_per_h:g} $/h serves {llm.name} in "
            f"both phases. {reason}".strip(),
            resolve="raise the budget, or use a smaller model or precision.",
        )
    return best
