import numpy as np
import pandas as pd
import pytest

from hetero import workload
from hetero.comparison import compare
from hetero.deployment import Engine
from hetero.routers import RoundRobin, SingleInstance
from hetero.simulator import Slo
from hetero.workload import Trace
from pipelines.studies import request_scheduling as study
from pipelines.studies.request_scheduling import GAP, RATE, RATES, TPS

ROUTERS = {
    "RR": RoundRobin(),
    "MB": study.printed(memory_based=True),
    "OS": study.printed(),
}


@pytest.fixture(scope="module")
def bench():
    return study.Workbench(workload.load("sharegpt", source="twin"), 12, [0, 1])


@pytest.fixture(scope="module")
def served(bench):
    return bench.serve(study.by_setting(study.two_instances), ROUTERS)


def frame(**tps: list[float]) -> pd.DataFrame:
    """Throughput of strategies over the seeds 0, 1, ... at every rate; gaps are a tenth of it."""
    return pd.DataFrame(
        {
            "link": "A",
            "engine": "B",
            RATE: rate,
            "strategy": name,
            "seed": seed,
            TPS: x,
            GAP: x / 10,
        }
        for rate in RATES
        for name, values in tps.items()
        for seed, x in enumerate(values)
    )


def test_deployments_of_the_paper():
    instances = study.by_setting(study.two_instances)
    assert len(instances) == 6
    assert [r.gpus for r in instances["NVLink 2", "chunked"].replicas] == [4, 1]
    machines = study.by_setting(study.two_machines, ["chunked"])
    assert list(machines) == [("PCIe 3 (printed)", "chunked"), ("NVLink 2", "chunked")]
    assert [r.gpus for r in machines["NVLink 2", "chunked"].replicas] == [2, 2, 2, 2, 1]
    small = study.two_instances(None, Engine(), "full").replicas[0]
    # Llama-3-8B has 8 of 32 heads for keys and values: 2 l h counts four times as many.
    grouped = study.two_instances(None, Engine()).replicas[0].kv_tokens
    assert grouped == pytest.approx(4 * small.kv_tokens, rel=0.01)
    assert study.printed().kv_bytes == small.kv_bytes_per_token


def test_a_trace_is_a_sample_at_a_rate(bench):
    assert study.rate_name(8.0) == "8 req/s"
    assert study.rate_name(np.inf) == "all at once"
    trace, longer = bench.trace(0, 8.0), bench.trace(0, 8.0, factor=3)
    assert len(trace) == 12
    assert (longer.input_tokens == 3 * trace.input_tokens).all()
    assert (longer.arrival_s == trace.arrival_s).all()
    assert bench.trace(0, np.inf).arrival_s.max() == 0.0
    assert bench.offered_tps(np.inf) == np.inf
    both = [bench.trace(seed, 8.0) for seed in (0, 1)]
    tps = [(t.input_tokens.sum() + t.output_tokens.sum()) / t.arrival_s[-1] for t in both]
    assert bench.offered_tps(8.0) == pytest.approx(sum(tps) / 2)


def test_every_setting_is_served_and_summarised(bench, served):
    assert len(served) == 2 * 3 * len(RATES) * 2 * len(ROUTERS)
    ends = served[["done, v100 t=4 [s]", "done, v100 t=1 [s]"]]
    assert np.allclose(served[GAP], (ends.max(axis=1) - ends.min(axis=1)))
    table = study.summary_frame(served, ["link", "engine", RATE, "strategy"])
    assert len(table) == len(served) / 2
    assert (table["low [tokens/s]"] <= table[TPS]).all()
    assert (table[TPS] <= table["high [tokens/s]"]).all()
    wide = study.rate_frame(served, ["link", "engine", "strategy"])
    assert list(wide.columns[3:]) == [f"{study.rate_name(rate)} [tokens/s]" for rate in RATES]


def test_sensitivity_has_a_row_per_setting(bench):
    assert len(bench.sensitivity(ROUTERS, [0.3])) == 2 * 2 * 2


def test_statements_of_the_claims():
    table = frame(RR=[1.0, 2.0], OS=[2.0, 3.0], MB=[1.0, 6.0])
    assert study.values(table, 8.0, ["MB"])["MB"].tolist() == [1.0, 6.0]
    assert study.gain_percent(table, 24.0).tolist() == [100.0, 50.0]
    assert study.memory_ratio(table).tolist() == [0.5, 2.0]
    assert study.gap_ratios(table) == pytest.approx([5 / 3] * 4)
    assert study.best_share(table, ["RR", "OS"]).tolist() == [1.0, 1.0]
    assert study.best_share(table, ["RR", "OS", "MB"]).tolist() == [1.0, 0.0]
    assert study.order(table[table["seed"] == 0], 8.0, ["RR", "OS"]) == "OS>RR"
    assert len(study.pick(table, 8.0, link="A", strategy="OS")) == 2
    two = pd.concat([table, table.assign(link="C")])
    assert study.other_readings(two, lambda rows: f"{len(rows)} rows") == "C, B: 24 rows"


def test_places_are_counted_by_link():
    table = pd.DataFrame(
        {"link": ["A", "A", "C"], "order at 8 req/s": ["OS>=RR, OS>MB", "RR>OS", "OS>RR"]}
    )
    assert study.places(table, 8.0, "OS", "first") == (
        "OS is first by mean in 1 of 2 settings with A and 1 of 1 settings with C "
        "(sensitivity table). "
    )
    assert "0 of 2 settings with A" in study.places(table, 8.0, "MB", "last")


def test_prompts_that_begin_alike_are_found_in_the_cache():
    engine = Engine(batching="chunked", admission="paged", prefix_cache=True)
    same = Trace(
        10.0 * np.arange(4), [1024] * 4, [8] * 4, prefix_offsets=2 * np.arange(5),
        prefix_ids=[0, 1] * 4, block_tokens=512,
    )  # fmt: skip
    alike = study.two_instances(None, engine)
    found = compare(
        alike, SingleInstance(0), same, [0.1, 0.4], [0], slo=Slo(ttft_s=2.0), process="scaled",
        resample=False,
    ).frame  # fmt: skip
    # All but the first prompt are there, less the token that every prefill computes.
    assert found["cached_share"].between(0.5, 0.75).all()
    assert (found["attainment"] == 1).all()
