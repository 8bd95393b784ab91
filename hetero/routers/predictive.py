r"""The router of this project: what each replica would do to a request, priced in seconds.

The request goes to the replica i of least

.. math::
    F_i + \kappa\, e^{-\theta (1 - \min(u_i, 1))}\, \frac{T_i}{\bar T_i}
        + \eta\, \frac{\max(O - \bar O, 0)^2}{\bar O}\, s_i

* ``F_i`` [s], its time to first token: the way there and back, the rest of the prefill in progress
  (half a step where the replica decodes), the wait ``w_i`` if the replica is full, and the prefill
  of the prompts ahead and its own, by the step model. ``u_i`` is the share of the KV cache or of
  the batch slots, the larger, that all unfinished requests and this one will take; above 1, ``w_i``
  is the sum of the times ``T`` of those that wait, or while none does ``(u_i - 1) R_i`` with
  ``R_i`` the time in which a full replica renews all that it holds.
* ``T_i`` [s], what it takes from the others: the time of the full replica that it uses up,

  .. math::
      T_i = prefill_i(I) + O\, s_i \max\Big(\frac{I + O}{KV_i}, \frac{1}{B_i}\Big)

  with ``s_i`` the decode step of a full batch of average requests. Over the average
  ``\bar T_i`` of recent requests it is a comparative advantage: 1 for an average request on any
  replica, less where the request suits the replica better than others do. In the linear program
  of the largest throughput, ``1 / \bar T_i`` is what a second of replica i is worth. The price
  rises as the replica fills and stays at ``\kappa`` once it is full: an empty replica is taken for
  its speed alone, one that is nearly full is kept for the requests that need it.
* The last term, for replies longer than average only, is a convex cost of their completion: the
  longest replies end the run, so they belong on the replicas of the shortest steps.

Tokens of the prompt that the dispatcher's books say are cached on a replica need no prefill there.

While all replicas are full, ``u_i`` above 1 or a standing queue, requests wait at the dispatcher,
the oldest first: which replica has room first, and for which request, is then seen instead of
predicted, and no replica runs dry beside the queue of another. A paged engine counts as full by
what a request holds on average, its prompt and half of its reply.

With a target for the first token, replicas that would miss it do not count. A request that would
miss it on all waits until one, with the request, is at most 90 % full; beyond capacity those that
can still meet the target thus go first, and the others use what they leave. Without a target all
wait alike, which is what keeps the tail short: the two aims are opposed there.

Predicted outputs are used as far as finished requests bear them out: ``O`` is the regression of
true on predicted outputs over the finished ones, so a predictor without skill counts as its
corrected mean. Without this, replicas collect the requests whose lengths were underestimated most.

Related: the exponential price of load is that of online routing on unrelated machines (Aspnes et
al., 1997); Xiong et al. (eq. 7) use it on the KV usage alone.

Layout of ``RM``: header of :data:`HEADER` entries, then the average T of each kind of replicas
(of one engine, step model and way), and what the request in hand means to each kind; in a fleet of
many replicas then the rows of :mod:`hetero.routers.shortlist`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hetero.deployment import Deployment
from hetero.engine.candidates import may_take, serves
from hetero.engine.compiled import compiled
from hetero.engine.held import is_deferred
from hetero.engine.prefix import known_tokens
from hetero.engine.state import (
    CHUNKED,
    DEFER,
    DEFERRED,
    DOWN,
    FINISHED,
    IN_DECODE,
    IN_PREFILL,
    PAGED,
    REJECT,
    REJECTED,
)
from hetero.engine.steps import step_s
from hetero.errors import require
from hetero.routers.base import PREDICTIVE, Builtin, Floats
from hetero.routers.shortlist import (
    BASE,
    BLOCKS,
    BOUND,
    FIRST,
    GAIN,
    IDLE_ONE,
    KIND,
    LESS_S,
    LIMITS,
    LOOSE,
    MOST_S,
    MOST_SLOTS,
    MOST_TAKEN,
    PRICE_H,
    RATE_S,
    REPLICA,
    STOP,
    ahead,
    arrange,
    bound_s,
    prefill_floor,
    row_at,
    row_of_block,
    size,
    tighten,
    update,
)

# Header entries: the parameters; means over recent arrivals; what finished requests taught.
PRICE_S, STEEPNESS, LONG_REPLY, TARGET_S = 0, 1, 2, 3
ARRIVED, INPUT, OUTPUT = 4, 5, 6
NEXT, FINISHES, PREDICTED, TRUE, VARIANCE, COVARIANCE = 7, 8, 9, 10, 11, 12
MANY = 13  # whether there are: 0 no, 1 perhaps, 2 yes
HEADER = 14
# What a request means to a kind: whether it may go there; its tokens, and those to prefill with
# their pairs; T, the part of it that is prefill, what a replica renews; T over its average; the
# delay of a long reply; and the share of its tokens that counts as held.
OPEN, INPUTS, OUTPUTS, FRESH, PAIRS = LIMITS, LIMITS + 1, LIMITS + 2, LIMITS + 3, LIMITS + 4
SHARE, OWN, RENEWAL, RATIO, LATE = LIMITS + 5, LIMITS + 6, LIMITS + 7, LIMITS + 8, LIMITS + 9
HELD_SHARE, TERMS = LIMITS + 10, LIMITS + 11
_RECENT = 200.0  # arrivals that the averages remember: minutes of traffic, many per length
_LEARNT = 500.0  # finished requests that the regression remembers
_SPARE = 0.9  # how full a replica may be that takes a request which has missed its target
_FEW = 48  # replicas that are looked at one by one
_PRIOR = 20.0  # finished requests that outweigh taking predictions at their word


@compiled
def _learn(R, RM, r):
    """Regress true on predicted outputs, over finished requests in order of arrival.

    In order of arrival, so that short replies, which finish first, do not count first.
    """
    k = int(RM[NEXT])
    while k < r and (R[k].status == FINISHED or R[k].status == REJECTED):
        if R[k].status == FINISHED:
            RM[FINISHES] += 1.0
            weight = 1.0 / min(RM[FINISHES], _LEARNT)
            dx = R[k].predicted_tokens - RM[PREDICTED]
            dy = R[k].output_tokens - RM[TRUE]
            RM[PREDICTED] += weight * dx
            RM[TRUE] += weight * dy
            RM[VARIANCE] = (1.0 - weight) * (RM[VARIANCE] + weight * dx * dx)
            RM[COVARIANCE] = (1.0 - weight) * (RM[COVARIANCE] + weight * dx * dy)
        k += 1
    RM[NEXT] = k


@compiled
def _expected(RM, predicted):
    """Output to expect when ``predicted`` tokens are predicted."""
    count = min(RM[FINISHES], _LEARNT)
    trust = count / (count + _PRIOR)
    slope = 1.0
    if RM[VARIANCE] > 0.0:
        slope += trust * (min(max(RM[COVARIANCE] / RM[VARIANCE], 0.0), 1.0) - 1.0)
    mean = RM[PREDICTED] + trust * (RM[TRUE] - RM[PREDICTED])
    return max(mean + slope * (predicted - RM[PREDICTED]), 1.0)


@compiled
def _prefill_s(e, FM, s, tokens, pairs, step):
    """Time until ``tokens`` of prompts are prefilled; chunks share their steps with the decode."""
    if e.batching != CHUNKED:
        return step_s(e, FM, tokens, 0, 0.0, pairs)
    running = float(s.running)
    room = max(e.max_step_tokens - running, 1.0)
    whole = math.floor(tokens / room)
    left = tokens - whole * room
    time = 0.0
    if whole > 0.0:
        time = whole * step_s(e, FM, room + running, s.running, s.cached, pairs / (whole + 1.0))
    if left > 0.0:
        time += step_s(e, FM, left + running, s.running, s.cached, pairs / (whole + 1.0))
    return max(time, step)


@compiled
def _wait_s(s, usage, renewal):
    """w: the work of those that wait, or how long until the excess over a full replica leaves."""
    if s.waiting == 0:
        return (usage - 1.0) * renewal
    return max(s.load - s.decoding_load, 0.0)


@compiled
def _first_token_s(e, s, FM, RM, c, ahead, t, usage):
    """F: time to the first token of a request that arrives now."""
    step = rest = 0.0
    if s.running > 0 and (s.mode == IN_DECODE or e.batching == CHUNKED):
        step = step_s(e, FM, s.running, s.running, s.cached, 0.0)
    if s.mode == IN_PREFILL:
        rest = max(FM[e.index] - t, 0.0)
    elif s.mode == IN_DECODE:
        rest = 0.5 * step
    if usage > 1.0:
        rest += _wait_s(s, usage, RM[c + RENEWAL])  # the prompts ahead are prefilled meanwhile
        ahead = 0
    if ahead == 0 and e.batching != CHUNKED:
        return e.way_s + rest + RM[c + OWN]
    return e.way_s + rest + _prefill_s(e, FM, s, RM[c + FRESH] + ahead, RM[c + PAIRS], step)


@compiled
def _cost(e, s, FM, RM, c, ahead, t, most, latest, least):
    """Cost of a replica that could take the request; NaN where it is to wait instead.

    There are ``ahead`` tokens to be prefilled before it. Beyond ``least`` only that is known.
    """
    slot = 1.0 / e.max_batch
    taken = s.outstanding_tokens + RM[c + INPUTS] + RM[c + OUTPUTS]
    # A queue that stands while the replica decodes shows that it is full, whatever was predicted of
    # the requests that run.
    stands = s.waiting > 0 and s.mode == IN_DECODE
    if s.outstanding > 0 and most < np.inf:
        full = max(taken * RM[c + HELD_SHARE] / e.kv_tokens, (s.outstanding + 1) / e.max_batch)
        if full > most or stands:
            return np.nan
    usage = max(taken / e.kv_tokens, (s.outstanding + 1) * slot)
    if stands:
        queued = s.waiting_tokens + s.waiting * RM[OUTPUT] + RM[c + INPUTS] + RM[c + OUTPUTS]
        usage = max(usage, 1.0 + queued / e.kv_tokens)
    first = _first_token_s(e, s, FM, RM, c, ahead, t, usage)
    if first > latest:
        return np.nan
    if first > least and RM[c + RATIO] >= 0.0:
        return first
    price = RM[PRICE_S]
    if usage < 1.0:
        price *= math.exp(RM[STEEPNESS] * (usage - 1.0))
    return first + price * RM[c + RATIO] + RM[c + LATE]


@compiled
def _price(R, E, FM, IM, RM, c, r, i, outputs, weight):
    """What a request means to replicas of a kind, of which ``i`` is one."""
    e = E[i]
    inputs = float(R[r].input_tokens)
    mean = RM[INPUT] + RM[OUTPUT]
    slot = 1.0 / e.max_batch
    batch = max(1.0 / max(mean / e.kv_tokens, slot), 1.0)
    full = np.int64(batch)
    cached = batch * (RM[INPUT] + 0.5 * RM[OUTPUT])
    step = step_s(e, FM, full, full, cached, 0.0)
    known = float(known_tokens(R, e, IM, r))
    fresh = inputs - known
    pairs = 0.5 * (inputs * inputs - known * known)
    if e.batching == CHUNKED:
        share = own = step_s(e, FM, fresh + full, full, cached, pairs) - step
    else:
        share = own = step_s(e, FM, fresh, 0, 0.0, pairs)
    share += outputs * step * max((inputs + outputs) / e.kv_tokens, slot)
    RM[HEADER + e.kind] += weight * (share - RM[HEADER + e.kind])
    average = RM[HEADER + e.kind]
    longer = max(outputs - RM[OUTPUT], 0.0)
    late = RM[LONG_REPLY] * longer * longer / RM[OUTPUT]
    RM[c + OPEN] = serves(R, E, r, i)
    RM[c + INPUTS], RM[c + OUTPUTS], RM[c + FRESH], RM[c + PAIRS] = inputs, outputs, fresh, pairs
    RM[c + SHARE], RM[c + OWN], RM[c + LATE], RM[c + RENEWAL] = (
        share,
        own,
        late * step,
        average * batch,
    )
    RM[c + RATIO] = share / average if average > 0.0 else 1.0
    # On average a request of a paged engine holds its prompt and half of its reply.
    RM[c + HELD_SHARE] = (RM[INPUT] + 0.5 * RM[OUTPUT]) / mean if e.admission == PAGED else 1.0


@compiled
def _limit(e, FM, RM, c, t, most, latest):
    """The terms of the bound of :mod:`hetero.routers.shortlist` for replicas of a kind."""
    floor, rate, less = prefill_floor(e, FM, RM[c + FRESH], RM[c + PAIRS])
    RM[c + RATE_S], RM[c + LESS_S] = rate, less
    size = (RM[c + INPUTS] + RM[c + OUTPUTS]) / e.kv_tokens
    gain = RM[PRICE_S] * RM[c + RATIO]
    RM[c + GAIN] = max(gain, 0.0)
    RM[c + BASE] = e.way_s + floor + RM[c + LATE] + min(gain, 0.0)
    RM[c + PRICE_H] = math.exp(RM[STEEPNESS] * (size - 1.0))
    # What is surely beyond, whatever is rounded.
    RM[c + MOST_TAKEN] = most / RM[c + HELD_SHARE] * (1.0 + 1e-9) + 1e-9 - size
    RM[c + MOST_SLOTS] = most * (1.0 + 1e-9)
    RM[c + MOST_S] = latest * (1.0 + 1e-9) + 1e-15 * t - e.way_s - floor
    if RM[c + FRESH] < 1.0 or RM[c + RENEWAL] < 0.0:
        RM[c + BASE], RM[c + MOST_S] = -np.inf, np.inf


@compiled
def _among_all(R, E, S, FM, IM, RM, r, t, outputs, weight, most, latest):
    """Look at every replica."""
    best, least, waits = REJECT, np.inf, False
    kinds = 0
    for i in range(len(E)):
        e, s = E[i], S[i]
        c = HEADER + len(E) + e.kind * TERMS
        if e.kind == kinds:
            kinds += 1
            _price(R, E, FM, IM, RM, c, r, i, outputs, weight)
        if RM[c + OPEN] != 0.0 and s.mode != DOWN:
            cost = _cost(e, s, FM, RM, c, ahead(R, s), t, most, latest, least)
            waits = waits or cost != cost
            if cost < least:
                best, least = i, cost
    return best, waits


@compiled
def _among_many(R, E, S, FM, IM, RM, r, t, outputs, weight, most, latest):
    """Look at those that can be the best; the decision is the same."""
    x = HEADER + len(E) * (1 + TERMS)
    update(R, E, S, FM, IM, RM, x)
    best, least, waits, excluded = REJECT, np.inf, False, False
    blocks = int(RM[x + BLOCKS])
    kinds, idle_of = 0, -1
    first, lowest = 0, np.inf
    for k in range(blocks):
        b = row_of_block(E, x, k)
        kind = int(RM[b + KIND])
        c = HEADER + len(E) + kind * TERMS
        if kind == kinds:
            kinds += 1
            i = int(RM[row_at(E, x, int(RM[b + FIRST])) + REPLICA])
            _price(R, E, FM, IM, RM, c, r, i, outputs, weight)
            _limit(E[i], FM, RM, c, t, most, latest)
        RM[b + BOUND] = np.inf
        if RM[c + OPEN] == 0.0:
            continue
        if RM[b + IDLE_ONE] < np.inf and idle_of < kind:
            tighten(E, RM, x, b)
            if RM[b + IDLE_ONE] < np.inf:
                idle_of = kind
                i = int(RM[b + IDLE_ONE])
                cost = _cost(E[i], S[i], FM, RM, c, 0, t, most, latest, least)
                waits = waits or cost != cost
                if cost < least or (cost == least and i < best):
                    best, least = i, cost
        RM[b + BOUND] = bound_s(RM, b, c, t)
        excluded = excluded or RM[b + BOUND] == np.inf
        if RM[b + BOUND] < lowest:
            first, lowest = k, RM[b + BOUND]
    for turn in range(-1, blocks):
        # That of the lowest bound first, which leaves few of the others.
        b = row_of_block(E, x, first if turn < 0 else turn)
        if turn == first or RM[b + BOUND] == np.inf or RM[b + BOUND] > _beyond(least, t):
            continue
        c = HEADER + len(E) + int(RM[b + KIND]) * TERMS
        if RM[b + LOOSE] != 0.0:
            tighten(E, RM, x, b)
            if bound_s(RM, b, c, t) > _beyond(least, t):
                continue
        for row in range(int(RM[b + FIRST]), int(RM[b + STOP])):
            q = row_at(E, x, row)
            bound = bound_s(RM, q, c, t)
            if bound == np.inf:
                excluded = True
            elif not bound > _beyond(least, t):
                i = int(RM[q + REPLICA])
                s = S[i]
                cost = _cost(E[i], s, FM, RM, c, ahead(R, s), t, most, latest, least)
                waits = waits or cost != cost
                if cost < least or (cost == least and i < best):
                    best, least = i, cost
    if best < 0 and excluded and not waits:
        for i in range(len(E)):
            waits = waits or may_take(R, E, S, r, i)
    return best, waits


@compiled
def _beyond(least, t):
    """A bound above this, however it is rounded, is above ``least``."""
    return least + 1e-9 * abs(least) + 1e-15 * t + 1e-12


@compiled
def predictive(R, E, S, FM, IM, RM, r, t):
    """The replica of least first token, priced share of its time, and delay of a long reply."""
    again = is_deferred(R, r)
    target = RM[TARGET_S]
    if target == 0.0 and not again and IM[DEFERRED] > 0:
        return DEFER  # behind those that wait
    _learn(R, RM, r)
    inputs, outputs = float(R[r].input_tokens), _expected(RM, R[r].predicted_tokens)
    RM[ARRIVED] += 0.0 if again else 1.0
    weight = 0.0 if again else 1.0 / min(RM[ARRIVED], _RECENT)
    RM[INPUT] += weight * (inputs - RM[INPUT])
    RM[OUTPUT] += weight * (outputs - RM[OUTPUT])
    most = latest = np.inf
    if target == 0.0:
        most = 1.0
    elif again:
        most = _SPARE
    else:
        latest = target
    if RM[MANY] == 1.0:
        x = HEADER + len(E) * (1 + TERMS)
        RM[MANY] = 2.0 if arrange(E, RM, x, RM[STEEPNESS]) else 0.0
    if RM[MANY] == 2.0:
        best, waits = _among_many(R, E, S, FM, IM, RM, r, t, outputs, weight, most, latest)
    else:
        best, waits = _among_all(R, E, S, FM, IM, RM, r, t, outputs, weight, most, latest)
    if best >= 0:
        R[r].credit = RM[HEADER + len(E) + E[best].kind * TERMS + SHARE]
    elif waits:
        return DEFER
    return best


@dataclass(frozen=True)
class Predictive(Builtin):
    """Least predicted time to first token, plus the price of what the request takes from others.

    While every replica is full, requests wait at the dispatcher, the oldest first, for the first
    that has room. Equation and reasons: :mod:`hetero.routers.predictive`. Throughput, attainment
    and tail change little when a parameter is halved or doubled; none is set by cluster or
    workload.

    Parameters
    ----------
    price_s
        kappa [s]: time to first token that an average request forgoes to spare a full replica;
        a few times the prefill of a long prompt.
    steepness
        theta: the price grows e-fold per 1/theta of the KV cache or batch in use.
    long_reply
        eta: weight of the completion of replies longer than average.
    target_s
        Target for the time to first token that as many requests as possible should meet, at the
        expense of the tail; none by default. A request that would miss it everywhere waits for a
        replica that has room to spare. A little below the promised time leaves room for what
        cannot be predicted.
    """

    price_s: float = 2.0
    steepness: float = 6.0
    long_reply: float = 0.005
    target_s: float | None = None
    name: str = "hetero"
    code: ClassVar[int] = PREDICTIVE

    def __post_init__(self) -> None:
        require(
            all(x >= 0 for x in (self.price_s, self.steepness, self.long_reply)),
            f"price_s {self.price_s}, steepness {self.steepness} and long_reply "
            f"{self.long_reply} must be 0 or more.",
            resolve="leave them at their defaults, or give 0 to switch a term off.",
        )
        require(
            self.target_s is None or self.target_s > 0,
            f"The target for the first token is {self.target_s} s.",
            resolve="give a time above 0 s, or none.",
        )

    def memory(self, deployment: Deployment) -> Floats:
        """Layout of :mod:`hetero.routers.predictive`."""
        count = len(deployment.replicas)
        many = count > _FEW
        memory = np.zeros(HEADER + count * (1 + TERMS) + (size(count) if many else 0))
        memory[MANY] = many
        memory[:ARRIVED] = (
            self.price_s,
            self.steepness,
            self.long_reply,
            self.target_s or 0.0,
        )
        return memory

    def renumber(self, memory: Floats, by: int) -> None:
        """The next request to learn from has another index."""
        memory[NEXT] = max(memory[NEXT] - by, 0.0)
