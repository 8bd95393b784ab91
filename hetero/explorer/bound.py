r"""The largest rate that any router could get out of a deployment, by a linear program.

A step of an engine takes at least

.. math:: step\_s \ge \alpha_p q + \alpha_d b + \beta c + \gamma\, pairs

for every q prefill tokens and b decoding requests that read c cached tokens, where the floor of a
step is shared by the most that one step may hold: a full batch, or a full KV cache. A request of I
input and O output tokens therefore keeps a replica busy for at least

.. math:: w = \alpha_p I + \alpha_d (O - 1) + \beta \sum_{k=1}^{O-1} (I + k - 1) + \gamma I^2 / 2

seconds, however it is batched, and no replica is busy for more than all of its time:

.. math:: \max \lambda \;\text{ s.t. }\; \sum_j x_{rj} = \lambda,\quad
          \frac{1}{N} \sum_r w_{rjk}\, x_{rj} \le count_j

over requests r, kinds of replicas j and inequalities k; where phases are split, prefill and decode
of a request have an x of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero.deployment import Deployment, Engine, Replica
from hetero.latency.step import Piece
from hetero.planners.islands.programs import Program
from hetero.workload import Trace

Floats = NDArray[np.float64]

_KEPT = 3  # inequalities per kind of replica: the others bind nowhere
_AT_TOKENS = (1, 16, 64, 256, 1024)  # where supporting lines of a step's time are taken


@dataclass(frozen=True, slots=True)
class _Line:
    """A lower bound on the time of a step, linear in what it does [s per token or pair]."""

    per_prefill_s: float
    per_decode_s: float
    per_cached_s: float
    per_pair_s: float

    def work_s(self, inputs: Floats, outputs: Floats, role: str) -> Floats:
        """Least time of each request in one role [s]; shape (N,)."""
        later = np.maximum(outputs - 1.0, 0.0)
        prefill = self.per_prefill_s * inputs + self.per_pair_s * inputs**2 / 2.0
        read = later * inputs + later * np.maximum(later - 1.0, 0.0) / 2.0
        decode = self.per_decode_s * later + self.per_cached_s * read
        return prefill * (role != "decode") + decode * (role != "prefill")


def bound_rps(deployment: Deployment, trace: Trace) -> float | None:
    """Rate of these requests that no router can exceed [requests/s].

    Requests that no replica can hold are left out. None where prefix caches shorten prompts by as
    much as the router makes of them.

    Examples
    --------
    >>> from hetero.latency.step import StepModel
    >>> step = StepModel.affine(floor_s=0.1, per_token_s=0.0, per_cached_token_s=0.0)
    >>> engine = Engine(max_step_tokens=1000, max_batch=100)
    >>> two = Deployment("two", tuple(Replica(n, step, 10**6, engine=engine) for n in "ab"))
    >>> round(bound_rps(two, Trace([0.0], [100], [1])), 6)  # ten prompts in a step of 0.1 s
    200.0
    """
    if trace.prefix_ids is not None and any(r.engine.prefix_share for r in deployment.replicas):
        return None
    longest = float(trace.input_tokens.max())
    kinds: dict[tuple[object, ...], list[Replica]] = {}
    for one in deployment.replicas:
        key = (*map(_content, one.step.pieces), one.engine, one.kv_tokens, one.role)
        kinds.setdefault(key, []).append(one)
    firsts = [group[0] for group in kinds.values()]
    counts = [float(len(group)) for group in kinds.values()]
    inputs = trace.input_tokens.astype(np.float64)
    outputs = trace.output_tokens.astype(np.float64)
    fits = np.array([inputs + outputs <= one.kv_tokens for one in firsts])
    roles = np.array([one.role for one in firsts])
    held = fits[roles != "decode"].any(axis=0) & fits[roles != "prefill"].any(axis=0)
    if not held.any():
        return 0.0
    inputs, outputs, fits = inputs[held], outputs[held], fits[:, held]

    program = Program()
    rate = program.variables(1, objective=1.0)
    phases = ["prefill", "decode"] if "prefill" in roles else ["both"]
    rows = {phase: program.rows(len(inputs), lower=0.0, upper=0.0) for phase in phases}
    for phase in phases:
        program.entries(rows[phase], rate, -1.0)
    for one, count, fit in zip(firsts, counts, fits, strict=True):
        x = program.variables(len(inputs), upper=np.where(fit, np.inf, 0.0))
        for phase in phases if one.role == "both" else [one.role]:
            program.entries(rows[phase], x, 1.0)
        for work_s in _tightest(one, longest, inputs, outputs):
            program.entries(program.rows(1, upper=count), x, work_s / len(inputs))
    return program.solve(solver="glop", names="the bound of a deployment").bound


def _content(piece: Piece) -> tuple[object, ...]:
    """What makes two pieces the same; step models of like machines are objects of their own."""
    arrays = (piece.knots_tokens, piece.knots_s, piece.per_cached_token_s, piece.levels)
    return (*(array.tobytes() for array in (*arrays, piece.mixed_rows)), piece.per_pair_s)


def _tightest(replica: Replica, longest: float, inputs: Floats, outputs: Floats) -> list[Floats]:
    works = [
        line.work_s(inputs, outputs, replica.role)
        for piece in replica.step.pieces
        for line in _lines(piece, replica.engine, replica.kv_tokens, longest)
    ]
    return sorted(works, key=lambda work: -float(work.sum()))[:_KEPT]


def _lines(piece: Piece, engine: Engine, kv_tokens: int, longest: float) -> list[_Line]:
    batch = float(engine.max_batch)
    most = max(float(engine.max_step_tokens), longest, batch)
    grid = np.concatenate([np.arange(1.0, batch + 1), piece.knots_tokens, [most]])
    grid = np.unique(grid[(grid >= 1) & (grid <= most)])
    time_s = piece.seconds(grid, 0, 0.0, 0.0)
    small = grid <= batch
    time_s = np.where(small, np.minimum(time_s, piece.seconds(grid, grid, 0.0, 0.0)), time_s)
    cached_s = float(min(piece.per_cached_token_s.min(), piece.mixed_rows[0].min()))
    least_s = float((time_s / grid).min())
    # Prompts share no step with decoding requests where they go first.
    apart = least_s if engine.batching != "chunked" else None
    found = [_Line(least_s, least_s, cached_s, piece.per_pair_s)]
    for slope_s, floor_s in _supports(grid, time_s):
        prefill_s = slope_s if apart is None else apart
        by_batch = slope_s + floor_s / batch
        by_cache = cached_s + floor_s / (kv_tokens + batch)
        found.append(_Line(prefill_s, by_batch, cached_s, piece.per_pair_s))
        found.append(_Line(prefill_s, slope_s, by_cache, piece.per_pair_s))
    return found


def _supports(tokens: Floats, time_s: Floats) -> list[tuple[float, float]]:
    """Slopes and intercepts, neither negative, of lines that lie below all times."""
    hull: list[int] = []
    for k in range(len(tokens)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            turn = (tokens[b] - tokens[a]) * (time_s[k] - time_s[a])
            if turn > (tokens[k] - tokens[a]) * (time_s[b] - time_s[a]):
                break
            hull.pop()
        hull.append(k)
    found = {(0.0, float(time_s.min()))}
    ends = tokens[hull]
    for at in _AT_TOKENS:
        k = min(int(np.searchsorted(ends, at, side="right")), len(hull) - 1)
        if k < 1:
            continue
        a, b = hull[k - 1], hull[k]
        slope = float((time_s[b] - time_s[a]) / (tokens[b] - tokens[a]))
        floor = float(time_s[a] - slope * tokens[a])
        if slope >= 0 and floor >= 0:
            found.add((slope, floor))
    return sorted(found)
