"""The inner loop: given islands, which prefill, which decode, and what each serves.

The mixed-integer program of Rignall's section 4.8.1 stands here as printed (``thesis``), in two
forms with the same optimum that solve faster (``sparse``, ``aggregated``), and as a maximum
concurrent flow (``flow``, ``flow aggregated``), which asks directly for the largest load of the
given mix of lengths and is the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from hetero.arrays import Floats, Ints
from hetero.errors import InfeasibleError, ParameterError, require
from hetero.planners.rignall.assignment import Assignment, IslandGroup, Layout
from hetero.planners.rignall.rates import PHASES, IslandClass, Phase, RateTable
from hetero.programs import Program, Solution, Solver, SolverLimits

Form: TypeAlias = Literal["thesis", "sparse", "aggregated", "flow", "flow aggregated"]
Capacity: TypeAlias = Literal["all", "at most"]

LEAST_RPS = 0.01  # epsilon of section 4.8.1


@dataclass(frozen=True, slots=True)
class Deviations:
    r"""How deviations from the mix of lengths are bounded and priced (Rignall section 4.8.1).

    Attributes
    ----------
    tau
        Largest deviation of a range over its share, :math:`\delta_j \le \tau p_j R`. The thesis
        gives no value.
    weight
        M in the price :math:`\lambda_j = M / (1 + p_j)` of a deviation. The thesis gives no
        value; from about 10 on it does not change the optimum of any instance tried.
    capacity
        ``all``: an island gives out its whole time, as printed, be it useful or not;
        ``at most``: it may idle.
    """

    tau: float = 0.5
    weight: float = 1000.0
    capacity: Capacity = "all"

    def __post_init__(self) -> None:
        if not self.tau >= 0:
            raise InfeasibleError(
                f"No assignment deviates by less than nothing: tau = {self.tau}.",
                resolve="give a deviation bound tau of 0 or more; 0 asks for the mix exactly.",
            )
        require(
            self.weight >= 0,
            f"M = {self.weight} would reward deviations.",
            resolve="give 0 or more.",
        )
        require(
            self.capacity in get_args(Capacity),
            f"There is no rule of capacity called '{self.capacity}'.",
            resolve=f"use one of {', '.join(get_args(Capacity))}.",
        )


@dataclass(frozen=True, slots=True)
class _Groups:
    """Islands that the program treats as one: a class, or a single island."""

    classes: tuple[IslandClass, ...]
    counts: Ints
    prefill: Floats
    decode: Floats
    share: Floats

    def rps(self, phase: Phase) -> Floats:
        return self.prefill if phase == "prefill" else self.decode


def solve(
    rates: RateTable,
    layout: Layout,
    form: Form = "flow aggregated",
    *,
    deviations: Deviations | None = None,
    phases: Mapping[IslandClass, int] | None = None,
    limits: SolverLimits | None = None,
    solver: Solver = "highs",
    relaxed: bool = False,
) -> Assignment:
    r"""Assign phases and ranges to the islands of a layout.

    Parameters
    ----------
    form
        ``thesis``, ``sparse`` and ``aggregated`` maximise
        :math:`R^{decode} + R^{prefill} - \sum_j \lambda_j (\delta_j^{decode} +
        \delta_j^{prefill} + \delta_j^{match})`: dense rows per island as printed, the rates as
        variables, and one integer per class of equal islands. ``flow`` and ``flow aggregated``
        maximise the load R with :math:`R_j \ge p_j R` in both phases.
    deviations
        Bound and price of deviations; the flow forms have none.
    phases
        Fixes how many islands of each class decode; the rest of them prefill.
    relaxed
        Let islands do both phases at once: the LP relaxation, whose objective bounds the rest.

    Raises
    ------
    InfeasibleError
        If the islands cannot serve every range in both phases. A bound ``tau`` of 0 or more
        can always be met.

    Notes
    -----
    Source: Rignall, section 4.8.1: inner loop (MILP); x_ij, z_i, R_j, delta_j, lambda_dev, tau.
    Islands of a class are interchangeable, so that the programs with integers per class have the
    same optimum as those with a binary per island.

    Examples
    --------
    >>> from hetero.workload.lengths import ranges
    >>> rates = RateTable((IslandClass("H200", 8), IslandClass("H20", 8)),
    ...                   ranges([100, 100, 100, 900], 500),
    ...                   [[9.0, 1.5], [2.0, 0.25]], [[4.0, 3.0], [5.0, 3.5]])
    >>> found = solve(rates, {IslandClass("H200", 8): 2, IslandClass("H20", 8): 2})
    >>> round(found.served_rps, 6), [(g.count, str(g.island)) for g in found.of("decode")]
    (8.0, [(2, '8 x H20')])
    """
    require(
        form in get_args(Form),
        f"There is no program called '{form}'.",
        resolve=f"use one of {', '.join(get_args(Form))}.",
    )
    deviations = deviations or Deviations()
    groups = _groups(rates, layout, each=form in ("thesis", "sparse", "flow"))
    _check_served(rates, groups)
    fixed = _fixed(groups, phases)
    name = f"the assignment of {int(groups.counts.sum())} islands"
    program = Program()
    if form in ("flow", "flow aggregated"):
        cells, decoding = _flow(program, groups, fixed)
    elif form == "thesis":
        cells, decoding = _printed(program, groups, fixed, deviations)
    else:
        cells, decoding = _sparse(program, groups, fixed, deviations)
    try:
        found = program.solve(limits, solver=solver, relaxed=relaxed, names=name)
    except InfeasibleError as error:
        raise _why_infeasible(groups) from error
    if form.startswith("flow") and found.objective <= 0:
        raise _why_infeasible(groups)
    label = f"{form}, relaxed" if relaxed else form
    return _assignment(rates, groups, cells, decoding, found, label, relaxed)


def _groups(rates: RateTable, layout: Layout, *, each: bool) -> _Groups:
    classes: list[IslandClass] = []
    counts: list[int] = []
    for island, count in layout.items():
        require(
            count >= 0 and int(count) == count,
            f"A layout of {count} islands of {island} does not exist.",
            resolve="give whole numbers of 0 or more.",
        )
        if each:
            classes += [island] * int(count)
            counts += [1] * int(count)
        elif count:
            classes.append(island)
            counts.append(int(count))
    require(bool(classes), "The layout has no island.", resolve="give at least two islands.")
    rows = [rates.index(c.gpu, c.size) for c in classes]
    return _Groups(
        tuple(classes),
        np.array(counts, np.int64),
        rates.prefill_rps[rows],
        rates.decode_rps[rows],
        rates.share,
    )


def _fixed(groups: _Groups, phases: Mapping[IslandClass, int] | None) -> Ints | None:
    """Number of decode islands per group, where the caller fixes it."""
    if phases is None:
        return None
    left = dict(phases)
    found = np.zeros(len(groups.classes), np.int64)
    for g, (island, count) in enumerate(zip(groups.classes, groups.counts, strict=True)):
        found[g] = min(left.get(island, 0), count)
        left[island] = left.get(island, 0) - int(found[g])
    over = [island for island, count in left.items() if count > 0]
    if over:
        raise ParameterError(
            f"More islands of {over[0]} are to decode than the layout has.",
            resolve="fix no more than there are.",
        )
    return found


def _check_served(rates: RateTable, groups: _Groups) -> None:
    for phase in PHASES:
        idle = np.flatnonzero(~(groups.rps(phase) > 0).any(axis=0))
        if len(idle):
            raise InfeasibleError(
                f"No island of the layout can {phase} {rates.named(int(idle[0]))}.",
                resolve="add larger islands or GPUs with more memory.",
            )
    if groups.counts.sum() < 2:
        raise InfeasibleError(
            "One island cannot prefill and decode.", resolve="give at least two islands."
        )


def _decoding(program: Program, groups: _Groups, fixed: Ints | None) -> Ints:
    """Integers: how many islands of each group decode (z_i where a group is one island)."""
    low = np.zeros(len(groups.counts)) if fixed is None else fixed
    high = groups.counts if fixed is None else fixed
    return program.variables(len(groups.counts), lower=low, upper=high, integer=True)


def _flow(program: Program, groups: _Groups, fixed: Ints | None) -> tuple[dict[Phase, Ints], Ints]:
    """Max R with sum_g b_gj x_gj >= p_j R in both phases, sum_j x_gj <= islands of the phase."""
    count, width = groups.prefill.shape
    decoding = _decoding(program, groups, fixed)
    load = program.variables(1, objective=1.0)
    every = np.arange(count)[:, None]
    cells: dict[Phase, Ints] = {}
    for phase in PHASES:
        rate = groups.rps(phase)
        upper = np.where(rate > 0, groups.counts[:, None], 0.0)
        x = program.variables(count * width, upper=upper.ravel()).reshape(count, width)
        decodes = phase == "decode"
        capacity = program.rows(count, upper=0.0 if decodes else groups.counts)
        program.entries(capacity[every], x, 1.0)
        program.entries(capacity, decoding, -1.0 if decodes else 1.0)
        served = program.rows(width, lower=0.0)
        # Over p_j, so that rare ranges weigh as much as common ones in the solver's tolerance.
        program.entries(served[None, :], x, rate / groups.share)
        program.entries(served, load, -1.0)
        cells[phase] = x
    return cells, decoding


def _sparse(
    program: Program, groups: _Groups, fixed: Ints | None, deviations: Deviations
) -> tuple[dict[Phase, Ints], Ints]:
    """Rignall's section 4.8.1: R_j and R are variables, rows 1 and 2 one capacity per phase."""
    count, width = groups.prefill.shape
    decoding = _decoding(program, groups, fixed)
    every = np.arange(count)[:, None]
    cells: dict[Phase, Ints] = {}
    ranges: dict[Phase, Ints] = {}
    price = deviations.weight / (1.0 + groups.share)
    for phase in PHASES:
        rate = groups.rps(phase)
        x = program.variables(count * width).reshape(count, width)
        decodes = phase == "decode"
        full = np.zeros(count) if decodes else groups.counts
        idle = deviations.capacity == "at most"
        capacity = program.rows(count, lower=-np.inf if idle else full, upper=full)
        program.entries(capacity[every], x, 1.0)
        program.entries(capacity, decoding, -1.0 if decodes else 1.0)
        each = program.variables(width)
        total = program.variables(1, lower=LEAST_RPS, objective=1.0)
        define = program.rows(width, lower=0.0, upper=0.0)
        program.entries(define[None, :], x, rate)
        program.entries(define, each, -1.0)
        whole = program.rows(1, lower=0.0, upper=0.0)
        program.entries(whole, each, 1.0)
        program.entries(whole, total, -1.0)
        delta = program.variables(width, objective=-price)
        for sign in (1.0, -1.0):
            row = program.rows(width, upper=0.0)
            program.entries(row, each, sign)
            program.entries(row, total, -sign * groups.share)
            program.entries(row, delta, -1.0)
        row = program.rows(width, upper=0.0)
        program.entries(row, delta, 1.0)
        program.entries(row, total, -deviations.tau * groups.share)
        cells[phase], ranges[phase] = x, each
    match = program.variables(width, objective=-price)
    for sign in (1.0, -1.0):
        row = program.rows(width, upper=0.0)
        program.entries(row, ranges["decode"], sign)
        program.entries(row, ranges["prefill"], -sign)
        program.entries(row, match, -1.0)
    return cells, decoding


def _printed(
    program: Program, groups: _Groups, fixed: Ints | None, deviations: Deviations
) -> tuple[dict[Phase, Ints], Ints]:
    """Rignall's section 4.8.1 as printed: rates as sums over islands, x <= z row by row."""
    count, width = groups.prefill.shape
    share, price = groups.share, deviations.weight / (1.0 + groups.share)
    decoding = _decoding(program, groups, fixed)
    cells: dict[Phase, Ints] = {}
    for phase in PHASES:
        # R_phase enters the objective as the sum of b x.
        rate = groups.rps(phase)
        cells[phase] = program.variables(count * width, objective=rate.ravel()).reshape(rate.shape)
    every = np.arange(count)[:, None]
    idle = deviations.capacity == "at most"
    row = program.rows(count, lower=-np.inf if idle else 1.0, upper=1.0)  # 1
    for x in cells.values():
        program.entries(row[every], x, 1.0)
    for phase, x in cells.items():  # 2
        decodes = phase == "decode"
        row = program.rows(count * width, upper=0.0 if decodes else 1.0).reshape(x.shape)
        program.entries(row, x, 1.0)
        program.entries(row, decoding[every], -1.0 if decodes else 1.0)
    for phase, x in cells.items():  # 3, 4, 5
        rate = groups.rps(phase)
        program.entries(program.rows(1, lower=LEAST_RPS), x, rate)
        delta = program.variables(width, objective=-price)
        # Row j holds R_j - p_j R: every cell of the phase, for every j.
        j = np.arange(width)
        dense = rate[None] * ((j[:, None, None] == j[None, None, :]) - share[:, None, None])
        for sign in (1.0, -1.0):
            row = program.rows(width, upper=0.0)
            program.entries(row[:, None, None], x[None], sign * dense)
            program.entries(row, delta, -1.0)
        row = program.rows(width, upper=0.0)
        program.entries(row, delta, 1.0)
        program.entries(
            row[:, None, None], x[None], -deviations.tau * share[:, None, None] * rate[None]
        )
    match = program.variables(width, objective=-price)  # 6
    for sign in (1.0, -1.0):
        row = program.rows(width, upper=0.0)
        program.entries(row[None, :], cells["decode"], sign * groups.decode)
        program.entries(row[None, :], cells["prefill"], -sign * groups.prefill)
        program.entries(row, match, -1.0)
    return cells, decoding


def _why_infeasible(groups: _Groups) -> InfeasibleError:
    """Which constraint rules every assignment out.

    It is never tau: every island that serves all ranges can split its time in proportion to
    p_j / b_j, and one that does not can idle in a range that it cannot serve.
    """
    program = Program()
    _flow(program, groups, None)
    load = program.solve(SolverLimits(gap=1e-3)).objective
    if load <= 0:
        return InfeasibleError(
            "No choice of phases lets the islands serve every range in both phases.",
            resolve="add islands that can decode long inputs, or that can prefill beside them.",
        )
    return InfeasibleError(
        f"The islands carry {load:.3g} requests/s; the program asks for {LEAST_RPS} requests/s "
        "in each phase.",
        resolve="add islands, or use a flow form, which has no such bound.",
    )


def _assignment(
    rates: RateTable,
    groups: _Groups,
    cells: dict[Phase, Ints],
    decoding: Ints,
    found: Solution,
    form: str,
    relaxed: bool,
) -> Assignment:
    decode = np.zeros(len(groups.counts)) if relaxed else np.round(found.values[decoding])
    work = {phase: np.clip(found.values[x], 0.0, None) for phase, x in cells.items()}
    if form.startswith("flow"):
        work = trimmed(work, {phase: groups.rps(phase) for phase in work}, groups.share)
    result: list[IslandGroup] = []
    for phase, time in work.items():
        for g, island in enumerate(groups.classes):
            decodes = phase == "decode"
            count = int(decode[g] if decodes else groups.counts[g] - decode[g])
            if relaxed:
                # Every island may do both: it counts in the phase that takes more of its time.
                count = int(groups.counts[g]) if time[g].sum() > 1e-9 else 0
            if count:
                result.append(IslandGroup(island, phase, count, time[g] / count))
    return Assignment(rates, tuple(result), form, found.objective, found.bound, found.status)


def trimmed(
    work: Mapping[Phase, Floats], rates: Mapping[Phase, Floats], share: Floats
) -> dict[Phase, Floats]:
    """The same work without what exceeds the given mix at the rate of the slower phase."""
    served = {phase: (rates[phase] * time).sum(axis=0) for phase, time in work.items()}
    load = min(float((rate / share).min()) for rate in served.values())
    return {phase: work[phase] * (load * share / served[phase]) for phase in work}
