"""What the dispatcher learns of an engine that is simulated, and how far from the truth it is.

What the engine does is exact, and what the dispatcher sees of it goes through its own records. The
prediction is compared at the decode steps that answers were made of, on a grid of steps that the
engine has not done, and at prefills.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hetero.apps.serving.learning import LEAST, First, Mark, StepLearner
from hetero.apps.serving.records import FleetRecords
from hetero.arrays import Floats
from hetero.deployment import Deployment, Replica
from hetero.latency.step import StepModel
from hetero.routers import RoundRobin
from hetero.simulator import simulate
from hetero.workload import Trace


def learners(real: Replica, told: StepModel, trace: Trace) -> Iterator[StepLearner]:
    """What is learnt of an engine that serves a trace, after every fit."""
    run = simulate(Deployment("real", (real,)), trace, RoundRobin())
    rows = run.requests[run.finished]
    records = FleetRecords(Deployment("told", (real,)), rows=len(rows))
    learner = StepLearner(told)
    events = sorted(
        (float(time), kind, k)
        for kind, name in enumerate(("arrival_s", "first_token_s", "finish_s"))
        for k, time in enumerate(rows[name])
    )
    beside: dict[int, tuple[int, int] | None] = {}
    marks: dict[int, Mark] = {}
    given: dict[int, int] = {}  # tokens that have come of the answers under way
    for now_s, kind, k in events:
        row = rows[k]
        first_s, inputs, outputs = (
            float(row["first_token_s"]),
            int(row["input_tokens"]),
            int(row["output_tokens"]),
        )
        for j in given:
            passed = (now_s - rows["first_token_s"][j]) / max(
                rows["finish_s"][j] - rows["first_token_s"][j], 1e-9
            )
            more = 1 + int(passed * (rows["output_tokens"][j] - 1)) - given[j]
            records.more_tokens(j, more)
            given[j] += more
        if kind == 0:
            records.open(inputs, outputs, now_s)
            records.send(k, 0, now_s)
            beside[k] = records.beside(0)
        elif kind == 1:
            records.first_token(k, now_s)
            marks[k], given[k] = records.loads[0].mark(), 1
        else:
            del given[k]
            records.close(k, now_s, inputs, outputs)
            if (found := beside[k]) is not None:
                learner.first.append(First(first_s - float(row["arrival_s"]), inputs, *found))
            if outputs > LEAST:
                tpot_s = (now_s - first_s) / (outputs - 1)
                learner.answer(tpot_s, outputs - 1, marks[k], records.loads[0].mark())
            if learner.due:
                learner.refit()
                yield learner


def errors(learner: StepLearner, real: StepModel) -> tuple[float, float, float]:
    """Mean size of the error of decode steps as done, of others, and of prefills as done."""

    def error(*steps: Floats) -> float:
        return float(np.abs(learner.step.seconds(*steps) / real.seconds(*steps) - 1.0).mean())

    done = np.array([(one.decoding, one.cached) for one in learner.later]).reshape(-1, 2)
    b = np.maximum(np.rint(done[:, 0]), 1.0)
    grid, context = (
        x.ravel() for x in np.meshgrid([1.0, 2, 4, 8, 16, 32, 64], [256.0, 1024, 2048])
    )
    n = np.array([float(one.tokens) for one in learner.first] or [512.0])
    none = np.zeros(len(n))
    return (
        error(b, b, done[:, 1]) if len(b) else np.nan,
        error(grid, grid, grid * context),
        error(n, none, none, 0.5 * n * n),
    )
