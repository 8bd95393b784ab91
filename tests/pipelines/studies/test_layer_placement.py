"""Notebook 08: flows, sizes, our plans and simulated placements of Helix's clusters."""

import numpy as np
import pytest

from hetero.placement import FlowNetwork
from hetero.planners.helix import search
from hetero.planners.helix.milp import judge
from pipelines.studies import layer_placement as lp
from pipelines.studies.helix_artifact import problem
from pipelines.studies.placement_examples import two_regions


@pytest.fixture(scope="module")
def plans():
    return {"small-10 30B": search(problem("small-10", "30B"))}


@pytest.fixture(scope="module")
def served(plans):
    return lp.simulated(plans, "twin", (10.0, 60.0), 0)


def test_every_example_is_drawn_with_its_flow():
    flows = {name: FlowNetwork(one).max_flow() for name, one in two_regions()[1].items()}
    axes = lp.examples_figure(flows).axes
    assert len(axes) == 3
    titles = [axis.get_title(loc="left") + axis.get_title() for axis in axes]
    assert all(
        f"{flow.tokens_per_s:,.0f}" in t for flow, t in zip(flows.values(), titles, strict=True)
    )


def test_flows_equal_the_objectives_that_the_solver_printed():
    table = lp.published_flows_frame().dropna()
    ours, printed = table["flow [tokens/s]"], table["published objective [tokens/s]"]
    assert len(table) > 3
    assert np.allclose(ours, printed, rtol=1e-3)


def test_pruning_leaves_fewer_variables():
    table = lp.sizes_frame()
    assert list(table["cluster"]) == ["geo-24", "geo-24", "hetero-42", "hetero-42"]
    rows = {row["claim"]: row["value"] for row in lp.size_claims(table)}
    assert len(rows) == 12
    assert rows["helix-16a"] == table["variables"][0]
    assert rows["helix-16h"] == table["constraints"][3]
    share = 100 * (1 - table["directed links"][0] / table["directed links"][1])
    assert rows["helix-32a"] == pytest.approx(share)


def test_our_plan_beside_the_published_one(plans):
    (plan,) = plans.values()
    row = lp.summary_frame(plans).iloc[0]
    assert row["best published [tokens/s]"] <= row["bound [tokens/s]"] * (1 + 1e-9)
    assert row["flow [tokens/s]"] == plan.tokens_per_s
    assert plan.tokens_per_s <= row["with partial inference [tokens/s]"]
    assert row["with partial inference [tokens/s]"] <= row["bound [tokens/s]"] * (1 + 1e-5)
    (axis,) = lp.progress_figure(plans).axes
    assert axis.get_xlabel() == "solving time [s]"
    assert len(axis.lines) == 7  # best and bound of all three, and the optimum
    assert axis.get_xscale() == axis.get_yscale() == "log"
    flow = plan.best[0].flow
    found = lp.pipelines_frame(flow, plan.problem.nodes, count=100)["flow [tokens/s]"]
    assert found.sum() == pytest.approx(flow.tokens_per_s)
    numbers = [row["claim"] for row in lp.plan_claims(plans)]
    assert numbers == ["helix-18", "helix-19a", "helix-19b"]


def test_published_placements_are_served_and_compared(served):
    runs, use = served
    table = lp.methods_frame(runs, use)
    assert list(table["placement"]) == 2 * [*lp.METHODS, "milp"]
    assert table["use by the flow [%]"].between(0, 100 + 1e-6).all()
    (axis,) = lp.method_bars_figure(table).axes
    assert [len(bars) for bars in axis.containers] == [2, 2, 2, 2]
    assert len(lp.case_study_figure(runs).axes) == 3
    printed = table.set_index(["cluster", "placement"])
    assert printed.loc[("geo-24", "swarm"), lp.PRINTED[0]] == 41.6
    assert printed.loc[("single-24", "petals"), lp.PRINTED[1]] == 194.5
    rows = {row["claim"]: row["value"] for row in lp.throughput_claims(table, "")}
    decoded = table.set_index(["cluster", "placement"])[lp.DECODED]
    assert rows["helix-12b"] == decoded["geo-24", "milp"] / decoded["geo-24", "swarm"]
    orders = {row["claim"]: row["value"] for row in lp.use_claims(runs, use, "")}
    assert set(orders) == {f"helix-30{letter}" for letter in "abcd"}
    assert sorted(orders["helix-30a"].split(">")) == ["Helix", "Petals", "Swarm"]
    # Judged by the time that nodes spend in batches, as Helix's Fig. 9 plots, not by the flow.
    busy = {m: runs[f"single-24 70B {m}"].node_use.mean() for m in lp.RUN}
    ranked = ">".join(m.capitalize() for m in sorted(busy, key=lambda m: -busy[m]))
    assert orders["helix-30d"] == ranked.replace("Milp", "Helix")


def test_the_program_as_solved_here_is_what_its_rows_say():
    for setting, known in lp.milp_frame().groupby("setting"):
        assert known["seconds"].is_monotonic_increasing
        assert known["bound"].is_monotonic_decreasing
        assert (known[["command", "machine", "date"]] != "").all(axis=None)
        last = lp.solved(setting)
        flow = judge(last, links=lp.milp_links(last.problem))
        # Rates were rounded down to whole numbers; nothing is beyond the bound.
        best, bound = known[["tokens_per_s", "bound"]].iloc[-1]
        assert best <= flow <= bound + len(last.problem.nodes)


def test_pruning_and_starts(served):
    decoded, reached_s = lp.ablation(served[0])
    assert list(decoded.index) == list(reached_s.index) == ["geo-24", "hetero-42"]
    left, right = lp.ablation_bars_figure(decoded, reached_s).axes
    assert [len(bars) for bars in left.containers + right.containers] == [2, 2, 2, 2]
    heights = [bar.get_height() for bar in right.containers[0]]
    assert heights == pytest.approx(reached_s["heuristic start"] / 60)
    rows = {row["claim"]: row["value"] for row in lp.ablation_claims(decoded, reached_s, "")}
    gain = 100 * (decoded["pruned"] / decoded["all links"] - 1)
    assert [rows["helix-17a"], rows["helix-17b"]] == pytest.approx(list(gain))
