"""A new plan for a new workload or inventory, with a price on islands that change."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hetero.display import Column, Shown, Table
from hetero.planners.rignall import exact_program
from hetero.planners.rignall.assignment import PHASES, Assignment, Inventory
from hetero.planners.rignall.exact import GAP, assigned, usable
from hetero.planners.rignall.exact_program import Changes
from hetero.planners.rignall.rates import IslandClass, RateTable
from hetero.programs import Limits


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Rescheduled(Shown):
    """A plan with what it keeps of the one that stood.

    Attributes
    ----------
    plan
        The new plan; its bound is that of the throughput less the price of changes.
    before
        The plan that stood.
    kept, flipped, formed
        Islands that stay as they are, that change their phase only, and that are new.
    """

    plan: Assignment
    before: Assignment
    kept: int
    flipped: int
    formed: int

    def table(self) -> Table:
        """One row: throughput and changes."""
        columns = (
            Column("load", "requests/s"),
            Column("islands kept"),
            Column("change phase"),
            Column("new"),
        )
        row = (self.plan.served_rps, self.kept, self.flipped, self.formed)
        return Table("Rescheduled islands", columns, (row,))


def reschedule(
    rates: RateTable,
    inventory: Inventory,
    current: Assignment,
    *,
    flip_rps: float = 0.0,
    form_rps: float = 0.0,
    minimum: int = 1,
    sizes: Collection[int] | None = None,
    limits: Limits | None = None,
) -> Rescheduled:
    """Plan again, giving up throughput for islands that may stay.

    Parameters
    ----------
    rates
        Rates on the new workload; they must have the classes that may be used from now on.
    current
        The plan that stands, on whatever workload it was made for.
    flip_rps, form_rps
        Throughput that must be gained per island that changes its phase, and per new one: what
        its pause costs, spread over the time until the next change [requests/s].

    Raises
    ------
    ParameterError
        If a new island is cheaper than a flipped one, or a price is negative.
    InfeasibleError
        If the inventory cannot serve the workload.
    """
    changes = Changes(current, flip_rps, form_rps)
    rates, held = usable(rates, inventory, minimum=minimum, sizes=sizes)
    found = exact_program.solve(rates, held, limits or Limits(gap=GAP), changes=changes)
    plan = assigned(
        rates,
        found.prefill,
        found.decode,
        found.solution.bound,
        found.solution.status,
        f"rescheduled at {flip_rps:g} and {form_rps:g} requests/s per change",
    )
    kept, flipped, formed = _compared(current, plan)
    return Rescheduled(plan, current, kept, flipped, formed)


def _counts(plan: Assignment) -> dict[tuple[IslandClass, str], int]:
    found: dict[tuple[IslandClass, str], int] = {}
    for group in plan.groups:
        key = (group.island, group.phase)
        found[key] = found.get(key, 0) + group.count
    return found


def _compared(before: Assignment, after: Assignment) -> tuple[int, int, int]:
    """Islands kept, flipped and formed, keeping as many as possible."""
    old, new = _counts(before), _counts(after)
    kept = {key: min(count, old.get(key, 0)) for key, count in new.items()}
    flipped = 0
    for island in {island for island, _ in new}:
        for phase, other in (PHASES, PHASES[::-1]):
            wanted = new.get((island, phase), 0) - kept.get((island, phase), 0)
            spare = old.get((island, other), 0) - kept.get((island, other), 0)
            flipped += min(wanted, spare)
    total = sum(new.values())
    return sum(kept.values()), flipped, total - sum(kept.values()) - flipped
