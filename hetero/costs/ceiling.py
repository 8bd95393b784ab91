r"""The most that GPUs serve within a target for the time per token: a bound by a linear program.

A step in which b requests decode with x cached tokens each, beside m prompt tokens, takes

.. math:: T = f(b + m, b) + \kappa_b\,b\,x, \qquad x_{min} \le x \le \min(x_{max}, C / b)

with C the cache. Every request is served; pairs of attention take a GPU's time besides. Who meets
the target :math:`\tau` gets a token per :math:`\tau` on average, so that over the steps of a pool,
the GPUs that one request may decode on, :math:`\sum b\,(T - \tau) \le 0` for those in time. A step
for both sorts is a mean of two for one of them, as T is straight in x. The late, :math:`1 - goal`
of the requests, have no more tokens than the longest. b is taken by intervals, with the least T and
the least T / b of each, and m at the corners of the convex envelope of f: no step does more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetero.arrays import Floats, Ints
from hetero.latency.step import Piece
from hetero.programs import Program
from hetero.workload import Trace


@dataclass(frozen=True, slots=True, eq=False)
class StepKind:
    """Steps that ``gpus`` GPUs of a type take together, never faster than their piece says.

    Attributes
    ----------
    pool
        Same for all that one request may decode on.
    kv_tokens, max_batch, max_tokens
        Largest cache, number of requests that decode, and new tokens of a step; 0 of either for
        who does the other phase alone.
    chunked, whole
        Whether prompts are cut beside what decodes, and whether all that decodes takes one step;
        in pipelines it comes in parts, which need not be whole numbers.
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

    def columns(self, least: float, most: float) -> Floats:
        """Prompt tokens, decoding, cached tokens, time and least time per token; shape (5, K).

        ``least`` and ``most`` are the cached tokens of a request that decodes.
        """
        knots = self.piece.knots_tokens
        knots = knots[(knots > 0) & (knots < self.max_tokens)]
        corners = np.array([0.0, *knots, self.max_tokens])
        times = self._seconds(corners, 0.0 * corners)
        hull = _envelope(corners, times)
        edges = np.concatenate(
            [np.arange(17.0), np.geomspace(16.0, max(16.0, self.max_batch), 40), knots]
        )
        edges = np.minimum(np.floor(edges) if self.whole else edges, self.max_batch)
        edges = np.unique(edges)
        fine = np.unique(np.append(edges, np.arange(self.max_batch + 1.0)))
        alone = self._seconds(fine, fine)
        if self.chunked:
            beside = fine * (1.0 + 1e-9) + 1e-9
            extra = self._seconds(beside, fine) - self._seconds(beside, 0.0 * fine)
            alone = np.minimum(alone, np.interp(fine, corners[hull], times[hull]) + extra)
        rates = np.minimum(self.piece.per_cached_token_s, self.piece.mixed_rows[0])
        rates = rates[np.clip(fine.astype(np.int64) - 1, 0, len(rates) - 1)]
        none = np.zeros(len(knots) + 1)
        found = [np.stack([corners[1:], none, none, times[1:], times[1:]])]
        for low, high in zip(edges[:-1] + self.whole, edges[1:], strict=True):
            if low * least > self.kv_tokens:
                break
            at = (fine >= low) & (fine <= high)
            b, t = fine[at], alone[at]
            rows = [(0.0, 1.0, float((t[b > 0] / b[b > 0]).min()), float(t.min()))]
            for n in corners[hull][corners[hull] >= high] if self.chunked else ():
                both = float(self._seconds(np.full(len(b), n), b).min())
                rows += [(n - k, k, both, both) for k in {low, high} if k > 0]
            m, k, t, wait = np.array(rows).T
            for x in (least, min(most, self.kv_tokens / max(low, 1e-9))):
                more = x * float(rates[at].min())
                found.append(np.stack([m, k, k * x, t + k * more, wait + low * more]))
        return np.concatenate(found, axis=1)

    def _seconds(self, tokens: Floats, decoding: Floats) -> Floats:
        return self.piece.seconds(tokens, decoding, 0.0, 0.0)


def _envelope(x: Floats, y: Floats) -> Ints:
    """Numbers of the points on the lower convex envelope of a line, in order."""
    kept: list[int] = []
    for k in range(len(x)):
        while (
            len(kept) > 1
            and np.interp(x[kept[-1]], x[[kept[-2], k]], y[[kept[-2], k]]) <= (y[kept[-1]])
        ):
            kept.pop()
        kept.append(k)
    return np.array(kept)


def most_rps(
    gpus: Mapping[str, int],
    kinds: Sequence[StepKind],
    trace: Trace,
    *,
    goal: float = 1.0,
    tpot_s: float | None = None,
) -> float:
    """Rate of the requests of a trace that no plan of such steps exceeds [requests/s].

    Parameters
    ----------
    goal, tpot_s
        Share of the requests that meets the target, and the target [s]; None for none.

    Examples
    --------
    >>> piece = Piece([0.0, 1.0], [0.02, 0.021], [0.0])
    >>> one = StepKind("gpu", 1, "pool", piece, 1e6, 256, 2048.0, chunked=False, whole=True)
    >>> chats = Trace([0.0], [1], [101])  # 100 tokens, at most 10 at once in 30 ms
    >>> found = [most_rps({"gpu": 1}, [one], chats, tpot_s=t) for t in (None, 0.03, 0.02)]
    >>> [round(rps, 2) for rps in found]
    [9.19, 3.32, 0.0]
    """
    inputs = trace.input_tokens.astype(np.float64)
    steps = np.maximum(trace.output_tokens.astype(np.float64) - 1.0, 0.0)
    cached = steps * inputs + steps * (steps - 1.0) / 2.0
    work = np.array([inputs.mean(), steps.mean(), cached.mean(), (inputs**2).mean() / 2.0])
    late = np.sort(steps)[len(steps) - int(np.ceil((1.0 - goal) * len(steps) - 1e-9)) :].sum()
    unit = np.maximum(work, 1e-9)
    program = Program()
    rate = program.variables(1, objective=1.0)
    done = program.rows(4, lower=0.0)
    program.entries(done, rate, -work / unit)
    held = {name: program.rows(1, upper=count) for name, count in gpus.items()}
    pools = {kind.pool: program.rows(1, upper=0.0) for kind in kinds}
    beyond = program.rows(1, upper=0.0)
    program.entries(beyond, rate, -late / len(steps) / unit[1])
    for kind in kinds:
        if kind.max_tokens:
            pairs = program.variables(1)
            program.entries(done[3], pairs, 1.0 / unit[3])
            program.entries(held[kind.gpu], pairs, kind.gpus * kind.piece.per_pair_s)
        each = kind.columns(float(inputs.min()), float((inputs + steps).max()))
        for in_time in (True, False) if tpot_s else (False,):
            taken = program.variables(each.shape[1])
            program.entries(done[:3, None], taken, each[:3] / unit[:3, None])
            program.entries(held[kind.gpu], taken, kind.gpus * each[3])
            if in_time:
                program.entries(pools[kind.pool], taken, each[1] * (each[4] - (tpot_s or 0.0)))
            elif tpot_s:
                program.entries(beyond, taken, each[1] / unit[1])
    return max(0.0, float(program.solve(names="the ceiling of a fleet").values[rate[0]]))
