"""What becomes of a service under each policy when something changes, episode by episode."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero.costs.demand import Demand
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError
from hetero.planners.reschedule.change import ClusterChange
from hetero.planners.reschedule.episode import Ending, Episode
from hetero.planners.reschedule.policy import Policy, Rescheduling, reschedule
from hetero.planners.reschedule.reload import Disk
from hetero.planners.reschedule.service import PhaseService
from hetero.planners.thunderserve.tabu import TabuSettings
from hetero.simulator import Slo
from hetero.simulator.metrics import attainment
from hetero.workload import Trace


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """A policy's answer to a change, and the episode that it led to.

    Attributes
    ----------
    search_s
        Time until the answer was there [s].
    """

    answer: Rescheduling
    episode: Episode
    search_s: float

    def usd_per_mtok(self, at_s: float) -> float | None:
        """Cost of the tokens of requests that came after the change [$/10^6 tokens]."""
        run, price = self.episode.run, self.answer.after.cluster.usd_per_h
        tokens = run.requests["input_tokens"] + run.requests["output_tokens"]
        later = (run.requests["arrival_s"] >= at_s) & run.finished
        span = float(run.requests["finish_s"][later].max() - at_s) if later.any() else 0.0
        if price is None or span <= 0:
            return None
        return price * span / 3600.0 / float(tokens[later].sum()) * 1e6


@dataclass(frozen=True, slots=True, repr=False)
class PolicyComparison(Shown):
    """Policies side by side.

    Attributes
    ----------
    outcomes
        What became of the service by policy, or why the policy has no answer.
    """

    service: PhaseService
    change: ClusterChange
    at_s: float
    slo: Slo
    outcomes: dict[Policy, PolicyOutcome | str]

    def _row(self, name: str, one: PolicyOutcome | str) -> dict[str, Any]:
        if isinstance(one, str):
            return {"policy": name, "error": one}
        answer, episode = one.answer, one.episode
        return {
            "policy": name,
            "prefill_groups": answer.after.ratio[0],
            "decode_groups": answer.after.ratio[1],
            "turned": list(answer.turned),
            "search_s": one.search_s,
            "reload_s": answer.reload_s,
            "estimate": answer.after.attainment,
            "attainment_of_episode": attainment(episode.run, self.slo),
            "in_flight_at_change": episode.in_flight(self.at_s),
            "routed_again": episode.routed_again,
            "lost": episode.lost - episode.too_long,
            "too_long": episode.too_long,
            "nothing_up_s": sum(end - begin for begin, end in episode.waits),
            "usd_per_mtok": one.usd_per_mtok(self.at_s),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values of JSON."""
        return {
            "cluster": self.service.cluster.name,
            "usd_per_h": self.service.cluster.usd_per_h,
            "what": self.change.what,
            "at_s": self.at_s,
            "policies": [self._row(name, one) for name, one in self.outcomes.items()],
        }

    def table(self) -> Table:
        """One row per policy."""

        def share(key: str) -> Callable[[dict[str, Any]], float | None]:
            return lambda row: 100 * row[key] if key in row else None

        def of(key: str) -> Callable[[dict[str, Any]], object]:
            return lambda row: row.get(key)

        def ratio(row: dict[str, Any]) -> str | None:
            return None if "error" in row else f"{row['prefill_groups']}:{row['decode_groups']}"

        rows = self.to_dict()["policies"]
        long = "{policy}: {too_long} requests are longer than any cache of the plan"
        notes = [
            ("{policy}: {error}" if "error" in row else long).format(**row)
            for row in rows
            if "error" in row or row["too_long"]
        ]
        columns = (
            Column("policy", of=of("policy")),
            Column("prefill:decode", of=ratio),
            Column("estimate", "%", of=share("estimate")),
            Column("met in the episode", "%", of=share("attainment_of_episode")),
            Column("search", "s", 3, of=of("search_s")),
            Column("reload", "s", 3, of=of("reload_s")),
            Column("in flight", of=of("in_flight_at_change")),
            Column("routed again", of=of("routed_again")),
            Column("lost", of=of("lost")),
            Column("cost after", "$/10^6 tokens", of=of("usd_per_mtok")),
        )
        return Table.of(f"After {self.change.what}", columns, rows, *notes)


def compare(
    service: PhaseService,
    change: ClusterChange,
    policies: Sequence[Policy],
    served: Trace,
    at_s: float,
    slo: Slo,
    *,
    demand: Demand | None = None,
    tabu: TabuSettings | None = None,
    disk_gbs: float = 1.2,
    search_s: float | None = None,
    ending: Ending = "abrupt",
    seed: int = 0,
) -> PolicyComparison:
    """Play the episode of a change under each policy.

    Parameters
    ----------
    served
        Requests of the whole episode.
    at_s
        When the change happens [s].
    demand
        What the service is asked for from then on; by default what it was planned for.
    disk_gbs
        Disk bandwidth of a machine [GB/s].
    search_s
        Time until a new plan is there [s]; by default as measured here.
    """
    outcomes: dict[Policy, PolicyOutcome | str] = {}
    for one in policies:
        start = time.perf_counter()
        try:
            answer = reschedule(
                service, change, one, demand=demand, tabu=tabu, disk=Disk(disk_gbs), seed=seed
            )
        except InfeasibleError as error:
            outcomes[one] = str(error)
            continue
        took = time.perf_counter() - start if search_s is None else search_s
        took = 0.0 if one == "none" else took
        episode = answer.episode(served, at_s, search_s=took, ending=ending, seed=seed)
        outcomes[one] = PolicyOutcome(answer, episode, took)
    return PolicyComparison(service, change, at_s, slo, outcomes)


def joined(first: Trace, later: Trace, at_s: float, rng: np.random.Generator) -> Trace:
    """Requests of one trace before a time [s], and drawn from another from then on."""
    before = first.arrival_s < at_s
    rest = later.all_at_once().take(rng.integers(0, len(later), int((~before).sum())))
    return Trace(
        first.arrival_s,
        np.concatenate([first.input_tokens[before], rest.input_tokens]),
        np.concatenate([first.output_tokens[before], rest.output_tokens]),
        name=f"{first.name}, then {later.name}",
    )
