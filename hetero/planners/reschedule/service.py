"""A plan in service: groups of GPUs with names that last while their phases change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hetero.cluster import Cluster
from hetero.costs.cost import CostModel
from hetero.costs.demand import Demand
from hetero.costs.groups import PHASES, Design, Phase, design
from hetero.costs.pipeline import Pipeline, table_of_shares
from hetero.costs.replicas import split
from hetero.costs.transfer import KvTransfer
from hetero.deployment import Deployment, Role
from hetero.display import Shown, Table
from hetero.errors import InfeasibleError, ParameterError
from hetero.planners.thunderserve.evaluate import Evaluator
from hetero.planners.thunderserve.phases import PhasePlan
from hetero.routers import PairShares
from hetero.simulator import Slo


@dataclass(frozen=True, slots=True, eq=False)
class ServingGroup:
    """A group of GPUs that holds the model and serves a phase."""

    name: str
    pipeline: Pipeline
    phase: Phase

    @property
    def machines(self) -> frozenset[str]:
        """Names of its machines."""
        return frozenset(machine.name for machine in self.pipeline.machines)


@dataclass(frozen=True, repr=False, eq=False)
class PhaseService(Shown):
    """Groups in service, and the share of the requests of every pair.

    Attributes
    ----------
    demand, slo, transfer
        What it was planned for.
    weights
        Share by (prefill group, decode group).
    attainment
        Share of the requests that meet their targets, by the planner's estimate.
    """

    groups: tuple[ServingGroup, ...]
    weights: Mapping[tuple[str, str], float]
    demand: Demand
    slo: Slo
    transfer: KvTransfer
    attainment: float
    label: str = ""

    @classmethod
    def of(
        cls, plan: PhasePlan, label: str = "", names: Iterable[str] | None = None
    ) -> PhaseService:
        """A plan with names for its groups: given ones, or G1, G2, ... in its order."""
        called = list(names or (f"G{k + 1}" for k in range(len(plan.parts))))
        groups = tuple(
            ServingGroup(name, pipeline, phase)
            for name, (_, pipeline, phase) in zip(called, plan.parts, strict=True)
        )
        share = plan.orchestration.share
        weights = {
            (called[i], called[len(plan.prefill) + j]): float(share[i, j])
            for i, j in zip(*np.nonzero(share > 0), strict=True)
        }
        if not weights:
            plan.router()  # which says why
        one = plan.evaluator
        return cls(groups, weights, one.demand, one.slo, one.transfer, plan.value.attainment, label)

    @classmethod
    def given(
        cls,
        parts: Iterable[tuple[Pipeline, Phase]],
        demand: Demand,
        slo: Slo,
        *,
        transfer: KvTransfer | None = None,
        label: str = "",
    ) -> PhaseService:
        """Groups and phases set by hand, such as those of a published plan; shares are planned.

        Raises
        ------
        InfeasibleError
            If a phase has no group.
        """
        groups = tuple(
            ServingGroup(f"G{k + 1}", pipeline, phase) for k, (pipeline, phase) in enumerate(parts)
        )
        bare = cls(groups, {}, demand, slo, transfer or KvTransfer(), 0.0, label)
        return bare.planned(bare.evaluator())

    def planned(self, evaluator: Evaluator, phases: Design | None = None) -> PhaseService:
        """The same groups with other phases, and with shares planned for them.

        Parameters
        ----------
        phases
            Group k as ((k, 1),) with its phase, as :meth:`evaluator` numbers them.
        """
        chosen = self.phases() if phases is None else phases
        ordered = [
            self.groups[members[0][0]].name
            for phase in PHASES
            for members, own in chosen
            if own == phase
        ]
        return PhaseService.of(PhasePlan.of(evaluator, chosen), self.label, ordered)

    def phases(self) -> Design:
        """Group k as ((k, 1),) with its phase."""
        return design((((k, 1),), one.phase) for k, one in enumerate(self.groups))

    @property
    def model(self) -> CostModel:
        """Cost model of its groups."""
        return self.groups[0].pipeline.model

    @property
    def cluster(self) -> Cluster:
        """Cluster that it runs on."""
        return self.model.cluster

    def in_phase(self, phase: Phase) -> list[ServingGroup]:
        """Groups that serve a phase."""
        return [one for one in self.groups if one.phase == phase]

    @property
    def ratio(self) -> tuple[int, int]:
        """Numbers of prefill and of decode groups."""
        return len(self.in_phase("prefill")), len(self.in_phase("decode"))

    def group(self, name: str) -> ServingGroup:
        """Group of that name."""
        for one in self.groups:
            if one.name == name:
                return one
        raise ParameterError(
            f"No group is called '{name}'.",
            resolve=f"use one of {', '.join(one.name for one in self.groups)}.",
        )

    @property
    def _parts(self) -> list[tuple[str, Pipeline, Role]]:
        return [(one.name, one.pipeline, one.phase) for one in self.groups]

    @cached_property
    def deployment(self) -> Deployment:
        """The groups as replicas, with the KV links between them."""
        return split(self.label or "service", self._parts, self.transfer)

    def router(self, *, drawn: bool = False) -> PairShares:
        """The shares as a router of the deployment."""
        return PairShares(self.weights, drawn=drawn)

    def without(self, names: frozenset[str]) -> PhaseService:
        """What is left when groups are gone, the other shares as they were.

        Raises
        ------
        InfeasibleError
            If a phase has no group left.
        """
        left = tuple(one for one in self.groups if one.name not in names)
        for phase in ("prefill", "decode"):
            if not any(one.phase == phase for one in left):
                raise InfeasibleError(
                    f"No group is left to {phase}.",
                    resolve="change the phase of another group (light), or plan anew (full).",
                )
        first = [one.name for one in left if one.phase == "prefill"]
        second = [one.name for one in left if one.phase == "decode"]
        weights = {pair: w for pair, w in self.weights.items() if not names & set(pair)}
        # Groups that only had pairs with lost ones would idle: they share what others take on.
        weights = weights or {(a, b): 1.0 for a in first for b in second}
        return replace(self, groups=left, weights=weights)

    def evaluator(self, demand: Demand | None = None) -> Evaluator:
        """Evaluator whose group k is group k in service, with the configuration that it has."""
        tagged = tuple((((k, 1),), one.pipeline) for k, one in enumerate(self.groups))
        return Evaluator(self.model, demand or self.demand, self.slo, self.transfer, fixed=tagged)

    def table(self) -> Table:
        """One row per group."""
        note = f"{100 * self.attainment:.1f} % meet their targets, by estimate"
        return table_of_shares(self.label or "Service", "group", self._parts, self.weights, note)


def moved(pipeline: Pipeline, model: CostModel) -> Pipeline:
    """The same stages costed on another state of the cluster, machines found by name.

    Raises
    ------
    InfeasibleError
        If a machine or GPUs that it uses are gone.
    """
    index = {machine.name: k for k, machine in enumerate(model.machines)}
    stages = []
    for stage, machine in zip(pipeline.stages, pipeline.machines, strict=True):
        if machine.name not in index:
            raise InfeasibleError(
                f"{pipeline.label} used machine '{machine.name}', which is gone.",
                resolve="count the group among the lost ones.",
            )
        stages.append(replace(stage, machine=index[machine.name]))
    return Pipeline(model, tuple(stages))
