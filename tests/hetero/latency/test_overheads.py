"""What an engine takes beside its kernels, and how it is fitted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetero.catalog import gpu, llm, serving_engine
from hetero.catalog.engines import EngineOverheads
from hetero.deployment import Deployment, Engine, Replica
from hetero.errors import ParameterError
from hetero.latency.overheads import with_overheads
from hetero.latency.resolve import resolve
from hetero.latency.step import StepModel
from hetero.routers import SingleInstance
from hetero.simulator import simulate
from hetero.workload import Trace
from pipelines.studies import server_fit, server_gpus, servers

EIGHT = llm("Llama-3.1-8B")
KERNELS = StepModel.affine(floor_s=0.01, per_token_s=1e-4, per_cached_token_s=1e-8)
NONE = EngineOverheads(engine="vllm", releases="none", source="made up")


def added(overheads: EngineOverheads, kernels: StepModel = KERNELS, degree: int = 1):
    """What steps take on top: a decode step of 30, a prompt of 500, and both at once."""
    arguments = ([30.0, 500.0, 530.0], [30, 0, 30], [3e4, 0.0, 3e4], [0.0, 125e3, 125e3])
    step = with_overheads(kernels, overheads, EIGHT, degree)
    return (step.seconds(*arguments) - kernels.seconds(*arguments)).tolist()


def test_each_overhead_is_added_where_it_belongs() -> None:
    assert added(NONE) == pytest.approx([0, 0, 0])
    assert added(replace(NONE, step_s=1e-3)) == pytest.approx([1e-3] * 3)
    assert added(replace(NONE, decoding_s=1e-4)) == pytest.approx([3e-3, 0, 3e-3])
    assert added(replace(NONE, worker_s=1e-3)) == pytest.approx([0] * 3)
    assert added(replace(NONE, worker_s=1e-3), degree=2) == pytest.approx([1e-3] * 3)


def test_launches_are_a_floor() -> None:
    kernels = KERNELS.seconds([30.0, 500.0], [30, 0], [3e4, 0.0])
    slow = replace(NONE, launch_s=0.02 / 32, step_s=1e-3)
    assert kernels[0] < 0.02 < kernels[1]
    assert added(slow)[:2] == pytest.approx([0.021 - kernels[0], 1e-3])


def test_tables_with_bends_and_mixed_steps_take_them_too() -> None:
    both = replace(NONE, step_s=2e-3, decoding_s=1e-4)
    for name, model in (("H100-SXM", EIGHT), ("RTX-PRO-6000-Server", EIGHT)):
        table = resolve(gpu(name), model).step
        assert added(both, table) == pytest.approx([5e-3, 2e-3, 5e-3])
    # Also with more requests than the table knows.
    many = with_overheads(table, both, EIGHT).decode_seconds([100] * 400)
    assert many == pytest.approx(float(table.decode_seconds([100] * 400)) + 2e-3 + 0.04)


def test_a_run_takes_its_steps_with_floor_and_overheads() -> None:
    """The simulator plays the two pieces, whose arrays differ in length, as they say."""
    slow = replace(NONE, launch_s=1e-3, step_s=1e-3, decoding_s=1e-4)
    step = with_overheads(KERNELS, slow, EIGHT)
    engine = Engine(batching="chunked", admission="paged", max_step_tokens=4096)
    deployment = Deployment("d", (Replica("r", step, 10**6, engine=engine),))
    run = simulate(deployment, Trace(np.zeros(20), [50] * 20, [11] * 20), SingleInstance(0))
    lengths = 50 + np.arange(1, 11)
    steps = [float(step.decode_seconds([n] * 20)) for n in lengths]
    assert min(steps) == max(steps) == pytest.approx(0.032 + 1e-3 + 2e-3)
    prefill = float(step.seconds(1000.0, 0, 0.0, 20 * 50.0**2 / 2))
    assert float(run.span_s) == pytest.approx(prefill + sum(steps), rel=1e-6)


def test_fitted_overheads_are_data() -> None:
    engine = serving_engine("vllm")
    assert {one.releases for one in engine.overheads} == {
        one.releases for one in server_fit.GENERATIONS.values()
    }
    assert all("serving_runs" in one.source for one in engine.overheads)
    # Layer by layer before 0.11, all at once since.
    assert engine.overheads_of("0.10.2").launch_s > engine.overheads_of("0.11").launch_s == 0.0
    assert engine.overheads_of().launch_s == 0.0
    with pytest.raises(ParameterError, match="no release"):
        engine.overheads_of("new")
    with pytest.raises(ParameterError, match="0 or more"):
        replace(NONE, step_s=-1.0)


def under(overheads: EngineOverheads) -> servers.StepsOfRun:
    return lambda run: with_overheads(servers.kernels(run), overheads, run.llm, run.tensor_parallel)


def runs_with(truth: EngineOverheads) -> tuple[servers.ServerRun, ...]:
    """Batches whose measured times are those of a simulation with given overheads."""
    found = []
    for degree in (1, 2):
        for size in (1, 8, 64):
            trace = Trace(np.zeros(size), [100] * size, [50] * size)
            run = servers.ServerRun(
                "made up", "vLLM", "H100-SXM", EIGHT, degree, f"{size}", trace, {}, "last"
            )
            own = servers.simulated(run, servers.served(run, under(truth)))
            found.append(replace(run, measured={"e2e_s": own["e2e_s"]}))
    return tuple(found)


def test_the_fit_finds_what_made_the_times() -> None:
    truth = replace(NONE, step_s=2e-3, worker_s=1.5e-3, decoding_s=6e-5)
    runs = runs_with(truth)
    generation = server_fit.Generation(
        "made up", lambda: list(runs), ("step_s", "worker_s", "decoding_s")
    )
    fit = server_fit.Fit.of(generation)
    found = fit.fit(runs)
    assert found.step_s == pytest.approx(truth.step_s, rel=0.02)
    assert found.worker_s == pytest.approx(truth.worker_s, rel=0.03)
    assert found.decoding_s == pytest.approx(truth.decoding_s, rel=0.03)
    assert fit.errors(runs, found)["E2E"].abs().max() < 0.5


def test_what_no_run_shows_stays_none() -> None:
    runs = runs_with(replace(NONE, step_s=2e-3))
    # The newest release, and layers are launched at once since an older one.
    free = ("step_s", "launch_s")
    generation = server_fit.Generation("made up", lambda: list(runs), free, "0.11")
    found = server_fit.Fit.of(generation).fit(runs)
    assert found.launch_s == 0.0
    assert found.step_s == pytest.approx(2e-3, rel=0.02)


def test_the_time_of_a_request_is_in_its_first_token() -> None:
    trace = Trace([0.0, 10.0], [100, 100], [5, 5])
    run = servers.ServerRun("made up", "vLLM", "H100-SXM", EIGHT, 1, "two", trace, {})
    slow = replace(NONE, request_s=0.02)
    with_it, without = (
        servers.simulated(run, servers.served(run, under(one))) for one in (slow, NONE)
    )
    assert with_it["ttft_s"] - without["ttft_s"] == pytest.approx(0.02)
    assert with_it["e2e_s"] - without["e2e_s"] == pytest.approx(0.02)
    assert with_it["tpot_s"] == pytest.approx(without["tpot_s"])


def test_the_tokens_of_a_mixtures_prompt_are_before_its_first_token() -> None:
    """A client that waits for its answer sends the next request so much later."""
    per_token = replace(NONE, request_s=0.02, prompt_token_s=1e-5)
    steps = [
        with_overheads(KERNELS, per_token, llm(name)) for name in ("Mixtral-8x7B", "Llama-3.1-8B")
    ]
    trace = Trace(np.zeros(2), [1000, 3000], [5, 5]).closed_loop(1)
    mixture, dense, plain = (
        simulate(Deployment("d", (Replica("r", step, 10**6),)), trace, SingleInstance(0))
        for step in (*steps, KERNELS)
    )
    assert (dense.ttft_s - plain.ttft_s).tolist() == pytest.approx([0.02, 0.02])
    assert (mixture.ttft_s - plain.ttft_s).tolist() == pytest.approx([0.03, 0.05])
    assert mixture.tpot_s.tolist() == pytest.approx(plain.tpot_s.tolist())
    assert mixture.span_s - plain.span_s == pytest.approx(0.08)


def test_every_run_is_tested_in_every_way(monkeypatch) -> None:
    truth = replace(NONE, step_s=2e-3)
    runs = []
    for name in ("H100-SXM", "A100-SXM-80GB", "MI300X"):
        for model in (EIGHT, llm("Llama-2-7B")):
            trace = Trace(np.zeros(8), [100] * 8, [20] * 8)
            run = servers.ServerRun("made up", "vLLM 0.15", name, model, 1, "8", trace, {}, "last")
            own = servers.simulated(run, servers.served(run, under(truth)))
            runs.append(replace(run, measured={"e2e_s": own["e2e_s"]}))
    generation = server_fit.Generation("made up", lambda: list(runs), ("step_s",))
    monkeypatch.setitem(server_fit.GENERATIONS, "made up", generation)
    asked = set()

    def fitted(group: server_gpus.Group, without: str = ""):
        asked.add((group.gpu, without))
        return group.lent(), ()

    monkeypatch.setattr(server_gpus, "fitted", fitted)  # from a thousand runs
    fit, fits = server_fit.Fit.fit, []

    def counted(self: server_fit.Fit, runs, near=None):
        fits.append(len(runs))
        return fit(self, runs, near)

    monkeypatch.setattr(server_fit.Fit, "fit", counted)
    found, frame = server_fit.left_out("made up")
    assert fits == [6, 4, 4, 4, 3, 3]  # without the runs of each GPU, then of each model
    assert asked == {("MI300X", EIGHT.name), ("MI300X", "Llama-2-7B")}
    assert found.step_s == pytest.approx(2e-3, rel=0.02)
    assert frame.groupby("test").size().to_dict() == dict.fromkeys(
        ("none", "in sample", "gpu", "llm"), len(runs)
    )
    # Nothing was measured of an MI300X's operators: it is tested alone, without its own runs.
    assert set(frame[frame["fitted"]]["kind"]) <= {"operators", "calibrated"}
    assert set(frame[~frame["fitted"]]["gpu"]) == {"MI300X"}
    size = frame["E2E"].abs().groupby([frame["test"], frame["gpu"]]).max()
    assert size["none"].min() > 5
    assert size["gpu"][["H100-SXM", "A100-SXM-80GB"]].max() < 1 < size["gpu"]["MI300X"]
