from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linprog

from hetero.errors import InfeasibleError, ParameterError
from hetero.planners.rignall.assignment import gpus_used
from hetero.planners.rignall.inner import Deviations, Form, solve
from hetero.planners.rignall.rates import IslandClass, RateTable
from hetero.programs import Program, SolverError, SolverLimits
from hetero.workload.lengths import LengthRanges

BOTH = (InfeasibleError, SolverError)
FORMS: tuple[Form, ...] = ("thesis", "sparse", "aggregated", "flow", "flow aggregated")


def table(seed: int, classes: int = 3, width: int = 4, *, zeros: bool = True) -> RateTable:
    random = np.random.default_rng(seed)
    share = random.dirichlet(np.ones(width))
    edges = np.arange(width + 1) * 100
    ranges = LengthRanges(edges[:-1], edges[1:], edges[:-1] + 50, share)
    size = 2 ** np.arange(1, classes + 1)
    prefill, decode = (random.uniform(0.5, 2.0, (classes, width)) * size[:, None] for _ in "pd")
    if zeros and classes > 1:
        decode[0] = 0.0
    named = tuple(IslandClass(f"gpu{k % 2}", int(size[k])) for k in range(classes))
    return RateTable(named, ranges, prefill, decode)


def layout(rates: RateTable, counts: tuple[int, ...]) -> dict[IslandClass, int]:
    return dict(zip(rates.classes, counts, strict=True))


def largest_load(rates: RateTable, counts: tuple[int, ...]) -> float:
    """Every choice of phases, each as a plain linear program."""
    best, width = 0.0, len(rates.share)
    for decoding in itertools.product(*(range(n + 1) for n in counts)):
        loads = []
        for phase, held in (
            ("prefill", np.subtract(counts, decoding)),
            ("decode", np.array(decoding)),
        ):
            rate = rates.rps(phase)  # type: ignore[arg-type]
            cells = len(counts) * width
            work = np.zeros((len(counts), cells + 1))
            serve = np.zeros((width, cells + 1))
            for c, j in itertools.product(range(len(counts)), range(width)):
                work[c, c * width + j] = 1.0
                serve[j, c * width + j] = -rate[c, j]
            serve[:, -1] = rates.share
            cost = np.zeros(cells + 1)
            cost[-1] = -1.0
            limits = np.concatenate([held, np.zeros(width)])
            found = linprog(cost, np.vstack([work, serve]), limits)
            loads.append(-found.fun)
        best = max(best, min(loads))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_equivalent_forms_agree_and_the_load_is_that_of_every_choice_of_phases(seed: int) -> None:
    rates = table(seed)
    counts = ((2, 2, 1), (1, 3, 2), (0, 2, 2), (3, 1, 1))[seed]
    found = {form: solve(rates, layout(rates, counts), form) for form in FORMS}
    for form in ("sparse", "aggregated"):
        assert found[form].objective == pytest.approx(found["thesis"].objective, rel=1e-6)
    assert found["flow"].objective == pytest.approx(found["flow aggregated"].objective, rel=1e-6)
    best = largest_load(rates, counts)
    assert found["flow aggregated"].objective == pytest.approx(best, rel=1e-6)
    assert found["flow aggregated"].served_rps == pytest.approx(best, rel=1e-6)
    assert found["flow aggregated"].deviation_rps == pytest.approx(0, abs=1e-6 * best)
    assert all(one.status == "optimal" and one.gap <= 1e-5 for one in found.values())


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("tau", [0.0, 0.1])
def test_any_bound_on_deviations_can_be_met(seed: int, tau: float) -> None:
    rates = table(seed)
    found = solve(rates, layout(rates, (2, 2, 2)), "sparse", deviations=Deviations(tau=tau))
    for phase in ("prefill", "decode"):
        rate = found.rate_rps(phase)  # type: ignore[arg-type]
        off = np.abs(rate - rates.share * rate.sum())
        assert np.all(off <= tau * rates.share * rate.sum() + 1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_forms_agree_where_islands_may_idle_and_give_twice_the_load(seed: int) -> None:
    rates, idle = table(seed + 10), Deviations(capacity="at most", tau=0.2, weight=100.0)
    islands = layout(rates, (1, 2, 2))
    objective = {form: solve(rates, islands, form, deviations=idle).objective for form in FORMS}
    assert objective["sparse"] == pytest.approx(objective["thesis"], rel=1e-6)
    assert objective["aggregated"] == pytest.approx(objective["thesis"], rel=1e-6)
    # With idling and a high price no deviation is left, so the printed objective is 2 R.
    assert objective["thesis"] == pytest.approx(2 * objective["flow"], rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_relaxation_bounds_the_program(form: Form) -> None:
    rates = table(3)
    islands = layout(rates, (2, 2, 1))
    whole = solve(rates, islands, form)
    relaxed = solve(rates, islands, form, relaxed=True)
    assert relaxed.objective >= whole.objective - 1e-6 * abs(whole.objective)
    assert relaxed.objective > whole.objective * 1.001 or whole.objective < 0


@pytest.mark.parametrize("form", FORMS)
def test_what_an_assignment_says_follows_from_its_islands(form: Form) -> None:
    rates = table(5)
    found = solve(rates, layout(rates, (2, 2, 1)), form)
    assert found.layout == {c: n for c, n in layout(rates, (2, 2, 1)).items() if n}
    for group in found.groups:
        assert group.share.min() >= 0
        assert group.share.sum() <= 1 + 1e-6
    for phase in ("prefill", "decode"):
        by_hand = np.zeros(4)
        for group in found.of(phase):  # type: ignore[arg-type]
            row = rates.index(group.island.gpu, group.island.size)
            by_hand += group.count * group.share * rates.rps(phase)[row]  # type: ignore[arg-type]
        assert found.rate_rps(phase) == pytest.approx(by_hand)  # type: ignore[arg-type]
    assert found.served_rps <= found.throughput_rps * (1 + 1e-9)


def test_phases_can_be_fixed_and_never_help() -> None:
    rates = table(1)
    islands = layout(rates, (2, 2, 1))
    free = solve(rates, islands)
    fixed = solve(rates, islands, phases={rates.classes[2]: 1})
    assert fixed.objective <= free.objective + 1e-9
    assert [(g.island, g.count) for g in fixed.of("decode")] == [(rates.classes[2], 1)]
    with pytest.raises(ParameterError, match="More islands of 8 x gpu0"):
        solve(rates, islands, phases={rates.classes[2]: 2})


def test_errors_name_the_cause() -> None:
    rates = table(2)
    with pytest.raises(ParameterError, match="no GPU called 'H1000'"):
        solve(rates, {IslandClass("H1000", 4): 2})
    with pytest.raises(ParameterError, match="no island of 3 gpu0"):
        solve(rates, {IslandClass("gpu0", 3): 2})
    with pytest.raises(ParameterError, match="layout has no island"):
        solve(rates, {})
    with pytest.raises(ParameterError, match="no program called 'flo'"):
        solve(rates, {rates.classes[0]: 2}, "flo")  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError, match="can decode lengths 0-99 tokens"):
        solve(rates, {rates.classes[0]: 2})
    with pytest.raises(InfeasibleError, match="One island cannot"):
        solve(rates, {rates.classes[1]: 1})
    with pytest.raises(InfeasibleError, match="less than nothing: tau = -1"):
        Deviations(tau=-1.0)
    with pytest.raises(ParameterError, match="reward deviations"):
        Deviations(weight=-1.0)
    slow = replace(rates, prefill_rps=rates.prefill_rps * 1e-5)
    with pytest.raises(InfeasibleError, match=r"asks for 0\.01 requests/s in each phase"):
        solve(slow, layout(rates, (2, 2, 1)), "sparse")
    part = np.zeros((2, 4))
    part[0, :2] = part[1, 2:] = 1.0
    apart = replace(table(2, classes=2), prefill_rps=part, decode_rps=np.ones((2, 4)))
    with pytest.raises(InfeasibleError, match="No choice of phases"):
        # Both islands must prefill, so that none is left to decode.
        solve(apart, dict.fromkeys(apart.classes, 1), "thesis")
    assert solve(apart, dict.fromkeys(apart.classes, 2), "thesis").served_rps > 0
    with pytest.raises(ParameterError, match="gap of 1"):
        SolverLimits(gap=1.0)


def test_a_limit_is_reported_as_one() -> None:
    rates = table(4, classes=6, width=8, zeros=False)
    islands = layout(rates, (3, 3, 3, 2, 2, 1))
    limited = solve(rates, islands, "sparse", limits=SolverLimits(gap=0.0, nodes=1))
    proven = solve(rates, islands, "sparse")
    assert limited.status == "limit"
    assert limited.bound >= proven.objective - 1e-6 * abs(proven.objective)
    assert "not proven" in str(limited)


def test_program_says_what_went_wrong() -> None:
    program = Program()
    x = program.variables(1, objective=1.0)
    row = program.rows(1, lower=2.0, upper=1.0)
    program.entries(row, x, 1.0)
    with pytest.raises(BOTH):
        program.solve()
    free = Program()
    x = free.variables(1, objective=1.0)
    free.entries(free.rows(1, lower=0.0), x, 1.0)
    with pytest.raises(BOTH, match="program"):
        free.solve()


def test_gpus_of_a_layout() -> None:
    assert gpus_used({IslandClass("a", 4): 2, IslandClass("b", 2): 1, IslandClass("a", 1): 1}) == {
        "a": 9,
        "b": 2,
    }
