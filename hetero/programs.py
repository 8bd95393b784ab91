"""Linear programs as arrays, solved by OR-Tools MathOpt with status and bound checked.

No other module imports MathOpt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from hetero.arrays import Flags, Floats, Ints
from hetero.errors import InfeasibleError, require
from hetero.errors import SolverError as SolverError  # for those who solve

Solver: TypeAlias = Literal["highs", "gscip", "glop", "cp_sat"]
Status: TypeAlias = Literal["optimal", "limit"]

GAP = 1e-6  # relative distance to the bound at which a program counts as solved


@dataclass(frozen=True, slots=True)
class SolverLimits:
    """Where a solver stops; by count, not by time, so that results do not change from run to run.

    Attributes
    ----------
    gap
        Relative distance between the best solution and the bound.
    nodes
        Nodes of the search tree; None for no limit.
    seconds
        Elapsed time; for people who wait, not for pipelines.
    threads
        Of CP-SAT; None lets the solver choose.
    """

    gap: float = GAP
    nodes: int | None = None
    seconds: float | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        require(
            0 <= self.gap < 1,
            f"A gap of {self.gap} is no relative distance.",
            resolve="give 0 <= gap < 1.",
        )
        for what, value in (("nodes", self.nodes), ("seconds", self.seconds)):
            require(
                value is None or value > 0,
                f"A limit of {value} {what} leaves nothing to solve.",
                resolve=f"give more than 0 {what}, or None for no limit.",
            )


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """Values of the variables, the objective, its proven bound, and dual values of an LP.

    Attributes
    ----------
    values
        Shape (variables,).
    objective, bound
        Objective at ``values``, and the value that no solution exceeds, or, of a minimisation,
        that none goes below.
    dual_bound
        The bound as the solver reports it; rounding may put it beyond ``objective``, where
        ``bound`` ends.
    status
        ``optimal`` if the gap was closed; ``limit`` if a limit came first.
    duals
        Shape (rows,); only for programs without integers.
    reduced
        Shape (variables,); reduced costs, only for programs without integers.
    """

    values: Floats
    objective: float
    bound: float
    dual_bound: float
    status: Status
    duals: Floats
    reduced: Floats

    @property
    def gap(self) -> float:
        """Relative distance between objective and bound."""
        return abs(self.bound - self.objective) / max(abs(self.objective), 1e-12)

    @property
    def dual_gap(self) -> float:
        """Relative distance between objective and the bound as reported."""
        return abs(self.objective - self.dual_bound) / max(abs(self.objective), 1e-300)


@dataclass(slots=True)
class Program:
    r"""A program :math:`\max c^T x` with :math:`l \le A x \le u`, built in blocks.

    Parameters
    ----------
    minimize
        Whether :math:`c^T x` is to be as small as possible instead.

    Examples
    --------
    >>> program = Program()
    >>> x = program.variables(2, upper=4.0, objective=[1.0, 2.0], integer=True)
    >>> row = program.rows(1, upper=5.5)
    >>> program.entries(row[[0, 0]], x, 1.0)
    >>> program.solve().values.round(6).tolist()
    [1.0, 4.0]
    """

    minimize: bool = False
    _lower: list[Floats] = field(default_factory=list)
    _upper: list[Floats] = field(default_factory=list)
    _objective: list[Floats] = field(default_factory=list)
    _integer: list[Flags] = field(default_factory=list)
    _row_lower: list[Floats] = field(default_factory=list)
    _row_upper: list[Floats] = field(default_factory=list)
    _triplets: list[tuple[Ints, Ints, Floats]] = field(default_factory=list)
    _columns: int = 0
    _rows: int = 0

    @property
    def size(self) -> tuple[int, int, int]:
        """Rows, variables and entries that are not zero."""
        return self._rows, self._columns, sum(len(values) for _, _, values in self._triplets)

    def variables(
        self,
        count: int,
        *,
        lower: ArrayLike = 0.0,
        upper: ArrayLike = np.inf,
        objective: ArrayLike = 0.0,
        integer: bool = False,
    ) -> Ints:
        """Add variables and return their numbers, shape (count,)."""
        self._lower.append(np.broadcast_to(np.asarray(lower, np.float64), count))
        self._upper.append(np.broadcast_to(np.asarray(upper, np.float64), count))
        self._objective.append(np.broadcast_to(np.asarray(objective, np.float64), count))
        self._integer.append(np.full(count, integer))
        first, self._columns = self._columns, self._columns + count
        return np.arange(first, first + count)

    def rows(self, count: int, *, lower: ArrayLike = -np.inf, upper: ArrayLike = np.inf) -> Ints:
        """Add rows and return their numbers, shape (count,)."""
        self._row_lower.append(np.broadcast_to(np.asarray(lower, np.float64), count))
        self._row_upper.append(np.broadcast_to(np.asarray(upper, np.float64), count))
        first, self._rows = self._rows, self._rows + count
        return np.arange(first, first + count)

    def entries(self, rows: ArrayLike, columns: ArrayLike, values: ArrayLike) -> None:
        """Set coefficients, each once; the three broadcast to one shape, zeros are left out."""
        r, c, v = np.broadcast_arrays(
            np.asarray(rows, np.int64), np.asarray(columns, np.int64), np.asarray(values, float)
        )
        kept = v != 0
        self._triplets.append((r[kept], c[kept], v[kept]))

    def solve(
        self,
        limits: SolverLimits | None = None,
        *,
        solver: Solver = "highs",
        relaxed: bool = False,
        start: ArrayLike | None = None,
        names: str = "the program",
        log: Callable[[Sequence[str]], None] | None = None,
    ) -> Solution:
        """Solve, and check what the solver says; CP-SAT takes whole numbers alone.

        Parameters
        ----------
        relaxed
            Drop integrality: the LP relaxation, whose optimum bounds that of the program.
        start
            Values to start from, shape (variables,); a hint that the solver may complete.
        names
            What the program is, for the text of errors.
        log
            Called with lines of the solver's log as they come.

        Raises
        ------
        InfeasibleError
            If no solution exists.
        SolverError
            If a limit came before any solution, or the solver failed.
        """
        from ortools.math_opt.python import mathopt

        limits = limits or SolverLimits()
        integer = np.concatenate(self._integer) & (not relaxed)
        model = mathopt.Model.from_model_proto(self._proto(integer))
        kind = mathopt.SolverType[solver.upper()]
        mixed = bool(integer.any())
        values = np.concatenate([triplet[-1] for triplet in self._triplets])
        require(
            solver != "cp_sat" or bool(integer.all() and np.all(values == np.rint(values))),
            "CP-SAT takes whole numbers alone, and would give wrong answers.",
            resolve="scale and round the program, or choose another solver.",
        )
        try:
            with _silent(mixed):
                result = mathopt.solve(
                    model,
                    kind,
                    params=_parameters(limits, mixed),
                    model_params=_hints(model, start),
                    msg_cb=log,
                )
        except (RuntimeError, ValueError, AttributeError) as error:
            # The binding hides the solver's message behind an AttributeError of its own.
            reason = error.__context__ or error
            raise SolverError(
                f"{solver} could not solve {names}: {reason}.", resolve="choose another solver."
            ) from error
        reason = result.termination.reason
        stopped = mathopt.TerminationReason
        if reason in (stopped.INFEASIBLE, stopped.INFEASIBLE_OR_UNBOUNDED):
            raise InfeasibleError(f"{names} has no solution.", resolve="loosen its constraints.")
        if reason not in (stopped.OPTIMAL, stopped.FEASIBLE):
            limit = result.termination.limit
            why = f"the limit on {limit.name.lower()}" if limit is not None else reason.name.lower()
            raise SolverError(
                f"{solver} ended on {names} at {why} before it found a solution.",
                resolve="raise the limit, or choose another solver.",
            )
        primal = result.solutions[0].primal_solution
        assert primal is not None
        values = np.fromiter(primal.variable_values.values(), float, self._columns)
        duals = reduced = np.zeros(0)
        dual = result.solutions[0].dual_solution
        if not mixed and dual is not None:
            duals = np.fromiter(dual.dual_values.values(), float, self._rows)
            reduced = np.fromiter(dual.reduced_costs.values(), float, self._columns)
        objective = float(primal.objective_value)
        bound = dual_bound = float(result.termination.objective_bounds.dual_bound)
        if np.isfinite(bound):
            bound = min(bound, objective) if self.minimize else max(bound, objective)
        elif not mixed:
            bound = objective
        status: Status = "optimal" if reason == stopped.OPTIMAL else "limit"
        return Solution(values, objective, bound, dual_bound, status, duals, reduced)

    def _proto(self, integer: Flags) -> object:
        # Arrays go straight into the message: adding variables one by one costs more than solving.
        from ortools.math_opt import model_pb2

        proto = model_pb2.ModelProto()
        variables = proto.variables
        variables.ids.extend(range(self._columns))
        variables.lower_bounds.extend(np.concatenate(self._lower))
        variables.upper_bounds.extend(np.concatenate(self._upper))
        variables.integers.extend(integer)
        objective = np.concatenate(self._objective)
        used = np.flatnonzero(objective)
        proto.objective.maximize = not self.minimize
        proto.objective.linear_coefficients.ids.extend(used)
        proto.objective.linear_coefficients.values.extend(objective[used])
        rows = proto.linear_constraints
        rows.ids.extend(range(self._rows))
        rows.lower_bounds.extend(np.concatenate(self._row_lower))
        rows.upper_bounds.extend(np.concatenate(self._row_upper))
        row, column, value = (np.concatenate(part) for part in zip(*self._triplets, strict=True))
        order = np.lexsort((column, row))
        matrix = proto.linear_constraint_matrix
        matrix.row_ids.extend(row[order])
        matrix.column_ids.extend(column[order])
        matrix.coefficients.extend(value[order])
        return proto


@contextmanager
def _silent(mixed: bool) -> Iterator[None]:
    """Keep a stray line of HiGHS off standard output, where it would spoil JSON."""
    if not mixed:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _hints(model: object, start: ArrayLike | None) -> object:
    from ortools.math_opt.python import mathopt

    if start is None:
        return mathopt.ModelSolveParameters()
    values = np.asarray(start, dtype=np.float64)
    chosen = dict(zip(model.variables(), values.tolist(), strict=True))  # type: ignore[attr-defined]
    hint = mathopt.SolutionHint(variable_values=chosen)
    return mathopt.ModelSolveParameters(solution_hints=[hint])


def _parameters(limits: SolverLimits, mixed: bool) -> object:
    import datetime

    from ortools.math_opt.python import mathopt

    return mathopt.SolveParameters(
        relative_gap_tolerance=limits.gap if mixed else None,
        node_limit=limits.nodes if mixed else None,
        threads=limits.threads,
        time_limit=None if limits.seconds is None else datetime.timedelta(seconds=limits.seconds),
    )
