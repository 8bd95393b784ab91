r"""The most that GPUs serve within a target for the time per token: a bound by a linear program.

A step in which b requests decode with x cached tokens each, beside m prompt tokens, takes

.. math:: T = f(b + m, b) + \kappa_b\,b\,x, \qquad x_{min} \le x \le \min(x_{max}, C / b)

with C the cache. Every request is served; a pair of attention takes further time of a GPU. Who
meets the target :math:`\tau` gets a token per :math:`\tau` on average, so that over the steps of a
pool, the GPUs that one request may decode on, what such requests wait stays within it:

.. math:: \sum_{steps} b_{in time} (T - \tau) \le 0 .

A step for requests of both sorts is a mean of two that are for one of them, as T is straight in x.
The rest, :math:`1 - goal` of the requests, has at most the tokens of the longest. The program takes
b by intervals, with the least T and the least T / b of each, and m at the corners of the convex
envelope of f, so no step does more than its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetero.arrays import Floats
from hetero.deployment import Replica
from hetero.programs import Program
from hetero.workload import Trace

_PARTS = (0.5, 0.85)  # of the tokens, by what is cached for them
_WIDTH = 1.1  # of an interval of batches, the upper over the lower end


@dataclass(frozen=True, slots=True, eq=False)
class StepKind:
    """Steps that GPUs of one type take together, never slower than said.

    Attributes
    ----------
    gpu, gpus, pool
        Type and number of the GPUs; what requests may decode on beside them has the same pool.
    seconds
        Time of a step of so many new tokens, so many of them decoded, without cached tokens [s].
    knots_tokens
        New tokens at which it takes another slope.
    cached_s, pair_s
        Time per cached token while 1, 2, ... decode, the last for all beyond, and per pair [s].
    kv_tokens, max_batch, max_tokens
        Largest cache, number that decodes, and number of new tokens of a step.
    chunked
        Whether prompts are prefilled beside what decodes.
    whole
        Whether all that decodes takes one step; in pipelines its parts need not be whole numbers.
    """

    gpu: str
    gpus: int
    pool: str
    seconds: Callable[[Floats, Floats], Floats]
    knots_tokens: Floats
    cached_s: Floats
    pair_s: float
    kv_tokens: float
    max_batch: int
    max_tokens: float
    chunked: bool
    whole: bool = False

    @classmethod
    def of(cls, one: Replica, gpu: str, pool: str, max_tokens: float) -> StepKind:
        """Steps of a replica of one stage, by the first piece of its times."""
        piece = one.step.pieces[0]
        return cls(
            gpu,
            one.gpus,
            pool,
            lambda n, b: piece.seconds(n, b, 0.0, 0.0),
            piece.knots_tokens,
            np.minimum(piece.per_cached_token_s, piece.mixed_rows[0]),
            piece.per_pair_s,
            one.kv_tokens,
            one.engine.max_batch,
            max_tokens,
            one.engine.batching == "chunked",
            whole=True,
        )

    def columns(self, sizes: Floats) -> Floats:
        """Prompt tokens, decoding, cached tokens, time and least time per token; shape (5, K).

        With each of ``sizes`` as cached tokens of a request that decodes, and what fits the cache.
        """
        knots = self.knots_tokens[(self.knots_tokens > 0) & (self.knots_tokens < self.max_tokens)]
        corners = np.array([0.0, *knots, self.max_tokens])
        times = self.seconds(corners, np.zeros(len(corners)))
        hull = _envelope(corners, times)
        first = 1.0 if self.whole else 0.0
        ends = [np.arange(17.0), np.geomspace(16.0, self.max_batch, self._intervals), knots]
        edges = np.unique(np.minimum(np.concatenate(ends), self.max_batch))
        edges = np.unique(np.floor(edges)) if self.whole else edges
        fine = np.unique(np.append(edges, np.arange(self.max_batch + 1.0)))
        alone = self.seconds(fine, fine)
        if self.chunked:
            beside = fine * (1.0 + 1e-9) + 1e-9
            extra = self.seconds(beside, fine) - self.seconds(beside, np.zeros(len(fine)))
            alone = np.minimum(alone, np.interp(fine, corners[hull], times[hull]) + extra)
        rate = self.cached_s[np.clip(fine.astype(np.int64) - 1, 0, len(self.cached_s) - 1)]
        found = [
            np.array([[n, 0.0, 0.0, t, t] for n, t in zip(corners[1:], times[1:], strict=True)])
        ]
        for low, high in zip(edges[:-1] + first, edges[1:], strict=True):
            fits = self.kv_tokens / max(low, 1e-9)
            if fits < sizes[0]:
                break
            at = (fine >= low) & (fine <= high)
            b, cached_s = fine[at], float(rate[at].min())
            each = float((alone[at][b > 0] / b[b > 0]).min())
            rows = [(0.0, 1.0, each, float(alone[at].min()))]
            for n in corners[hull][corners[hull] >= high] if self.chunked else ():
                both = float(self.seconds(np.full(len(b), n), b).min())
                rows += [(n - k, k, both, both) for k in {low, high} if k > 0]
            m, k, t, wait = np.array(rows).T
            for x in np.unique(np.minimum(sizes, fits)):
                more = cached_s * x
                found.append(np.array([m, k, k * x, t + k * more, wait + low * more]).T)
        return np.concatenate(found).T

    @property
    def _intervals(self) -> int:
        return 1 + int(np.ceil(np.log(max(self.max_batch / 16.0, 1.0)) / np.log(_WIDTH)))


def _envelope(x: Floats, y: Floats) -> Floats:
    """Numbers of the points on the lower convex envelope of a line, in order."""
    kept: list[int] = []
    for k in range(len(x)):
        while len(kept) > 1 and (y[kept[-1]] - y[kept[-2]]) * (x[k] - x[kept[-2]]) >= (
            y[k] - y[kept[-2]]
        ) * (x[kept[-1]] - x[kept[-2]]):
            kept.pop()
        kept.append(k)
    return np.array(kept)


def _beyond(inputs: Floats, steps: Floats, size: float) -> float:
    """Cached tokens beyond a size that the decode steps of a mean request read."""
    last = np.maximum(inputs + steps - size, 0.0)
    first = np.maximum(inputs - size, 0.0)
    return float(((last * (last - 1.0) - first * (first - 1.0)) / 2.0).mean())


def most_rps(
    gpus: Mapping[str, int],
    kinds: Sequence[StepKind],
    trace: Trace,
    *,
    goal: float = 1.0,
    tpot_s: float | None = None,
) -> float:
    """Rate of the requests of a trace that no plan of such steps exceeds, all served [requests/s].

    Parameters
    ----------
    gpus
        Number of GPUs of each type.
    goal, tpot_s
        Share of the requests that meets the target, and the target [s]; None for none.

    Raises
    ------
    SolverError
        If the linear program ends without its optimum.

    Examples
    --------
    >>> from hetero.latency.step import StepModel
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-3, per_cached_token_s=0.0)
    >>> one = StepKind.of(Replica("a", step, 100_000), "gpu", "pool", 2048.0)
    >>> chats = Trace([0.0], [1], [101])  # 100 tokens, at most 10 at once in 30 ms
    >>> found = [most_rps({"gpu": 1}, [one], chats, tpot_s=t) for t in (None, 0.03, 0.02)]
    >>> [round(rps, 2) for rps in found]
    [9.19, 3.32, 0.0]
    """
    inputs = trace.input_tokens.astype(np.float64)
    steps = np.maximum(trace.output_tokens.astype(np.float64) - 1.0, 0.0)
    cached = steps * inputs + steps * (steps - 1.0) / 2.0
    work = np.array([inputs.mean(), steps.mean(), cached.mean(), (inputs**2).mean() / 2.0])
    order = np.argsort(inputs + steps / 2.0)
    sizes = np.floor((inputs + steps / 2.0)[order])[
        np.searchsorted(np.cumsum(steps[order]), np.multiply(_PARTS, steps.sum()))
    ]
    sizes = np.unique([inputs.min(), *sizes, (inputs + steps).max()])
    late = np.sort(steps)[len(steps) - int(np.ceil((1.0 - goal) * len(steps) - 1e-9)) :].sum()
    unit = np.maximum(work, 1e-9)
    program = Program()
    rate = program.variables(1, objective=1.0)
    done = program.rows(4, lower=0.0)
    program.entries(done, rate, -work / unit)
    held = {name: program.rows(1, upper=count) for name, count in gpus.items()}
    long = program.rows(len(sizes), upper=0.0)
    excess = np.array([_beyond(inputs, steps, size) for size in sizes])
    program.entries(long, rate, -excess / unit[2])
    pools = {kind.pool: program.rows(1, upper=0.0) for kind in kinds}
    beyond = program.rows(1, upper=0.0)
    program.entries(beyond, rate, -late / len(steps) / unit[1])
    for kind in kinds:
        pairs = program.variables(1)
        program.entries(done[3], pairs, 1.0 / unit[3])
        program.entries(held[kind.gpu], pairs, kind.gpus * kind.pair_s)
        found = kind.columns(sizes)
        more = np.maximum(found[2] - sizes[:, None] * found[1], 0.0)
        for in_time in (True, False) if tpot_s else (False,):
            taken = program.variables(found.shape[1])
            program.entries(done[:3, None], taken, found[:3] / unit[:3, None])
            program.entries(held[kind.gpu], taken, kind.gpus * found[3])
            program.entries(long[:, None], taken, more / unit[2])
            if in_time and tpot_s:
                program.entries(pools[kind.pool], taken, found[1] * (found[4] - tpot_s))
            elif tpot_s:
                program.entries(beyond, taken, found[1] / unit[1])
    return max(0.0, float(program.solve(names="the ceiling of a fleet").values[rate[0]]))
