r"""The value of a design: the lower level solved, every part of it once.

Requests are orchestrated at the load that this causes: a transportation problem iterated to a fixed
point.

The attainment D of a pair depends on the loads that the shares Z put on it. From shares in
proportion to capacity each iteration takes D and its derivatives at the loads of Z, solves the
transportation problem for the marginal gain of every pair

.. math:: G_{ij} = D_{ij} + \sum_{j'} Z_{ij'} \frac{\partial D_{ij'}}{\partial Z_{ij}}
                          + \sum_{i'} Z_{i'j} \frac{\partial D_{i'j}}{\partial Z_{ij}}

and moves Z towards its solution by the best of a few steps (Frank and Wolfe's method on
:math:`\sum Z D(Z)`). Without the derivatives ("paper" gains) the same iteration takes D alone.
It ends when no step improves the attainment, or after a number of iterations.

The paper (ThunderServe, section 3.3) has a transportation problem of two stages: it maximises
:math:`\sum_{ij} X_i Y_{ij} D_{ij}`, bilinear in the share X of the requests per prefill replica and
the share Y of these per decode replica. With :math:`Z_{ij} = X_i Y_{ij}` it is linear, and
capacities, without which everything takes the best pair, enter in the same way:

.. math::
    \max_{Z \ge 0} \sum_{ij} D_{ij} Z_{ij} \quad\text{so that}\quad \sum_{ij} Z_{ij} \le 1,\;
    \sum_j Z_{ij} \le A_i,\; \sum_i Z_{ij} \le B_j,\; Z_{ij} \le L_{ij}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hetero.arrays import Floats
from hetero.costs.attainment import Decode, Pairs, Prefill
from hetero.costs.cost import CostModel
from hetero.costs.demand import Demand
from hetero.costs.groups import PHASES, Design, Fleet, Group, Phase
from hetero.costs.parallel import Configurations
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import split
from hetero.costs.transfer import KvTransfer
from hetero.errors import require
from hetero.programs import Program
from hetero.routers.pairs import PairShares
from hetero.simulator.metrics import Slo, attainment
from hetero.simulator.replicas import simulate
from hetero.workload import Trace

_STEPS = (1.0, 0.5, 0.25, 0.1)
_TINY = 1e-4  # less is not worth leaving shares in proportion to capacity


@dataclass(frozen=True, eq=False, slots=True)
class Orchestration:
    """Shares of the requests per pair and what they attain.

    Attributes
    ----------
    share
        Z, shape (m, n); together at most 1, less where capacities do not suffice.
    pair_attainment
        D at the loads of Z, shape (m, n).
    attainment
        Share of all requests that meet their targets; those not served do not.
    iterations
        Transportation problems solved.
    settled
        Whether it ended because no step improved the attainment.
    """

    share: Floats
    pair_attainment: Floats
    attainment: float
    iterations: int
    settled: bool

    @property
    def served(self) -> float:
        """Share of the requests that capacities allow to be served."""
        return float(self.share.sum())


def orchestrate(pairs: Pairs, *, iterations: int = 4, marginal: bool = True) -> Orchestration:
    """Shares that maximise the SLO attainment, see the module.

    Parameters
    ----------
    iterations
        Largest number of transportation problems.
    marginal
        Whether the gain of a pair counts what its load costs others.
    """
    a, b, c = pairs.prefill_share, pairs.decode_share, pairs.pair_share
    share = _proportional(a, b, c)
    value, gain = _value(pairs, share)
    done, settled = 0, value + _TINY >= 1.0  # nothing could improve on it by enough
    while done < iterations and not settled:
        push = _marginal(pairs, share, gain, pairs.demand.rate_rps) if marginal else gain
        # Serving is never worth less than not serving.
        target = transport(np.maximum(push, 1e-9), a, b, c)
        done += 1
        options = [share + step * (target - share) for step in _STEPS]
        values = [_value(pairs, option) for option in options]
        k = int(np.argmax([found for found, _ in values]))
        if values[k][0] <= value + _TINY:
            settled = True
        else:
            share, (value, gain) = options[k], values[k]
    return Orchestration(share, gain, value, done, settled)


def _proportional(a: Floats, b: Floats, c: Floats) -> Floats:
    """Shares in proportion to capacities, within them."""
    total = min(1.0, float(a.sum()), float(b.sum()))
    if total <= 0:
        return np.zeros((len(a), len(b)))
    return np.asarray(np.minimum(total * np.outer(a / a.sum(), b / b.sum()), c))


def _value(pairs: Pairs, share: Floats) -> tuple[float, Floats]:
    rate = pairs.demand.rate_rps
    gain = pairs.attainment(rate * share.sum(axis=1), rate * share.sum(axis=0))
    return float((share * gain).sum()), gain


def _marginal(pairs: Pairs, share: Floats, gain: Floats, rate: float) -> Floats:
    """Gain of a little more on every pair; differences over 1 % of the capacities."""
    rows, columns = share.sum(axis=1), share.sum(axis=0)
    da = np.maximum(0.01 * np.minimum(pairs.prefill_share, 1.0), 1e-9)
    db = np.maximum(0.01 * np.minimum(pairs.decode_share, 1.0), 1e-9)
    by_row = (pairs.attainment(rate * (rows + da), rate * columns) - gain) / da[:, None]
    by_column = (pairs.attainment(rate * rows, rate * (columns + db)) - gain) / db[None, :]
    push = gain + (share * by_row).sum(axis=1)[:, None] + (share * by_column).sum(axis=0)[None, :]
    return np.asarray(push)


def transport(gain: Floats, prefill: Floats, decode: Floats, pair: Floats | None = None) -> Floats:
    """Shares Z of the requests per pair that maximise the gain; shape (m, n).

    Source: ThunderServe, section 3.3: orchestration as a transportation problem (TSTP); X, Y, D.

    Parameters
    ----------
    gain
        SLO attainment D of every pair, or another gain; shape (m, n).
    prefill, decode
        Largest share of the requests per prefill and decode replica, shapes (m,) and (n,).
    pair
        Largest share per pair, shape (m, n); none by default.

    Raises
    ------
    SolverError
        If the solver does not return an optimum.

    Examples
    --------
    >>> gain = np.array([[0.9, 0.8], [0.7, 0.1]])
    >>> transport(gain, np.array([0.6, 0.6]), np.array([0.5, 1.0])).round(3)
    array([[0.1, 0.5],
           [0.4, 0. ]])
    """
    m, n = gain.shape
    require(
        len(prefill) == m and len(decode) == n and (pair is None or pair.shape == gain.shape),
        f"Gains of shape {gain.shape} with capacities of {len(prefill)} and {len(decode)}.",
        resolve="give one capacity per row and one per column.",
    )
    least = min(prefill.min(), decode.min(), 0.0 if pair is None else pair.min())
    require(least >= 0, "A capacity is negative.", resolve="give shares of 0 or more.")
    most = np.minimum(prefill[:, None], decode[None, :])
    most = np.minimum(most if pair is None else np.minimum(most, pair), 1.0)
    program = Program()
    share = program.variables(m * n, upper=most.ravel(), objective=gain.ravel()).reshape(m, n)
    program.entries(program.rows(1, upper=1.0), share, 1.0)
    program.entries(program.rows(m, upper=np.minimum(prefill, 1.0))[:, None], share, 1.0)
    program.entries(program.rows(n, upper=np.minimum(decode, 1.0)), share, 1.0)
    found = program.solve(solver="glop", names=f"the transportation of {m} x {n} replicas").values
    return np.asarray(np.clip(found.reshape(m, n), 0.0, None))


_TIE = 1e-3
_MOST_HEADROOM = 3.0


@dataclass(frozen=True, slots=True)
class Value:
    """What a design attains.

    Attributes
    ----------
    score
        What searches maximise: the attainment, and among designs that attain the same the one
        whose capacities exceed the demand most (a thousandth at three times the demand). Minus 1
        for a design that cannot serve.
    attainment
        Share of the requests that meet their targets.
    headroom
        Smaller capacity of the two phases over the demand.
    """

    score: float
    attainment: float
    headroom: float


_NOTHING = Value(-1.0, 0.0, 0.0)


def weights(
    parts: Sequence[tuple[str, Pipeline, Phase]], found: Orchestration
) -> dict[tuple[str, str], float]:
    """Shares above 0 of an orchestration by the names of the two replicas."""
    first, second = ([name for name, _, at in parts if at == phase] for phase in PHASES)
    above = zip(*np.nonzero(found.share), strict=True)
    return {(first[i], second[j]): float(found.share[i, j]) for i, j in above}


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates designs of a fleet for a demand and its targets; results are kept.

    Parameters
    ----------
    iterations
        Transportation problems per design at most.
    fixed
        Pipelines of groups whose parallel configuration is not to be deduced but kept, for
        rescheduling without a reload.
    sample
        Requests with their arrivals, whose simulation under the shares of the formulas says what
        a design attains; by default the formulas say it.
        Source: ThunderServe, section 3.3: DistServe's simulator estimates the attainment.
    """

    model: CostModel
    demand: Demand
    slo: Slo
    transfer: KvTransfer = field(default_factory=KvTransfer)
    iterations: int = 4
    fixed: tuple[tuple[Group, Pipeline], ...] = ()
    sample: Trace | None = None
    _values: dict[Design, Value] = field(default_factory=dict, repr=False)
    _prefill: dict[Group, Prefill] = field(default_factory=dict, repr=False)
    _decode: dict[Group, Decode] = field(default_factory=dict, repr=False)
    _moves: dict[tuple[Group, Group], tuple[float, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def fleet(self) -> Fleet:
        """The machines as the search sees them."""
        return Fleet(self.model, frozenset(self._kept))

    @cached_property
    def configurations(self) -> Configurations:
        """Parallel configurations, each found once."""
        return Configurations(self.model, self.demand)

    @cached_property
    def _kept(self) -> dict[Group, Pipeline]:
        return dict(self.fixed)

    @property
    def evaluated(self) -> int:
        """Different designs evaluated so far."""
        return len(self._values)

    def pipeline(self, group: Group, phase: str) -> Pipeline | None:
        """Pipeline of a group in a phase, None where the model does not fit."""
        if group in self._kept:
            return self._kept[group]
        return self.configurations.best(group, "prefill" if phase == "prefill" else "decode")

    def pipelines(self, design: Design) -> tuple[list[Pipeline], list[Pipeline]] | None:
        """Prefill and decode pipelines in the order of the design; None if any does not fit."""
        found: dict[str, list[Pipeline]] = {"prefill": [], "decode": []}
        for group, phase in design:
            pipeline = self.pipeline(group, phase)
            if pipeline is None or pipeline.kv_tokens < 1:
                return None
            found[phase].append(pipeline)
        return found["prefill"], found["decode"]

    def parts(self, design: Design) -> list[tuple[str, Pipeline, Phase]]:
        """Name, pipeline and phase of every replica of a design that fits, first what prefills."""
        return [
            (f"{phase[0].upper()}{k} {one.label}", one, phase)
            for phase, built in zip(PHASES, self.pipelines(design) or (), strict=False)
            for k, one in enumerate(built, start=1)
        ]

    def pairs(self, design: Design) -> Pairs | None:
        """The pairs of replicas of a design; None if it lacks a phase or a group does not fit."""
        built = self.pipelines(design)
        if built is None or not all(built):
            return None
        first = [group for group, phase in design if phase == "prefill"]
        second = [group for group, phase in design if phase == "decode"]
        for group, pipeline in zip(first, built[0], strict=True):
            self._prefill[group] = self._prefill.get(group) or Prefill.of(pipeline, self.demand)
        for group, pipeline in zip(second, built[1], strict=True):
            self._decode[group] = self._decode.get(group) or Decode.of(pipeline, self.demand)
        times = np.empty((len(first), len(second), 2))
        for i, (a, source) in enumerate(zip(first, built[0], strict=True)):
            for j, (b, target) in enumerate(zip(second, built[1], strict=True)):
                if (a, b) not in self._moves:
                    self._moves[a, b] = self.transfer.seconds(source, target)
                times[i, j] = self._moves[a, b]
        return Pairs(
            self.demand,
            self.slo,
            tuple(self._prefill[group] for group in first),
            tuple(self._decode[group] for group in second),
            times[..., 0],
            times[..., 1],
        )

    def orchestration(self, design: Design) -> Orchestration | None:
        """Shares per pair of a design, None where it cannot serve."""
        pairs = self.pairs(design)
        return None if pairs is None else orchestrate(pairs, iterations=self.iterations)

    def value(self, design: Design) -> Value:
        """What a design attains; mirror images under machines of a kind are evaluated once."""
        # Groups whose pipelines are given have names, so no machine stands for another.
        key = design if self.fixed else self.fleet.canonical(design)
        if key not in self._values:
            self._values[key] = self._evaluate(key)
        return self._values[key]

    def _evaluate(self, design: Design) -> Value:
        pairs = self.pairs(design)
        if pairs is None:
            return _NOTHING
        found = orchestrate(pairs, iterations=self.iterations)
        met = found.attainment
        if self.sample is not None and met > 0:
            parts = self.parts(design)
            served = split("", parts, self.transfer)
            run = simulate(served, self.sample, PairShares(weights(parts, found)))
            met = attainment(run, self.slo)
        headroom = min(float(pairs.prefill_share.sum()), float(pairs.decode_share.sum()))
        tie = _TIE * min(headroom, _MOST_HEADROOM) / _MOST_HEADROOM
        return Value(met + tie, met, headroom)

    def values(self, designs: Iterable[Design], jobs: int = 1) -> list[Value]:
        """What several designs attain, in processes if ``jobs`` is not 1; the same either way."""
        wanted = list(designs)
        if jobs != 1:
            from joblib import Parallel, delayed

            keys = [design if self.fixed else self.fleet.canonical(design) for design in wanted]
            new = [key for key in dict.fromkeys(keys) if key not in self._values]
            found = Parallel(n_jobs=jobs)(delayed(self._evaluate)(key) for key in new)
            self._values.update(zip(new, found, strict=True))
        return [self.value(design) for design in wanted]
