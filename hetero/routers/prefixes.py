r"""Longest prefix against load.

The request goes to the replica of least

.. math::
    L_i - \omega\, h_i

with ``L_i`` the inputs and predicted outputs of its unfinished requests [tokens] and ``h_i`` the
tokens at the start of the prompt that the dispatcher's books say are cached there. ``omega`` is
the load that a cached token outweighs: 0 is least tokens, infinity the longest prefix wherever it
is (ties by load). Related: the overlap score of NVIDIA Dynamo's KV router weighs the blocks still
to be prefilled against those in use.

Layout of ``RM``: [omega].
"""

from __future__ import annotations

from hetero.engine.candidates import may_take
from hetero.engine.compiled import compiled
from hetero.engine.prefix import hit_tokens


@compiled
def cache_aware(R, E, S, IM, RM, r):
    """The replica of least load, less the weight of what it has cached of the prompt."""
    best, least, lightest = -1, 0.0, 0.0
    for i in range(len(E)):
        if may_take(R, E, S, r, i):
            load = float(S[i].outstanding_tokens)
            # Weighed so that an infinite weight leaves the load for ties.
            hits = float(hit_tokens(R, E[i], IM, E[i].books, r))
            cost = load - RM[0] * hits if RM[0] < 1e300 else -hits
            if best < 0 or cost < least or (cost == least and load < lightest):
                best, least, lightest = i, cost, load
    return best
