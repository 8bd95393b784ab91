"""Uncertainty of plans: draws against closed forms, and what they do to rankings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from hetero import workload
from hetero.catalog import gpu, llm
from hetero.deployment import Deployment, Engine, Replica
from hetero.errors import ParameterError
from hetero.latency import for_gpu
from hetero.latency.calibration.expected import StepError
from hetero.latency.sources import measured
from hetero.latency.sources.profiles import profiled_step
from hetero.routers import LeastTokens
from hetero.simulator import simulate, uncertainty

ERROR = StepError(
    level="carried",
    prefill_sd=0.2,
    decode_sd=0.1,
    correlation=0.5,
    prefill_scatter=0.05,
    decode_scatter=0.05,
    prefill_p90_percent=30.0,
    decode_p90_percent=20.0,
    rows=100,
    front_sd=0.4,
)
MODEL = llm("Llama-3.1-8B")


def deployment(name: str, count: int = 1) -> Deployment:
    step = for_gpu(gpu(name), MODEL).step_model()
    one = Replica("0", step, kv_tokens=50_000, gpu=gpu(name), usd_per_h=2.0, engine=Engine())
    return Deployment(name, tuple(replace(one, name=str(k)) for k in range(count)))


def case(name: str) -> uncertainty.JudgedPlan:
    """Judged by one decode step: its logarithm is that of the drawn factor."""

    def evaluate(found: Deployment) -> dict[str, float]:
        step = found.replicas[0].step
        return {
            "decode_s": float(step.decode_seconds([500] * 8)),
            "prefill_s": float(step.prefill_seconds([2000])),
        }

    return uncertainty.JudgedPlan(deployment(name), evaluate)


def test_a_draw_of_the_front_end_moves_the_first_token() -> None:
    slow = deployment("H100-SXM")
    step = replace(slow.replicas[0].step, request_s=0.01)
    slow = replace(slow, replicas=(replace(slow.replicas[0], step=step),))
    trace = workload.Trace([0.0], [100], [2])
    first = [
        simulate(
            uncertainty.perturbed(slow, {"0": np.array([1.0, 1.0, front])}), trace, LeastTokens()
        )
        for front in (1.0, 3.0)
    ]
    assert float(first[1].ttft_s[0] - first[0].ttft_s[0]) == pytest.approx(0.02)
    assert float(first[1].tpot_s[0]) == pytest.approx(float(first[0].tpot_s[0]))


def test_draws_have_the_deviations_they_are_drawn_with() -> None:
    found = uncertainty.draw_factors({"a": ERROR, "b": ERROR}, 20_000, seed=3, common=0.6)
    logs = np.hstack([np.log(found["a"]), np.log(found["b"])])
    np.testing.assert_allclose(logs.std(axis=0), [0.2, 0.1, 0.4, 0.2, 0.1, 0.4], rtol=0.03)
    np.testing.assert_allclose(np.median(logs, axis=0), 0.0, atol=0.01)
    correlation = np.corrcoef(logs.T)
    assert correlation[0, 1] == pytest.approx(0.5, abs=0.02)
    assert correlation[0, 2] == pytest.approx(0.0, abs=0.02)
    for k in range(3):
        assert correlation[k, k + 3] == pytest.approx(0.6, abs=0.02)
    again = uncertainty.draw_factors({"b": ERROR}, 20_000, seed=3, common=0.6)
    np.testing.assert_array_equal(again["b"], found["b"])  # whoever else is drawn


def test_scaling_reaches_every_part_of_a_step() -> None:
    step = profiled_step("RTX-PRO-6000-Server", "Llama-3.1-8B").model
    both = uncertainty.scaled(step, 3.0, 3.0)
    n = np.array([1, 64, 100, 300, 900, 2048, 5000])
    for b, cached, pairs in ((0, 0, 0), (0, 0, 5e5), (50, 4e4, 1e5)):
        own = both.seconds(n + b, b, cached, pairs)
        # Geometric steps between 256 and 1,024 tokens follow the table's knots closely.
        np.testing.assert_allclose(own, 3.0 * step.seconds(n + b, b, cached, pairs), rtol=0.01)
    levels = next(iter(measured.aiconfigurator_step_models().values()))
    assert levels.pieces[0].decode_level_s is not None
    np.testing.assert_allclose(
        uncertainty.scaled(levels, 1.0, 2.0).decode_seconds([700] * 100),
        2 * levels.decode_seconds([700] * 100),
        rtol=0.01,
    )
    decode = uncertainty.scaled(step, 1.0, 3.0)
    assert float(decode.decode_seconds([700] * 40)) == pytest.approx(
        3 * float(step.decode_seconds([700] * 40)), rel=0.01
    )
    assert float(decode.prefill_seconds([2000])) == pytest.approx(
        float(step.prefill_seconds([2000])), rel=0.01
    )


def test_outcomes_follow_the_closed_form() -> None:
    cases = {"H100": case("H100-SXM"), "A100": case("A100-SXM-80GB")}
    errors = {"H100-SXM": ERROR, "A100-SXM-80GB": ERROR}
    found = uncertainty.propagate(cases, draws=4000, seed=1, errors=errors)
    low, high = found.interval("H100", "decode_s")
    nominal = found.nominal[0, 0]
    assert np.log(high / nominal) == pytest.approx(stats.norm.ppf(0.95) * 0.1, rel=0.08)
    assert np.log(low / nominal) == pytest.approx(-stats.norm.ppf(0.95) * 0.1, rel=0.08)
    gap = np.log(found.nominal[1, 0] / nominal)
    expected = stats.norm.sf(gap / (np.sqrt(2) * 0.1))
    assert found.flips("H100", "A100", "decode_s") == pytest.approx(expected, abs=0.02)
    assert sum(found.wins("decode_s", largest=False).values()) == pytest.approx(1.0)
    assert found.rankings("decode_s").rows[0][2] == found.flips("H100", "A100", "decode_s")
    assert "H100" in str(found)


def test_errors_of_one_gpu_type_never_flip_plans_on_it() -> None:
    small, large = case("H100-SXM"), case("H100-SXM")
    large = uncertainty.JudgedPlan(
        large.deployment, lambda d: {k: 1.001 * v for k, v in small.evaluate(d).items()}
    )
    found = uncertainty.propagate({"small": small, "large": large}, draws=300)
    assert found.flips("small", "large", "decode_s") == 0.0


def test_robust_choices_can_differ() -> None:
    values = np.array([[[10.0], [10.0], [1.0]], [[6.0], [6.0], [6.0]], [[9.0], [3.0], [7.5]]])
    found = uncertainty.Outcomes(
        ("bold", "safe", "odd"), ("x",), np.array([[5], [6], [9.0]]), values
    )
    assert found.best("x", "nominal") == "odd"
    assert found.best("x", "best mean") == "bold"
    assert found.best("x", "best worst case") == "safe"
    assert found.best("x", "best worst case", largest=False) == "safe"
    assert found.best("x", "best mean", largest=False) == "safe"
    # Nominally bold < safe; drawn it is above twice and below once.
    assert found.flips("bold", "safe", "x") == pytest.approx(2 / 3)
    with pytest.raises(ParameterError, match="best mean"):
        found.best("x", "worst")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="plan"):
        found.of("none", "x")


def test_robust_choice_by_simulation_takes_what_is_measured_over_what_is_guessed() -> None:
    """A GPU of known speed beats one that may be much slower, though that is nominally faster."""
    rng = np.random.default_rng(0)
    trace = workload.load("azure2023_conv").sample(60, rng).poisson(50.0, rng)
    evaluate = uncertainty.served(LeastTokens(), trace)
    slow, fast = deployment("H100-SXM", 1), deployment("H200-SXM", 1)
    cases = {d.name: uncertainty.JudgedPlan(d, evaluate) for d in (slow, fast)}
    sure, unsure = replace(ERROR, prefill_sd=0.01, decode_sd=0.01), replace(ERROR, decode_sd=1.0)
    errors = {"H100-SXM": sure, "H200-SXM": unsure}
    measure = "throughput [tokens/s]"
    found = uncertainty.robust(cases, measure, "best worst case", draws=25, errors=errors)
    assert (found.nominal, found.name) == ("H200-SXM", "H100-SXM")
    assert found.outcomes.best(measure, "best worst case") == found.name
    assert uncertainty.robust(cases, measure, "nominal", draws=2, errors=errors).name == "H200-SXM"
    assert "H100-SXM" in str(found)
    with pytest.raises(ParameterError, match="no measure 'speed'"):
        uncertainty.robust(cases, "speed", draws=1)


def test_what_cannot_be_drawn_is_refused() -> None:
    bare = Deployment("x", (Replica("r", deployment("T4").replicas[0].step, kv_tokens=1000),))
    with pytest.raises(ParameterError, match="no GPU"):
        uncertainty.propagate({"x": uncertainty.JudgedPlan(bare, lambda _: {"a": 1.0})})
    with pytest.raises(ParameterError, match="no plan"):
        uncertainty.propagate({})
    with pytest.raises(ParameterError, match="0 draws"):
        uncertainty.draw_factors({"a": ERROR}, 0)
    other = uncertainty.JudgedPlan(deployment("T4"), lambda _: {"b": 1.0})
    cases = {"x": case("T4"), "y": other}
    with pytest.raises(ParameterError, match="same measures"):
        uncertainty.propagate(cases, draws=1)
