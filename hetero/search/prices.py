r"""What a replica is worth at prices of work: a bound on any router over any set of replicas.

Every request takes work :math:`W_p` of each part p: prompt tokens, their pairs, decode tokens, and
cached tokens read by them. Whatever the router does, the replicas r of a design serve at most

.. math::
    \lambda \le \sum_r v_r, \qquad
    v_r = \max_{steps} \frac{\sum_p \pi_p w_p + \theta\,\tau\,b}{T} - \theta\,b, \qquad
    \sum_p \pi_p W_p = 1

requests/s at any prices :math:`\pi \ge 0`, where a step of T seconds does work w and decodes b
requests (weak duality). The target :math:`\tau` of TPOT holds on average over the tokens of those
that meet it, priced by :math:`\theta \ge 0`; tokens of the others, at most those of the longest
replies, have steps and a price of their own. T is a line between the knots of the step model, over
pairs and over cached tokens, of which the KV cache holds M, so that the largest value stands at a
knot, with none or the most of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from hetero.arrays import Floats
from hetero.deployment import Replica
from hetero.question import Load

MOST_STEP_TOKENS = 8192.0
"""Of the steps that prompts may be cut into."""

_DECODE = (0.0, 0.15, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)  # of the price of a request
_CACHED = (0.0, 0.4, 0.8, 1.0)  # of that of its decoding
_LATE = ((1.0, 0.0), (0.0, 1.0), (0.0, 4.0), (0.6, 1.0), (0.6, 4.0))  # price of late tokens, theta


@dataclass(frozen=True, slots=True, eq=False)
class WorkPrices:
    """Prices of the parts of the work in requests per unit, shape (P,) each.

    Attributes
    ----------
    prompt, pair, token, cached
        Per prompt token, pair, decode token and cached token.
    late
        Share of its price that a decode token of a request that misses its target has.
    theta
        Per decoding request of a step beyond the target of TPOT [requests/s].
    tpot_s
        That target; 0 without one, where theta is 0.
    longest
        Tokens of the longest prompt.
    """

    prompt: Floats
    pair: Floats
    token: Floats
    cached: Floats
    late: Floats
    theta: Floats
    tpot_s: float
    longest: float

    @classmethod
    def of(cls, load: Load, *, pairs: float, prompts: bool = True) -> WorkPrices:
        """A grid of prices for the requests of a load.

        Parameters
        ----------
        pairs
            Prompt tokens that take as long as a pair, about.
        prompts
            Whether prompts are work, which prefix caches may spare.

        Examples
        --------
        >>> from hetero.latency.step import StepModel
        >>> from hetero.workload import Trace
        >>> even = Load(Trace([0.0], [1000], [101]), 1.0)
        >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
        >>> found = WorkPrices.of(even, pairs=0.0).values(Replica("a", step, kv_tokens=50_000))
        >>> bool(6.1 < found.min() < 7.1)  # 1 / (0.1 s of prefill + 100 steps of 30 ms / 48)
        True
        """
        inputs = load.trace.input_tokens.astype(np.float64)
        steps = np.maximum(load.trace.output_tokens.astype(np.float64) - 1.0, 0.0)
        cached = float((steps * inputs + steps * (steps - 1.0) / 2.0).mean())
        slo_s, met = load.slo.tpot_s, int(np.ceil(load.goal * len(steps) - 1e-9))
        prompt = float(inputs.mean() + pairs * (inputs**2).mean() / 2.0)
        least = float(np.sort(steps)[:met].sum()) / len(steps)
        rows = []
        for share, read, (late, theta) in product(_DECODE, _CACHED, _LATE if slo_s else _LATE[:1]):
            token = late * float(steps.mean()) + (1.0 - late) * least
            parts = np.array([1.0 - share, share * (1.0 - read), share * read])
            work = np.array([prompt, token, cached])
            if (work[parts > 0] > 0).all() and (prompts or share == 1.0):
                first, each, held = parts / np.maximum(work, 1e-300)
                slow = theta * share / max(token, 1e-300) / slo_s if slo_s else 0.0
                rows.append((first, pairs * first, each, held, late, slow))
        first, pair, each, held, late_share, slow = np.array(rows).T
        return cls(first, pair, each, held, late_share, slow, slo_s or 0.0, float(inputs.max()))

    def values(self, replica: Replica) -> Floats:
        """The most that a replica adds to the rate at each price, shape (P,) [requests/s]."""
        engine, found = replica.engine, np.full(len(self.prompt), np.inf)
        chunked = engine.batching == "chunked"
        most = max(engine.max_step_tokens, MOST_STEP_TOKENS if chunked else self.longest)
        batch = np.arange(1.0, engine.max_batch + 1.0)
        for piece in replica.step.pieces:
            knots = piece.knots_tokens
            alone = np.array([1.0, *knots[(knots > 1.0) & (knots < most)], most])
            # New tokens and decoding requests: prefill alone, decode alone, and both at once.
            corners = {"prefill": [(alone, 0.0 * alone)], "decode": [(batch, batch)]}
            both = (np.repeat(alone, len(batch)), np.tile(batch, len(alone)))
            mixed = [both, (batch + 1.0, batch)] if chunked else []
            corners["both"] = [*corners["prefill"], *corners["decode"], *mixed]
            n, b = (np.concatenate(one) for one in zip(*corners[replica.role], strict=True))
            n, b = n[n >= b], b[n >= b]
            straight, best = replace(piece, bends=None), np.zeros_like(found)  # bends only add
            for held, longest in product((0.0, float(replica.kv_tokens)), (0.0, self.longest)):
                cached, pairs = np.where(b > 0, held, 0.0), (n - b) * longest
                seconds = straight.seconds(n, b, cached, pairs)[:, None]
                parts = ((n - b, self.prompt), (pairs, self.pair), (cached, self.cached))
                work = sum(np.multiply.outer(*part) for part in parts)
                token, slack = b[:, None] * self.token, b[:, None] * self.theta
                met = (work + token + slack * self.tpot_s) / seconds - slack
                missed = (work + self.late * token) / seconds
                best = np.maximum(best, np.maximum(met, missed).max(axis=0))
            found = np.minimum(found, best)
        return found
