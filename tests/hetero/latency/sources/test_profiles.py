"""Layer profiles: the reduction against the raw tables, and what the step models say."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from hetero.catalog import gpu, llm
from hetero.errors import ParameterError
from hetero.latency.sources import profiles
from hetero.latency.step import Mixed, Piece, StepModel
from hetero.workload import datasets
from pipelines.studies import layer_profiles, profile_settings

DECODE, MEAN_DECODE = 5.0, 1.0  # what the reduction may cost [%]


@pytest.fixture
def raw_tables(need):
    need("llmservingsim_profile")
    need("llmservingsim_profile_v0")
    return {(p.gpu, p.llm, p.tensor_parallel): p for p in layer_profiles.layer_profiles()}


def test_mixed_steps_have_their_own_rates() -> None:
    mixed = Mixed(np.array([3.0, 5.0]), np.array([1.0, 2.0]), np.array([0.5, 0.25]))
    piece = Piece(np.array([0.0, 1.0]), np.array([0.0, 1.0]), np.array([2.0, 4.0]), 0.0, mixed)
    model = StepModel((piece,), source="", provenance="assumed")
    assert float(model.seconds(2, 2, 10)) == 2 + 4 * 10
    assert float(model.seconds(6, 2, 10)) == 6 + 5 * 10 + 2 + 0.25 * 4
    assert float(model.seconds(6, 0, 0)) == 6
    assert float(model.seconds(7, 9, 10)) == 7 + 4 * 10  # more requests than tokens: no prefill


def test_every_profile_decodes_within_the_limits() -> None:
    for found in profiles.profiled_steps():
        mean, largest = found.errors["decode"]
        assert mean <= MEAN_DECODE, found.model.source
        assert largest <= DECODE, found.model.source


def test_committed_models_are_those_of_the_raw_tables(raw_tables) -> None:
    for found in profiles.profiled_steps():
        raw = raw_tables[found.gpu, found.llm, found.tensor_parallel]
        again = layer_profiles.reduce_profile(raw)
        assert found.skew == pytest.approx(raw.skew, nan_ok=True)
        for n, b, cached, pairs in ((1, 1, 500, 0), (100, 100, 9e4, 0), (900, 100, 9e4, 4e5)):
            np.testing.assert_allclose(
                found.model.seconds(n, b, cached, pairs),
                again.model.seconds(n, b, cached, pairs),
                rtol=1e-3,
            )


def test_a_decode_step_adds_up_from_the_files(raw_tables) -> None:
    folder = "llmservingsim/profile/RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp1"

    def read(name: str) -> pd.DataFrame:
        return pd.read_csv(datasets.path("llmservingsim_profile", f"{folder}/{name}.csv"))

    dense, head, attention = read("dense"), read("per_sequence"), read("attention")
    row = attention.query("prefill_chunk == 0 and n_decode == 64 and kv_decode == 1024")
    of = dense[dense["tokens"] == 64].set_index("layer")["time_us"]
    layers = of.drop(["embedding", "final_layernorm"]).sum() + of["layernorm"]
    heads = head.pivot(index="sequences", columns="layer", values="time_us").sum(axis=1)
    total = 32 * (layers + float(row["time_us"].iloc[0])) + of["embedding"] + of["final_layernorm"]
    total += np.interp(64, heads.index, heads)
    profile = raw_tables["RTX-PRO-6000-Server", "Llama-3.1-8B", 1]
    at = (profile.chunk_tokens == 0) & (profile.decoding == 64) & (profile.context_tokens == 1024)
    assert profile.seconds[at][0] == pytest.approx(total * 1e-6, rel=1e-12)
    assert float(
        profiles.profiled_step("RTX-PRO-6000-Server", "Llama-3.1-8B").model.decode_seconds(
            [1024] * 64
        )
    ) == pytest.approx(total * 1e-6, rel=0.03)


def test_mixed_rows_are_kept(raw_tables) -> None:
    profile = raw_tables["RTX-PRO-6000-Server", "Llama-3.1-8B", 1]
    model = profiles.profiled_step("RTX-PRO-6000-Server", "Llama-3.1-8B").model
    n, b, cached, pairs = profile.step_arguments
    at = (profile.chunk_tokens == 512) & (profile.start_tokens == 0) & (b == 64)
    at &= (profile.context_tokens >= 256) & (profile.context_tokens <= 2048)
    own = model.seconds(n[at], b[at], cached[at], pairs[at])
    np.testing.assert_allclose(own, profile.seconds[at], rtol=0.04)
    # Without the refinement the same steps come out too short by far more.
    plain = StepModel(
        (Piece(*(getattr(model.pieces[0], x) for x in (
            "knots_tokens", "knots_s", "per_cached_token_s", "per_pair_s"))),),
        source="", provenance="derived",
    )  # fmt: skip
    short = plain.seconds(n[at], b[at], cached[at], pairs[at]) / profile.seconds[at] - 1
    assert short.mean() < -0.05


def test_ragged_batches_cost_more_than_equal_ones() -> None:
    found = profiles.profiled_step("RTX-PRO-6000-Server", "Llama-3.1-8B")
    ratio = np.linspace(1.0, 3.0, 256)
    equal, ragged = found.model, found.ragged(ratio)
    assert float(ragged.decode_seconds([900])) == float(equal.decode_seconds([900]))
    extra = float(ragged.decode_seconds([900] * 128) - equal.decode_seconds([900] * 128))
    rate = equal.pieces[0].per_cached_token_s[127]
    assert extra == pytest.approx(rate * 128 * 900 * 0.0436 * (ratio[127] - 1.0))
    # The profiler found nothing at 16 requests, and less in mixed steps of many.
    assert float(ragged.decode_seconds([900] * 16)) == float(equal.decode_seconds([900] * 16))
    assert float(ragged.seconds(640, 128, 9e4)) == float(equal.seconds(640, 128, 9e4))
    assert float(ragged.seconds(512, 2, 9e3)) > float(equal.seconds(512, 2, 9e3))
    unknown = profiles.profiled_step("RTX-4090", "Llama-3.1-8B")
    assert unknown.ragged(ratio) is unknown.model


def test_old_profiles_read_their_weights_and_compute_their_prompts() -> None:
    """A decode step cannot beat the bandwidth, a prefill not the peak, of the spec sheet."""
    model = llm("Llama-3.1-8B")
    for name in ("RTX-A6000", "RTX-3090", "RTX-4090", "RTX-PRO-6000-Server"):
        step = profiles.profiled_step(name, "Llama-3.1-8B").model
        least = (model.weight_bytes() - model.vocab * model.hidden * 2) / (
            gpu(name).mem_bw_gbs * 1e9
        )
        assert least < float(step.decode_seconds([1])) < 1.6 * least
        compute = 2 * model.matmul_params * 2048 / (gpu(name).fp16_tflops * 1e12)
        assert 0.9 * compute < float(step.prefill_seconds([2048])) < 2.5 * compute


def test_unknown_profiles_name_those_there_are() -> None:
    with pytest.raises(ParameterError, match="RTX-4090"):
        profiles.profiled_step("T4", "Llama-3.1-8B")
    with pytest.raises(ParameterError, match="RTX-PRO-6000-Server"):
        profiles.all_reduce_s("T4", 2, 1e6)


def test_another_host_changes_two_all_reduces_per_layer() -> None:
    found = profiles.profiled_step("RTX-PRO-6000-Server", "Qwen3-32B", 2)
    other = found.on_other_host(found.model)
    n = float(found.model.pieces[0].knots_tokens[-1])
    size = 2 * 5120 * n
    slow, fast = (
        float(profiles.all_reduce_s("RTX-PRO-6000-Server", 2, size, e))
        for e in ("vLLM 0.19.0", "vLLM 0.24.0")
    )
    change = float(found.model.seconds(n) - other.seconds(n))
    assert change == pytest.approx(2 * 64 * (slow - fast), abs=1e-9)
    assert float(other.decode_seconds([900] * 128)) < float(found.model.decode_seconds([900] * 128))


def test_settings_of_a_profile_are_those_of_its_tables(raw_tables) -> None:
    """Beside the other sources: the reduced model and the published tables agree."""
    for own, raw in zip(
        profile_settings.measurements(), layer_profiles.measurements(), strict=True
    ):
        assert own.label == raw.label
        error = own.seconds / raw.seconds - 1.0
        assert np.abs(error[own.decode]).max() < 0.03
        assert np.abs(error[~own.decode]).max() < 0.12
    whole = raw_tables["RTX-4090", "Llama-3.1-8B", 1]
    at = (whole.chunk_tokens == 0) & (whole.decoding == 16) & (whole.context_tokens == 1024)
    table = next(t for t in layer_profiles.measurements() if t.gpu == "RTX-4090")
    row = table.decode & (table.batch == 16) & (table.length_tokens == 1024)
    assert table.seconds[row] == pytest.approx(whole.seconds[at])
