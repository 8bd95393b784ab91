r"""The least that any fleet must cost: a proven bound for whole replicas under any router.

A step of an instance takes at least :math:`a_j + s_j n + k c + p q` for ``n`` new tokens, ``c``
cached tokens read and ``q`` prefill pairs, for each supporting line j of its step times. At most
``B`` requests decode in a step, and what they hold fits the KV cache, :math:`c \le C`; so the
fixed part :math:`a_j` is shared by slots, 1/B each, or by cache, c/C each. In the long run a
request of ``I`` inputs and ``O`` outputs thus keeps an instance busy for at least

.. math:: w_{j\beta} = s_j (I + O - 1) + p I^2 / 2 + k c
    + a_j \Big[\beta \frac{c}{C} + (1 - \beta) \frac{O - 1}{B}\Big], \quad
    c = (O-1) I + \tfrac12 (O-1)(O-2), \quad \beta \in \{0, 1\}

and all busy time of an instance fits the clock, for every j and :math:`\beta`. Summed with any
weights :math:`\mu \ge 0` over instances i, a fleet that serves the requests r at a rate has

.. math:: \sum_i \mu_i \ge rate \cdot mean_r \min_i \sum_{j\beta} \mu_{ij\beta} w_{rij\beta}

whatever serves whom. Such inequalities, with weights from the duals of linear programs over ranges
of similar requests, bound the price of the cheapest fleet from below by a small integer program
(Benders' method): the ranges only choose the weights, the bound holds request by request.
No target on latency enters, so a fleet that keeps one may have to cost more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hetero.arrays import Flags, Floats, Ints
from hetero.deployment import Replica
from hetero.errors import InfeasibleError, require
from hetero.planners.ground import Kind
from hetero.programs import Program, SolverLimits
from hetero.workload import Trace

Counts = dict[tuple[int, tuple[int, ...]], int]
"""Machines by kind and division."""

_ROUNDS = 40
_RANGES = 48
_LIMITS = SolverLimits(gap=1e-4, nodes=20_000)
_NAMES = "the bound of a fleet"


def together(first: Counts, second: Counts) -> Counts:
    """Machines of two fleets.

    Examples
    --------
    >>> together({(0, (1,)): 2}, {(0, (1,)): -1, (1, (2, 2)): 1})
    {(0, (1,)): 1, (1, (2, 2)): 1}
    """
    found = {at: first.get(at, 0) + second.get(at, 0) for at in sorted({**first, **second})}
    return {at: n for at, n in found.items() if n}


def work_s(replica: Replica, inputs: Floats, outputs: Floats) -> Floats:
    """Least busy time of an instance per request, for every line and share; shape (R, rows) [s].

    Infinite where a request does not fit its KV cache.

    Examples
    --------
    >>> from hetero.latency.step import StepModel
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=0.0)
    >>> one = Replica("a", step, kv_tokens=10_000)
    >>> work_s(one, np.array([99.0]), np.array([2.0])).max().round(6)  # 100 tokens, 0.1 ms each
    np.float64(0.010198)
    """
    steps = outputs - 1.0
    cached = steps * inputs + 0.5 * steps * (steps - 1.0)
    fits = inputs + outputs <= replica.kv_tokens
    shares = (cached / replica.kv_tokens, steps / replica.engine.max_batch)
    rows = []
    for piece in replica.step.pieces:
        rates = min(piece.per_cached_token_s.min(), piece.mixed_rows[0].min())
        fixed = piece.per_pair_s * inputs**2 / 2 + rates * cached
        lift = min(0.0, float(piece.levels.min()))
        for start_s, slope_s in _lines(piece.knots_tokens, piece.knots_s):
            base = slope_s * (inputs + steps) + fixed
            rows += [base + max(start_s + lift, 0.0) * share for share in shares]
    return np.where(fits[:, None], np.stack(rows, axis=1), np.inf)


def _lines(knots: Floats, times: Floats) -> list[tuple[float, float]]:
    """Lines that nowhere lie above a piecewise linear table: value at 0 and slope."""
    slopes = np.diff(times) / np.diff(knots) if len(knots) > 1 else np.zeros(1)
    found = []
    for k, slope in enumerate(slopes):
        start = float(times[k] - slope * knots[k])
        below = np.all(start + slope * knots <= times * (1 + 1e-9) + 1e-15)
        if below and slope <= slopes[-1] * (1 + 1e-9) and slope >= 0:
            found.append((start, float(slope)))
    return found or [(float(times.min()), 0.0)]


@dataclass(eq=False)
class Fluid:
    """Least work of the requests of a trace on every instance of some kinds of machines.

    Parameters
    ----------
    prices
        Of a machine of each kind [$/h].
    most
        Machines of each kind that there are; None where always more.
    most_gpus
        Largest number of GPUs of a type.
    """

    kinds: tuple[Kind, ...]
    trace: Trace
    prices: tuple[float, ...]
    most: tuple[int | None, ...]
    most_gpus: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        x = self.trace.input_tokens.astype(np.float64)
        y = self.trace.output_tokens.astype(np.float64)
        self.keys = [(k, d) for k, kind in enumerate(self.kinds) for d in kind.instances]
        work = [work_s(self.kinds[k].instances[d], x, y) for k, d in self.keys]
        fits = np.logical_or.reduce([np.isfinite(one[:, 0]) for one in work])
        self.left_out = float(1.0 - fits.mean())
        """Share of the requests that fit no instance."""
        require(
            bool(fits.any()),
            "No request fits the KV cache of any instance.",
            resolve="offer larger GPUs, or cut long requests.",
            error=InfeasibleError,
        )
        self.work = [one[fits] for one in work]
        order = np.lexsort((y[fits], np.round(4 * np.log2(1 + x[fits]))))
        self._ranges = np.array_split(order, min(_RANGES, int(fits.sum())))
        self.columns = [
            (k, division) for k, kind in enumerate(self.kinds) for division in kind.divisions
        ]
        self._cuts: list[Floats] = []

    def held(self, counts: Counts) -> Floats:
        """Instances of each key in a fleet."""
        return np.array(
            [
                sum(n * division.count(d) for (kk, division), n in counts.items() if kk == k)
                for k, d in self.keys
            ],
            np.float64,
        )

    def most_rps(self, counts: Counts) -> float:
        """Rate that no router exceeds with a fleet [requests/s]; 0 if it leaves requests out."""
        held = self.held(counts)
        weights = self._duals(held)
        if weights is None:
            return 0.0
        least, total = self._inequality(weights)
        return float(total @ held) / least if least > 0 else np.inf

    def least_usd_per_h(self, rate_rps: float) -> float:
        """Bound on the price of any fleet that serves a rate [$/h]."""
        bound = 0.0
        if not self._cuts:
            least, total = self._inequality(self._relaxed())
            self._cuts.append(np.append(total, least))
        for _ in range(_ROUNDS):
            bound, counts = self._cheapest(rate_rps)
            held = self.held(counts)
            weights = self._duals(held)
            if weights is None:  # some requests fit none of its instances
                weights = self._reach(held)
            least, total = self._inequality(weights)
            if total @ held >= rate_rps * least * (1 - 1e-6):
                break
            self._cuts.append(np.append(total, least))
        return bound

    def _inequality(self, weights: list[Floats]) -> tuple[float, Floats]:
        """Mean over the requests of the least weighted work, and the weight of each instance."""
        each = np.stack([_weighed(work, w) for work, w in zip(self.work, weights, strict=True)])
        return float(each.min(axis=0).mean()), np.array([w.sum() for w in weights])

    def _reach(self, held: Floats) -> list[Floats]:
        """Weights of instances that a fleet lacks and without which some request fits none."""
        least = min(float(work[np.isfinite(work)].min()) for work in self.work)
        scale = 1.0 / max(least, 1e-12)
        return [
            np.full(work.shape[1], 0.0 if held[i] else scale / work.shape[1])
            for i, work in enumerate(self.work)
        ]

    def _duals(self, held: Floats) -> list[Floats] | None:
        """Weights under which the fleet's largest rate is least; None if it leaves some out."""
        program = Program()
        rate = program.variables(1, objective=1.0)
        clocks = [
            program.rows(work.shape[1], upper=count)
            for work, count in zip(self.work, held, strict=True)
        ]
        if not self._assign(program, clocks, held > 0, rate):
            return None
        found = _weights(program, clocks)
        # What the fleet lacks gets the least weight that leaves the least work as it is.
        least = np.stack([_weighed(w, m) for w, m in zip(self.work, found, strict=True)])
        least = np.where((held > 0)[:, None], least, np.inf).min(axis=0)
        for i, work in enumerate(self.work):
            if held[i] > 0 or not (fits := np.isfinite(work[:, 0])).any():
                continue
            row = int(np.median(work[fits], axis=0).argmax())
            ratio = least[fits] / np.maximum(work[fits, row], 1e-12)
            found[i][row] = float(np.max(ratio[np.isfinite(ratio)], initial=0.0))
        return found

    def _relaxed(self) -> list[Floats]:
        """Weights from the cheapest fleet whose numbers of machines need not be whole."""
        program = Program(minimize=True)
        clocks = [program.rows(work.shape[1], upper=0.0) for work in self.work]
        machines = program.variables(
            len(self.columns), objective=[self.prices[k] for k, _ in self.columns]
        )
        for rows, (k, d) in zip(clocks, self.keys, strict=True):
            counts = [division.count(d) if kk == k else 0 for kk, division in self.columns]
            program.entries(rows[:, None], machines, -np.array(counts))
        self._assign(program, clocks, np.ones(len(self.keys), np.bool_), None)
        return _weights(program, clocks)

    def _assign(self, program: Program, clocks: list[Ints], able: Flags, rate: Ints | None) -> bool:
        """Ranges of requests to instances; False where a range fits none that is able."""
        total = sum(len(one) for one in self._ranges)
        for members in self._ranges:
            share = len(members) / total
            fitting = [
                i
                for i, work in enumerate(self.work)
                if able[i] and np.isfinite(work[members, 0]).all()
            ]
            if not fitting and rate is not None:
                return False
            served = share if fitting and rate is None else 0.0
            balance = program.rows(1, lower=served, upper=served)
            if rate is not None:
                program.entries(balance, rate, -share)
            shares = program.variables(len(fitting))
            program.entries(balance, shares, 1.0)
            for i, one in zip(fitting, shares, strict=True):
                program.entries(clocks[i], one, self.work[i][members].mean(axis=0))
        return True

    def _cheapest(self, rate_rps: float) -> tuple[float, Counts]:
        """The cheapest fleet that satisfies the inequalities found so far, and its bound."""
        program = Program(minimize=True)
        kind = np.array([k for k, _ in self.columns])
        machines = program.variables(
            len(self.columns),
            upper=[100_000 if most is None else most for most in (self.most[k] for k in kind)],
            objective=[self.prices[k] for k in kind],
            integer=True,
        )
        for k, limit in enumerate(self.most):
            if limit is not None:
                program.entries(program.rows(1, upper=limit), machines[kind == k], 1.0)
        for name, most in self.most_gpus.items():
            each = [self.kinds[k].machine for k in kind]
            gpus = [one.count if one.gpu.name == name else 0 for one in each]
            program.entries(program.rows(1, upper=most), machines, gpus)
        for cut in self._cuts:
            worth = [
                sum(division.count(d) * cut[i] for i, (kk, d) in enumerate(self.keys) if kk == k)
                for k, division in self.columns
            ]
            program.entries(
                program.rows(1, lower=rate_rps), machines, np.array(worth) / max(cut[-1], 1e-300)
            )
        try:
            found = program.solve(_LIMITS, solver="gscip", names=_NAMES)
        except InfeasibleError:
            raise InfeasibleError(
                f"No fleet within the limits serves {rate_rps:g} requests/s.",
                resolve="offer more machines, or lower the rate.",
            ) from None
        numbers = [round(value) for value in found.values]
        return found.dual_bound, {
            at: n for at, n in zip(self.columns, numbers, strict=True) if n > 0
        }


def _weighed(work: Floats, weights: Floats) -> Floats:
    """Weighted work per request; infinite where it does not fit."""
    fits = np.isfinite(work[:, 0])
    return np.where(fits, np.where(fits[:, None], work, 0.0) @ weights, np.inf)


def _weights(program: Program, clocks: list[Ints]) -> list[Floats]:
    """Duals of the clocks of the instances, each 0 or more."""
    duals = program.solve(solver="glop", names=_NAMES).duals
    # More of a clock raises the rate, or lowers the price.
    duals = np.maximum(-duals if program.minimize else duals, 0.0)
    return [duals[rows] for rows in clocks]
