r"""Longest prefix against load.

The request goes to the replica of least

.. math::
    L_i - \omega\, h_i

with ``L_i`` the inputs and predicted outputs of its unfinished requests [tokens] and ``h_i`` the
tokens at the start of the prompt that the dispatcher's records say are cached there. ``omega`` is
the load that a cached token outweighs: 0 is least tokens, infinity the longest prefix wherever it
is (ties by load). Related: the overlap score of NVIDIA Dynamo's KV router weighs the blocks still
to be prefilled against those in use.

What is cached where is taken from the dispatcher's own records: the blocks of the prompts it sent,
aged as the replica's cache ages them (:mod:`hetero.engine.prefix`). Layout of ``RM``: [omega].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hetero.deployment import Deployment
from hetero.engine.candidates import may_take
from hetero.engine.compiled import compiled
from hetero.engine.prefix import known_tokens
from hetero.errors import require
from hetero.routers.base import CACHE_AWARE, Builtin, Floats


@compiled
def cache_aware(R, E, S, IM, RM, r):
    """The replica of least load, less the weight of what it has cached of the prompt."""
    best, least, lightest = -1, 0.0, 0.0
    for i in range(len(E)):
        if may_take(R, E, S, r, i):
            load = float(S[i].outstanding_tokens)
            # Weighed so that an infinite weight leaves the load for ties.
            hits = float(known_tokens(R, E[i], IM, r))
            cost = load - RM[0] * hits if RM[0] < 1e300 else -hits
            if best < 0 or cost < least or (cost == least and load < lightest):
                best, least, lightest = i, cost, load
    return best


@dataclass(frozen=True)
class CacheAware(Builtin):
    """The least tokens, less a weight per token of the prompt that a replica has cached.

    Without prefix caches, or a trace without blocks, it is least tokens.

    Parameters
    ----------
    hit_weight
        omega: tokens of load that one cached token outweighs; infinity follows the longest
        prefix.
    """

    hit_weight: float = 4.0
    name: str = "cache aware"
    code: ClassVar[int] = CACHE_AWARE

    def __post_init__(self) -> None:
        require(
            self.hit_weight >= 0,
            f"The weight of a cached token is {self.hit_weight}.",
            resolve="give 0 for least tokens, infinity for the longest prefix, or between.",
        )

    def memory(self, deployment: Deployment) -> Floats:
        """The weight."""
        return np.array([self.hit_weight])
