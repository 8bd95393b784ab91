r"""Our own search: an integer program over patterns of groups, then local search from its designs.

A pattern is a group up to the choice of machines: sizes on one kind of machine, or on two, or some
whole machines of a kind. Each pattern in each phase is costed once, at a few levels of load: at
level :math:`g` it takes the rate :math:`r_{pg}` at which a share :math:`a_{pg}` of the requests
meets its target, the time to the first token for prefill and the time per token for decode. With
numbers :math:`x_{pg}` of groups and the rates :math:`y_{pg}` that they serve,

.. math::
    \max \sum a_{pg}\, y_{pg} + \epsilon H, \quad y_{pg} \le r_{pg} x_{pg},\;
    \sum_{prefill} y = \sum_{decode} y \le rate,\;
    H \le \sum_{phase} r_{pg} x_{pg},\; \sum_{pg} n_{pk} x_{pg} \le N_k

for every kind k of machine with :math:`N_k` GPUs. Sizes that divide each other pack whatever their
numbers, so any solution can be laid on machines. The program does not grow with the fleet. Its
attainment is that of both phases on their own; the evaluation that follows takes both together,
with the transfers between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations_with_replacement, product

import numpy as np

from hetero.costs.attainment import MOST_LOAD, Decode, Prefill
from hetero.costs.groups import PHASES, Design, Fleet, Group, Phase, design, group, merged
from hetero.errors import InfeasibleError, SolverError
from hetero.planners.thunderserve.evaluate import Evaluator
from hetero.planners.thunderserve.tabu import TabuSearch, TabuSettings, TabuStep
from hetero.programs import Program, SolverLimits

Shape = tuple[tuple[int, int], ...]
"""GPUs of a pattern: (kind of machine, number on one machine) pairs, sorted."""

LEVELS = (0.5, 0.7, 0.85, 0.95)
"""Loads at which patterns are costed, as shares of their capacity."""

_MOST_PAIRS = 40
_MOST_WHOLE = 4
_EPSILON = 1e-2
_GAP = 5e-3
_NODES = 50
_STARTS = ((LEVELS[0], LEVELS[2]), (LEVELS[0],), (LEVELS[-1],))


@dataclass(frozen=True, slots=True)
class PatternColumn:
    """A pattern in a phase at a level: rate per group [1/s] and share that meets its target."""

    shape: Shape
    phase: Phase
    rate_rps: float
    met: float


def sizes(count: int) -> list[int]:
    """Sizes that divide each other, the largest being the whole machine.

    Examples
    --------
    >>> sizes(8), sizes(6), sizes(7)
    ([1, 2, 4, 8], [1, 3, 6], [1, 7])
    """
    found = [count]
    while found[0] > 1:
        found.insert(0, found[0] // next(p for p in range(2, found[0] + 1) if found[0] % p == 0))
    return found


def shapes(fleet: Fleet) -> Iterator[Shape]:
    """All patterns whose memory holds the model."""
    kinds = sorted(set(fleet.kinds))
    number = {k: fleet.kinds.count(k) for k in kinds}
    pairs = [(a, b) for a, b in combinations_with_replacement(kinds, 2) if a != b or number[a] > 1]
    pairs.sort(key=lambda ab: -float(fleet.model.bandwidth_gbs[_two(fleet, *ab)]))
    found: dict[Shape, None] = {}
    for kind in kinds:
        whole = ((kind, fleet.inventory[kind]),)
        found |= {((kind, n),): None for n in sizes(fleet.inventory[kind])}
        found |= {whole * n: None for n in range(2, min(number[kind], _MOST_WHOLE) + 1)}
    for a, b in pairs[:_MOST_PAIRS]:
        parts = product(sizes(fleet.inventory[a]), sizes(fleet.inventory[b]))
        found |= {tuple(sorted([(a, n), (b, k)])): None for n, k in parts}
    return filter(fleet.fits, found)


def _two(fleet: Fleet, a: int, b: int) -> tuple[int, int]:
    """Two different machines of these kinds."""
    return a, next(m for m, kind in enumerate(fleet.kinds) if kind == b and m != a)


def example(fleet: Fleet, shape: Shape) -> Group:
    """A group of that shape, each part on a machine of its own."""
    free = {kind: [m for m, k in enumerate(fleet.kinds) if k == kind] for kind, _ in shape}
    return group((free[kind].pop(0), n) for kind, n in shape)


def columns(evaluator: Evaluator, levels: Sequence[float] = LEVELS) -> list[PatternColumn]:
    """Every pattern in every phase that serves anything, at every level in turn."""
    found = []
    for shape in shapes(evaluator.fleet):
        for phase in PHASES:
            pipeline = evaluator.pipeline(example(evaluator.fleet, shape), phase)
            if pipeline is None or pipeline.kv_tokens < 1:
                continue
            for level in levels:
                if phase == "prefill":
                    first = Prefill.of(pipeline, evaluator.demand)
                    service = first.service_s(np.zeros_like(first.busy_s))
                    rate = level * MOST_LOAD / evaluator.demand.mean(service)
                    met = _prefill_met(first, rate, evaluator)
                else:
                    second = Decode.of(pipeline, evaluator.demand)
                    rate = level * second.most_rps
                    met = _decode_met(second, rate, evaluator)
                if rate > 0:
                    found.append(PatternColumn(shape, phase, rate, met))
    return found


def _prefill_met(one: Prefill, rate_rps: float, evaluator: Evaluator) -> float:
    """Share of the requests whose first token is in time; with E2E alone, leaves decode half."""
    slo = evaluator.slo
    target = slo.ttft_s if slo.ttft_s is not None else (slo.e2e_s or np.inf) / 2.0
    service = one.service_s(np.zeros_like(one.busy_s))
    load = rate_rps * evaluator.demand.mean(service)
    wait = rate_rps * evaluator.demand.mean(service**2) / (2.0 * (1.0 - load))
    left = target - one.latency_s
    tail = load * np.exp(-np.maximum(left, 0.0) * load / wait)
    return evaluator.demand.mean(np.where(left >= 0, 1.0 - tail, 0.0))


def _decode_met(one: Decode, rate_rps: float, evaluator: Evaluator) -> float:
    """1 if the mean batch keeps to the time per token, falling as it does not."""
    slo, demand = evaluator.slo, evaluator.demand
    target = slo.tpot_s
    if target is None:
        target = (slo.e2e_s or np.inf) / 2.0 / max(demand.mean_output - 1.0, 1.0)
    batch = one.mean_batch(rate_rps)
    token = float(np.interp(batch + np.sqrt(demand.context_spread * batch), one.batch, one.token_s))
    return float(min(1.0, target / token))


def solve(
    fleet: Fleet, pool: Sequence[PatternColumn], rate_rps: float
) -> list[tuple[PatternColumn, int]]:
    """Numbers of groups per column that maximise what is in time, see the module.

    Raises
    ------
    InfeasibleError
        If the fleet has no room for a group of each phase.
    SolverError
        If the solver finds no solution within its nodes.
    """
    program = Program()
    rates = np.array([column.rate_rps for column in pool])
    first = np.array([column.phase == "prefill" for column in pool])
    number = program.variables(len(pool), integer=True)
    served = program.variables(len(pool), objective=[column.met for column in pool])
    spare = program.variables(1, upper=3.0 * rate_rps, objective=_EPSILON)
    capacity = program.rows(len(pool), upper=0.0)
    program.entries(capacity, served, 1.0)
    program.entries(capacity, number, -rates)
    for at in (first, ~first):
        headroom = program.rows(1, upper=0.0)
        program.entries(headroom, spare, 1.0)
        program.entries(headroom, number[at], -rates[at])
        program.entries(program.rows(1, lower=1.0), number[at], 1.0)
        program.entries(program.rows(1, upper=rate_rps), served[at], 1.0)
    program.entries(program.rows(1, lower=0.0, upper=0.0), served, np.where(first, 1.0, -1.0))
    for kind in sorted(set(fleet.kinds)):
        total = fleet.inventory[kind] * fleet.kinds.count(kind)
        used = [sum(n for k, n in column.shape if k == kind) for column in pool]
        program.entries(program.rows(1, upper=total), number, used)
    names = f"the program over {len(pool)} columns"
    values = program.solve(SolverLimits(_GAP, _NODES), names=names).values[number]
    return [
        (column, round(value)) for column, value in zip(pool, values, strict=True) if value > 0.5
    ]


def lay(fleet: Fleet, chosen: Sequence[tuple[PatternColumn, int]]) -> Design:
    """Groups on machines: the largest parts first, each on the first machine with room."""
    free = list(fleet.inventory)
    members: list[list[tuple[int, int]]] = []
    parts: list[tuple[int, int, int]] = []
    phases: list[Phase] = []
    for column, count in chosen:
        for _ in range(count):
            parts += [(n, kind, len(members)) for kind, n in column.shape]
            members.append([])
            phases.append(column.phase)
    for n, kind, k in sorted(parts, key=lambda part: (-part[0], part[1], part[2])):
        alike = [m for m, of in enumerate(fleet.kinds) if of == kind and free[m] >= n]
        # The fullest machine with room keeps whole machines whole; a group stays together.
        m = min(alike, key=lambda m: (m not in {a for a, _ in members[k]}, free[m], m))
        free[m] -= n
        members[k].append((m, n))
    return design(
        (reduce(merged, ((part,) for part in one)), phase)
        for one, phase in zip(members, phases, strict=True)
    )


def starts(evaluator: Evaluator) -> list[Design]:
    """Designs of the integer program, for two levels together and for low and high load alone.

    Raises
    ------
    InfeasibleError
        If no pattern serves one of the phases.
    """
    pool = columns(evaluator)
    # One column per pattern, phase and level, so those of some levels are a choice of all.
    per_level = {level: pool[k :: len(LEVELS)] for k, level in enumerate(LEVELS)}
    if {column.phase for column in pool} != set(PHASES):
        raise InfeasibleError(
            f"No group of {evaluator.model.cluster.name} serves {evaluator.model.llm.name} in "
            "both phases.",
            resolve="add GPUs, or use a smaller model or precision.",
        )
    found: dict[Design, None] = {}
    for levels in _STARTS:
        some = [column for level in levels for column in per_level[level]]
        try:
            chosen = solve(evaluator.fleet, some, evaluator.demand.rate_rps)
        except (InfeasibleError, SolverError):
            continue
        one = lay(evaluator.fleet, chosen)
        if evaluator.value(one).score > -1:
            found[one] = None
    return list(found)


def polish(
    evaluator: Evaluator,
    settings: TabuSettings | None = None,
    *,
    seed: int = 0,
    jobs: int = 1,
    progress: Callable[[TabuStep], None] | None = None,
) -> TabuSearch:
    """Tabu search from two designs: the best of the integer program, and the paper's clusters.

    The second search is that of the paper, seed for seed, so what is found is never worse.

    Raises
    ------
    InfeasibleError
        If the fleet cannot hold two copies of the model.
    """
    # The clusters come first: they say so where the fleet cannot hold the model twice.
    second = TabuSearch.start(evaluator, settings, seed=seed)
    options = starts(evaluator)
    values = [value.score for value in evaluator.values(options, jobs)]
    searches = [second]
    if options:
        best = options[int(np.argmax(values))]
        searches.insert(0, TabuSearch.start(evaluator, settings, seed=seed, start=best))
    for search in searches:
        search.run(jobs=jobs, progress=progress)
    return max(searches, key=lambda search: search.history[-1].best)
