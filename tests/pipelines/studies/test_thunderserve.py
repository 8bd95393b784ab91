"""Notebook 11: plans beside other systems, lost GPUs, a shift, and the claims."""

from dataclasses import replace

import numpy as np
import pytest

from hetero import catalog, cluster, workload
from hetero.costs.cost import IN_PAPERS, CostModel
from hetero.costs.groups import Fleet
from hetero.simulator import simulate
from hetero.simulator.metrics import attainment
from pipelines.studies import thunderserve as ts
from pipelines.studies import thunderserve_changes as changes
from pipelines.studies import thunderserve_claims as claims
from pipelines.studies import thunderserve_figures as pictures
from tests import committed

RATE = 3.0


@pytest.fixture(scope="module")
def study():
    codes = {"coding": "azure2023_code", "conversation": "azure2023_conv"}
    return ts.ThunderServeStudy(
        {name: workload.load(key).head(400) for name, key in codes.items()},
        llm=catalog.llm("LLaMA-1-30B"),
        cloud=cluster.cluster("thunderserve-cloud-32"),
        in_house=cluster.cluster("thunderserve-a100-8"),
        seeds=[0, 1],
        requests=20,
        plan_scale=5.0,
        settings=replace(IN_PAPERS, max_stages=2),
        tabu_steps=1,
    )


@pytest.fixture(scope="module")
def told(study):
    """What the notebook compares, and what comes of it in few requests and steps."""
    names = (
        "slo systems plans planned searched serve scales overloaded lose losses variants without"
    )
    small = {"rates_rps": [RATE], "middle": RATE, "loss_rate_rps": RATE, "seeds": study.seeds}
    small |= {"tabu_steps": 1, "search_steps": 0, "hexgen_generations": 1, "output": "none"}
    given = {"study": study, "traces": study.traces} | small
    return committed.told("11_thunderserve", *names.split(), "thrown", "ablation", **given)


@pytest.fixture(scope="module")
def plans(told):
    return {name: made[0] for name, made in told["searched"].items()}


def _values(rows):
    return {row["claim"].removeprefix("thunderserve-"): row["value"] for row in rows}


def test_a_workload_and_its_target(study):
    table = ts.workloads_frame(study).set_index("workload")
    assert study.target("coding").e2e_s == pytest.approx(5 * table.loc["coding", "A100 E2E [s]"])
    assert len(study.work("coding", RATE, 0)) == 20


def test_plans_of_every_system_use_their_own_gpus(study, plans, told):
    table = ts.replicas_frame(told["planned"], study.seeds)
    assert len(table) == 2 * len(told["planned"])
    table = table[table["seed"] == 0].set_index(["workload", "system"])
    assert set(table.loc["coding"].index) == set(ts.SYSTEMS)
    assert table.loc[("coding", "vLLM"), "replicas for both"] == 4
    assert table.loc["coding"].loc["DistServe"][["prefill replicas", "decode replicas"]].sum() == 4
    assert table.loc[("coding", "ThunderServe"), "prefill replicas"] == len(plans["coding"].prefill)
    for group in (one for made in told["searched"]["coding"] for one in made.prefill + made.decode):
        assert group.gpus <= 4
        assert len({stage.gpus for stage in group.stages}) == 1
    words = ts.configurations_frame({("coding", "ours"): plans["coding"]})
    counts = words["replicas"].str.split().str[0].astype(int)
    made = plans["coding"]
    assert counts.sum() == len(made.prefill) + len(made.decode)
    shares = ts.gpu_phases_frame({("coding", "data sheets"): made})
    assert shares["A40 on prefill [%]"][0] == 100 * made.gpu_share("A40")
    assert ts.as_printed(study.cloud).gpus == study.cloud.gpus
    rows = _values(claims.plans(told["searched"], plans, RATE, 5.0))
    every = [len(one.prefill) + len(one.decode) for one in told["searched"]["coding"]]
    assert rows["8c"] == pytest.approx(np.mean(every))
    assert set(rows["8a"].replace(">=", ">").split(">")) == {"prefill", "decode"}


def test_pictures_of_plans(plans):
    left, right = pictures.groups_figure(plans, (10.2, 3.5)).axes
    counts = len(plans["coding"].prefill), len(plans["coding"].decode)
    assert "{} prefill, {} decode".format(*counts) in left.get_title(loc="left") + left.get_title()
    used = [
        sum(stage.gpus for group in made.prefill + made.decode for stage in group.stages)
        for made in plans.values()
    ]
    assert [len(left.patches), len(right.patches)] == used
    assert len(pictures.orchestration_figure(plans).axes) == 2


def test_attainment_and_the_smallest_deadlines(told):
    scales = told["scales"]
    mean = ts.mean_attained(scales["coding", RATE, "vLLM"])
    assert (np.diff(mean) >= 0).all()
    table = ts.smallest_scales_frame(scales, [0, 1])
    assert len(table) == 2 * len(ts.SYSTEMS) * 2 * 3 * 2
    assert len(ts.deadline_frame(table)) == 2 * 3 * 2
    for fig, curves in (
        (pictures.cloud_attainment_figure(scales), 3),
        (pictures.in_house_attainment_figure(scales), 5),
    ):
        assert {len(axis.lines) for axis in fig.axes} == {curves + 2}
        assert fig.axes[5].get_xlabel() == "SLO scale [x A100]"
    recorded = claims.deadlines(table, scales, 5.0)
    assert all("interval" in row for row in recorded)
    rows = _values(recorded)
    assert set(rows) == {"6a", "6b", "7", "19c", "19d", "26"}
    assert rows["19c"] >= rows["19d"]
    assert 0 <= rows["26"] <= 100


def test_throughput_under_overload(told):
    table = told["overloaded"]
    assert (table[ts.TPS] > 0).all()
    axis = pictures.throughput_figure(table).axes[0]
    assert axis.get_title(loc="left") + axis.get_title() == "coding"
    rows = claims.throughput(table, RATE)
    by = table.set_index(["workload", "system", "seed"]).sort_index()[ts.TPS]
    ratio = (by["coding", "ThunderServe"] / by["coding", "HexGen"]).mean()
    assert _values(rows)["4a"] == pytest.approx(ratio)
    low, high = rows[0]["interval"]
    assert low <= ratio <= high
    assert all("interval" in row for row in rows)
    assert _values(rows)["19a"] >= max(_values(rows)[key] for key in ("4a", "4b", "5a", "5b"))


def test_searches_converge_on_parts_of_the_cloud(study, told):
    curves = ts.convergence(study, told["searched"], RATE)
    assert {size for _, size in curves} == {16, 24, 32}
    assert {best.shape for best in curves.values()} == {(2, 2)}
    assert all((np.diff(best) >= 0).all() for best in curves.values())
    assert [len(axis.lines) for axis in pictures.convergence_figure(curves).axes] == [3, 3]
    assert {row["claim"][:15] for row in claims.search_times()} <= {"thunderserve-10"}


def test_table_3_has_the_printed_groups(study):
    groups = changes.printed_groups(study.costs)
    phases = {name: [phase for _, phase in made] for name, made in groups.items()}
    assert {n: (p.count("prefill"), p.count("decode")) for n, p in phases.items()} == {
        "coding": (8, 4),
        "conversation": (4, 8),
    }
    gpus = [s.gpus for pipeline, _ in groups["coding"] for s in pipeline.stages]
    assert sum(gpus) == 32


def test_a_lost_machine_and_the_policies(study, told):
    light = told["losses"]["coding", "Table 3", "light"]
    assert light.before.ratio == (8, 4)
    assert sum(light.after.ratio) == 10
    table, steady = changes.steady(study, told["losses"], RATE, told["serve"])
    assert len(table) == len(steady)
    assert table[changes.ATTAINED].between(0, 100).all()
    fig = pictures.losses_figure(steady)
    assert sum(len(axis.lines) for axis in fig.axes) == len(table)
    search_s = {"full": 60.0, "light": 10.0}
    times = changes.rescheduling_times_frame(light.before, search_s)
    whole = 60.0 + changes.reload_s(light.before, "per machine")
    assert times["together [s]"][1] == pytest.approx(whole)
    rows = _values(claims.rescheduling(steady, light.before, search_s, RATE, 5.0))
    assert rows["12"] == pytest.approx(whole / 10.0)
    # The smaller of both workloads by seed is at most that of their means.
    of = table.query("plan == 'Table 3'").pivot_table(changes.ATTAINED, "workload", "rescheduling")
    assert rows["11b"] <= (of["light"] - of["none"]).min() + 1e-9
    assert changes.recorded_s("no such key") is None


def test_no_request_of_an_episode_is_lost(study, told):
    table, simulated = changes.episodes(study, told["losses"], RATE, 5.0)
    assert (table["lost"] == 0).all()
    assert len(table) == len(simulated)
    assert len(pictures.episodes_figure(simulated, 5.0).axes) == 2


def test_every_loss_has_a_plan_or_a_reason(study, told):
    small = replace(study, cloud=replace(study.cloud, machines=study.cloud.machines[:1]))
    table = changes.every_loss_frame(small, told["losses"], ["conversation"], RATE, steps=0)
    service = told["losses"]["conversation", "Algorithm 1", "full"].before
    assert len(table) == len(service.groups) + 1 + 3
    assert table["light: prefill:decode"].notna().all()
    assert (table["full: requests lost"].dropna() == 0).all()


def test_parts_switched_off_one_by_one(told):
    table, scales = told["ablation"], told["ablation_scales"]
    top, _, bottom, _ = pictures.ablation_figure(table, scales).axes
    assert len(top.lines) == 4
    assert [text.get_text() for text in bottom.get_yticklabels()] == list(
        table["system"].unique()[1:]
    )
    by = table.set_index(["workload", "system", "seed"]).sort_index()["mean E2E [s]"]
    ratio = by["coding", "without compression"] / by["coding", "full system"]
    assert _values(claims.ablation(table, RATE))["13a"] == pytest.approx(ratio.mean())


def test_two_machines_print_what_the_claims_divide(study):
    table, best = ts.two_machines(study.llm, study.printed)
    at = table.set_index("configuration")
    assert at.loc["40 Gbit/s, 16 bits", "printed KV transfer [ms]"] == 584
    rows = _values(claims.two_machines(table, best) + claims.alone(table))
    gain = at.loc["40 Gbit/s", ts.TPS] / at.loc["baseline", ts.TPS]
    assert rows["15a"] == gain
    assert rows["15c"] + rows["15d"] <= 8
    assert rows["29a"] == at.loc["baseline", "prefill [ms]"]
    assert rows["30c"] == pytest.approx(rows["30a"] / rows["30b"])


def test_two_machines_as_slow_as_printed(study):
    slower = ts.as_slow_as_printed(study.llm, study.printed)
    table = ts.two_machines(study.llm, study.printed, slower)[0].set_index("configuration")
    for label in ("baseline", "40 Gbit/s"):
        for what in ("prefill [ms]", "decode [ms]"):
            assert table.loc[label, what] == pytest.approx(table.loc[label, f"printed {what}"])
    assert min(compute for compute, _ in slower.values()) > 1


def test_kv_caches_take_a_larger_share_with_more_bits():
    table = ts.kv_shares_frame()
    assert len(table) == 3 * 3 * 4
    wide = table.pivot_table(index="bits", values="KV share [%]")["KV share [%]"]
    assert wide.is_monotonic_increasing
    rows = _values(claims.kv_shares(table))
    assert rows["14a"] <= rows["14b"]
    (axis,) = pictures.kv_shares_figure(table).axes
    assert axis.get_ylabel() == "KV transfer [% of the time]"


def test_arrivals_of_the_trace_beside_poisson_ones(study, told):
    table, own = ts.arrivals(study, told["planned"], RATE)
    assert len(table) == 2 * 4 * 2
    fig = pictures.arrivals_figure(told["scales"], own, RATE)
    assert [len(axis.lines) for axis in fig.axes] == [8, 8]


def test_a_shift_is_noticed_and_counted(study, plans):
    detector, table = changes.shift(replace(study, requests=150), plans["coding"], RATE)
    assert "Shift detector" in str(detector)
    assert list(table["rescheduling"]) == ["none", "light"]
    assert (table["lost"] == 0).all()


def test_plans_are_judged_on_their_planners_network(study, told):
    table = ts.networks_frame(study, told["plans"], told["serve"])
    assert len(table) == 2 * len(study.seeds)
    for name, here in table.groupby("workload", sort=False):
        made = told["plans"][name, RATE]
        slo, unseen = study.target(name), study.steady.work(name, RATE, 1001)
        runs = [simulate(one.deployment(), unseen, one.router()) for one in made]
        assert here["estimate"].tolist() == [100 * attainment(run, slo) for run in runs]
    assert [axis.get_title() for axis in pictures.networks_figure(table).axes] == [*study.traces]
    links = told["planned"]["coding", RATE, "ThunderServe"][0][0].links
    assert {link.media for _, _, link in links} == {()}
    # Unequal links give the clustering that starts the search something other than machines.
    unequal = CostModel(cluster.cluster("thunderserve-cloud-32-unequal"), study.llm, study.printed)
    first = Fleet(unequal).clusters(np.random.default_rng(0))
    assert {len(members) for members, _ in first} == {1, 2}


def test_claims_of_replicas(study, told):
    table = ts.replicas_frame(told["planned"], study.seeds)
    rows = _values(claims.replicas(table, told["losses"], RATE))
    light = told["losses"]["coding", "Table 3", "light"]
    # Groups that change their phase, negative where more turn to prefill.
    (before, _), (after, _) = light.before.ratio, light.after.ratio
    assert rows["22a"] == (len(light.turned) if after < before else -len(light.turned))
    assert "27" not in rows
