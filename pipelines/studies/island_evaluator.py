"""Throughput at every single length, where the solver saw the middles of ranges only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetero.arrays import Floats
from hetero.display import Column, Shown, Table
from hetero.errors import require
from hetero.planners.rignall.assignment import Assignment
from hetero.planners.rignall.rates import PHASES, Phase, RateTable


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Evaluation(Shown):
    r"""Throughput per length, as the model has it and with the rates of each exact length.

    Attributes
    ----------
    assignment
        What was evaluated.
    tokens
        Shape (S,), the lengths with requests [tokens].
    share
        Shape (S,), p(s) of each.
    model_rps, evaluated_rps
        By phase, shape (S,): :math:`\sum_i x_i(r) b_i(s_r) p(s) / p_r` with the rate at the
        middle of the length's range r, and with :math:`b_i(s)` at the length itself
        [requests/s].
    goodput_rps
        By phase: the load of the mix that the islands carry when each length takes its own time
        in the share of its range [requests/s].
    """

    assignment: Assignment
    tokens: Floats
    share: Floats
    model_rps: dict[Phase, Floats]
    evaluated_rps: dict[Phase, Floats]
    goodput_rps: dict[Phase, float]

    @property
    def throughput_rps(self) -> float:
        """The smaller phase with exact lengths [requests/s]."""
        return float(min(rate.sum() for rate in self.evaluated_rps.values()))

    @property
    def served_rps(self) -> float:
        """Load of the mix that both phases carry with exact lengths [requests/s]."""
        return min(self.goodput_rps.values())

    def table(self) -> Table:
        """One row per phase."""
        unit = "requests/s"
        columns = (
            Column("phase", of=str),
            Column("model", unit, of=lambda phase: float(self.model_rps[phase].sum())),
            Column("evaluated", unit, of=lambda phase: float(self.evaluated_rps[phase].sum())),
            Column("carried", unit, of=lambda phase: self.goodput_rps[phase]),
        )
        return Table.of(
            f"Evaluation at {len(self.tokens)} lengths",
            columns,
            PHASES,
            "Model: rates at the middle of each range. Evaluated: at each exact length, weighted "
            "by its share (5.2.2). Carried: each length takes its own time, at the given mix.",
        )


def evaluate(assignment: Assignment, exact: RateTable) -> Evaluation:
    r"""Evaluate an assignment with the rates of every single length (Rignall, section 5.2.2).

    The thesis weights rates: :math:`\sum_i x_i(r) b_i(s) p(s) / p_r`. Time adds up instead: an
    island that gives the share x of its time to a range serves
    :math:`x / \sum_{s \in r} (p(s) / p_r) / b(s)` of its mix; ``goodput_rps`` is that.

    Source: Rignall, section 5.2.2: evaluator of an assignment at every single length.

    Parameters
    ----------
    exact
        Rates of the same classes on ranges of one length each, such as
        ``model.on(ranges(lengths, 1))`` gives.
    """
    fine, coarse = exact.ranges, assignment.rates.ranges
    require(
        bool(np.all(fine.end_tokens - fine.start_tokens == 1)),
        "The exact rates are on ranges of several lengths.",
        resolve="tabulate them on ranges of width 1.",
    )
    of = coarse.index(fine.start_tokens)
    mass = np.bincount(of, fine.share, minlength=len(coarse))
    within = fine.share / mass[of]  # p(s) / p_r
    model: dict[Phase, Floats] = {}
    evaluated: dict[Phase, Floats] = {}
    goodput_rps: dict[Phase, float] = {}
    for phase in PHASES:
        groups = assignment.of(phase)
        middle = assignment.flow_rps(phase)
        at_length = exact.rps(phase)[[exact.index(g.island.gpu, g.island.size) for g in groups]]
        time = np.array([g.count * g.share for g in groups])
        model[phase] = middle.sum(axis=0)[of] * within
        evaluated[phase] = (time[:, of] * at_length).sum(axis=0) * within
        with np.errstate(divide="ignore"):
            slow = np.array(
                [np.bincount(of, within / rate, minlength=len(coarse)) for rate in at_length]
            )
        served = (time / slow).sum(axis=0)
        used = mass > 0
        goodput_rps[phase] = float((served[used] / mass[used]).min())
    tokens = fine.start_tokens.astype(np.float64)
    return Evaluation(assignment, tokens, fine.share, model, evaluated, goodput_rps)
