"""Expected errors: held-out errors against fresh fits, levels and coverage."""

from __future__ import annotations

import numpy as np
import pytest

from hetero.catalog import gpus
from hetero.errors import CatalogError, ParameterError
from hetero.latency.calibration import expected, roofline_fit
from pipelines.studies import roofline_calibration


def test_every_gpu_has_a_stated_error() -> None:
    for gpu in gpus():
        error = expected.expected_error(gpu.name)
        assert error.level in expected.LEVELS
        # On other makers' GPUs servers were slower by far more than any table says.
        most = 200 if gpu.vendor == "NVIDIA" else 400
        assert 0 < error.decode_p90_percent < most
        assert 0 < error.prefill_p90_percent < most


def test_less_known_gpus_have_larger_errors() -> None:
    measured_, calibrated, _, borrowed = map(expected.error_of, expected.LEVELS)
    for phase in ("prefill", "decode"):
        sds = [getattr(e, f"{phase}_sd") for e in (measured_, calibrated, borrowed)]
        assert sds == sorted(sds)


def test_held_out_rows_are_errors_of_fits_without_the_model(need) -> None:
    need("helix_layer_latency")
    tables = [t for t in roofline_calibration.tables("helix", raw=True) if t.gpu == "L4"]
    rest = [t for t in tables if t.llm != "Llama-2-70B"]
    own = next(t for t in tables if t.llm == "Llama-2-70B" and t.tensor_parallel == 1)
    efficiency = roofline_calibration.calibrate(rest, hold_out=False).efficiency
    error = np.log(roofline_fit.predict(own, efficiency) / own.seconds)[own.decode]
    frame = expected.held_out_frame()
    row = frame[
        (frame["level"] == "calibrated")
        & (frame["gpu"] == "L4")
        & (frame["llm"] == "Llama-2-70B")
        & (frame["degree"] == 1)
        & (frame["phase"] == "decode")
    ].iloc[0]
    assert row["rows"] == len(error)
    assert row["mean"] == pytest.approx(error.mean(), abs=1e-3)
    assert row["scatter"] == pytest.approx(error.std(), abs=1e-3)


def test_carried_efficiencies_do_not_know_their_chip() -> None:
    a100 = roofline_calibration.without_chip("A100-SXM-80GB")
    assert (
        a100.values.tolist() == roofline_calibration.without_chip("A100-SXM-40GB").values.tolist()
    )
    frame = expected.fitted_frame()
    others = frame[~frame["gpu"].str.startswith("A100")]
    assert others["compute_efficiency"].min() <= a100.compute_efficiency
    assert a100.compute_efficiency <= others["compute_efficiency"].max()


@pytest.mark.parametrize("level", ["calibrated", "carried"])
def test_intervals_hold_what_they_say(level) -> None:
    """On steps of chips that took no part in making them, settings and not repeats."""
    found = roofline_calibration.coverage_frame(level)
    assert found["rows"].sum() >= 200
    pooled = float((found["covered"] * found["rows"]).sum() / found["rows"].sum())
    assert 0.85 <= pooled <= 0.95
    assert bool((found["low"] < 1).all() and (found["high"] > 1).all())
    half = roofline_calibration.coverage_frame(level, 0.5)
    narrower = float((half["covered"] * half["rows"]).sum() / half["rows"].sum())
    assert 0.35 < narrower < 0.65


def test_unknown_names_are_refused() -> None:
    with pytest.raises(CatalogError):
        expected.expected_error("H1000")
    with pytest.raises(ParameterError, match="calibrated"):
        expected.error_of("guessed")  # type: ignore[arg-type]
