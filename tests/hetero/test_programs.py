"""Programs as arrays: both senses, and what the solver's bound becomes."""

from __future__ import annotations

import numpy as np
import pytest

from hetero import errors
from hetero.errors import InfeasibleError
from hetero.programs import Program, Solution, Solver, SolverError


def covering(*, minimize: bool, sign: float, integer: bool) -> Program:
    """Cover 7 with pieces of 3 and 2 that cost 5 and 4."""
    program = Program(minimize=minimize)
    x = program.variables(2, upper=9.0, objective=[sign * 5.0, sign * 4.0], integer=integer)
    program.entries(program.rows(1, lower=7.0), x, [3.0, 2.0])
    return program


@pytest.mark.parametrize("solver", ["highs", "gscip"])
def test_a_minimum_is_the_maximum_of_the_negative(solver: Solver) -> None:
    least = covering(minimize=True, sign=1.0, integer=True).solve(solver=solver)
    most = covering(minimize=False, sign=-1.0, integer=True).solve(solver=solver)
    assert least.values.round(6).tolist() == [1.0, 2.0]
    assert least.objective == pytest.approx(13.0)
    assert most.objective == pytest.approx(-13.0)
    assert least.bound <= least.objective
    assert most.bound >= most.objective
    assert least.gap == pytest.approx(most.gap)


def test_the_relaxation_of_a_minimum_bounds_it_from_below() -> None:
    program = covering(minimize=True, sign=1.0, integer=True)
    relaxed = program.solve(solver="glop", relaxed=True)
    assert relaxed.objective == pytest.approx(35.0 / 3.0)
    assert relaxed.duals == pytest.approx([5.0 / 3.0])
    assert relaxed.objective <= program.solve().objective


def test_gaps_do_not_depend_on_the_sense() -> None:
    none = np.zeros(0)
    for objective, bound in ((10.0, 11.0), (10.0, 9.0)):
        found = Solution(none, objective, bound, bound, "limit", none, none)
        assert found.gap == found.dual_gap == pytest.approx(0.1)


def test_there_is_one_error_of_solvers() -> None:
    assert SolverError is errors.SolverError
    program = Program(minimize=True)
    program.entries(program.rows(1, lower=2.0), program.variables(1, upper=1.0), 1.0)
    with pytest.raises(InfeasibleError, match="has no solution"):
        program.solve(solver="glop")
