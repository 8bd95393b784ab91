r"""Helix's integer program for the placement, as section 4.4 prints it.

Variables of node i: its first layer s_i (integer) and b_i^k (binary), whether it holds k layers;
e_i = s_i + \sum_k k b_i^k. Of link (i, j): its flow f_ij, whether it is valid d_ij (binary), and
with partial inference cond^1_ij and cond^2_ij (binary). Helix's Tables 5 and 6 list them.

In whole numbers, as CP-SAT takes it, flows are whole tokens per second, no constant exceeds what a
node at either end or the bound by work allows, the work of all nodes bounds the flow over all
layers, and equal nodes with equal links stand in the order of their first layers: none of that
loses the optimum, but for what rounding rates down costs.

The artifact's readings are followed where they differ from the text: the second inequality for
e_i = s_j is L d <= L + (e_i - s_j) (the paper has a sign wrong), and every node holds a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetero.arrays import Flags, Floats, Ints
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError
from hetero.placement import FlowNetwork, Placement, Problem
from hetero.placement.pruning import all_links
from hetero.planners.helix.bound import simple_bound
from hetero.planners.helix.groups import groups
from hetero.programs import Program, Solver, SolverLimits, Status


@dataclass(frozen=True, slots=True)
class ProgramSize(Shown):
    """Number of variables and constraints of the program, by group.

    Examples
    --------
    >>> from pipelines.studies.helix_artifact import problem
    >>> size = Milp(problem("single-24", "70B")).size
    >>> size.total_variables, size.total_constraints
    (1376, 1848)
    """

    variables: dict[str, int]
    constraints: dict[str, int]

    @property
    def total_variables(self) -> int:
        """All variables."""
        return sum(self.variables.values())

    @property
    def total_constraints(self) -> int:
        """All constraints."""
        return sum(self.constraints.values())

    def table(self) -> Table:
        """One row per group, as Helix's Tables 5 and 6."""
        rows = [("variables", name, number) for name, number in self.variables.items()]
        rows += [("constraints", name, number) for name, number in self.constraints.items()]
        return Table("", (Column("what"), Column("group"), Column("number")), tuple(rows))


@dataclass(frozen=True, slots=True, eq=False)
class MilpResult:
    """Outcome of the program.

    Attributes
    ----------
    tokens_per_s, bound
        Objective and proven bound.
    placement
        Its placement.
    judged_tokens_per_s
        Exact maximum flow of the placement on the same links: solvers with a tolerance accept
        links that are not quite valid, which big constants turn into flow out of nothing.
    """

    tokens_per_s: float
    bound: float
    status: Status
    placement: Placement
    judged_tokens_per_s: float


class Milp:
    """The program of one problem.

    Source: Helix, section 4.4: placement as a mixed-integer program (MILP); s_i, b_i^j, f_ij, d_ij.

    Parameters
    ----------
    links
        Links that it may use, shape (n + 1, n + 1), all by default; see
        :func:`hetero.placement.pruning.pruned`.
    partial_inference
        Whether a node may start in the middle of its layers.
    early_stop
        Share of the work of all nodes per layer that is good enough: the objective is held at it,
        so that a solution that reaches it ends the search (the artifact takes 0.995).
    whole
        Write it in whole numbers, for CP-SAT.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        links: Flags | None = None,
        partial_inference: bool = False,
        early_stop: float | None = None,
        whole: bool = False,
    ) -> None:
        self.problem = problem
        self.whole = whole
        self.partial_inference = partial_inference
        self.early_stop = early_stop
        self.links = all_links(problem) if links is None else links & all_links(problem)
        self._variables: dict[str, int] = {}
        self._constraints: dict[str, int] = {}
        self._build()

    @property
    def size(self) -> ProgramSize:
        """Variables and constraints by group.

        Source: Helix, Table 5: variables of the program.
        Source: Helix, Table 6: constraints of the program.
        """
        return ProgramSize(self._variables, self._constraints)

    def _build(self) -> None:
        problem, program = self.problem, Program()
        n, layers = len(problem.nodes), problem.llm.layers
        rows, columns = np.nonzero(self.links)
        inner = (rows < n) & (columns < n)
        owner = np.repeat(np.arange(n), [node.max_layers for node in problem.nodes])
        held = np.concatenate([np.arange(1, node.max_layers + 1) for node in problem.nodes])
        rate = np.concatenate([node.tokens_per_s[1:] for node in problem.nodes])

        capacity = problem.link_tokens_per_s[rows, columns]
        if self.whole:
            most = np.floor(simple_bound(problem))
            rate = np.floor(np.minimum(rate, most))
            best = np.array([*(rate[owner == k].max() for k in range(n)), most])
            capacity = np.floor(np.min([capacity, best[rows], best[columns]], axis=0))
        s = program.variables(n, upper=layers - 1.0, integer=True)
        b = program.variables(len(owner), upper=1.0, integer=True)
        f = program.variables(
            len(rows),
            upper=capacity if self.whole else np.inf,
            objective=(rows == n).astype(float),
            integer=self.whole,
        )
        d = program.variables(len(rows), upper=1.0, integer=True)
        self._variables = {"s": n, "b": len(owner), "f": len(rows), "d": len(rows)}

        one = program.rows(n, lower=1.0, upper=1.0)
        program.entries(one[owner], b, 1.0)
        end = program.rows(n, upper=float(layers))
        program.entries(end, s, 1.0)
        program.entries(end[owner], b, held)
        kept = program.rows(n, lower=0.0, upper=0.0)
        work = program.rows(n, upper=0.0)
        into, out = columns < n, rows < n
        program.entries(kept[columns[into]], f[into], 1.0)
        program.entries(kept[rows[out]], f[out], -1.0)
        program.entries(work[columns[into]], f[into], 1.0)
        program.entries(work[owner], b, -rate)

        first, last = np.flatnonzero(rows == n), np.flatnonzero(columns == n)
        starts = program.rows(len(first), upper=float(layers))
        program.entries(starts, s[columns[first]], 1.0)
        program.entries(starts, d[first], float(layers))
        ends = program.rows(len(last), upper=0.0)
        program.entries(ends, d[last], float(layers))
        program.entries(ends, s[rows[last]], -1.0)
        for row, node in zip(ends, rows[last], strict=True):
            program.entries(row, b[owner == node], -held[owner == node])
        self._constraints = {
            "placement": 2 * n,
            "flow conservation": n,
            "inference throughput": n,
            "validity, coordinator": len(first) + len(last),
        }
        middle = np.flatnonzero(inner)
        a, z = rows[middle], columns[middle]
        # Which holding variables belong to the tail and the head of every link.
        of_tail = [np.flatnonzero(owner == node) for node in range(n)]

        def ends_of(target: Ints, nodes: Ints, sign: float) -> None:
            """Add sign times e_i to the rows."""
            program.entries(target, s[nodes], sign)
            count = np.array([len(of_tail[node]) for node in nodes])
            which = np.concatenate([of_tail[node] for node in nodes])
            program.entries(np.repeat(target, count), b[which], sign * held[which])

        if self.partial_inference:
            c1 = program.variables(len(middle), upper=1.0, integer=True)
            c2 = program.variables(len(middle), upper=1.0, integer=True)
            self._conditions = np.concatenate([c1, c2])
            self._variables |= {"cond1": len(middle), "cond2": len(middle)}
            # (L + 1)(1 - cond1) >= s_j - e_i
            before = program.rows(len(middle), upper=layers + 1.0)
            program.entries(before, s[z], 1.0)
            ends_of(before, a, -1.0)
            program.entries(before, c1, layers + 1.0)
            # e_j - e_i >= 1 - (L + 1)(1 - cond2)
            behind = program.rows(len(middle), lower=-float(layers))
            ends_of(behind, z, 1.0)
            ends_of(behind, a, -1.0)
            program.entries(behind, c2, -(layers + 1.0))
            both = program.rows(len(middle), upper=0.0)
            program.entries(both, d[middle], 1.0)
            program.entries(both, c1, -0.5)
            program.entries(both, c2, -0.5)
            self._constraints["validity, nodes"] = 3 * len(middle)
        else:
            for sign in (1.0, -1.0):
                # L d <= L + sign (s_j - e_i)
                meet = program.rows(len(middle), upper=float(layers))
                program.entries(meet, d[middle], float(layers))
                program.entries(meet, s[z], -sign)
                ends_of(meet, a, sign)
            self._constraints["validity, nodes"] = 2 * len(middle)
        carry = program.rows(len(rows), upper=0.0)
        program.entries(carry, f, 1.0)
        program.entries(carry, d, -capacity)
        self._constraints["transmission throughput"] = len(rows)
        if self.whole:
            shared = program.rows(1, upper=0.0)[0]
            program.entries(shared, f[rows == n], float(layers))
            program.entries(shared, b, -held * rate)
            equal = len(np.unique(problem.link_tokens_per_s[rows, columns])) <= 2
            equal &= len(rows) == n * (n + 1)  # else equal nodes may have links of their own
            alike = [pair for g in groups(problem) for pair in pairwise(g.members) if equal]
            ordered = program.rows(len(alike), upper=0.0)
            pairs = np.array(alike, dtype=np.int64).reshape(-1, 2)
            program.entries(ordered, s[pairs[:, 0]], 1.0)
            program.entries(ordered, s[pairs[:, 1]], -1.0)
            self._constraints["cuts and order"] = 1 + len(alike)
        if self.early_stop is not None:
            enough = self.early_stop * problem.compute_bound_tokens_per_s
            program.entries(program.rows(1, upper=enough)[0], f[rows == n], 1.0)
            self._constraints["early stop"] = 1
        self._program, self._s, self._b, self._owner, self._held = program, s, b, owner, held
        self._f, self._d, self._rows, self._columns = f, d, rows, columns

    def start(self, placement: Placement) -> Floats:
        """Values of the variables for a placement and its maximum flow, shape (variables,).

        Source: Helix, section 4.5: start of the program from the placement of a heuristic.
        """
        network = FlowNetwork(placement, self.partial_inference, self.links)
        valid = network.valid()
        values = np.zeros(self._program.size[1])
        for k, _, (first, stop) in placement.nodes():
            values[self._s[k]] = first
            values[self._b[(self._owner == k) & (self._held == stop - first)]] = 1.0
        used = valid[self._rows, self._columns]
        values[self._d] = used
        with suppress(InfeasibleError):  # nothing flows, as on pruned links: all flows are 0
            flow = network.max_flow().link_tokens_per_s
            values[self._f] = flow[self._rows, self._columns]
        return values

    def solve(
        self,
        limits: SolverLimits | None = None,
        *,
        solver: Solver = "highs",
        start: Placement | None = None,
        log: Callable[[Sequence[str]], None] | None = None,
    ) -> MilpResult:
        """Solve the program, and judge the placement that comes out by its exact flow.

        Raises
        ------
        SolverError
            If a limit came before any solution.
        """
        hint = None if start is None else self.start(start)
        solution = self._program.solve(
            limits, solver=solver, start=hint, names="the placement program", log=log
        )
        values = solution.values
        ranges: list[tuple[int, int] | None] = []
        for k in range(len(self.problem.nodes)):
            mine = self._owner == k
            held = int(self._held[mine][values[self._b[mine]].argmax()])
            first = min(round(values[self._s[k]]), self.problem.llm.layers - held)
            ranges.append((first, first + held))
        placement = Placement(self.problem, tuple(ranges), "integer program")
        return MilpResult(
            solution.objective,
            solution.bound,
            solution.status,
            placement,
            judge(placement, self.partial_inference, self.links),
        )


def judge(
    placement: Placement, partial_inference: bool = False, links: Flags | None = None
) -> float:
    """Exact maximum flow of a placement, 0 where nothing flows [tokens/s]."""
    try:
        return FlowNetwork(placement, partial_inference, links).max_flow().tokens_per_s
    except InfeasibleError:
        return 0.0
