r"""The most that GPUs or a deployment serve: one bound of their work, by linear duality.

A step in which b requests decode with x cached tokens each, beside m prompt tokens, takes

.. math:: T = f(b + m, b) + \kappa_b\,b\,x, \qquad x_{min} \le x \le \min(x_{max}, C / b)

seconds, with C the cache. b is taken by intervals, with the least T and the least T / b of each,
and m at the corners of the convex envelope of f: no step does more. Prompts that are not cut share
steps of up to M tokens; longer ones go alone. With y = I / M no such step holds more than 1 in sum
of y, nor of :math:`\lfloor (k + 1)\,y \rfloor / k`, or y where (k + 1) y is whole (Fekete and
Schepers, 2001). Who meets the target :math:`\tau` gets a token per :math:`\tau` on average: over
the steps of a pool, the GPUs that one request may decode on, :math:`\sum b\,(T - \tau) \le 0` for
those in time. A step for both sorts is a mean of two for one of them, as T is straight in x.

Let a GPU of type g cost :math:`u_g`, being late q, and let steps of kind k earn :math:`p_k` for
prompts and :math:`d_{ks}` for tokens decoded and read, in time or late (s), but never more than
they cost. Then request r pays at least :math:`c_r`, and weak duality bounds the rate:

.. math::
    c_r = \min_k (p_k \cdot w_{kr} + u_k\,a_{kr}) + \min_{ks} (d_{ks} \cdot v_r + q\,[s\ late]),
    \qquad \lambda \le \frac{\sum_g N_g\,u_g}{\bar c - q\,(1 - goal)}

with what its prompt fills w, its attention and its steps alone a [s], and its tokens v. Where a
request decodes on the replica that prefilled it, k is the same in both: one minimum of their sum.
Any prices do; good ones are the duals of a linear program over classes of like requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import joblib
import numpy as np

from hetero.arrays import Floats, Ints
from hetero.deployment import Deployment, Replica
from hetero.latency.step import Piece
from hetero.programs import Program
from hetero.workload import Trace

_QUANTILES = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # between classes of requests
_FILLS = (1, 2, 3)  # k of the functions of what fills a step
_INTERVALS = 40  # of the number of requests that decode, above 16


@dataclass(frozen=True, slots=True, eq=False)
class StepKind:
    """Steps that ``gpus`` GPUs of a type take together, never faster than their piece says.

    Attributes
    ----------
    pool
        Same for all that one request may decode on.
    kv_tokens, max_batch, max_tokens
        Largest cache, number of requests that decode, and new tokens of a step; 0 of either for
        who does the other phase alone. Prompts that are not cut go alone if they are longer.
    chunked, whole
        Whether prompts are cut beside what decodes, and whether all that a step does is done at
        once; in pipelines it comes in parts, which need not be whole numbers.
    """

    gpu: str
    gpus: int
    pool: str
    piece: Piece
    kv_tokens: float
    max_batch: int
    max_tokens: float
    chunked: bool
    whole: bool

    @classmethod
    def of(
        cls, one: Replica, gpu: str, pool: str, *, most_tokens: float = 0.0, whole: bool = True
    ) -> StepKind:
        """Steps of a replica, of up to ``most_tokens`` where its prompts are cut and that is more.

        Of two pieces, each of which its steps take at least, this is the first.
        """
        chunked = one.engine.batching == "chunked" and one.role != "decode"
        tokens = max(float(one.engine.max_step_tokens), most_tokens if chunked else 0.0)
        batch = 0 if one.role == "prefill" else one.engine.max_batch
        tokens = 0.0 if one.role == "decode" else tokens
        piece, held = one.step.pieces[0], one.kv_tokens
        return cls(gpu, one.gpus, pool, piece, held, batch, tokens, chunked, whole)

    def columns(self, least: float, most: float, intervals: int = _INTERVALS) -> Floats:
        """Prompt tokens, decoding, cached tokens, time and least time per token; shape (5, K).

        ``least`` and ``most`` are the cached tokens of a request that decodes.
        """
        knots = self.piece.knots_tokens
        knots = knots[(knots > 0) & (knots < self.max_tokens)]
        corners = np.unique([0.0, *knots, self.max_tokens])
        times = self._seconds(corners, 0.0 * corners)
        hull = _envelope(corners, times)
        prompts = np.unique([least, *corners[1:]])
        prompts = prompts[(self.chunked | (prompts >= least)) & (prompts <= self.max_tokens)]
        found = [[prompts, 0.0 * prompts, 0.0 * prompts, *2 * [self._prompts_s(prompts)]]]
        edges = np.array(
            [*range(17), *np.geomspace(16, max(16, self.max_batch), intervals), *knots]
        )
        edges = np.unique(np.minimum(np.floor(edges) if self.whole else edges, self.max_batch))
        b = np.unique(np.append(edges, np.arange(self.max_batch + 1.0)))
        alone = self._seconds(b, b)
        if self.chunked:
            beside = b * (1.0 + 1e-9) + 1e-9
            extra = self._seconds(beside, b) - self._seconds(beside, 0.0 * b)
            alone = np.minimum(alone, np.interp(b, corners[hull], times[hull]) + extra)
        rates = np.minimum(self.piece.per_cached_token_s, self.piece.mixed_rows[0])
        rates = rates[np.clip(b.astype(np.int64) - 1, 0, len(rates) - 1)]
        low, high = edges[:-1] + self.whole, edges[1:]
        low, high = low[low * least <= self.kv_tokens], high[low * least <= self.kv_tokens]
        ends = np.stack([np.searchsorted(b, low), np.searchsorted(b, high, side="right")], axis=1)

        def lowest(values: Floats) -> Floats:
            """Least of the values within each interval."""
            padded = np.append(values, np.full((*values.shape[:-1], 1), np.inf), axis=-1)
            return np.asarray(np.minimum.reduceat(padded, ends.ravel(), axis=-1)[..., ::2])

        wait, rate = lowest(alone), lowest(rates)
        pace = lowest(np.append(np.inf, alone[1:] / b[1:]))
        rows = [(0.0 * low, 0.0 * low + 1.0, pace, wait, np.arange(len(low)))]
        if self.chunked:
            both = lowest(self._seconds(corners[hull][:, None], b))
            for edge, good in ((low, low > 0), (high, high > low)):
                n, at = np.nonzero((corners[hull][:, None] >= high) & good)
                rows.append((corners[hull][n] - edge[at], edge[at], *2 * [both[n, at]], at))
        m, k, t, wait, at = (np.concatenate(part) for part in zip(*rows, strict=True))
        for x in (np.full(len(at), least), np.minimum(most, self.kv_tokens / low.clip(1e-9))[at]):
            more = x * rate[at]
            found.append([m, k, k * x, t + k * more, wait + low[at] * more])
        return np.concatenate([np.array(one) for one in found], axis=1)

    def shares(self, inputs: Floats) -> tuple[Floats, Floats]:
        """What prompts fill of a step, by each function, shape (F, N), and seconds alone, (N,)."""
        share, alone_s = inputs / self.max_tokens, self.piece.per_pair_s * inputs**2 / 2.0
        if self.chunked:
            return share[None], alone_s
        fills = [share]
        for k in _FILLS:
            n = (k + 1.0) * inputs
            fills.append(np.where(n % self.max_tokens == 0, share, n // self.max_tokens / k))
        short = inputs <= self.max_tokens
        return np.where(short, fills, 0.0), alone_s + np.where(short, 0.0, self._prompts_s(inputs))

    def _prompts_s(self, tokens: Floats) -> Floats:
        """Time of prefilling so many tokens, in one step or in the best of equal parts [s]."""
        times = self._seconds(tokens, 0.0 * tokens)
        # Between knots the time per token only rises or falls.
        knots = self.piece.knots_tokens[self.piece.knots_tokens > 0]
        pace = np.append(np.inf, self._seconds(knots, 0.0 * knots) / knots)
        least = np.minimum.accumulate(pace)[np.searchsorted(knots, tokens, side="right")]
        return times if self.whole else np.minimum(times, tokens * least)

    def _seconds(self, tokens: Floats, decoding: Floats) -> Floats:
        return self.piece.seconds(tokens, decoding, 0.0, 0.0)


def _envelope(x: Floats, y: Floats) -> Ints:
    """Numbers of the points on the lower convex envelope of a line, in order."""
    slope = np.subtract.outer(y, y) / (np.subtract.outer(x, x) + np.eye(len(x)))
    before = np.tri(len(x), k=-1, dtype=bool)
    steepest = slope.max(axis=1, where=before, initial=-np.inf)
    return np.flatnonzero(steepest < slope.min(axis=1, where=before.T, initial=np.inf))


def deployment_rps(deployment: Deployment, trace: Trace) -> float | None:
    """Rate of the requests of a trace that no router gets out of a deployment [requests/s].

    Targets do not enter. Requests that no replica can hold are left out. None where prefix caches
    shorten prompts by as much as the router makes of them.

    Examples
    --------
    >>> from hetero.latency.step import StepModel
    >>> step = StepModel.affine(floor_s=0.0, per_token_s=0.01, per_cached_token_s=0.0)
    >>> two = Deployment("two", tuple(Replica(name, step, kv_tokens=10**6) for name in "ab"))
    >>> round(deployment_rps(two, Trace([0.0], [99], [2])), 6)  # 100 tokens, 1 s each
    2.0
    """
    every = deployment.replicas
    if trace.prefix_ids is not None and any(one.engine.prefix_cache for one in every):
        return None
    most = [max(r.kv_tokens for r in every if r.role != one) for one in ("prefill", "decode")]
    held = np.flatnonzero(trace.input_tokens + trace.output_tokens <= min(most))
    if not len(held):
        return 0.0
    gpus, kinds = dict[str, int](), dict[str, StepKind]()
    for one in every:  # step models of like replicas are objects of their own
        alike = joblib.hash((one.step.pieces, one.engine, one.kv_tokens, one.role, one.gpus))
        gpus[alike] = gpus.get(alike, 0) + one.gpus
        kinds.setdefault(alike, StepKind.of(one, alike, alike))
    split = any(one.role != "both" for one in every)
    return fleet_rps(gpus, list(kinds.values()), trace.take(held), split=split)


def fleet_rps(
    gpus: Mapping[str, int],
    kinds: Sequence[StepKind],
    trace: Trace,
    *,
    goal: float = 1.0,
    tpot_s: float | None = None,
    split: bool = True,
) -> float:
    """Rate of the requests of a trace that no plan of such steps exceeds [requests/s].

    Parameters
    ----------
    goal, tpot_s
        Share of the requests that meets the target, and the target [s]; None for none.
    split
        Whether a request may decode elsewhere than it was prefilled; else targets do not enter.

    Examples
    --------
    >>> piece = Piece([0.0, 1.0], [0.02, 0.021], [0.0])
    >>> one = StepKind("gpu", 1, "pool", piece, 1e6, 256, 2048.0, chunked=False, whole=True)
    >>> chats = Trace([0.0], [1], [101])  # 100 tokens, at most 10 at once in 30 ms
    >>> found = [fleet_rps({"gpu": 1}, [one], chats, tpot_s=t) for t in (None, 0.03, 0.02)]
    >>> [round(rps, 2) for rps in found]
    [9.19, 3.32, 0.0]
    """
    inputs = trace.input_tokens.astype(np.float64)
    steps = np.maximum(trace.output_tokens.astype(np.float64) - 1.0, 0.0)
    tokens = np.array([steps, steps * inputs + steps * (steps - 1.0) / 2.0])
    unit, spare = np.maximum(tokens.mean(axis=1, keepdims=True), 1e-9), max(0.0, 1.0 - goal)
    contexts = float(inputs.min()), float((inputs + steps).max())
    first = _classes(inputs, [x * kind.max_tokens for kind in kinds for x in (0.5, 1.0)])
    then = len(steps) * _classes(tokens[1] / np.maximum(steps, 1.0)) + _classes(steps)
    then = np.unique(np.where(steps > 0, then, -1), return_inverse=True)[1]
    if not split:
        first = then = np.unique(first * (then.max() + 1) + then, return_inverse=True)[1]
        tpot_s = None
    program = Program()
    rate = program.variables(1, objective=1.0)
    begun, ended = (program.rows(int(one.max()) + 1, upper=0.0) for one in (first, then))
    program.entries(begun, rate, 1.0)
    program.entries(ended, rate, _means([np.sign(steps)], then))
    held = {name: program.rows(1, upper=count) for name, count in gpus.items()}
    pools = {kind.pool: program.rows(1, upper=0.0) for kind in kinds}
    beyond = program.rows(1, upper=0.0)
    program.entries(beyond, rate, -spare)
    found = []
    for kind in kinds:
        m, b, cached, busy_s, wait_s = kind.columns(
            *contexts, _INTERVALS if split else kind.max_batch
        )
        prompts, does = program.rows(0), [m / max(kind.max_tokens, 1.0), *len(_FILLS) * [m > 0]]
        if kind.max_tokens:
            fills, alone_s = kind.shares(inputs)
            prompts, taken = program.rows(len(fills), upper=0.0), program.variables(len(begun))
            program.entries(begun, taken, -len(first) / np.bincount(first))
            program.entries(prompts[:, None], taken, _means(fills, first))
            program.entries(held[kind.gpu], taken, kind.gpus * _means([alone_s], first))
        for late in (False, True) if tpot_s and kind.max_batch else (False,):
            decodes = program.rows(2, upper=0.0)
            taken = program.variables(len(ended)) if split else taken
            if kind.max_batch:
                program.entries(ended, taken, -len(then) / np.bincount(then))
                program.entries(decodes[:, None], taken, _means(tokens / unit, then))
                program.entries(beyond, taken, float(late))
            rows = np.concatenate([prompts, decodes, held[kind.gpu], pools[kind.pool]])
            done = [*does[: len(prompts)], b / unit[0], cached / unit[1]]
            wait = b * (wait_s - tpot_s) if tpot_s and not late else 0.0 * b
            values = np.array([*(-1.0 * x for x in done), kind.gpus * busy_s, wait])
            program.entries(rows[:, None], program.variables(len(b)), values)
            found.append((kind, late, rows, values))
    duals = program.solve(names="the bound of a fleet").duals
    price = np.resize(duals, program.size[0]).clip(0.0)  # zeros where there are none
    for kind, _, rows, values in found:  # GPUs cost what rounding lets steps be worth beyond
        lack = -(price[rows] @ values) / values[-2].clip(1e-300)
        price[held[kind.gpu]] += lack.max(initial=0.0)
    prefill, decode = [np.full(len(inputs), np.inf)], [np.where(steps > 0, np.inf, 0.0)]
    for kind, late, rows, _ in found:
        if kind.max_tokens:
            fills, alone_s = kind.shares(inputs)
            prefill.append(price[rows[:-4]] @ fills + price[held[kind.gpu]] * kind.gpus * alone_s)
        if kind.max_batch:
            decode.append(price[rows[-4:-2]] @ (tokens / unit) + late * price[beyond])
    apart = np.min(prefill, axis=0) + np.min(decode, axis=0)
    least = apart if split else np.min(np.add(prefill, decode), axis=0)
    worth = float(least.mean() - price[beyond[0]] * spare)
    paid = sum(float(price[held[name][0]]) * count for name, count in gpus.items())
    return paid / worth * (1.0 + 1e-9) if worth > 0 else np.inf


def _classes(values: Floats, edges: Sequence[float] = ()) -> Ints:
    """Number of the class of each value."""
    cuts = np.unique([*np.quantile(values, _QUANTILES), *edges])
    return np.unique(np.searchsorted(cuts, values), return_inverse=True)[1]


def _means(values: Floats | Sequence[Floats], classes: Ints) -> Floats:
    """Means of each row of the values, by class."""
    return np.array([np.bincount(classes, one) for one in values]) / np.bincount(classes)
