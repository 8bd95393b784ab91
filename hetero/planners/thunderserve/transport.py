r"""Orchestration as a two-stage transportation problem (ThunderServe, section 3.3).

The paper maximises :math:`\sum_{ij} X_i Y_{ij} D_{ij}`, bilinear in the share X of the requests per
prefill replica and the share Y of these per decode replica. With :math:`Z_{ij} = X_i Y_{ij}` it is
linear, and capacities, without which everything takes the best pair, enter in the same way:

.. math::
    \max_{Z \ge 0} \sum_{ij} D_{ij} Z_{ij} \quad\text{so that}\quad \sum_{ij} Z_{ij} \le 1,\;
    \sum_j Z_{ij} \le A_i,\; \sum_i Z_{ij} \le B_j,\; Z_{ij} \le L_{ij}
"""

from __future__ import annotations

import numpy as np

from hetero.arrays import Floats
from hetero.errors import require
from hetero.programs import Program


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
