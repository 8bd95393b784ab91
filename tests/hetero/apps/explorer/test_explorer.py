"""The explorer: its bound, its views, and widgets that only call it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hetero.apps.explorer import explore
from hetero.apps.explorer.view import LOADS
from hetero.bounds import deployment_rps
from hetero.deployment import Deployment, Engine, KvLink, Replica
from hetero.errors import CatalogError, HeteroError, InfeasibleError, ParameterError
from hetero.latency.step import StepModel
from hetero.routers import DEFER
from hetero.simulator import Slo
from hetero.workload import Trace

FAST = StepModel.affine(floor_s=0.0, per_token_s=1e-3, per_cached_token_s=0.0)
SLOW = StepModel.affine(floor_s=0.0, per_token_s=4e-3, per_cached_token_s=0.0)


def requests(count: int = 400, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    return Trace(
        np.zeros(count), rng.integers(20, 400, count), rng.integers(1, 60, count), name="drawn"
    )


def fleet(*steps: StepModel, **options: object) -> Deployment:
    replicas = [
        Replica(f"r{k}", step, 100_000, **options)  # type: ignore[arg-type]
        for k, step in enumerate(steps)
    ]
    return Deployment("fleet", tuple(replicas))


# The bound -------------------------------------------------------------------------------------


def test_bound_of_work_by_the_token_is_tokens_over_speed() -> None:
    trace = requests()
    tokens = (trace.input_tokens + trace.output_tokens - 1).mean()
    assert deployment_rps(fleet(FAST), trace) == pytest.approx(1000 / tokens)
    assert deployment_rps(fleet(FAST, FAST, SLOW), trace) == pytest.approx(2250 / tokens)


def test_bound_gives_each_replica_the_requests_it_is_better_at() -> None:
    # One replica reads prompts ten times faster and decodes ten times slower than the other.
    long_prompts, long_replies = (1000, 2), (2, 1000)
    trace = Trace(np.zeros(200), *np.array([long_prompts, long_replies] * 100).T, name="two kinds")
    prefill = StepModel.affine(floor_s=0, per_token_s=1e-4, per_cached_token_s=1e-4)
    decode = StepModel.affine(floor_s=0, per_token_s=1e-3, per_cached_token_s=0.0)
    best = deployment_rps(fleet(prefill, decode), trace)
    # Each on its own kind: 1,001 tokens of 0.1 ms and of 1 ms; half of the requests are of a kind,
    # and the first helps the second with what it has to spare, which is nothing worth having.
    assert best is not None
    assert 2 * 1000 / 1001 <= best < 1.02 * 2 * 1000 / 1001


def test_bound_keeps_requests_to_the_phases_of_split_replicas() -> None:
    trace = requests()
    one = Replica("p", FAST, 100_000, role="prefill")
    two = Replica("d", SLOW, 100_000, role="decode")
    split = Deployment("split", (one, two), (("p", "d", KvLink(100.0)),))
    by_prefill = 1000 / trace.input_tokens.mean()
    by_decode = 250 / (trace.output_tokens - 1).mean()
    assert deployment_rps(split, trace) == pytest.approx(min(by_prefill, by_decode))


def test_bound_leaves_out_what_no_replica_holds_and_knows_when_there_is_none() -> None:
    held = Trace([0.0, 0.0], [100, 200_000], [2, 2], name="one too long")
    assert deployment_rps(fleet(FAST), held) == pytest.approx(1000 / 101)
    assert deployment_rps(fleet(FAST), Trace([0.0], [200_000], [2])) == 0.0
    shared = Trace([0.0], [32], [2], prefix_offsets=[0, 1], prefix_ids=[7], block_tokens=16)
    caching = fleet(FAST, engine=Engine(admission="paged", prefix_cache=True))
    assert deployment_rps(caching, shared) is None


# Views -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def view():  # type: ignore[no-untyped-def]
    return explore(
        "heteroserve-4", "azure2023_conv", 20.0, Slo(ttft_s=0.1, tpot_s=0.02), requests=500
    )


def test_the_same_arguments_give_the_same_view(view) -> None:  # type: ignore[no-untyped-def]
    again = explore(
        "heteroserve-4", "azure2023_conv", 20.0, Slo(ttft_s=0.1, tpot_s=0.02), requests=500
    )
    assert again.plan is view.plan  # planned and bounded once
    assert str(again) == str(view)
    assert (again.here, again.curve) == (view.here, view.curve)


def test_a_view_counts_what_its_run_shows(view) -> None:  # type: ignore[no-untyped-def]
    r, here = view.run.requests, view.here
    n = len(r)
    start, last = r["arrival_s"][int(0.2 * n)], r["arrival_s"][n - int(0.05 * n) - 1]
    done = [k for k in range(n) if start <= r["finish_s"][k] <= last]
    met = [
        k
        for k in done
        if view.run.ttft_s[k] <= 0.1 and (r["output_tokens"][k] == 1 or view.run.tpot_s[k] <= 0.02)
    ]
    assert here.served_rps == pytest.approx(len(done) / (last - start))
    assert here.met_rps == pytest.approx(len(met) / (last - start))
    assert 0 < here.met_rps < here.served_rps


def test_the_curve_follows_the_offer_and_stays_below_the_bound(view) -> None:  # type: ignore[no-untyped-def]
    bound = view.plan.bound_rps
    offered = [point.offered_rps for point in view.curve]
    assert offered == pytest.approx([load * bound for load in LOADS[: len(offered)]])
    for point in view.curve:
        assert point.met_rps <= point.served_rps
        # Counted in a window, finishes may run ahead of arrivals by the noise of the arrivals.
        assert point.served_rps < 1.1 * min(bound, point.offered_rps)


def test_targets_change_what_is_met_and_nothing_else(view) -> None:  # type: ignore[no-untyped-def]
    loose = explore("heteroserve-4", "azure2023_conv", 20.0, Slo(ttft_s=60.0), requests=500)
    assert loose.here.served_rps == view.here.served_rps == loose.here.met_rps
    np.testing.assert_array_equal(loose.run.ttft_s, view.run.ttft_s)


def test_a_higher_rate_stretches_the_same_requests_less(view) -> None:  # type: ignore[no-untyped-def]
    double = explore("heteroserve-4", "azure2023_conv", 40.0, Slo(), requests=500)
    slow, fast = view.run.requests, double.run.requests[: len(view.run.requests)]
    assert len(double.run.requests) >= len(slow)
    np.testing.assert_allclose(2 * fast["arrival_s"], slow["arrival_s"])
    np.testing.assert_array_equal(fast["input_tokens"], slow["input_tokens"])


def test_overload_and_short_runs_are_told() -> None:
    found = explore("heteroserve-4", "azure2023_conv", 500.0, Slo(ttft_s=1.0), requests=200)
    assert found.of_bound > 1
    assert any("More arrives than any router" in note for note in found.notes)
    assert any("requests are played of" in note for note in found.notes)
    assert len(found.curve) == len(LOADS)


@pytest.mark.parametrize("load", [1.2, 2.0, 8.0])
def test_beyond_saturation_a_fleet_serves_what_it_can_and_no_more(load: float) -> None:
    bound = explore("heteroserve-4", "azure2023_conv", 1.0, Slo()).plan.bound_rps
    full = explore("heteroserve-4", "azure2023_conv", 1.1 * bound, Slo()).here.served_rps
    served = explore("heteroserve-4", "azure2023_conv", load * bound, Slo()).here.served_rps
    assert served == pytest.approx(full, rel=0.1)
    assert served < bound


def test_machines_left_out_are_named() -> None:
    options = {"llm": "Qwen2.5-7B", "requests": 200}
    found = explore("helix-10", "azure2023_conv", 1.0, Slo(), **options)  # type: ignore[arg-type]
    assert {one.gpu.name for one in found.run.deployment.replicas if one.gpu} == {"L4"}
    assert "Idle: 6 x T4." in found.notes
    assert "bound of any router" in str(found)
    again = explore(found.plan, "azure2023_conv", 1.0, Slo(), requests=200)
    assert again.plan.bound_rps == found.plan.bound_rps
    assert (again.here, again.curve) == (found.here, found.curve)


def test_a_deployment_and_a_router_of_ones_own_can_be_explored() -> None:
    class First:
        name = "first"

        def __init__(self) -> None:
            self.asked = 0

        def choose(self, request, fleet):  # type: ignore[no-untyped-def]
            self.asked += 1
            return 0

    mine = First()
    found = explore(fleet(FAST, FAST), requests(), 2.0, Slo(ttft_s=5.0), mine)
    assert (found.run.requests["node"] == 0).all()
    assert mine.asked == 0  # every run has a copy: what one learns, no other knows


def test_wrong_questions_are_refused() -> None:
    slo = Slo()
    with pytest.raises(ParameterError, match="at 0 requests/s"):
        explore("heteroserve-4", "azure2023_conv", 0.0, slo)
    with pytest.raises(ParameterError, match="No router is called 'best'"):
        explore("heteroserve-4", "azure2023_conv", 1.0, slo, "best")
    with pytest.raises(CatalogError, match="No cluster is called 'nowhere'"):
        explore("nowhere", "azure2023_conv", 1.0, slo)
    with pytest.raises(ParameterError, match="0 requests"):
        explore("heteroserve-4", "azure2023_conv", 1.0, slo, requests=0)
    with pytest.raises(InfeasibleError, match=r"fits no machine.*Resolve"):
        explore("heteroserve-4", "azure2023_conv", 1.0, slo, llm="Llama-3.1-405B")


def test_the_figure_says_where_the_target_cuts(view) -> None:  # type: ignore[no-untyped-def]
    from hetero.plots import figures

    figure = view.figure()
    ttft, tpot, load, queue, cache = figure.axes
    arrival_s = view.run.requests["arrival_s"]
    n = len(arrival_s)
    first, last = arrival_s[int(0.2 * n)], arrival_s[n - int(0.05 * n) - 1]
    counted = (first <= arrival_s) & (arrival_s <= last)
    met = 100 * (view.run.ttft_s[counted] <= 0.1).mean()
    assert ttft.get_title(loc="left") == f"{met:.3g} % within 0.1 s"
    assert f"{met:.3g} % within target" in str(view)
    assert f"the {counted.sum():,} of {n:,} requests" in str(view)
    assert sum(len(line.get_xdata()) for line in ttft.lines[:2]) == counted.sum()
    assert tpot.get_title(loc="left").endswith("% within 20 ms")
    marks = [line for line in load.lines if line.get_marker() == "o"]
    drawn = [(line.get_xdata()[0], line.get_ydata()[0]) for line in marks]
    assert drawn == [(20.0, view.here.served_rps), (20.0, view.here.met_rps)]
    samples = view.run.samples
    assert max(line.get_ydata().max() for line in cache.lines[:-1]) == pytest.approx(
        100 * samples.kv_use.max()
    )
    assert queue.get_ylabel() == "waiting [requests]"
    figures.close(figure)


# Widgets ---------------------------------------------------------------------------------------


def test_widgets_show_the_view_of_the_pure_function() -> None:
    pytest.importorskip("ipywidgets", reason="the lab extra is not installed")
    from hetero.apps.explorer import Explorer

    shown = Explorer(cluster="heteroserve-4", rate_rps=10.0, simulated=300)
    first = bytes(shown._figure.value)
    assert first.startswith(b"\x89PNG")
    shown.rate_rps.value = 30.0
    slo = Slo(ttft_s=shown.ttft_s.value, tpot_s=1e-3 * shown.tpot_ms.value)
    want = explore(
        "heteroserve-4", "azure2023_conv", shown.rate_rps.value, slo, "hetero", requests=300
    )
    assert shown.view is not None
    assert str(shown.view) == str(want)
    assert want._repr_html_() in shown._text.value
    assert bytes(shown._figure.value) != first


def test_overload_grows_at_the_dispatcher_and_own_routers_are_in_the_menu() -> None:
    pytest.importorskip("ipywidgets", reason="the lab extra is not installed")
    from hetero.apps.explorer import Explorer
    from hetero.plots import figures

    class Hoarder:
        """Sends a request only while fewer than eight are out."""

        name = "hoarder"

        def choose(self, request, fleet):  # type: ignore[no-untyped-def]
            return 0 if fleet.outstanding.sum() < 8 else DEFER

    shown = Explorer(
        fleets={"fast": fleet(FAST)}, workloads={"drawn": requests()},
        routers={"mine": Hoarder}, rate_rps=6.0, simulated=400,
    )  # fmt: skip
    assert shown.router.options[:2] == ("mine", "round-robin")
    view = shown.view
    assert view is not None
    assert view.run.router == "hoarder"
    figure = view.figure()
    (line,) = (one for one in figure.axes[3].lines if one.get_label() == "dispatcher")
    held = line.get_ydata()
    r, times = view.run.requests, np.asarray(line.get_xdata()) + view.run.requests["arrival_s"][0]
    come = [np.count_nonzero(r["arrival_s"] <= t) - np.count_nonzero(r["finish_s"] <= t)
            for t in times]  # fmt: skip
    np.testing.assert_array_equal(held, np.maximum(np.array(come) - 8, 0))
    assert held.max() > 30
    figures.close(figure)


def test_widgets_tell_what_cannot_be_served_and_recover() -> None:
    pytest.importorskip("ipywidgets", reason="the lab extra is not installed")
    from hetero.apps.explorer import Explorer

    shown = Explorer(cluster="heteroserve-4", simulated=300)
    shown.model.value = "Llama-3.1-405B"
    assert shown.view is None
    assert "fits no machine" in shown._text.value
    assert shown._figure.layout.display == "none"
    shown.model.value = "Qwen2.5-7B"
    assert shown.view is not None
    assert shown._figure.layout.display == ""


def test_without_ipywidgets_the_explorer_says_what_to_install(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import sys

    import hetero.apps.explorer

    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.delitem(sys.modules, "hetero.apps.explorer.widgets", raising=False)
    with pytest.raises(HeteroError, match=r"hetero\[lab\]"):
        hetero.apps.explorer.Explorer  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'Explored'"):
        hetero.apps.explorer.Explored  # noqa: B018


def test_a_router_without_a_bound_has_no_share_of_it() -> None:
    shared = Trace(
        np.zeros(50), [32] * 50, [2] * 50, prefix_offsets=np.arange(51), prefix_ids=[7] * 50,
        block_tokens=16, name="shared",
    )  # fmt: skip
    found = explore(
        fleet(FAST, engine=Engine(admission="paged", prefix_cache=True)),
        shared,
        2.0,
        Slo(ttft_s=1.0),
    )
    assert found.plan.bound_rps is None
    assert math.isnan(found.of_bound)
    assert found.curve == ()
