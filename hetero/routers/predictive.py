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

Tokens of the prompt that the dispatcher's records say are cached on a replica need no prefill
there.

While all replicas are full, ``u_i`` above 1 or a standing queue, requests wait at the dispatcher,
the oldest first: which replica has room first, and for which request, is then seen instead of
predicted, and no replica runs dry beside the queue of another. A paged engine counts as full by
what a request holds on average, its prompt and half of its reply; and one as full whose prompts
ahead take longer than two full steps of the slowest: it has enough to do until it is asked again.

Once none has come for :data:`_GONE` times the mean gap, what counts is when the last of those that
wait, n of them, ends. A request then waits rather than go where its reply, all but surely over in
``x_i`` [s], outlasts T, at which they would end together if each replica took until its last
reply just ends by then:

.. math::
    \sum_i \frac{\max(T - x_i, 0)}{\bar T_i} = n, \qquad
    x_i = (O + 3 \sigma)\, s_i + \max(O - \bar O, 0) \frac{B_i\, prefill_i}{\bar O}

with ``sigma`` the deviation of true outputs from the regression; the last term are the prompts
that the replica prefills while a long reply runs.

With a target for the first token, replicas that would miss it do not count. A request that would
miss it on all waits until one, with the request, is at most 90 % full; beyond capacity those that
can still meet the target thus go first, and the others use what they leave. Without a target all
wait alike, which is what keeps the tail short: the two aims are opposed there.

Where phases are split, a prefill replica hands over to the decode replica j of least

.. math::
    \max\Big(\frac{\sum_n (I + O / 2)}{KV_j}, \frac{n}{B_j},
        \frac{s_j(n) + w_j / (O - 1)}{\tau}\Big) + 2\,l_j

with n its unfinished requests and this one, ``s_j(n)`` their decode step, and ``w_j`` [s] the wait
for the links to j and the transfer: the one whose tightest limit, of cache, of batch slots and of
the time per token, leaves most room. ``tau`` is the target of TPOT; without one, the step of a full
batch on the slowest. ``l_j`` [s] is the time that the transfer takes links from others, none inside
a machine. Where the fleet is divided into cells, j is in that of the prefill replica as long as one
there stays within its limits without the wait: transfers between many machines wait for two links
each, and hold one idle while they wait for the other.

Predicted outputs are used as far as finished requests bear them out: ``O`` is the regression of
true on predicted outputs over the finished ones, so a predictor without skill counts as its
corrected mean. Without this, replicas collect the requests whose lengths were underestimated most.

Related: the exponential price of load is that of online routing on unrelated machines (Aspnes et
al., 1997); Xiong et al. (eq. 7) use it on the KV usage alone.

Among many replicas the same choice is made without a look at most: replicas of one kind have rows
with what bounds their cost from below, written anew where a step has ended or begun since.

Layout of ``RM``: header of :data:`HEADER` entries, :data:`TERMS` for each kind, then the columns.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hetero.deployment import Deployment
from hetero.engine.candidates import may_take, takes_more
from hetero.engine.compiled import compiled, inlined, interpreted
from hetero.engine.dispatcher_queue import is_deferred
from hetero.engine.kv import fits
from hetero.engine.prefix import known_tokens
from hetero.engine.state import (
    BLOCK,
    CHUNKED,
    DECODE_ONLY,
    DEFER,
    DEFERRED,
    DOWN,
    EVENTS,
    FINISHED,
    IN_DECODE,
    IN_PREFILL,
    PAGED,
    PREFILL_ONLY,
    REJECT,
    REJECTED,
)
from hetero.engine.steps import step_s, token_s
from hetero.errors import require
from hetero.routers.base import PREDICTIVE, Builtin, Floats

# Header entries: the parameters; means over recent arrivals; what finished requests taught.
PRICE_S, STEEPNESS, LONG_REPLY, TARGET_S, TPOT_S = 0, 1, 2, 3, 4
ARRIVED, INPUT, OUTPUT = 5, 6, 7
NEXT, FINISHES, PREDICTED, TRUE, VARIANCE, COVARIANCE = 8, 9, 10, 11, 12, 13
# The request in hand and its output to expect; events seen; whether there are many replicas (1:
# perhaps, 2: in rows) and of how many kinds; the second best of the decision before.
LAST, EXPECTED, SEEN_EVENTS, MANY, KINDS, SECOND = 14, 15, 16, 17, 18, 19
# The latest arrival and the mean gap; the variance of true outputs; when those that wait would end,
# and the longest that prompts ahead may take while others wait.
LATEST, GAP, TRUE_VARIANCE, END_S, LONGEST_S = 20, 21, 22, 23, 24
HEADER = 25
# Of each kind: the average T; and what the request in hand means to it: T, its prefill, the tokens
# of that and their pairs, what a full replica renews, T over its average, the delay of a long
# reply, and the share of its tokens that counts as held; its first row and the one behind its last;
# least time per token; what it costs at least on any replica of the kind; the step of a full batch,
# and most tokens of prompts ahead while others wait.
SHARE, OWN, FRESH, PAIRS, RENEWAL, RATIO, LATE, HELD_SHARE = 1, 2, 3, 4, 5, 6, 7, 8
START, STOP, LEAST_RATE, FLOOR, STEP, AHEAD, TERMS = 9, 10, 11, 12, 13, 14, 15
# Columns for M replicas each: the end of its step when its row was written, and its row; by row its
# replica, and what bounds its cost, see _bound_s; by block its first end then; bounds; its cell.
SEEN_END, ROW, REPLICA, REST, BY_TOKENS, BY_SLOTS, BEFORE = 0, 1, 2, 3, 4, 5, 6
SEEN_BLOCK, BOUND, CELL, COLUMNS = 7, 8, 9, 10
_RECENT = 200.0  # arrivals that the averages remember: minutes of traffic, many per length
_LEARNT = 500.0  # finished requests that the regression remembers
_GONE = 20.0  # mean gaps without an arrival after which none is expected: by chance once in e^20
_SPARE = 0.9  # how full a replica may be that takes a request which has missed its target
_LINK = 2.0  # 1/s; the share of a limit that a request forgoes to spare links a second
_FEW = 48  # replicas that are looked at one by one
_FINITE = 1e300  # s; above every cost, below that of what is out
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
            RM[TRUE_VARIANCE] = (1.0 - weight) * (RM[TRUE_VARIANCE] + weight * dy * dy)
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


@inlined
def _reply_s(RM, c, outputs):
    """x: time in which a reply on a full replica is all but surely over."""
    known = RM[COVARIANCE] * RM[COVARIANCE] / max(RM[VARIANCE], 1e-300)
    most = outputs + 3.0 * math.sqrt(max(RM[TRUE_VARIANCE] - known, 0.0))
    beside = max(RM[c + RENEWAL] / RM[OUTPUT] - RM[c + STEP], 0.0)
    return most * RM[c + STEP] + max(outputs - RM[OUTPUT], 0.0) * beside


@compiled
def _end_s(R, E, S, IM, RM, r, outputs):
    """T: when those that wait would end, if all were as long as ``r`` and replicas end together."""
    end = np.inf
    while True:
        work, rate = float(IM[DEFERRED]), 0.0
        for i in range(len(E)):
            c = HEADER + TERMS * E[i].kind
            reply = _reply_s(RM, c, outputs)
            if reply < end and RM[c] > 0.0 and may_take(R, E, S, r, i):
                work += reply / RM[c]
                rate += 1.0 / RM[c]
        if rate == 0.0 or not work / rate < end:
            return end
        end = work / rate


@inlined
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


@inlined
def _ahead(R, s):
    """Tokens that a replica will prefill before those of a request that comes now."""
    tokens = s.waiting_tokens + s.staged_tokens
    if s.partial >= 0:
        tokens += R[s.partial].input_tokens - s.partial_tokens
    return tokens


@inlined
def _first_token_s(R, e, s, FM, RM, c, t, usage):
    """F: time to the first token of a request that arrives now."""
    step = rest = 0.0
    if s.running > 0 and (s.mode == IN_DECODE or e.batching == CHUNKED):
        step = step_s(e, FM, s.running, s.running, s.cached, 0.0)
    if s.mode == IN_PREFILL:
        rest = max(FM[e.index] - t, 0.0)
    elif s.mode == IN_DECODE:
        rest = 0.5 * step
    ahead = _ahead(R, s)
    if usage > 1.0:
        # w: until the excess over a full replica leaves, or the work of those that wait.
        excess = (usage - 1.0) * RM[c + RENEWAL]
        rest += excess if s.waiting == 0 else max(s.load - s.decoding_load, 0.0)
        ahead = 0  # the prompts ahead are prefilled meanwhile
    if ahead == 0 and e.batching != CHUNKED:
        return e.way_s + rest + RM[c + OWN]
    return e.way_s + rest + _prefill_s(e, FM, s, RM[c + FRESH] + ahead, RM[c + PAIRS], step)


@inlined
def _beyond(least, t):
    """What a bound has to be above for a cost above ``least``, whatever is rounded."""
    return least + 1e-9 * abs(least) + 1e-15 * t + 1e-12


@inlined
def _slope(e, FM, p, tokens):
    """Least slope from a point of a table on; its last slope, and where such a line begins."""
    j = e.knots[p] + 3 * (e.knot_count[p] - 1)
    slope = steep = FM[j + 2]
    start, base = token_s(e, FM, p, tokens), 0.0
    while j >= e.knots[p] and FM[j] > tokens:
        slope = min(slope, (FM[j + 1] - start) / (FM[j] - tokens))
        base = min(base, FM[j + 1] - start - steep * (FM[j] - tokens))
        j -= 3
    return slope, steep, base


@inlined
def _prefill_floor(e, FM, RM, c):
    """What a prefill takes at least, and per token before it; NaN where that is not known."""
    fresh = RM[c + FRESH]
    slope = _slope(e, FM, 0, fresh)[0]
    if e.batching != CHUNKED:
        if e.pieces == 2:
            slope = min(slope, _slope(e, FM, 1, fresh)[0])
        return RM[c + OWN], slope
    if e.max_batch >= e.max_step_tokens:
        return np.nan, 0.0
    if fresh > e.max_step_tokens - e.max_batch:  # it may take several steps
        floor = RM[c + LEAST_RATE] * fresh + 0.5 * e.pair_s[0] * RM[c + PAIRS]
        return floor, RM[c + LEAST_RATE]
    pairs = 0.5 * RM[c + PAIRS]  # those of the last step, where what is before takes others
    return token_s(e, FM, 0, fresh) + e.pair_s[0] * pairs, min(slope, RM[c + LEAST_RATE])


@inlined
def _cost(R, e, s, FM, RM, c, t, inputs, outputs, most, latest, least):
    """Cost of a replica; infinite where the request is to wait instead, or beyond ``least``."""
    if RM[END_S] < np.inf and _reply_s(RM, c, outputs) > RM[END_S]:
        return np.inf
    slot = 1.0 / e.max_batch
    taken = s.outstanding_tokens + inputs + outputs
    usage = max(taken / e.kv_tokens, (s.outstanding + 1) * slot)
    # A queue that stands while the replica decodes shows that it is full, whatever was predicted of
    # the requests that run.
    stands = s.waiting > 0 and s.mode == IN_DECODE
    if s.outstanding > 0 and most < np.inf:
        full = max(taken * RM[c + HELD_SHARE] / e.kv_tokens, (s.outstanding + 1) / e.max_batch)
        if full > most or stands or _ahead(R, s) > RM[c + AHEAD]:
            return np.inf
    if stands:
        queued = s.waiting_tokens + s.waiting * RM[OUTPUT] + inputs + outputs
        usage = max(usage, 1.0 + queued / e.kv_tokens)
    price = RM[PRICE_S] * math.exp(RM[STEEPNESS] * (min(usage, 1.0) - 1.0))
    if RM[c + FLOOR] + price * RM[c + RATIO] > _beyond(least, t):
        return np.inf
    first = _first_token_s(R, e, s, FM, RM, c, t, usage)
    if first > latest or (first > least and RM[c + RATIO] >= 0.0):
        return np.inf
    return first + price * RM[c + RATIO] + RM[c + LATE]


@inlined
def _value(R, e, FM, IM, RM, c, r, inputs, outputs, weight):
    """What a request means to replicas of a kind, as an entry of ``RM`` each."""
    slot = 1.0 / e.max_batch
    mean = RM[INPUT] + RM[OUTPUT]
    batch = max(1.0 / max(mean / e.kv_tokens, slot), 1.0)
    full = int(batch)
    cached = batch * (RM[INPUT] + 0.5 * RM[OUTPUT])
    step = step_s(e, FM, full, full, cached, 0.0)
    known = float(known_tokens(R, e, IM, r))
    fresh = inputs - known
    pairs = 0.5 * (inputs * inputs - known * known)
    if e.batching == CHUNKED:
        own = step_s(e, FM, fresh + full, full, cached, pairs) - step
    else:
        own = step_s(e, FM, fresh, 0, 0.0, pairs)
    share = own + outputs * step * max((inputs + outputs) / e.kv_tokens, slot)
    RM[c] += weight * (share - RM[c])
    longer = max(outputs - RM[OUTPUT], 0.0)
    RM[c + SHARE], RM[c + OWN], RM[c + FRESH], RM[c + PAIRS] = share, own, fresh, pairs
    RM[c + RENEWAL], RM[c + STEP] = RM[c] * batch, step
    if RM[c + AHEAD] == 0.0:
        size = e.max_step_tokens
        RM[c + AHEAD] = RM[LONGEST_S] * size / step_s(e, FM, size, 0, 0.0, 0.0)
    RM[c + RATIO] = share / RM[c] if RM[c] > 0.0 else 1.0
    RM[c + LATE] = RM[LONG_REPLY] * longer * longer / RM[OUTPUT] * step
    # On average a request of a paged engine holds its prompt and half of its reply.
    RM[c + HELD_SHARE] = (RM[INPUT] + 0.5 * RM[OUTPUT]) / mean if e.admission == PAGED else 1.0
    floor, slope = _prefill_floor(e, FM, RM, c)
    RM[c + FLOOR] = -np.inf
    if slope >= 0.0 and RM[c + RATIO] >= 0.0 and floor > 0.0:
        RM[c + FLOOR] = e.way_s + floor + RM[c + LATE]


@compiled
def _best(R, E, S, FM, IM, RM, r, t, inputs, outputs, anew, weight, most, latest):
    """The replica of least cost, -1 for none."""
    best, least = -1, np.inf
    for i in range(len(E)):
        e = E[i]
        c = HEADER + TERMS * e.kind
        if (anew and e.first == i) or e.prefix_index > 0:
            _value(R, e, FM, IM, RM, c, r, inputs, outputs, weight)
        if not RM[c + FLOOR] > _beyond(least, t) and may_take(R, E, S, r, i):
            cost = _cost(R, e, S[i], FM, RM, c, t, inputs, outputs, most, latest, least)
            if cost < least:
                best, least = i, cost
    return best


@compiled
def _arrange(E, FM, RM):
    """Give replicas of one kind rows side by side, where kinds are few enough for that."""
    count = len(E)
    x = HEADER + TERMS * count
    row = kind = 0
    RM[MANY] = 0.0
    while row < count:
        if 8 * kind > count:
            return
        c = HEADER + TERMS * kind
        RM[c + START] = row
        for i in range(count):
            if E[i].kind == kind:
                RM[x + ROW * count + i], RM[x + REPLICA * count + row] = row, i
                RM[x + i] = RM[x + SEEN_BLOCK * count + i] = np.nan
                RM[c + LEAST_RATE] = _least_rate(E[i], FM)
                row += 1
        RM[c + STOP] = row
        kind += 1
    RM[KINDS], RM[MANY] = kind, 2.0


@compiled
def _write(R, e, s, FM, RM, x, count):
    """Write the row of a replica."""
    before = float(_ahead(R, s))
    rest = np.inf if s.mode == DOWN else 0.0
    by_tokens = math.exp(RM[STEEPNESS] * min(s.outstanding_tokens / e.kv_tokens, 2.0))
    by_slots = math.exp(RM[STEEPNESS] * ((s.outstanding + 1) / e.max_batch - 1.0))
    if s.waiting > 0 and s.mode == IN_DECODE:
        by_slots = np.inf
    beside = 0.0
    if e.batching == CHUNKED and s.running > 0:
        j, levels = e.rates[0] + min(s.running, e.rate_count[0]) - 1, e.rate_count[0]
        beside = FM[j + 2 * levels] + FM[j + levels] * s.cached
        if FM[j + 3 * levels] < 0.0:
            beside = np.nan
        before += s.running
    if s.mode == IN_PREFILL:
        rest = FM[e.index] + beside
    elif s.mode == IN_DECODE and s.running > 0:
        rest = -0.5 * step_s(e, FM, s.running, s.running, s.cached, 0.0) - beside
    if before < 0.0 or not beside >= 0.0:
        rest = np.nan  # no bound
    RM[x + e.index] = FM[e.index]
    q = x + int(RM[x + ROW * count + e.index])
    RM[q + REST * count], RM[q + BEFORE * count] = rest, before
    RM[q + BY_TOKENS * count], RM[q + BY_SLOTS * count] = by_tokens, by_slots


@compiled
def _least_rate(e, FM):
    """Least time per token of the table of a step."""
    top = float(e.max_step_tokens + e.max_batch)
    rate = token_s(e, FM, 0, top) / top
    for j in range(e.knots[0], e.knots[0] + 3 * e.knot_count[0], 3):
        if 0.0 < FM[j] < top:
            rate = min(rate, FM[j + 1] / FM[j])
    return rate


@inlined
def _bound_s(rest, by_tokens, by_slots, more, t, floor, latest, gain, size, tokens, slots):
    """Below the cost of a replica; infinite where it is full or late, NaN where it may be less.

    ``rest`` is the end of its step where that is above 0, else less than 0 by what is left of it;
    ``more`` [s] what is to be prefilled before adds.
    """
    wait = rest - t if rest > 0.0 else -rest
    price = gain * min(max(by_tokens * size, by_slots), 1.0)
    # Where it is full, other things count than what is to be prefilled before.
    bound = floor + wait + min(more + price, gain)
    out = (by_tokens > tokens) | (by_slots > slots) | (wait > latest)
    return np.inf if out else bound


@compiled
def _look(R, E, S, FM, RM, r, i, t, inputs, outputs, most, latest, least):
    """Cost of replica ``i``; infinite where it cannot take the request now, or beyond ``least``."""
    if not may_take(R, E, S, r, i):
        return np.inf
    c = HEADER + TERMS * E[i].kind
    return _cost(R, E[i], S[i], FM, RM, c, t, inputs, outputs, most, latest, least)


@compiled
def _best_of_many(R, E, S, FM, IM, RM, r, t, inputs, outputs, anew, weight, most, latest):
    """The same with a look at those only whose cost is not surely above the least so far."""
    count = len(E)
    x = HEADER + TERMS * count
    best, least = -1, np.inf
    blocks = x + SEEN_BLOCK * count
    for b in range(0, count, BLOCK):
        # Who is not sent a request changes when a step ends, the first of its block before others.
        earliest = FM[E[b].block]
        if RM[blocks + b // BLOCK] == earliest and earliest > t:
            continue
        RM[blocks + b // BLOCK] = earliest
        for i in range(b, min(b + BLOCK, count)):
            if RM[x + i] != FM[i] or FM[i] <= t:
                _write(R, E[i], S[i], FM, RM, x, count)
                if not anew:  # whoever has not changed had no room for it
                    cost = _look(R, E, S, FM, RM, r, i, t, inputs, outputs, most, latest, least)
                    if cost < least:
                        best, least = i, cost
    theta = RM[STEEPNESS]
    slots = math.exp(theta * (most - 1.0)) * (1.0 + 1e-9)
    second, cut, kinds = int(RM[SECOND]), _FINITE, int(RM[KINDS])
    bounds = RM[x + BOUND * count : x + BOUND * count + BLOCK]
    first = E[second].kind
    for kind in range(first, first + kinds if anew else first):
        c = HEADER + TERMS * (kind % kinds)
        start, stop = int(RM[c + START]), int(RM[c + STOP])
        e = E[int(RM[x + REPLICA * count + start])]
        _value(R, e, FM, IM, RM, c, r, inputs, outputs, weight)
        if kind == first:  # the second best of before is likely to be near the least
            cost = _look(R, E, S, FM, RM, r, second, t, inputs, outputs, most, latest, least)
            if cost < least:
                best, least, cut = second, cost, _beyond(cost, t)
        if RM[c + FLOOR] > cut:
            continue
        floor, slope = _prefill_floor(e, FM, RM, c)
        # Up to here a look at the table tells what is to be prefilled before.
        fresh, one_step, steep, base = RM[c + FRESH], np.inf, slope, 0.0
        alone = token_s(e, FM, 0, fresh)
        if e.pieces == 2:
            one_step = 0.0
        elif e.batching == CHUNKED:
            one_step = float(e.max_step_tokens)
            alone -= 0.5 * e.pair_s[0] * RM[c + PAIRS]
        else:
            steep, base = _slope(e, FM, 0, fresh)[1:]
        late = latest * (1.0 + 1e-9) + 1e-15 * t - floor - e.way_s if slope >= 0.0 else np.inf
        gain = RM[PRICE_S] * RM[c + RATIO]
        floor = e.way_s + floor + RM[c + LATE] if gain >= 0.0 else np.nan
        size = math.exp(theta * ((inputs + outputs) / e.kv_tokens - 1.0))
        held = RM[c + HELD_SHARE]
        tokens = slots if held == 1.0 else math.exp(theta * (most / held - 1.0)) * (1.0 + 1e-9)
        tokens = max(tokens / size, 1.0 + 1e-9)  # one that is empty takes any request
        if theta == 0.0 or e.max_batch == 1:
            floor = np.nan
        for b in range(start, stop, BLOCK):
            end = min(b + BLOCK, stop)
            rest = RM[x + REST * count + b : x + REST * count + end]
            by_tokens = RM[x + BY_TOKENS * count + b : x + BY_TOKENS * count + end]
            by_slots = RM[x + BY_SLOTS * count + b : x + BY_SLOTS * count + end]
            before = RM[x + BEFORE * count + b : x + BEFORE * count + end]
            near = 0
            for k in range(end - b):
                bounds[k] = _bound_s(
                    *(rest[k], by_tokens[k], by_slots[k]),
                    max(slope * before[k], steep * before[k] + base),
                    *(t, floor, late, gain, size, tokens, slots),
                )
                near += not bounds[k] > cut
            for k in range(end - b if near > 0 else 0):
                if bounds[k] > cut:
                    continue
                if before[k] > 0.0 and fresh + before[k] < one_step:
                    more = token_s(e, FM, 0, fresh + before[k]) - alone
                    bound = _bound_s(
                        *(rest[k], by_tokens[k], by_slots[k], more),
                        *(t, floor, late, gain, size, tokens, slots),
                    )
                    if bound > cut:
                        continue
                i = int(RM[x + REPLICA * count + b + k])
                cost = _look(R, E, S, FM, RM, r, i, t, inputs, outputs, most, latest, least)
                if cost < least or (cost == least and i < best):
                    second = best
                    best, least = i, cost
                    cut = _beyond(least, t)
    if best >= 0:
        RM[x + best] = RM[blocks + best // BLOCK] = np.nan
        RM[SECOND] = max(second, 0)
    return best


@compiled
def _decode(R, E, S, FM, IM, RM, e, r, t, inputs, outputs):
    """The decode replica whose tightest limit leaves most room, beside prefill replica ``e``."""
    count = len(E)
    cells = HEADER + (TERMS + CELL) * count
    target = RM[TPOT_S]
    held_share = (RM[INPUT] + 0.5 * RM[OUTPUT]) / (RM[INPUT] + RM[OUTPUT])
    for j in range(count if target == 0.0 else 0):
        if E[j].role == DECODE_ONLY:
            target = max(target, RM[HEADER + TERMS * E[j].kind + STEP])
    for anywhere in range(2):
        best, least, room = -1, np.inf, False
        for j in range(count):
            if anywhere == 0 and RM[cells + j] != RM[cells + e.index]:
                continue
            if E[j].role == DECODE_ONLY and takes_more(S[j]) and fits(R, E[j], r):
                cached = (S[j].outstanding_tokens + inputs + outputs) * held_share
                held = S[j].outstanding + 1
                batch = min(held, E[j].max_batch)
                step = step_s(E[j], FM, batch, batch, min(cached, float(E[j].kv_tokens)), 0.0)
                usage = max(cached / E[j].kv_tokens, held / E[j].max_batch)
                room = room or max(usage, step / target) < 1.0
                free, busy, taken = t, FM[e.link_s_per_token + j] * inputs, 0.0
                for k in range(e.media + 2 * j, e.media + 2 * j + 2):
                    if IM[k] >= 0:
                        free, taken = max(free, FM[IM[k]]), busy
                way = free - t + FM[e.link_latency_s + j] + busy
                pace = (step + way / max(outputs - 1.0, 1.0)) / target
                usage = max(usage, pace) + _LINK * taken
                if usage < least:
                    best, least = j, usage
        if room:
            break
    return best


@compiled
def predictive(R, E, S, FM, IM, RM, r, t):
    """The replica of least first token, priced share of its time, and delay of a long reply."""
    again = is_deferred(R, r)
    target = RM[TARGET_S]
    if not again:
        RM[GAP] += (t - RM[LATEST] - RM[GAP]) / min(RM[ARRIVED] + 1.0, _RECENT)
        RM[LATEST] = t
    if target == 0.0 and not again and IM[DEFERRED] > 0:
        return DEFER  # behind those that wait
    _learn(R, RM, r)
    inputs, outputs = float(R[r].input_tokens), _expected(RM, R[r].predicted_tokens)
    RM[ARRIVED] += 0.0 if again else 1.0
    weight = 0.0 if again else 1.0 / min(RM[ARRIVED], _RECENT)
    RM[INPUT] += weight * (inputs - RM[INPUT])
    RM[OUTPUT] += weight * (outputs - RM[OUTPUT])
    most = latest = np.inf
    if target == 0.0 or again:
        most = _SPARE if target > 0.0 else 1.0
    else:
        latest = target
    if RM[SEEN_EVENTS] != IM[EVENTS]:
        RM[SEEN_EVENTS], RM[LAST] = IM[EVENTS], -1.0
        RM[MANY] = min(RM[MANY], 1.0)
    end = np.inf
    if again and not E[0].split and t - RM[LATEST] > _GONE * RM[GAP]:
        end = _end_s(R, E, S, IM, RM, r, outputs)
    anew = not again or RM[LAST] != r or RM[EXPECTED] != outputs or end > RM[END_S]
    RM[END_S] = end
    RM[LAST], RM[EXPECTED] = r if again or target == 0.0 else -1, outputs
    if RM[MANY] == 1.0:
        _arrange(E, FM, RM)
    if RM[MANY] == 2.0:
        best = _best_of_many(R, E, S, FM, IM, RM, r, t, inputs, outputs, anew, weight, most, latest)
    else:
        best = _best(R, E, S, FM, IM, RM, r, t, inputs, outputs, anew, weight, most, latest)
    if best >= 0:
        R[r].credit = RM[HEADER + TERMS * E[best].kind + SHARE]
        if E[best].role == PREFILL_ONLY:
            R[r].decode_node = _decode(R, E, S, FM, IM, RM, E[best], r, t, inputs, outputs)
        return best
    for i in range(len(E)):
        if may_take(R, E, S, r, i):
            return DEFER
    return REJECT


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
    tpot_s
        Target for the time per token, by which decode replicas are chosen; none by default.
    cells
        Parts of the fleet, each with its share of every kind of replica in the order in which they
        stand, that KV caches do not leave while there is room in them: where links of many machines
        block one another.
    """

    price_s: float = 2.0
    steepness: float = 6.0
    long_reply: float = 0.005
    target_s: float | None = None
    tpot_s: float | None = None
    cells: int = 1
    name: str = "hetero"
    code: ClassVar[int] = PREDICTIVE

    def __post_init__(self) -> None:
        require(
            all(x >= 0 for x in (self.price_s, self.steepness, self.long_reply)),
            f"price_s {self.price_s}, steepness {self.steepness} and long_reply "
            f"{self.long_reply} must be 0 or more.",
            resolve="leave them at their defaults, or give 0 to switch a term off.",
        )
        for what, target_s in (("the first token", self.target_s), ("a token", self.tpot_s)):
            require(
                target_s is None or target_s > 0,
                f"The target for {what} is {target_s} s.",
                resolve="give a time above 0 s, or none.",
            )
        require(
            self.cells >= 1,
            f"A fleet cannot be divided into {self.cells} cells.",
            resolve="give a whole number of 1 or more.",
        )

    def memory(self, deployment: Deployment) -> Floats:
        """Layout of :mod:`hetero.routers.predictive`."""
        count = len(deployment.replicas)
        memory = np.zeros(HEADER + (TERMS + COLUMNS) * count)
        memory[MANY] = count > _FEW and not interpreted()  # bounds pay where they are compiled
        memory[:ARRIVED] = (
            self.price_s,
            self.steepness,
            self.long_reply,
            self.target_s or 0.0,
            self.tpot_s or 0.0,
        )
        nodes = deployment.replicas
        memory[LONGEST_S] = 2.0 * max(
            float(one.step.prefill_seconds([one.engine.max_step_tokens]))
            if one.engine.batching != "static"
            else np.inf
            for one in nodes
        )
        kinds = [(one.role, one.gpu, one.gpus, one.kv_tokens, one.step.source) for one in nodes]
        number, seen = Counter(kinds), Counter[object]()
        for k, kind in enumerate(kinds):
            memory[k - count] = seen[kind] * self.cells // number[kind]
            seen[kind] += 1
        return memory

    def renumber(self, memory: Floats, by: int) -> None:
        """The next request to learn from has another index."""
        memory[NEXT] = max(memory[NEXT] - by, 0.0)
        memory[LAST] = -1.0
