"""A plan at the resolution of single lengths (Rignall, section 5.2.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError
from hetero.planners.islands.assignment import Assignment
from hetero.planners.islands.rates import Floats, Phase, RateTable
from hetero.workload.lengths import LengthRanges

_PHASES: tuple[Phase, Phase] = ("prefill", "decode")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Evaluation(Shown):
    r"""What a plan yields at every length, and what its model of ranges said it would.

    Attributes
    ----------
    ranges
        The S lengths or narrow ranges.
    range_of
        Shape (S,); the plan's range that each lies in.
    model_rps, evaluated_rps
        By phase, shape (S,); :math:`\sum_i b_i x_{ij}\, p(s) / p_j` with the rate at the middle of
        range j, and with that at the length s [requests/s].
    served_rps
        By phase, shape (J,); what each range of the plan is served if its islands work on its mix
        of lengths: the mean time of a request counts, not the mean rate [requests/s].
    """

    ranges: LengthRanges
    range_of: NDArray[np.int64]
    model_rps: Mapping[Phase, Floats]
    evaluated_rps: Mapping[Phase, Floats]
    served_rps: Mapping[Phase, Floats]

    def table(self) -> Table:
        """Throughput of each phase: of the model, evaluated, and by the mean time."""
        rows = tuple(
            (
                phase,
                float(self.model_rps[phase].sum()),
                float(self.evaluated_rps[phase].sum()),
                float(self.served_rps[phase].sum()),
            )
            for phase in _PHASES
        )
        columns = (
            Column("phase"),
            Column("model", "requests/s"),
            Column("evaluated", "requests/s"),
            Column("by mean time", "requests/s"),
        )
        return Table(f"The plan at {len(self.ranges):,} lengths", columns, rows)


def evaluate(plan: Assignment, single: RateTable) -> Evaluation:
    """Apply the assignment of each range to every length in it (section 5.2.2).

    Parameters
    ----------
    single
        Rates of the plan's island classes on single lengths, or on ranges that lie within those
        of the plan, each with the parallelism chosen at that resolution.

    Raises
    ------
    ParameterError
        If a class is missing, or a length lies in no range of the plan.

    Examples
    --------
    >>> from hetero.planners.islands import IslandClass
    >>> from hetero.planners.islands.inner import solve
    >>> from hetero.workload.lengths import ranges
    >>> lengths, islands = [100, 100, 300, 900], {IslandClass("a", 8): 2}
    >>> plan = solve(RateTable(tuple(islands), ranges(lengths, 1000), [[8.0]], [[8.0]]), islands)
    >>> fine = RateTable(tuple(islands), ranges(lengths, 500), [[9.0, 3.0]], [[8.0, 8.0]])
    >>> print(evaluate(plan, fine))
    The plan at 2 lengths
    phase    model [requests/s]  evaluated [requests/s]  by mean time [requests/s]
    -------  ------------------  ----------------------  -------------------------
    prefill               8.000                   7.500                      6.000
    decode                8.000                   8.000                      8.000
    """
    coarse, fine = plan.rates.ranges, single.ranges
    where = coarse.index(fine.start_tokens)
    inside = (fine.start_tokens >= coarse.start_tokens[where]) & (
        fine.end_tokens <= coarse.end_tokens[where]
    )
    if not inside.all():
        first = int(np.argmin(inside))
        raise ParameterError(
            f"{single.named(first)[0].upper()}{single.named(first)[1:]} lie in no range of the "
            "plan.",
            resolve="evaluate at lengths that the plan was made for.",
        )
    weight = fine.share / np.bincount(where, fine.share, minlength=len(coarse))[where]
    model: dict[Phase, Floats] = {}
    evaluated: dict[Phase, Floats] = {}
    served: dict[Phase, Floats] = {}
    for phase in _PHASES:
        groups = plan.of(phase)
        rows = [single.index(g.island.gpu, g.island.size) for g in groups]
        rate = single.rps(phase)[rows]
        work = np.array([g.count * g.share for g in groups]).reshape(len(groups), len(coarse))
        model[phase] = plan.rate_rps(phase)[where] * weight
        evaluated[phase] = np.asarray((rate * work[:, where]).sum(axis=0) * weight)
        with np.errstate(divide="ignore"):
            time = weight / rate
        mean = np.array([np.bincount(where, row, minlength=len(coarse)) for row in time])
        served[phase] = np.asarray((work / mean.reshape(work.shape)).sum(axis=0))
    return Evaluation(fine, where, model, evaluated, served)
