"""Groups of mixed GPUs: phases on different groups (ThunderServe), and both on each (HexGen)."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.arena import ground
from hetero.arena.base import Adapter
from hetero.arena.build import entry_of, of_baseline
from hetero.arena.case import Case
from hetero.arena.entry import Entry
from hetero.planners.baselines.hexgen import hexgen
from hetero.planners.phases import plan as phase_plan
from hetero.planners.phases.tabu import TabuSettings


@dataclass(frozen=True)
class PhaseSplitting(Adapter):
    """Prefill and decode on different groups of GPUs (ThunderServe).

    Parameters
    ----------
    search
        ``"patterns"``: our integer program over groups, then tabu search; ``"tabu"``: the search
        of the paper.
    """

    search: phase_plan.Search = "patterns"

    @property
    def name(self) -> str:
        """Its name."""
        return "phase splitting" if self.search == "patterns" else f"phase splitting, {self.search}"

    def unfit(self, case: Case) -> str | None:
        """No network, no KV cache on its way."""
        return ground.unfit(case) or ground.unfit_network(case)

    def _plan(self, case: Case) -> Entry:
        found = phase_plan.plan(
            case.cluster,
            case.llm,
            ground.demand(case),
            ground.targets(case),
            search=self.search,
            settings=ground.costs(case).settings,
            tabu=TabuSettings(
                steps=self.effort.tabu_steps,
                neighbours=self.effort.tabu_neighbours,
                stall=max(1, self.effort.tabu_steps // 3),
            ),
            seed=case.seed,
        )
        share = found.orchestration.share
        total = float(share.sum()) or 1.0
        shares = dict(zip(found.names[0], share.sum(axis=1) / total, strict=True))
        shares |= dict(zip(found.names[1], share.sum(axis=0) / total, strict=True))
        return entry_of(
            self.name,
            found.deployment(engine=ground.ENGINE, name=f"{self.name} on {case.cluster.name}"),
            [*found.prefill, *found.decode],
            found.router,
            "fixed shares of pairs of replicas, in rotation",
            shares={name: float(value) for name, value in shares.items()},
            notes=(
                f"{100 * found.value.attainment:.1f} % meet their targets at "
                f"{case.rate_rps:.4g} requests/s by the planner's own account.",
                "KV caches travel in 4 bits.",
            ),
        )


@dataclass(frozen=True)
class HexGen(Adapter):
    """Groups of mixed GPUs that serve both phases, by genetic search (HexGen)."""

    @property
    def name(self) -> str:
        """Its name."""
        return "HexGen"

    def unfit(self, case: Case) -> str | None:
        """Groups span machines."""
        return ground.unfit(case) or ground.unfit_network(case)

    def _plan(self, case: Case) -> Entry:
        found = hexgen(
            ground.costs(case),
            ground.demand(case),
            ground.requests(case, self.effort.requests),
            ground.targets(case),
            generations=self.effort.generations,
            population=self.effort.population,
            children=2 * self.effort.population,
            seed=case.seed,
        )
        return of_baseline(self.name, found, routing="shares by capacity, in rotation")
