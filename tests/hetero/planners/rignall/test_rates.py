from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hetero import workload
from hetero.catalog import gpu as catalog_gpu
from hetero.catalog import llm
from hetero.errors import CatalogError, InfeasibleError, ParameterError
from hetero.latency.models.moe import MoeModel
from hetero.latency.models.moe_devices import MoeDevice, moe_device
from hetero.latency.models.reference_quirks import CORRECTED, FAITHFUL
from hetero.planners.rignall.model import IslandModel
from hetero.planners.rignall.parallelism import (
    READINGS,
    batch_rule,
    benchmark_decode,
    benchmark_prefill,
    reading,
)
from hetero.planners.rignall.rates import IslandClass, RateTable, occupied
from hetero.workload.lengths import LengthRanges, ranges
from hetero.workload.synthetic import RIGNALL_INPUT

V3 = llm("DeepSeek-V3")
LENGTHS = np.array([200.0, 2000.0, 6000.0])
SHARE = np.array([0.5, 0.3, 0.2])
A, B = IslandClass("H200", 8), IslandClass("H20", 4)
TWO = ranges([100, 100, 100, 900], 500)


def table(
    prefill: object = ((9.0, 1.5), (2.0, 0.0)),
    decode: object = ((4.0, 3.0), (0.0, 0.0)),
    where: LengthRanges = TWO,
    classes: tuple[IslandClass, ...] = (A, B),
) -> RateTable:
    return RateTable(classes, where, np.array(prefill), np.array(decode), reading="as given")


def sample(name: str = "fitting", width: int = 1000, **more: object) -> IslandModel:
    return IslandModel.of(
        RIGNALL_INPUT,
        width,
        limit_tokens=8001,
        output_tokens=100,
        max_output_tokens=1000,
        reading=reading(name),
        **more,  # type: ignore[arg-type]
    )


# The table --------------------------------------------------------------------------------------


def test_a_table_knows_its_rows_and_mixes() -> None:
    rates = table()
    assert rates.gpus == ("H200", "H20")
    assert rates.sizes.tolist() == [8, 4]
    assert rates.index("H20", 4) == 1
    # One request in four is long: a mean one takes 0.75 / 9 + 0.25 / 1.5 s.
    assert rates.alone_rps("prefill").tolist() == pytest.approx([1 / (0.75 / 9 + 0.25 / 1.5), 0])
    picked = rates.select([A])
    assert picked.classes == (A,)
    assert picked.prefill_rps.tolist() == [[9.0, 1.5]]
    assert "8 x H200" in str(rates)
    assert "as given" in str(rates)
    assert not rates.prefill_rps.flags.writeable


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"prefill": ((9.0, 1.5),)}, r"prefill rates have shape \(1, 2\) for 2 classes and 2 ra"),
        ({"decode": ((4.0, -3.0), (0.0, 1.0))}, "8 x H200 has a decode rate of -3.0 requests/s on"),
        ({"prefill": ((9.0, np.nan), (0.0, 1.0))}, "prefill rate of nan requests/s on lengths 500"),
        ({"classes": (A, A)}, "8 x H200 stands twice"),
        ({"classes": ()}, "There is no island class"),
        ({"where": replace(TWO, share=np.array([0.5, 0.25]))}, "add up to 0.75"),
        (
            {"where": replace(TWO, share=np.array([1.0, 0.0]))},
            "no mass in lengths 500-999 tokens.*Resolve: leave ranges without requests out",
        ),
    ],
)
def test_wrong_tables_say_what_is_wrong(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ParameterError, match=sentence):
        table(**wrong)  # type: ignore[arg-type]


def test_a_range_that_nobody_serves_is_named() -> None:
    with pytest.raises(InfeasibleError, match="No island class can decode lengths 500-999 tokens"):
        table(decode=((4.0, 0.0), (1.0, 0.0)))
    with pytest.raises(InfeasibleError, match=r"can prefill lengths 0-499 tokens \(2 such ranges"):
        table(prefill=np.zeros((2, 2)))


def test_unknown_islands_are_named() -> None:
    with pytest.raises(ParameterError, match=r"no GPU called 'H300'\. Resolve: use H200, H20"):
        table().index("H300", 8)
    with pytest.raises(ParameterError, match=r"no island of 16 H200 GPUs\. Resolve: use a si"):
        table().select([IslandClass("H200", 16)])
    with pytest.raises(ParameterError, match="An island of 0 H20 GPUs"):
        IslandClass("H20", 0)
    with pytest.raises(CatalogError, match="No GPU is called 'H2000'"):
        sample().rates([("H2000", 8)])


def test_empty_ranges_are_left_out() -> None:
    kept = occupied(ranges([10, 250, 260], 100))
    assert kept.start_tokens.tolist() == [0, 200]
    assert kept.share.tolist() == pytest.approx([1 / 3, 2 / 3])
    assert kept.index([250]).tolist() == [1]


# Parallelism ------------------------------------------------------------------------------------


def test_prefill_configurations_are_all_factorings() -> None:
    made = MoeModel(V3, moe_device("H800"))
    found = benchmark_prefill(made, 12, LENGTHS, SHARE, READINGS["printed"])
    assert sorted(zip(found.tp.tolist(), found.dp.tolist(), strict=True)) == [
        (1, 12),
        (2, 6),
        (3, 4),
        (4, 3),
        (6, 2),
        (12, 1),
    ]
    for k, (tp, dp) in enumerate(zip(found.tp, found.dp, strict=True)):
        time = made.prefill(LENGTHS, tp=tp, dp=dp).total_ms
        assert found.rps[k].tolist() == pytest.approx((1000 / time).tolist())
    groups = benchmark_prefill(made, 12, LENGTHS, SHARE, READINGS["whole"])
    np.testing.assert_allclose(groups.rps, found.rps * found.dp[:, None])


def test_decode_is_dp_groups_of_batches() -> None:
    made = MoeModel(V3, moe_device("H200"))
    for name, per_group in (("printed", None), ("thesis", "gpu"), ("whole", "group")):
        found = benchmark_decode(
            made,
            16,
            LENGTHS,
            SHARE,
            READINGS[name],
            output_tokens=100,
            max_output_tokens=1000,
        )
        pairs = list(zip(found.tp.tolist(), found.dp.tolist(), strict=True))
        wanted = [
            (t, d)
            for t, d in itertools.product(range(1, 17), range(1, 17))
            if 16 % d == 0 and (16 // d) % t == 0
        ]
        assert sorted(pairs) == sorted(wanted)
        served = 0
        for k, (tp, dp) in enumerate(pairs):
            gpus = 16 // dp
            for j, length in enumerate(LENGTHS):
                most = float(made.max_batch(length, tp=tp, gpus=gpus, output_tokens=1000))
                batch = int(batch_rule(most))
                if batch > most:
                    assert found.rps[k, j] == found.batch[k, j] == 0
                    continue
                served += 1
                steps = made.decode(
                    length + np.arange(1, 101), batch, tp=tp, gpus=gpus, output_tokens=0
                )
                requests = {"gpu": batch * gpus, "group": batch * gpus / tp, None: 1}[per_group]
                rate = dp * requests * 1000 / steps.tpot_ms.sum()
                assert found.rps[k, j] == pytest.approx(rate)
                assert found.batch[k, j] == batch
        assert served > 10


def test_batches_are_multiples_of_eight() -> None:
    assert batch_rule([8.0, 15.9, 16.0, 1023.9, 1e6]).tolist() == [8, 8, 16, 1016, 1024]


def test_the_choice_deviates_least_from_the_best() -> None:
    made = MoeModel(V3, moe_device("H20"))
    found = benchmark_decode(
        made,
        64,
        LENGTHS,
        SHARE,
        READINGS["thesis"],
        output_tokens=100,
        max_output_tokens=1000,
    )
    best = found.rps.max(axis=0)
    by_hand = [
        sum(p * (b - r) / b for p, b, r in zip(SHARE, best, row, strict=True)) for row in found.rps
    ]
    assert found.deviation().tolist() == pytest.approx(by_hand)
    assert by_hand[found.chosen] == pytest.approx(min(by_hand))
    plain = found.deviation(weighted=False)
    assert plain.tolist() == pytest.approx((1 - found.rps / best).mean(axis=1).tolist())
    assert found.choice in found.names
    assert f"{found.choice} *" in str(found)


def test_weights_must_fit_only_where_the_reading_says_so() -> None:
    for name, serves in (("whole", True), ("fitting", False)):
        small = sample(name).benchmark("H200", 2, "prefill")
        assert bool(small.rps.any()) == serves
        assert (small.choice == "-") == (not serves)
    # 256 experts a layer of 44 MB on 8 GPUs of 141 GB fit, on 4 they do not.
    assert sample().benchmark("H200", 8, "prefill").rps.any()
    assert not sample().benchmark("H200", 4, "prefill").rps.any()


def test_mended_batches_serve_what_the_rule_of_eight_drops() -> None:
    kept = sample().benchmark("H800", 12, "decode")
    mended = sample(quirks=FAITHFUL.mend("d")).benchmark("H800", 12, "decode")
    gained = (mended.rps > 0) & (kept.rps == 0)
    assert gained.any()
    assert (mended.batch[gained] < 8).all()
    np.testing.assert_array_equal(mended.rps[kept.rps > 0], kept.rps[kept.rps > 0])


def test_unknown_readings_are_named() -> None:
    with pytest.raises(ParameterError, match="No reading is called 'sum'"):
        reading("sum")
    assert "weights need not fit" in READINGS["thesis"].text


# From a workload to rates -----------------------------------------------------------------------


def test_each_island_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero.planners.rignall import model as module

    calls: list[tuple[str, int]] = []
    timed = module.benchmark_prefill

    def counted(latency: MoeModel, size: int, *rest: object) -> object:
        calls.append((latency.device.name, size))
        return timed(latency, size, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "benchmark_prefill", counted)
    made = sample()
    for _ in range(3):
        made.rates([("H200", 8), IslandClass("H200-SXM", 16), ("DGX-B300", 8)])
    assert calls == [("H200-SXM", 8), ("H200-SXM", 16), ("B300-SXM", 8)]


def test_rates_are_those_of_the_chosen_parallelism() -> None:
    made = sample()
    rates = made.rates([("H200", 16), ("H800", 32)])
    for k, island in enumerate(rates.classes):
        for phase in ("prefill", "decode"):
            found = made.benchmark(island.gpu, island.size, phase)  # type: ignore[arg-type]
            assert rates.rps(phase)[k].tolist() == found.rps[found.chosen].tolist()  # type: ignore[arg-type]
    assert rates.prefill_choice == ("tp1 dp16", "tp1 dp32")
    assert rates.reading == READINGS["fitting"].text


def test_single_lengths_agree_with_ranges_at_the_middle() -> None:
    coarse = sample(width=500)
    fine = coarse.on(occupied(ranges(RIGNALL_INPUT, 1, limit_tokens=8001)))
    wide, narrow = (m.rates([("H200", 16), ("B300", 16)]) for m in (coarse, fine))
    assert wide.prefill_choice == narrow.prefill_choice
    assert wide.decode_choice == narrow.decode_choice
    at = wide.ranges.middle_tokens
    np.testing.assert_allclose(narrow.prefill_rps[:, at[at < 8001]], wide.prefill_rps[:, at < 8001])
    assert float(narrow.share[:500].sum()) == pytest.approx(float(wide.share[0]))


def test_traces_bring_their_lengths_and_outputs() -> None:
    trace = workload.load("azure2023_code")
    made = IslandModel.of_trace(trace, 400, quirks=CORRECTED)
    assert made.output_tokens == round(float(trace.output_tokens.mean()))
    assert made.max_output_tokens == trace.output_tokens.max()
    assert (made.ranges.share > 0).all()
    rates = made.rates([("H200", 32), ("H20", 64)])
    assert (rates.alone_rps("decode") > 0).all()
    with pytest.raises(ParameterError, match="mean output of 50 and a largest of 20"):
        replace(made, output_tokens=50, max_output_tokens=20)


def test_gpus_and_models_of_ones_own() -> None:
    fast = MoeDevice.of(
        replace(catalog_gpu("H200-SXM"), name="mine", mem_bw_gbs=9600), gpus_per_node=16
    )
    made = sample(devices=(fast,))
    rates = made.rates([("mine", 16), ("H200-SXM", 16)])
    assert rates.gpus == ("mine", "H200-SXM")
    assert (rates.decode_rps[0] > rates.decode_rps[1]).all()
    dense = sample(model=llm("Llama-3.1-70B"), quirks=CORRECTED).rates([("H100-SXM", 4)])
    assert (dense.decode_rps > 0).all()


def test_ranges_may_have_outputs_of_their_own() -> None:
    trace = workload.load("azure2023_conv")
    whole = IslandModel.of_trace(trace, 400)
    own = IslandModel.of_trace(trace, 400, by_range=True)
    of = own.ranges.index(trace.input_tokens)
    means = np.asarray(own.output_tokens)
    for j in (0, 2, 5):
        assert means[j] == round(float(trace.output_tokens[of == j].mean()))
    one, each = (m.rates([("H200", 16)]) for m in (whole, own))
    assert (each.prefill_rps == one.prefill_rps).all()
    # Decode time is nearly the output times the time of a step.
    ratio = each.decode_rps[0] / one.decode_rps[0]
    assert each.decode_choice == one.decode_choice
    np.testing.assert_allclose(ratio * means / whole.output_tokens, 1.0, atol=0.02)
    single = own.on(occupied(ranges(trace.input_tokens, 1)))
    assert np.asarray(single.output_tokens)[0] == means[0]
    with pytest.raises(ParameterError, match="3 mean outputs for"):
        replace(own, output_tokens=np.array([1, 2, 3]))
