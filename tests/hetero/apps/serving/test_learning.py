"""Step models learnt from answers, against engines of which the simulator knows everything."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("prometheus_client", reason="the serving extra is not installed")

from collections.abc import Iterator

from hetero.apps.refitted import refitted
from hetero.apps.serving.learning import LEAST, First, Mark, StepLearner
from hetero.apps.serving.records import FleetRecords
from hetero.apps.serving.settings import load
from hetero.arrays import Floats
from hetero.deployment import Deployment, Engine, Replica
from hetero.latency import storage
from hetero.latency.step import StepModel
from hetero.routers import RoundRobin
from hetero.simulator import simulate
from hetero.streams import stream
from hetero.workload import Trace

TOLD = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=2e-7)
RULES = Engine(batching="chunked", admission="paged")


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


def requests(rate, count=200):
    rng = stream(1, "learnt")
    inputs = np.clip(rng.lognormal(5.5, 0.8, count), 8, 2000).astype(int)
    outputs = np.clip(rng.lognormal(3.5, 0.6, count), 1, 200).astype(int)
    return Trace(np.cumsum(rng.exponential(1 / rate, count)), inputs, outputs)


@pytest.mark.parametrize("rate", [0.3, 3.0])
@pytest.mark.parametrize(
    ("prefill", "decode", "growth", "front_s"),
    [(1.0, 1.0, 1.0, 0.0), (3.0, 2.0, 2.5, 0.05), (0.4, 0.6, 0.5, 0.0)],
)
def test_steps_are_known_after_a_few_answers(rate, prefill, decode, growth, front_s):
    step = refitted(TOLD, prefill, decode, front_s, floor=decode, growth=growth)
    real = Replica("real", step, kv_tokens=100_000, engine=RULES)
    found = [
        (one.answers, one.refits, *errors(one, step))
        for one in learners(real, TOLD, requests(rate))
    ]
    assert [one[0] for one in found[:3]] == [8, 16, 32]
    late = [one[2:] for one in found if one[0] >= 32]
    assert np.max(late) < 0.1
    if (prefill, decode, growth) == (1.0, 1.0, 1.0):  # what is right is left alone
        assert found[-1][1] == 0


def test_a_slower_engine_is_told_where_nothing_may_change():
    step = refitted(TOLD, 2.0, 2.0, 0.0, floor=2.0)
    real = Replica("real", step, kv_tokens=100_000, engine=RULES)
    learner = next(learners(real, TOLD, requests(1.0)))
    fresh = type(learner)(TOLD)
    fresh.first, fresh.later, fresh.answers = learner.first, learner.later, learner.answers
    assert not fresh.refit(keep=False)
    assert fresh.step is TOLD
    assert fresh.ratio == pytest.approx(2.0, rel=0.1)
    assert fresh.refits == 0


def test_factors_stay_within_their_bounds():
    step = refitted(TOLD, 30.0, 30.0, 0.0, floor=30.0)
    real = Replica("real", step, kv_tokens=100_000, engine=RULES)
    *_, learner = learners(real, TOLD, requests(0.05))
    b = np.array([1, 8, 64])
    assert (learner.step.seconds(b, b, 500 * b) <= 8.001 * TOLD.seconds(b, b, 500 * b)).all()
    assert learner.step.seconds(1, 1, 100) == pytest.approx(8 * TOLD.seconds(1, 1, 100), rel=0.01)


def test_an_engine_without_a_profile_begins_with_that_of_another(tmp_path):
    storage.save(TOLD, tmp_path / "s.json")
    file = tmp_path / "d.yaml"
    gpus = "gpu: {{name: {0}, fp16_tflops: {1}, mem_gib: 80, mem_bw_gbs: {2}}}"
    backend = '  - {{name: {0}, url: "http://127.0.0.1:1", kv_tokens: 9000{1}}}\n'

    def steps(*more):
        rows = [backend.format(name, "".join(f", {x}" for x in of)) for name, *of in more]
        file.write_text("model: m\nbackends:\n" + "".join(rows))
        return [one.step for one in load(file).deployment().replicas]

    big, small = gpus.format("big", 400, 2000), gpus.format("small", 100, 1000)
    new, known = steps(("a", small), ("b", "step: s.json", big))
    assert new.provenance == "assumed"
    b, n = np.array([1, 5, 50]), np.array([1.0, 100, 2000])
    assert known.seconds(n) == pytest.approx(TOLD.seconds(n))
    assert new.seconds(b, b, 100 * b) == pytest.approx(2 * TOLD.seconds(b, b, 100 * b))
    first = TOLD.seconds(1)
    assert new.seconds(n) == pytest.approx(2 * first + 4 * (TOLD.seconds(n) - first))
    new, _ = steps(("a",), ("b", "step: s.json", big))  # which GPU is not known
    assert new.seconds(n) == pytest.approx(TOLD.seconds(n))
    one, two = steps(("a",), ("b",))
    assert one is two  # valued once for each request
    assert 0.01 < float(one.decode_seconds([1000])) < 0.05


def test_refitted_floor_and_growth_are_those_of_their_equations():
    new = refitted(TOLD, 1.5, 2.0, 0.0, 32, floor=0.5, growth=3.0)
    b, n = np.array([1, 7, 32]), np.array([1.0, 64, 999])
    alone = TOLD.seconds(1, 1)
    assert new.seconds(b, b, 50 * b) == pytest.approx(
        2.0 * alone + 3.0 * (TOLD.seconds(b, b, 50 * b) - alone)
    )
    assert new.seconds(n) == pytest.approx(
        0.5 * TOLD.seconds(1) + 1.5 * (TOLD.seconds(n) - TOLD.seconds(1))
    )
