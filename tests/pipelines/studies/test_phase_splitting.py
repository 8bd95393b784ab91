"""Notebook 10: prices, batching, bandwidth and ratios of replicas."""

import numpy as np
import pandas as pd
import pytest

from hetero import catalog, cluster, workload
from hetero.simulator import metrics, simulate
from pipelines.studies import phase_splitting as ps
from tests import committed


@pytest.fixture(scope="module")
def told():
    """What the notebook compares, for few requests."""
    codes = {"coding": "azure2023_code", "conversation": "azure2023_conv"}
    traces = {name: workload.load(key).head(300) for name, key in codes.items()}
    names = "bar llm divide draw serve thrown fig6 fig6_mean best6 attained fig14"
    given = {"traces": traces, "requests": 10, "seeds": [0, 1], "slo_scale": 8.0, "loads": [0.5]}
    return committed.told("10_phase_splitting", *names.split(), output="none", **given)


def _planned() -> pd.DataFrame:
    rows = [
        (reading, 2, name, prefill, 10 - prefill, 80.0, 20.0)
        for reading in ps.READINGS
        for name, prefill in (("coding", 8), ("conversation", 5))
    ]
    columns = ["figures", "stages", "workload", "prefill replicas", "decode replicas"]
    return pd.DataFrame(rows, columns=[*columns, "A40 on prefill [%]", "RTX-3090Ti on prefill [%]"])


def test_table_1_divides_what_a_gpu_has_by_its_price():
    table = ps.table1_frame().set_index("GPU")
    per_usd = table["corrected fp16 [TFLOPS]"] / table["price [$/h]"]
    assert np.allclose(table["corrected TFLOPS per $/h"], per_usd)
    assert list(table.index) == list(ps.NAMES) == list(ps.gpus_of("printed"))
    assert table.loc["RTX-A5000", "printed fp16 [TFLOPS]"] < per_usd["RTX-A5000"]


def test_prices_are_drawn_for_the_gpus_that_are_rented():
    prices = ps.prices_frame()
    assert len(prices) == 10
    assert (prices[["prefill [$/10^6]", "decode [$/10^6]"]] > 0).all(axis=None)
    order = ps.cheapest(prices, "corrected", "prefill")
    assert order.index("A40") < order.index("RTX-3090Ti")
    axes = ps.price_bars_figure(prices).axes
    assert [len(axis.patches) for axis in axes] == [8, 8]
    assert [axis.get_title(loc="left") or axis.get_title() for axis in axes] == [
        "prefill",
        "decode",
    ]


def test_decode_gains_from_batches_and_prefill_does_not():
    prefill, decode = ps.batching()
    by_tokens = prefill.set_index("tokens")[ps.TPS]
    by_requests = decode.set_index("requests")[ps.TPS]
    assert by_tokens[8192] < 1.2 * by_tokens[1024]
    assert by_requests[8] > 5 * by_requests[1]
    assert decode["fits"].iloc[0]
    left, right = ps.batching_curves_figure(prefill, decode).axes
    assert (left.get_xlabel(), right.get_xlabel()) == (
        "tokens in the batch",
        "requests in the batch",
    )


def test_bandwidth_has_a_cell_for_every_pair_of_gpus():
    in_house = cluster.cluster("thunderserve-a100-8")
    fig = ps.bandwidths_figure(
        {"cloud": cluster.cluster("thunderserve-cloud-32"), "in house": in_house}
    )
    assert "32 GPUs" in fig.axes[0].get_title(loc="left") + fig.axes[0].get_title()
    assert fig.axes[1].collections[0].get_array().size == 64


def test_every_division_of_the_replicas_is_simulated(told):
    table = told["fig6_mean"]
    assert len(table) == 2 * (3 + 5 + 7)
    assert (table["prefill replicas"] + table["decode replicas"] == table["GPUs"] // 2).all()
    made = told["divide"](8, "coding", 1, 100.0)
    run = simulate(made.deployment(), told["draw"]("coding", np.inf, 0), made.router())
    assert told["fig6"][ps.TPS].iloc[0] == metrics(run).total_tps
    drawn = [
        [len(line.get_xdata()) for line in axis.lines if len(line.get_xdata())]
        for axis in ps.throughput_curves_figure(table).axes
    ]
    assert drawn == [[3, 3], [5, 5], [7, 7]]


def test_claims_rank_the_workloads_by_their_best_division(told):
    prices, (prefill, decode) = ps.prices_frame(), ps.batching()
    table = told["fig14"]
    assert len(table) == 2 * 7 * 2
    assert table["attainment [%]"].between(0, 100).all()
    means = ps.means_frame(table, ["workload", "load"], "attainment [%]", "estimated [%]")
    assert [len(axis.lines) for axis in ps.attainment_curves_figure(means).axes] == [2, 2]
    # Coding is best at 3 prefill replicas with every seed, conversation at 2.
    best = {"coding": 3, "conversation": 2}
    thrown = pd.DataFrame(
        [
            (size, name, k, seed, 100.0 - abs(k - best[name]) + seed)
            for size in ps.SIZES
            for name in best
            for k in range(1, size // 2)
            for seed in range(3)
        ],
        columns=["GPUs", "workload", "prefill replicas", "seed", ps.TPS],
    )
    rows = ps.claims(prices, prefill, decode, thrown, table, 8.0)
    values = {row["claim"]: row["value"] for row in rows}
    assert values["thunderserve-28a"] == "coding>conversation"
    assert values["thunderserve-1a"] == "A40<3090Ti"
    assert (rows[1]["value"], "A40<3090Ti with" in rows[1]["note"]) == ("3090Ti<A40", True)
    assert "3:5 for coding" in rows[-1]["note"]


def test_plans_and_the_conclusions_that_hold(told):
    fleet = cluster.cluster("thunderserve-a5000-8")
    printed = ps.read(fleet, "printed").machines[0].gpu
    assert printed == catalog.gpu("RTX-A5000", preset="thunderserve") != fleet.machines[0].gpu
    plans = ps.plan_table({("printed", 1, "coding"): told["divide"](8, "coding", 1, 1.0)}, ["A40"])
    assert plans[["prefill replicas", "decode replicas"]].to_numpy().tolist() == [[1, 3]]
    table = ps.conclusions_frame(ps.prices_frame(), _planned()).set_index("conclusion")
    assert (table.loc["plans put most A40 on prefill"] == "yes").all()
    assert (table.loc["coding plans have the larger share of prefill replicas"] == "yes").all()
