"""After how many answers the dispatcher knows the step times of an engine without a profile.

Engines are simulated: what they do is exact, and what the dispatcher sees of them goes through its
own records. The prediction is compared at the decode steps that answers were made of, on a grid of
steps that the engine has not done, and at prefills.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hetero import catalog, workload
from hetero.apps.serving.learning import LEAST, First, Mark, StepLearner
from hetero.apps.serving.plan import FleetPlan
from hetero.apps.serving.records import FleetRecords
from hetero.apps.serving.settings import DeploymentFile
from hetero.deployment import Deployment, Engine, Replica
from hetero.display import Column, Table
from hetero.latency import for_gpu, storage
from hetero.latency.step import StepModel
from hetero.routers import RoundRobin
from hetero.simulator import simulate
from hetero.streams import stream
from hetero.workload import Trace
from pipelines.bench.measured import Measured

Floats = NDArray[np.float64]
_KNOWN = "A100-SXM-80GB"
_NEW = ("L4", "A10G", "L40S", "H100-SXM")
_MODEL = "Llama-3.1-8B"
_KV_TOKENS = 60_000
_WITHIN = 0.1
_PARTS = ("steps done", "others", "prefill")


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


@dataclass(frozen=True, slots=True, repr=False)
class LearningBench(Measured):
    """How soon an engine without a profile is known.

    Attributes
    ----------
    rows
        GPU, load over its capacity, what it begins with, error of steps at first, answers until
        every later prediction is within 10 % in the mean (as done, others, prefill), and the
        errors at last [%]; "not yet" where that is never so.
    """

    rows: tuple[tuple[object, ...], ...]

    def table(self) -> Table:
        """One row per engine, load and start."""
        columns = (
            *(Column(name) for name in ("engine", "load", "begins with")),
            Column("error at first", "%", 2),
            *(Column(f"{name} known", "answers", 3) for name in _PARTS),
            *(Column(f"error of {name}", "%", 2) for name in _PARTS),
        )
        note = f"{_MODEL}; beside a profiled {_KNOWN}; simulated engines, conversations of the twin"
        return Table("Engines without a profile", columns, self.rows, (note,))

    def record(self) -> list[dict[str, object]]:
        """The rows as plain values."""
        names = [column.heading for column in self.table().columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]


def bench(*, requests: int = 500, seed: int = 0) -> LearningBench:
    """Serve requests by engines of several GPUs that the dispatcher is told nothing of."""
    llm = catalog.llm(_MODEL)
    rules = Engine(batching="chunked", admission="paged")
    drawn = workload.load("azure2023_conv").sample(requests, stream(seed, "requests"))
    rows: list[tuple[object, ...]] = []
    for gpu in _NEW:
        real = Replica(gpu, for_gpu(catalog.gpu(gpu), llm).step_model(), _KV_TOKENS, engine=rules)
        means = float(drawn.input_tokens.mean()), float(drawn.output_tokens.mean())
        most_rps = FleetPlan.of(Deployment("one", (real,)), *means).capacity_rps
        for load in (0.2, 0.7):
            trace = drawn.poisson(load * most_rps, stream(seed, "arrivals"))
            for start, told in _starts(gpu).items():
                begin = errors(StepLearner(told), real.step)[1]
                found = [(x.answers, *errors(x, real.step)) for x in learners(real, told, trace)]
                known = [_known([(one[0], one[k]) for one in found]) for k in (1, 2, 3)]
                last = [100.0 * x for x in found[-1][1:]]
                rows.append((gpu, load, start, 100.0 * begin, *known, *last))
    return LearningBench(tuple(rows))


def _known(errors: list[tuple[int, float]]) -> int | str:
    """Answers from which on all errors are within what is asked for."""
    late = [k for k, (_, error) in enumerate(errors) if error > _WITHIN]
    after = late[-1] + 1 if late else 0
    return errors[after][0] if after < len(errors) else "not yet"


def _starts(gpu: str) -> dict[str, StepModel]:
    """Step models that a deployment file without a profile begins with."""
    step = for_gpu(catalog.gpu(_KNOWN), catalog.llm(_MODEL)).step_model()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        storage.save(step, Path(folder) / "known.json")
        for start, more, files in (
            ("another engine's", (None, None), ("known.json", None)),
            ("that and GPUs", (_KNOWN, gpu), ("known.json", None)),
            ("nothing", (None, None), (None, None)),
        ):
            backends = [
                {"name": name, "url": "http://127.0.0.1:1", "kv_tokens": _KV_TOKENS}
                | {"step": file, "gpu": named}
                for name, file, named in zip(("known", "new"), files, more, strict=True)
            ]
            raw = {"model": "m", "backends": backends, "folder": Path(folder)}
            settings = DeploymentFile.model_validate(raw)
            found[start] = settings.deployment().replicas[1].step
    return found
