r"""What a layout serves, about: mean requests on the best steps, over links that are never idle.

A replica serves at most so many requests/s of I prompt and S decode tokens, x of them cached in the
mean step,

.. math::
    c = \max_b \frac{b}{S\,T}, \qquad T = T(b + m, b, b\,x) \le \tau, \quad b\,x \le KV,
    \quad m = b\,I / S

where it serves both phases, as many without m where it decodes, and p where it takes prompts alone.
Machines i with the sums :math:`c_i, p_i, d_i` hand over inside as much as they can and the rest
over their links, on which a request takes :math:`l_i` seconds out and :math:`l'_i` in:

.. math::
    \lambda = \sum_i \big(c_i + h_i\big) + \min\Big(
        \sum_i \min(p_i - h_i, 1 / l_i),\; \sum_i \min(d_i - h_i, 1 / l'_i)\Big),
    \qquad h_i = \min(p_i, d_i)

No bound: that is :mod:`hetero.search.space`. It says which layouts to race first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np

from hetero.arrays import Floats
from hetero.costs.pipeline import Pipeline
from hetero.costs.transfer import Bits, KvTransfer
from hetero.deployment import Replica, Role
from hetero.question import Load
from hetero.search.space import ReplicaLayout, ReplicaSpace, best_first

_MARGIN = 0.9  # of the target for the time per token
_SHARES = np.linspace(0.0, 1.0, 11)  # of the price of a request that its prefill is worth
_EACH = 300  # layouts that are looked at for each of them
_STEP_TOKENS = 4096.0  # of prompts that are prefilled together, where they are not cut


@dataclass(frozen=True, slots=True)
class MeanRequest:
    """Prompt tokens, their pairs, decode tokens, and cached tokens that one of them reads."""

    inputs: float
    pairs: float
    steps: float
    cached: float
    tpot_s: float

    @classmethod
    def of(cls, load: Load) -> MeanRequest:
        """The mean request of a load, and its target."""
        inputs = load.trace.input_tokens.astype(np.float64)
        steps = np.maximum(load.trace.output_tokens.astype(np.float64) - 1.0, 0.0)
        cached = float((steps * inputs + steps * (steps - 1.0) / 2.0).sum() / max(steps.sum(), 1.0))
        pairs, tpot_s = float((inputs**2).mean() / 2.0), load.slo.tpot_s or np.inf
        most_s = _MARGIN * tpot_s
        return cls(float(inputs.mean()), pairs, max(float(steps.mean()), 1e-9), cached, most_s)

    def rates(self, replica: Replica) -> Floats:
        """c, p and d of a replica [requests/s], shape (3,): one of them is not 0.

        Examples
        --------
        >>> from hetero.latency.step import StepModel
        >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
        >>> one = MeanRequest(1000.0, 0.0, 100.0, 1050.0, np.inf)
        >>> roles = "both", "prefill", "decode"
        >>> found = [one.rates(Replica("a", step, 50_000, role=role)) for role in roles]
        >>> [round(float(each.sum()), 1) for each in found]
        [6.0, 9.5, 15.9]
        """
        engine, step = replica.engine, replica.step
        chunked = engine.batching == "chunked"
        most = max(float(engine.max_step_tokens) if chunked else _STEP_TOKENS, self.inputs)
        count = most / self.inputs
        alone = count / float(np.asarray(step.seconds(most, 0, 0.0, count * self.pairs)))
        if replica.role == "prefill":
            return np.array([0.0, alone, 0.0])
        room = replica.kv_tokens // max(self.cached, 1.0)
        b = np.unique(np.floor(np.geomspace(1.0, max(1.0, min(engine.max_batch, room)), 40)))
        b = b[b <= room]
        begun = b / self.steps if replica.role == "both" else 0.0 * b
        if chunked:
            parts = b + begun * self.inputs, b, b * self.cached, begun * self.pairs
            seconds = np.asarray(step.seconds(*parts))
        else:
            seconds = np.asarray(step.seconds(b, b, b * self.cached, 0.0 * b)) + begun / alone
        good = seconds <= self.tpot_s
        served = float((b[good] / seconds[good]).max(initial=0.0)) / self.steps
        return np.array([served, 0.0, 0.0] if replica.role == "both" else [0.0, 0.0, served])


def promising(space: ReplicaSpace, load: Load, count: int) -> list[tuple[float, ReplicaLayout]]:
    """So many layouts at most that should serve the most, the best first, and how much [req/s]."""
    mean, found = MeanRequest.of(load), dict[tuple[Bits, tuple[int, ...]], float]()
    known: dict[tuple[Pipeline, Role], Floats] = {}

    def rates(pipeline: Pipeline, role: Role) -> Floats:
        if (pipeline, role) not in known:
            known[pipeline, role] = mean.rates(space.replica(pipeline, "", role))
        return known[pipeline, role]

    order = [(kind, m) for kind, numbers in enumerate(space.kinds) for m in numbers]
    for bits in space.bits:
        held = _held_s(space, bits, mean.inputs)
        worth = []
        for kind, numbers in enumerate(space.kinds):
            parts = (space.parts(numbers[0], one) for _, one in space.divisions[kind])
            sums = np.array([sum((rates(*part) for part in one), np.zeros(3)) for one in parts])
            both, prefill, decode = sums.T
            inside, (out_s, in_s) = np.minimum(prefill, decode), held[kind]
            sent = np.minimum(prefill - inside, 1.0 / out_s)
            worth.append(
                np.stack([both + inside, sent, np.minimum(decode - inside, 1.0 / in_s)], axis=1)
            )
        for share in _SHARES:
            values = [one @ np.array([1.0, share, 1.0 - share]) for one in worth]
            ranked = [np.argsort(-one, kind="stable") for one in values]
            lines = [one[at].tolist() for one, at in zip(values, ranked, strict=True)]
            for _, state in islice(best_first(lines, [kind for kind, _ in order]), _EACH):
                # Among machines of a kind it makes no difference which is divided in which way.
                own = zip(order, state, strict=True)
                chosen = sorted((k, int(ranked[k][i])) for (k, _), i in own)
                alone, sent, taken = np.sum([worth[k][i] for k, i in chosen], axis=0)
                found[bits, tuple(i for _, i in chosen)] = float(alone + min(sent, taken))
    layouts = []
    for bits, state in sorted(found, key=lambda one: (-found[one], one)):
        pairs = zip(order, state, strict=True)
        whole = [part for (k, m), i in pairs for part in space.parts(m, space.divisions[k][i][1])]
        layout = ReplicaLayout(tuple(whole), bits)
        if (layout.split or bits == space.bits[0]) and layout.runs():
            layouts.append((found[bits, state], layout))
        if len(layouts) == count:
            break
    return layouts


def _held_s(space: ReplicaSpace, bits: Bits, tokens: float) -> list[tuple[float, float]]:
    """By kind how long a prompt takes the link out of a machine, and the one into it, in mean."""
    transfer, ends = KvTransfer(bits=bits), list[tuple[int, Pipeline]]()
    for numbers, ways in zip(space.kinds, space.divisions, strict=True):
        whole = next((one for _, one in ways if one), ())
        ends += [(m, space.parts(m, whole)[0][0]) for m in (numbers if whole else ())]
    found = []
    for numbers in space.kinds:
        own = [one for m, one in ends if m == numbers[0]]
        others = [one for m, one in ends if m != numbers[0]]
        out = [transfer.seconds(a, b)[1] for a in own for b in others]
        into = [transfer.seconds(b, a)[1] for a in own for b in others]
        mean_s = [max(1e-9, tokens * float(np.mean(one or [0.0]))) for one in (out, into)]
        found.append((mean_s[0], mean_s[1]))
    return found
