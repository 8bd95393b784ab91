from functools import partial

import numpy as np
import pandas as pd
import pytest

from hetero import catalog, cluster, workload
from hetero.planners.xiong.tensor_parallel import roofline_source, search
from hetero.routers import RoundRobin
from pipelines.studies import tensor_parallel_search as study

DEGREES = [1, 2, 4, 8]


@pytest.fixture(scope="module")
def machine():
    return cluster.cluster("xiong-8xv100")


@pytest.fixture(scope="module")
def model():
    return catalog.llm("Llama-3-8B")


@pytest.fixture(scope="module")
def estimate(machine, model):
    return partial(search, machine, model)


@pytest.fixture(scope="module")
def samples():
    lengths = workload.load("sharegpt", source="twin")
    return [lengths.sample(20, np.random.default_rng(seed)) for seed in (0, 1)]


def test_readings_hold_every_choice_and_draw_the_paper_s(estimate, samples):
    table = study.readings_frame(estimate, {0: samples[0], 1: samples[1]})
    # Two links, two KV formulas, two scalings, two overheads, two samples.
    assert len(table) == 2**5
    first = table.iloc[0]
    here = search_tps(estimate, samples[0])
    assert [first[f"t={t} [tokens/s]"] for t in DEGREES] == pytest.approx(here)
    figure = study.estimated_figure(table)
    assert [axis.get_title(loc="left") or axis.get_title() for axis in figure.axes] == list(
        study.links()
    )
    bars = figure.axes[0].containers
    assert len(bars) == 4  # two formulas of two samples
    assert [bar.get_height() for bar in bars[0]] == pytest.approx(here)


def search_tps(estimate, sample):
    link = next(iter(study.links().values()))
    found = estimate(sample, latency=roofline_source(link=link), kv_formula="full")
    return [degree.system_tps for degree in found.degrees]


def test_inputs_are_stretched_and_outputs_kept(samples):
    longer = study.stretched(samples[0], 3)
    assert (longer.input_tokens == 3 * samples[0].input_tokens).all()
    assert (longer.output_tokens == samples[0].output_tokens).all()


def test_equal_work_ends_together_and_is_drawn_by_instance(estimate, machine, model, samples):
    works = {7: samples[0].all_at_once().duplicate(8)}
    table = study.simulations_frame(machine, model, DEGREES, works, RoundRobin())
    assert len(table) == 2 * 3 * len(DEGREES)
    assert [len(ends) for ends in table["ends_s"][:4]] == [8, 4, 2, 1]
    assert table["slowest/fastest instance"].max() == pytest.approx(1.0)
    tps = study.by_setting(table)
    assert next(iter(tps)) == ("PCIe 3 (printed)", "prefill first")
    assert list(tps["NVLink 2", "chunked"].columns) == DEGREES
    estimated = {link: estimate(samples[0], kv_formula="full") for link in study.links()}
    found = estimated["NVLink 2"]
    simulated = pd.DataFrame([[4.0 * d.system_tps for d in found.degrees]] * 2, columns=DEGREES)
    simulated.loc[1, 8] /= 2.0
    assert study.largest_share([found, found], simulated) == pytest.approx([0.25, 0.5])
    figure = study.simulated_figure(table, estimated)
    # One bar per instance and link.
    assert len(figure.axes[2].patches) == 2 * (8 + 4 + 2 + 1)


def test_degrees_are_ordered_by_throughput_and_ties_by_degree():
    assert study.order_of(pd.Series({1: 5.0, 2: 9.0, 4: 5.0})) == "2>1>4"


def test_sensitivity_ranks_every_setting_and_says_where_as_published(estimate, samples):
    table = study.sensitivity_frame(estimate, samples, [0.3, 20.0])
    assert len(table) == 2 * 2 * 2 * 2
    first = table["orders of the samples"].str.split(", ")
    assert all({*order.split(">")} == {"1", "2", "4", "8"} for two in first for order in two)
    as_published = [set(two) == {study.PUBLISHED} for two in first]
    assert list(table["as published"]) == as_published
