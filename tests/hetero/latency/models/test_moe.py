from __future__ import annotations

import csv
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.catalog import gpu as catalog_gpu
from hetero.catalog import llm
from hetero.errors import CatalogError, ParameterError
from hetero.latency.models.moe import MoeModel
from hetero.latency.models.moe_devices import MoeDevice, moe_device, moe_devices
from hetero.latency.models.moe_reduction import decode_group, prefill_group
from hetero.latency.models.reference_quirks import CORRECTED, FAITHFUL, LETTERS
from hetero.workload import datasets

V3 = llm("DeepSeek-V3")
PREFILL = {
    "dense_mla_ms_per_layer": "dense_attention_ms",
    "dense_mlp_ms_per_layer": "dense_mlp_ms",
    "sparse_mla_ms_per_layer": "attention_ms",
    "shared_expert_ms_per_layer": "shared_ms",
    "routed_expert_ms_per_layer": "routed_ms",
    "dispatch_ms_per_layer": "dispatch_ms",
    "combine_ms_per_layer": "combine_ms",
    "compute_total_ms": "compute_ms",
    "comm_total_ms": "communication_ms",
    "prefill_total_ms": "total_ms",
}
DECODE = {name: PREFILL[name] for name in list(PREFILL)[:7]} | {
    "delta_ms_per_layer": "delta_ms",
    "tpot_ms": "tpot_ms",
    "tpot_no_comm_ms": "compute_ms",
}


def model(gpu: str, mended: str = "", name: str = "DeepSeek-V3") -> MoeModel:
    return MoeModel(llm(name), moe_device(gpu), FAITHFUL.mend(mended))


def test_every_row_of_the_reference_grid(need: Callable[[str], None]) -> None:
    need("moe_reference")
    with datasets.path("moe_reference", "reference_grid.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 2000
    for gpu in moe_devices():
        for phase, names in (("prefill", PREFILL), ("decode", DECODE)):
            mine = [
                r for r in rows if r["phase"] == phase and moe_device(r["gpu"]).name == gpu.name
            ]
            if not mine:
                continue

            def column(name: str, mine: list[dict[str, str]] = mine) -> np.ndarray:
                return np.array([float(r[name] or "nan") for r in mine])

            faithful = MoeModel(V3, gpu)
            if phase == "prefill":
                got = faithful.prefill(
                    column("seq_len_tokens"),
                    tp=column("tp"),
                    dp=column("dp"),
                    hit_rate=column("kv_cache_rate"),
                )
            else:
                got = faithful.decode(
                    column("seq_len_tokens"),
                    column("batch_size_per_device"),
                    tp=column("tp"),
                    gpus=column("ep_device_num"),
                    output_tokens=column("decode_len_tokens"),
                )
                assert (got.fits == (column("feasible") == 1)).all()
                np.testing.assert_allclose(got.max_batch, column("max_batch_size"), rtol=1e-9)
            for theirs, ours in names.items():
                np.testing.assert_allclose(
                    getattr(got, ours), column(theirs), rtol=1e-9, atol=1e-12, err_msg=theirs
                )


@pytest.mark.parametrize(
    ("gpu", "printed_ms"),
    [
        ("H200", 163.456),
        ("H800", 176.097),
        ("H20", 958.458),
        ("H20-3E", 957.175),
        ("B200", 62.232),
        ("B300", 49.838),
        ("GB300", 41.415),
    ],
)
def test_prefills_that_the_original_prints(gpu: str, printed_ms: float) -> None:
    got = model(gpu).prefill(4383, tp=4, dp=8, hit_rate=0.563)
    assert float(got.total_ms) == pytest.approx(printed_ms, abs=6e-4)


def test_decode_that_the_original_prints() -> None:
    got = model("RubinU-NVL576").decode(4383, 256, tp=4, gpus=320, output_tokens=1210)
    assert float(got.tpot_ms) == pytest.approx(12.747, abs=6e-4)
    assert float(256e3 / got.tpot_ms) == pytest.approx(20083.4, abs=0.06)


def test_parts_by_hand() -> None:
    """H800, one prompt of 1,000 tokens on one GPU of 16: written out number by number."""
    got = model("H800").prefill(1000, tp=1, dp=16)
    share = 0.85 * 112 / 132
    f8, f16, memory = 1979 * share, 989 * share, 0.85 * 4000
    g = 2e-9 * 1000 * (7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256)
    a = 2e-9 * (128 * 1e6 * 320 + 1000 * 128 * 128 * 7168)
    w = 187105280 / 2**20
    assert float(got.dense_attention_ms) == pytest.approx(g / f8 / 0.7 + a / f16 / 0.7 + w / memory)
    load = 3 * 7168 * 2048 / 2**20 / memory
    one = 6e-9 * 1000 * 7168 * 2048 / f8
    assert float(got.routed_ms) == pytest.approx(8 * one + 16 * load)
    size = 3 * 8 * 1000 * 7168 / 2**20 / (8 * 0.85 * 50)
    assert float(got.dispatch_ms) == pytest.approx(size / 2 + 0.05)
    assert float(got.combine_ms) == pytest.approx(2 * size + 0.05)


def test_fp4_units_are_for_the_products_of_a_layer() -> None:
    got = model("B200").prefill(1000, tp=1, dp=16)
    f4, f16 = 9000 * 0.85 * 140 / 160, 2250 * 0.85 * 140 / 160
    g = 2e-9 * 1000 * (7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256)
    a = 2e-9 * (128 * 1e6 * 320 + 1000 * 128 * 128 * 7168)
    assert float(got.dense_attention_ms) == pytest.approx(g / f4 + a / f16 / 0.7)


# Each quirk alone ------------------------------------------------------------------------------


def test_a_dispatch_is_halved_with_fp4_only() -> None:
    for gpu, ratio in (("H200", 2.0), ("B200", 1.0)):
        kept = model(gpu).prefill(4096, tp=1, dp=32).dispatch_ms - 0.05
        mended = model(gpu, "a").prefill(4096, tp=1, dp=32).dispatch_ms - 0.05
        assert float(mended / kept) == pytest.approx(ratio)


def test_b_h200_has_its_own_efficiencies() -> None:
    tokens = np.array([0.0, 1.9, 7.0, 8.0, 100.0, 5000.0])
    h20 = [0.06, 0.06, 0.12, 0.25, 0.9, 1.0]
    other = [0.05, 0.05, 0.05, 0.08, 0.35, 0.7]
    assert model("H200").efficiency(tokens).tolist() == h20
    assert model("H200", "b").efficiency(tokens).tolist() == other
    assert model("H20-3E", "b").efficiency(tokens).tolist() == h20
    assert model("H800").efficiency(tokens).tolist() == other


def test_c_a_millisecond_moves_a_million_bytes_per_gbs() -> None:
    kept = model("H800").prefill(4096, tp=1, dp=32).combine_ms - 0.05
    mended = model("H800", "c").prefill(4096, tp=1, dp=32).combine_ms - 0.05
    assert float(mended / kept) == pytest.approx(2**20 / 1e6)
    step = {"tp": 1, "gpus": 32, "output_tokens": 1}
    far, near = (model("H800", "c").decode(s, 8, **step).attention_ms for s in (10_000, 0))
    read = 10_000 * 576 * 8 / 1e6 / 3400 + 2e-9 * 8 * 128 * 10_000 * 1088 / (0.85 * 989) / 0.7
    assert float(far - near) == pytest.approx(read)


def test_d_a_batch_that_does_not_fit_is_cut() -> None:
    step = {"tp": 1, "gpus": 8, "output_tokens": 1000}
    kept = model("H200").decode(8000, 512, **step)
    most = float(kept.max_batch)
    assert not kept.fits
    assert math.isnan(float(kept.tpot_ms))
    mended = model("H200", "d").decode(8000, 512, **step)
    assert bool(mended.fits)
    assert float(mended.batch) == math.floor(most) < 512
    same = model("H200").decode(8000, math.floor(most), **step)
    assert float(mended.tpot_ms) == float(same.tpot_ms)


def test_e_the_table_of_efficiencies_ends() -> None:
    with pytest.raises(ParameterError, match=r"65,535.*mend quirk e"):
        model("H800").efficiency(np.array([65536.0]))
    assert model("H800").efficiency(np.array([65535.0])).tolist() == [0.7]
    assert model("H800", "e").efficiency(np.array([1e9])).tolist() == [0.7]


def test_f_memory_counts_the_bytes_of_the_shape() -> None:
    def free(mended: str) -> float:
        return float(model("H200", mended).free_bytes(tp=1, gpus=256))

    assert free("") == pytest.approx(
        (0.9 * 141 - 2.91 - 187.17 * 61 / 1024 - 44.05 * 58 * 2 / 1024) * 2**30
    )
    held = V3.params - 58 * 255 * V3.expert_params  # one routed expert a layer
    assert free("f") == pytest.approx(0.9 * 141 * 2**30 - held)


def test_g_half_of_the_pairs_lie_under_the_mask() -> None:
    kept, mended = (model("H800", m).prefill(8192, tp=1, dp=32) for m in ("", "g"))
    saved = 2e-9 * 128 * 320 * 8192**2 / 2 / (0.85 * 989 * 112 / 132) / 0.7
    assert float(kept.attention_ms - mended.attention_ms) == pytest.approx(saved)


def test_h_dense_layers_are_divided_too() -> None:
    kept, mended = (model("H800", m).prefill(4096, tp=8, dp=4) for m in ("", "h"))
    assert float(kept.dense_mlp_ms) == pytest.approx(8 * float(mended.dense_mlp_ms))
    assert float(mended.dense_attention_ms) == float(mended.attention_ms)
    freed = model("H800", "h").free_bytes(tp=8, gpus=32) - model("H800").free_bytes(tp=8, gpus=32)
    assert float(freed) == pytest.approx(7 / 8 * 3 * V3.mlp_params)


def test_i_hits_are_not_computed() -> None:
    half = model("H800", "i").prefill(4096, tp=1, dp=32, hit_rate=0.5)
    rest = model("H800", "i").prefill_step(2048, 2048 * (2048 + 1024), tp=1, dp=32)
    assert float(half.total_ms) == float(rest.total_ms)
    whole = model("H800").prefill(4096, tp=1, dp=32)
    assert float(half.total_ms) < 0.65 * float(whole.total_ms)
    kept = model("H800").prefill(4096, tp=1, dp=32, hit_rate=0.5)
    assert 0.97 < float(kept.total_ms / whole.total_ms) < 1


def test_j_a_group_attends_for_all_its_gpus() -> None:
    step = {"tp": 8, "gpus": 32, "output_tokens": 1000}
    mended = model("H800", "j").decode(2000, 8, **step)
    group = model("H800").decode_step(*map(np.float64, (2000, 64, 8, 32)))
    assert float(mended.attention_ms) == pytest.approx(float(group["attention_ms"]))
    assert float(mended.routed_ms) == float(model("H800").decode(2000, 8, **step).routed_ms)


def test_k_an_island_within_a_node_needs_no_network() -> None:
    kept, mended = (model("H200", m).prefill(4096, tp=1, dp=8) for m in ("", "k"))
    inside = 7 / 8 * 8 * 4096 * 7168 / 2**20 / (0.85 * 450)
    assert float(mended.combine_ms) == pytest.approx(2 * inside + 0.05)
    across = 3 * 8 * 4096 * 7168 / 2**20 / (8 * 0.85 * 50)
    assert float(kept.combine_ms) == pytest.approx(2 * across + 0.05)
    wide = {"tp": 1, "gpus": 64, "output_tokens": 1}
    same = [float(model("H200", m).decode(100, 8, **wide).combine_ms) for m in ("", "k")]
    assert same[0] == same[1]
    few = {"tp": 1, "gpus": 4, "output_tokens": 1}
    small = [model("H200", m).decode_step(*map(np.float64, (100, 8, 1, 4))) for m in ("", "k")]
    assert float(small[1]["dispatch_ms"]) < float(small[0]["dispatch_ms"])
    assert not model("H200").decode(100, 8, **few).fits


def test_the_table_shows_the_steps_that_it_names() -> None:
    own = model("H200")
    first = own.table().rows[3]
    assert first[:2] == ("decode, 16 x 4,096", "tp1, 32 GPUs")
    whole = own.decode(4096, 16, tp=1, gpus=32, output_tokens=512).tpot_ms
    assert first[-1] == pytest.approx(float(whole), nan_ok=True)


def test_switches_have_letters() -> None:
    assert "".join(LETTERS) == "abcdefghijk"
    assert FAITHFUL.kept == "abcdefghijk"
    assert "mended" in str(CORRECTED)
    with pytest.raises(ParameterError, match="letter 'z'"):
        FAITHFUL.mend("z")


# Other models and GPUs --------------------------------------------------------------------------


def test_models_of_other_shapes() -> None:
    mixtral = MoeModel(llm("Mixtral-8x7B"), moe_device("H200"), CORRECTED)
    t = mixtral.prefill(1000, tp=1, dp=8)
    f8 = 1979 * 0.85 * 112 / 132
    load = 3 * 4096 * 14336 / 1e6 / (0.85 * 4800)
    assert float(t.routed_ms) == pytest.approx(2 * 6e-9 * 1000 * 4096 * 14336 / f8 + load)
    assert float(t.shared_ms) == float(t.dense_mlp_ms) == 0.0
    # Grouped-query attention: 8 heads of keys and values over 4 GPUs, so each holds a quarter.
    per_token = 32 * 2 * 8 * 128
    assert float(mixtral.cached_bytes_per_token(1)) == per_token
    assert float(mixtral.cached_bytes_per_token(4)) == per_token
    assert float(mixtral.cached_bytes_per_token(16)) == 2 * per_token
    assert float(model("H200").cached_bytes_per_token(4)) == 4 * 61 * 576


def test_dense_models_need_their_layers_divided() -> None:
    with pytest.raises(ParameterError, match="mend at least quirk h"):
        MoeModel(llm("Llama-3.1-70B"), moe_device("H200"))
    dense = MoeModel(llm("Llama-3.1-70B"), moe_device("H200"), CORRECTED)
    one, eight = (dense.prefill(4096, tp=tp, dp=1) for tp in (1, 8))
    assert float(one.communication_ms) == 0.0
    assert 4 < float(one.total_ms / eight.total_ms) < 8
    assert float(dense.free_bytes(tp=1, gpus=1)) == pytest.approx(
        0.9 * 141 * 2**30 - llm("Llama-3.1-70B").params
    )
    assert float(dense.decode(1000, 8, tp=8, gpus=8, output_tokens=100).routed_ms) == 0.0


def test_devices_of_the_table_and_others() -> None:
    assert len(moe_devices()) == 12
    assert moe_device("DGX-B300").name == "B300-SXM"
    assert moe_device("A100-SXM-80GB").source == "assumed"
    assert moe_device("A100-SXM-80GB").tflops("fp8", prefill=False) == pytest.approx(0.85 * 312)
    with pytest.raises(CatalogError, match="No GPU is called 'H2000'"):
        moe_device("H2000")
    with pytest.raises(ParameterError, match="10 of 10 multiprocessors"):
        MoeDevice.of(catalog_gpu("H20"), sm_count=10, comm_sm_count=10)


def test_steps_that_do_not_exist() -> None:
    with pytest.raises(ParameterError, match="tp and dp of 1 or more"):
        model("H20").prefill(100, tp=0, dp=1)
    with pytest.raises(ParameterError, match="hits of 0 to 1"):
        model("H20").prefill(100, tp=1, dp=1, hit_rate=1.5)
    with pytest.raises(ParameterError, match="batch, tp, gpus above 0"):
        model("H20").decode(100, 0, tp=1, gpus=1, output_tokens=1)


# Sums and reductions ----------------------------------------------------------------------------

GPUS = st.sampled_from(["H800", "H20", "H200", "B300", "GB200", "Rubin-NVL144"])


@settings(max_examples=25)
@given(
    gpu=GPUS,
    length=st.integers(0, 9000),
    output=st.integers(1, 300),
    batch=st.integers(1, 64),
    tp=st.sampled_from([1, 2, 8]),
    mended=st.sampled_from(["", "".join(LETTERS)]),
)
def test_a_request_is_the_sum_of_its_steps(
    gpu: str, length: int, output: int, batch: int, tp: int, mended: str
) -> None:
    made = model(gpu, mended)
    whole = made.request_ms(
        length, batch, tp=tp, gpus=64, output_tokens=output, max_output_tokens=400
    )
    steps = made.decode(
        length + np.arange(1, output + 1), batch, tp=tp, gpus=64, output_tokens=400 - output
    )
    one = made.decode(length, batch, tp=tp, gpus=64, output_tokens=400)
    if not one.fits:
        assert np.isnan(whole)
    elif float(one.batch) == batch:
        again = made.decode_step(
            *np.broadcast_arrays(length + np.arange(1.0, output + 1), batch, tp, 64)
        )
        assert float(whole) == pytest.approx(float(again["tpot_ms"].sum()), rel=1e-12)
        assert steps.tpot_ms.shape == (output,)


@settings(max_examples=20)
@given(
    gpu=GPUS,
    tp=st.sampled_from([1, 2, 4]),
    groups=st.sampled_from([1, 4, 16]),
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=40),
    mended=st.sampled_from(["", "".join(LETTERS)]),
)
def test_step_models_lose_nothing(
    gpu: str, tp: int, groups: int, lengths: list[int], mended: str
) -> None:
    made = model(gpu, mended)
    prefill = prefill_group(made, tp=tp, dp=groups)
    for length in lengths[:3]:
        assert 1e3 * float(prefill.model.prefill_seconds([length])) == pytest.approx(
            float(made.prefill(length, tp=tp, dp=groups).total_ms), rel=1e-10
        )
    decode = decode_group(made, tp=tp, gpus=32, copies=groups)
    step = made.decode_step(*map(np.float64, (np.mean(lengths), len(lengths) / groups, tp, 32)))
    assert 1e3 * float(decode.model.decode_seconds(lengths)) == pytest.approx(
        float(step["tpot_ms"]), rel=1e-10
    )
    for found in (prefill.accuracy["prefill"], decode.accuracy["decode"]):
        assert found.max_percent < 1e-9


def test_mending_all_is_mending_each() -> None:
    assert FAITHFUL.mend("".join(LETTERS)) == CORRECTED
    lengths = np.array([128, 1024, 8192])
    kept, mended = (model("H200", m).prefill(lengths, tp=2, dp=16) for m in ("", "abcdefghijk"))
    assert not np.isclose(kept.total_ms, mended.total_ms).any()
