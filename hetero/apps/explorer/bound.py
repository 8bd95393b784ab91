r"""The largest rate that any router could get out of a deployment, by a linear program.

However it is batched, a request keeps a replica of kind j busy for at least :math:`w_{rjk}` seconds
(:func:`hetero.apps.capacity.fluid.work_s`, one inequality k for each supporting line of the step
times), and no replica is busy for more than all of its time:

.. math:: \max \lambda \;\text{ s.t. }\; \sum_j x_{rj} = \lambda,\quad
          \frac{1}{N} \sum_r w_{rjk}\, x_{rj} \le count_j

over the N requests r. Where phases are split, prefill and decode of a request have an x of their
own. Targets do not enter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero.apps.capacity.fluid import work_s
from hetero.deployment import Deployment, Replica
from hetero.latency.step import Piece
from hetero.programs import Program
from hetero.workload import Trace

Floats = NDArray[np.float64]

_KEPT = 3  # inequalities per kind of replica, those of the most work: the others hardly bind


def bound_rps(deployment: Deployment, trace: Trace) -> float | None:
    """Rate of these requests that no router can exceed [requests/s].

    Requests that no replica can hold are left out. None where prefix caches shorten prompts by as
    much as the router makes of them.

    Examples
    --------
    >>> from hetero.latency.step import StepModel
    >>> step = StepModel.affine(floor_s=0.0, per_token_s=0.01, per_cached_token_s=0.0)
    >>> two = Deployment("two", tuple(Replica(name, step, kv_tokens=10**6) for name in "ab"))
    >>> round(bound_rps(two, Trace([0.0], [99], [2])), 6)  # 100 tokens, 1 s each
    2.0
    """
    if trace.prefix_ids is not None and any(r.engine.prefix_cache for r in deployment.replicas):
        return None
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
        for least_s in _works(one, inputs, outputs, fit):
            program.entries(program.rows(1, upper=count), x, least_s / len(inputs))
    return program.solve(solver="glop", names="the bound of a deployment").bound


def _content(piece: Piece) -> tuple[object, ...]:
    """What makes two pieces the same; step models of like machines are objects of their own."""
    arrays: tuple[Floats, ...]
    arrays = (piece.knots_tokens, piece.knots_s, piece.per_cached_token_s, piece.levels)
    if piece.bends is not None:
        arrays = (*arrays, piece.bends.context_tokens, piece.bends.extra_s)
    return (*(array.tobytes() for array in (*arrays, piece.mixed_rows)), piece.per_pair_s)


def _works(
    replica: Replica, inputs: Floats, outputs: Floats, fit: NDArray[np.bool_]
) -> list[Floats]:
    """Least busy time of each request in the phase of the replica [s], 0 where it does not fit."""
    inputs, outputs = np.where(fit, inputs, 1.0), np.where(fit, outputs, 1.0)
    whole, prefill = (work_s(replica, inputs, o) for o in (outputs, np.ones_like(outputs)))
    rows = {"both": whole, "prefill": prefill, "decode": whole - prefill}[replica.role]
    rows = np.where(fit[:, None], np.maximum(rows, 0.0), 0.0)
    most = np.argsort(-rows.sum(axis=0), kind="stable")[:_KEPT]
    return [rows[:, k] for k in most]
