"""Full, light and no rescheduling of a service (ThunderServe, section 3.4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from hetero.costs.attainment import MOST_LOAD
from hetero.costs.cost import CostModel
from hetero.costs.demand import Demand
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError
from hetero.planners.reschedule.change import ClusterChange
from hetero.planners.reschedule.episode import Ending, Episode, Era, play
from hetero.planners.reschedule.reload import Disk, Reload, reload
from hetero.planners.reschedule.service import PhaseService, moved
from hetero.planners.thunderserve.phases import Search, phases, replan
from hetero.planners.thunderserve.tabu import TabuSettings
from hetero.workload import Trace

Policy: TypeAlias = Literal["none", "light", "full"]
"""``"none"``: what is left goes on as it is. ``"light"``: groups keep their GPUs and weights, their
phases and shares are planned anew. ``"full"``: everything is planned anew and loaded again."""


@dataclass(frozen=True, repr=False)
class Rescheduling(Shown):
    """A service before and after a change.

    Attributes
    ----------
    between
        What serves while the new plan is made: what is left, with its old shares; None where a
        phase has no group left and requests wait.
    after
        What serves then.
    turned
        Names of the groups that change their phase.
    reload
        What has to be loaded; None where nothing is.
    """

    policy: Policy
    before: PhaseService
    change: ClusterChange
    between: PhaseService | None
    after: PhaseService
    turned: tuple[str, ...]
    reload: Reload | None

    @property
    def reload_s(self) -> float:
        """Time to load weights [s]."""
        return self.reload.seconds if self.reload is not None else 0.0

    def episode(
        self,
        trace: Trace,
        at_s: float,
        *,
        search_s: float,
        ending: Ending = "abrupt",
        seed: int = 0,
    ) -> Episode:
        """Serve a trace in which the change happens.

        Parameters
        ----------
        at_s
            When the change happens.
        search_s
            Time until the new plan is there; the service goes on meanwhile with what is left.
        ending
            How groups that change their phase end the old one: at once, so that their requests
            are routed again, or after the requests that they hold.
        """
        eras = [Era(0.0, self.before.deployment, self.before.weights, label="before")]
        if self.between is not None:
            left = self.between
            eras.append(Era(at_s, left.deployment, left.weights, label="what is left"))
        if self.policy != "none" or self.between is None:
            start_s = at_s + search_s if self.between is not None else at_s
            eras.append(
                Era(
                    start_s,
                    self.after.deployment,
                    self.after.weights,
                    ready_s=at_s + search_s + self.reload_s,
                    change=ending if self.policy == "light" else "abrupt",
                    label=f"{self.policy} rescheduling",
                )
            )
        return play(eras, trace, seed=seed)

    def table(self) -> Table:
        """Groups before and after."""
        old = {one.name: one for one in self.before.groups}
        new = {one.name: one for one in self.after.groups}
        columns = (
            Column("group", of=str),
            Column("GPUs by stage", of=lambda name: (old.get(name) or new[name]).pipeline.label),
            Column("before", of=lambda name: old[name].phase if name in old else "-"),
            Column("after", of=lambda name: new[name].phase if name in new else "gone"),
        )
        notes = (
            self.change.what,
            f"{self.before.ratio[0]}:{self.before.ratio[1]} prefill:decode groups before, "
            f"{self.after.ratio[0]}:{self.after.ratio[1]} after; "
            f"{100 * self.after.attainment:.1f} % meet their targets, by estimate",
            f"weights are loaded for {self.reload_s:.0f} s"
            if self.reload_s
            else "nothing is loaded",
        )
        names = dict.fromkeys([*old, *new])
        return Table.of(f"Rescheduling: {self.policy}", columns, names, *notes)


def reschedule(
    service: PhaseService,
    change: ClusterChange,
    policy: Policy = "light",
    *,
    demand: Demand | None = None,
    search: Search = "patterns",
    tabu: TabuSettings | None = None,
    disk: Disk | None = None,
    seed: int = 0,
) -> Rescheduling:
    """Adapt a service to a change of its cluster, of its demand, or of both.

    Source: ThunderServe, section 3.4: rescheduling in full, lightly or not at all.

    Parameters
    ----------
    demand
        New demand; by default the one it was planned for.
    search, tabu
        How full rescheduling plans.
    disk
        Where full rescheduling loads weights from.

    Raises
    ------
    InfeasibleError
        If what is left cannot serve: the model no longer fits twice, once for each phase, or,
        without rescheduling, a phase has no group left.

    Examples
    --------
    >>> from hetero import workload
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> from hetero.costs.cost import CostSettings
    >>> from hetero.costs.demand import reference, scaled
    >>> from hetero.planners.reschedule.change import lose_gpu
    >>> model, chats = llm("LLaMA-1-13B"), workload.load("azure2023_conv")
    >>> demand = Demand.of(chats, 4.0)
    >>> fleet = cluster("thunderserve-a5000-12")
    >>> target, short = scaled(reference(model, demand), 6.0), CostSettings(max_stages=1)
    >>> running = PhaseService.of(phases(fleet, model, demand, target, settings=short))
    >>> less = lose_gpu(running, running.groups[-1].name)
    >>> found = reschedule(running, less, "light")
    >>> len(found.after.groups) == len(running.groups) - 1, found.reload_s
    (True, 0.0)
    """
    wanted = demand or service.demand
    between = _left(service, change, wanted)
    if policy == "none":
        if between is None:
            raise InfeasibleError(
                f"After {_phrase(change)} a phase has no group left.",
                resolve="reschedule lightly or in full.",
            )
        return Rescheduling(policy, service, change, between, between, (), None)
    if policy == "light":
        after = _light(service, change, wanted, seed)
        old = {one.name: one.phase for one in service.groups}
        turned = tuple(one.name for one in after.groups if old.get(one.name) != one.phase)
        return Rescheduling(policy, service, change, between, after, turned, None)
    made = phases(
        change.cluster,
        service.model.llm,
        wanted,
        service.slo,
        search=search,
        settings=service.model.settings,
        transfer=service.transfer,
        tabu=tabu,
        seed=seed,
    )
    count = len(made.design)
    after = PhaseService.of(made, "full rescheduling", [f"N{k + 1}" for k in range(count)])
    loading = reload([one.pipeline for one in after.groups], disk)
    return Rescheduling(policy, service, change, between, after, (), loading)


def _phrase(change: ClusterChange) -> str:
    return f"the change ({change.what})" if change.what else "the change"


def _standing(service: PhaseService, change: ClusterChange) -> PhaseService | None:
    """Groups that are left, costed on the cluster as it is now; None if there is none."""
    model = CostModel(change.cluster, service.model.llm, service.model.settings)
    groups = tuple(
        replace(one, pipeline=moved(one.pipeline, model))
        for one in service.groups
        if one.name not in change.lost
    )
    return replace(service, groups=groups, label="what is left") if groups else None


def _left(service: PhaseService, change: ClusterChange, demand: Demand) -> PhaseService | None:
    standing = _standing(service, change)
    if standing is None or 0 in standing.ratio:
        return None
    kept = standing.without(change.lost)
    pairs = kept.evaluator(demand).pairs(kept.phases())
    if pairs is None:
        return None
    # The estimate for the shares that the groups go on with.
    rows = [one.name for one in kept.in_phase("prefill")]
    columns = [one.name for one in kept.in_phase("decode")]
    total = sum(kept.weights.values())
    share = np.array([[kept.weights.get((a, b), 0.0) / total for b in columns] for a in rows])
    rate = demand.rate_rps
    gain = pairs.attainment(rate * share.sum(axis=1), rate * share.sum(axis=0))
    # Where more arrives than is served the queue grows, and in the end nobody is in time.
    gain = np.where(share.sum(axis=1)[:, None] * MOST_LOAD < pairs.prefill_share[:, None], gain, 0)
    gain = np.where(share.sum(axis=0)[None, :] * MOST_LOAD < pairs.decode_share[None, :], gain, 0)
    return replace(kept, demand=demand, attainment=float((share * gain).sum()))


def _light(service: PhaseService, change: ClusterChange, demand: Demand, seed: int) -> PhaseService:
    standing = _standing(service, change)
    if standing is None or len(standing.groups) < 2:
        count = 0 if standing is None else len(standing.groups)
        raise InfeasibleError(
            f"After {_phrase(change)} {count} group holds {service.model.llm.name}, and each "
            "phase needs one.",
            resolve="reschedule in full, which may divide what is left anew.",
        )
    evaluator = standing.evaluator(demand)
    found = replan(evaluator, standing.phases(), seed=seed)
    return replace(standing, label="light rescheduling").planned(evaluator, found.design)
