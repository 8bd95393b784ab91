r"""Orchestration at the load it causes: the transportation problem iterated to a fixed point.

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

from dataclasses import dataclass

import numpy as np

from hetero.arrays import Floats
from hetero.costs.attainment import Pairs
from hetero.errors import require
from hetero.programs import Program

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
