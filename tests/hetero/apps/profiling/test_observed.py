"""`hetero observe`: which part of an engine differs from its simulation, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from hetero.apps.profiling.observed import ServedLog, observe
from hetero.apps.refitted import refitted
from hetero.deployment import Deployment, Engine, Replica
from hetero.errors import DataError, FitError, HeteroError
from hetero.latency import storage
from hetero.latency.step import Mixed, Piece, StepModel
from hetero.routers import RoundRobin
from hetero.simulator import simulate
from hetero.streams import stream
from hetero.workload import Trace

STEP = StepModel.affine(floor_s=0.03, per_token_s=1.2e-3, per_cached_token_s=1e-6)
RULES = Engine(batching="chunked", admission="paged", max_step_tokens=2048, max_batch=64)
TOLD = Replica("engine", STEP, 1024, engine=RULES)
# Factors of prefill and decode, time per request, and share of the cache.
FAULTS = {
    "": (1.0, 1.0, 0.0, 1.0),
    "decode": (1.0, 1.6, 0.0, 1.0),
    "prefill": (1.6, 1.0, 0.0, 1.0),
    "front end": (1.0, 1.0, 0.15, 1.0),
    "KV cache": (1.0, 1.0, 0.0, 0.4),
}


def requests(seed: int, count: int = 160) -> Trace:
    rng = stream(seed, "observed")
    inputs = np.clip(rng.lognormal(3.8, 0.7, count), 4, 200).astype(int)
    outputs = np.clip(rng.lognormal(2.8, 0.6, count), 2, 64).astype(int)
    return Trace(np.cumsum(rng.gamma(0.5, 0.5, count)), inputs, outputs)


def served(engine: Replica, trace: Trace, seed: int = 0) -> pd.DataFrame:
    """What clients see of an engine whose times scatter."""
    rng = stream(seed, "scatter")
    found = simulate(Deployment("real", (engine,)), trace, RoundRobin()).frame()
    found["ttft_s"] *= np.exp(rng.normal(0.0, 0.15, len(found)))
    found["tpot_s"] *= np.exp(rng.normal(0.0, 0.08, len(found)))
    return found


def disturbed(part: str) -> Replica:
    prefill, decode, front_s, cache = FAULTS[part]
    step = refitted(STEP, prefill, decode, front_s, 64)
    return replace(TOLD, step=step, kv_tokens=int(cache * TOLD.kv_tokens))


@pytest.fixture(autouse=True)
def _fewer_caches(monkeypatch):
    some = tuple(2.0 ** (k / 3) for k in range(-6, 7, 2))
    monkeypatch.setattr("hetero.apps.profiling.observed._KV_FACTORS", some)


@pytest.mark.parametrize("part", ["", "prefill", "front end", "KV cache"])
def test_the_part_that_is_off_is_named_and_refitted(part):
    found = observe(ServedLog.of(served(disturbed(part), requests(1))), TOLD, resamples=100)
    assert found.named == ((part,) if part else ())
    prefill, decode, front_s, cache = FAULTS[part]
    true = {"prefill": prefill, "decode": decode, "front end": front_s, "KV cache": cache * 1024}
    for one in found.parts:
        assert one.low <= one.high
        if one.part == part:
            assert one.found == pytest.approx(true[part], rel=0.1)
    # Fresh requests take what the refitted engine says.
    fresh = requests(7)
    real = simulate(Deployment("real", (disturbed(part),)), fresh, RoundRobin())
    again = simulate(Deployment("refitted", (found.replica,)), fresh, RoundRobin())
    assert np.nanmean(again.tpot_s) == pytest.approx(np.nanmean(real.tpot_s), rel=0.1)
    assert np.mean(again.e2e_s) == pytest.approx(np.mean(real.e2e_s), rel=0.1)


def test_cache_hits_that_do_not_come_are_named(monkeypatch):
    monkeypatch.setattr("hetero.apps.profiling.observed._KV_FACTORS", (0.5, 1.0, 2.0))
    trace = requests(2).with_prefix(0.75)
    told = replace(TOLD, kv_tokens=4096, engine=replace(RULES, prefix_cache=True))
    cold = replace(told, engine=RULES)
    for engine, named in ((told, ()), (cold, ("cache hits",))):
        log = replace(ServedLog.of(served(engine, trace)), trace=trace)
        assert observe(log, told, resamples=50).named == named


def test_a_cache_that_never_fills_has_no_upper_end():
    log = ServedLog.of(served(replace(TOLD, kv_tokens=100_000), requests(3)))
    found = observe(log, replace(TOLD, kv_tokens=100_000), resamples=50)
    assert found.named == ()
    assert found.parts[3].high == np.inf
    assert "never filled" in str(found)


@pytest.mark.parametrize("pieces", [1, 2])
def test_refitted_times_are_those_of_their_equations(pieces):
    mixed = Mixed(np.full(4, 2e-6), np.full(4, 1e-3), np.zeros(4))
    one = Piece(np.array([1.0, 64.0, 512.0]), np.array([0.02, 0.05, 0.4]), np.full(4, 1e-6), 1e-8,
                mixed, np.array([0.0, 1e-3, 2e-3, 3e-3]))  # fmt: skip
    step = StepModel((one,) * pieces, source="made up", provenance="assumed")
    new = refitted(step, 1.5, 0.7, 0.2, 16)
    b = np.arange(1, 17)
    assert new.seconds(b, b, 90.0 * b) == pytest.approx(0.7 * step.seconds(b, b, 90.0 * b))
    n = np.array([2.0, 30.0, 300.0, 900.0])
    first = step.seconds(1.0)
    assert new.seconds(n) == pytest.approx(first + 1.5 * (step.seconds(n) - first))
    assert new.request_s == 0.2
    same = refitted(step, 1.0, 1.0, step.request_s, 4)
    assert same.seconds(70.0, 3, 200.0, 50.0) == pytest.approx(step.seconds(70.0, 3, 200.0, 50.0))


def test_the_command_writes_steps_that_simulate_reads(tmp_path, told):
    log, steps, refit = (tmp_path / name for name in ("log.csv", "steps.json", "refit.json"))
    served(disturbed("decode"), requests(1)).to_csv(log, index=False)
    storage.save(STEP, steps)
    call = ("observe", log, "--steps", steps, "--kv-tokens", "1024", "--chunk", "2048")
    found = told(*call, "--max-batch", "64", "-o", refit)
    assert found["off"] == ["decode"]
    assert found["error_percent"]["refitted"][1] < found["error_percent"]["told"][1]
    slower = storage.load(refit).decode_seconds([80] * 4) / STEP.decode_seconds([80] * 4)
    assert float(slower) == pytest.approx(1.6, rel=0.1)


def test_logs_may_hold_dates_and_e2e_and_failures(tmp_path):
    frame = served(TOLD, requests(1))
    file = tmp_path / "log.csv"
    frame.to_csv(file, index=False)
    plain = ServedLog.read(file)
    frame["arrival_s"] = pd.Timestamp("2026-01-31") + pd.to_timedelta(frame["arrival_s"], unit="s")
    frame["e2e_s"] = frame["ttft_s"] + frame["tpot_s"] * (frame["output_tokens"] - 1)
    frame.loc[3, "status"] = "rejected"
    frame.drop(columns="tpot_s").sample(frac=1.0, random_state=0).to_csv(file, index=False)
    found = ServedLog.read(file)
    left = np.delete(np.arange(len(frame)), 3)
    assert found.trace.arrival_s == pytest.approx(plain.trace.arrival_s[left], abs=1e-6)
    assert found.tpot_s == pytest.approx(plain.tpot_s[left])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda frame: frame.drop(columns="ttft_s"), "'ttft_s' is missing"),
        (lambda frame: frame.assign(replica=["a", "b"] * (len(frame) // 2)), "answers of a, b"),
        (lambda frame: frame.assign(status="rejected"), "answers of engine"),
        (lambda frame: frame.assign(ttft_s="soon"), "neither a number nor a date"),
        (lambda frame: frame.assign(ttft_s=0.0), "no time to first token"),
    ],
)
def test_a_log_that_cannot_be_read_says_why(change, said, tmp_path):
    file = tmp_path / "log.csv"
    change(served(TOLD, requests(1))).to_csv(file, index=False)
    with pytest.raises(HeteroError, match=said):
        ServedLog.read(file)
    with pytest.raises(DataError, match="no such file"):
        ServedLog.read(tmp_path / "none.csv")


def test_too_little_is_refused():
    log = ServedLog.of(served(TOLD, requests(1)))
    with pytest.raises(FitError, match="cannot hold every request"):
        observe(log, replace(TOLD, kv_tokens=64))
    with pytest.raises(FitError, match="39 requests tell nothing"):
        observe(ServedLog.of(served(TOLD, requests(1, 39))), TOLD)
    with pytest.raises(HeteroError, match="tolerance"):
        observe(log, TOLD, tolerance=0.0)
