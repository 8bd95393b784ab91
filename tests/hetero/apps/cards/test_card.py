from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import hetero
from hetero import cluster, workload
from hetero.apps.ask import Ask
from hetero.apps.cards import sections
from hetero.apps.cards.answer import grouped, grown
from hetero.apps.cards.card import PlanCard, Sampled
from hetero.apps.cards.delivery import SHARES, goodput, promised, redeployed, rerun, worst_quarter
from hetero.apps.cards.difference import difference
from hetero.apps.cards.request import more, request
from hetero.apps.cards.sensitivity import BETTER, first_missed, without
from hetero.apps.export import vllm
from hetero.apps.export.service import Service
from hetero.catalog import Link
from hetero.deployment import Deployment, KvLink
from hetero.errors import DataError, ParameterError
from hetero.plans import Group
from hetero.question import drawn, judged, rescaled, sustained_rps
from hetero.routers import Predictive
from hetero.search.portfolio import planner
from hetero.simulator import Slo
from hetero.simulator.sustained import steady_s
from hetero.workload import datasets
from tests.hetero.apps.cards.quick_cards import ASKED, AT_VLLM, LITTLE, PAIR, TWO_KINDS, little
from tests.hetero.apps.cards.quick_cards import pair as card_of_pair
from tests.hetero.apps.cards.quick_cards import two_kinds as card_of_two_kinds

FLEET = "xiong-v100-a800"


@pytest.fixture(autouse=True)
def _little(monkeypatch):
    little(monkeypatch)


@pytest.fixture
def card() -> PlanCard:
    return card_of_two_kinds()


@pytest.fixture
def pair() -> PlanCard:
    return card_of_pair()


def test_the_plan_uses_gpus_that_are_there_and_carries_what_is_asked(card):
    offered = TWO_KINDS.gpu_counts
    used = {one.gpu: one.count for one in card.sources}
    for name, count in offered.items():
        assert used.get(name, 0) + card.idle.get(name, 0) == count
    counted = {}
    for group in card.groups:
        for name, count in group.gpus.items():
            counted[name] = counted.get(name, 0) + group.count * count
    assert counted == used
    assert card.goodput_rps.value >= card.question.rate_rps == 2.0
    assert card.served["met joint"].value >= card.question.goal


def test_the_goodput_is_where_the_goal_is_just_met(card):
    asked = request(TWO_KINDS, **ASKED)
    load = asked.question.load(precision=asked.effort.precision)
    assert len(load.trace) > len(asked.question.trace)  # all requests, not those for planners
    for seed, rate in enumerate(card.goodput_rps.seeds):
        assert judged(card.plan, load.at(rate), seed)[1].sustained
        assert not judged(card.plan, load.at(1.03 * rate), seed)[1].sustained


def test_the_plan_is_the_best_of_what_was_tried_and_no_bound_is_passed(card):
    best = max(one.goodput_rps for one in card.tried if math.isfinite(one.goodput_rps))
    named = next(one for one in card.tried if one.planner == card.planner)
    assert named.goodput_rps == best
    assert card.goodput_rps.value <= card.bound.rate_rps
    assert card.bound.gap_percent == pytest.approx(
        100 * (1 - card.goodput_rps.value / card.bound.rate_rps)
    )


def test_more_load_leaves_fewer_requests_within_the_targets(card):
    rates = [one.rate_rps for one in card.at_rates]
    assert rates == pytest.approx([share * card.promised_rps for share in SHARES])
    by_share = dict(zip(SHARES, card.at_rates, strict=True))
    assert by_share[0.5].met >= card.question.goal > by_share[1.5].met
    tails = [one.latencies_s["ttft"] for one in card.at_rates]
    assert all(p50 <= p90 <= p99 for p50, p90, p99 in tails)
    assert tails[-1][1] > 2 * tails[0][1]
    half = by_share[0.5]
    load = request(TWO_KINDS, **ASKED).question.load(half.rate_rps, precision=0.02)
    run = rerun(card.plan, load, 0)
    begin_s, end_s = steady_s(run)
    counted = (run.trace.arrival_s >= begin_s) & (run.trace.arrival_s < end_s)
    within = (run.ttft_s <= 2.0) & ((run.tpot_s <= 0.1) | (run.trace.output_tokens == 1))
    assert within[counted].mean() == pytest.approx(half.met)


def test_phases_stay_together_unless_split_and_what_apart_would_bring_is_said(card, pair):
    for one in (card, pair):
        assert {group.phase for group in one.groups} == {"both"}
        assert sum(note.startswith("Prefill and decode apart would") for note in one.notes) == 1
    assert not request(PAIR, **AT_VLLM).question.split
    assert request(PAIR, split=True, **AT_VLLM).question.split


def test_what_is_promised_holds_for_requests_drawn_anew(card):
    question = request(TWO_KINDS, **ASKED).question
    by_share = dict(zip(SHARES, card.at_rates, strict=True))
    assert by_share[1.0].met >= card.question.goal
    kept = 1 + request(TWO_KINDS, **ASKED).effort.precision
    assert 0 < card.promised_rps <= card.goodput_rps.value / kept
    load = question.load(card.promised_rps)
    fresh = [load.rule.judge(rerun(card.plan, load, seed)).attained for seed in range(50, 60)]
    assert sum(share >= card.question.goal for share in fresh) >= 9
    beyond = load.at(1.2 * card.promised_rps)
    assert load.rule.judge(rerun(card.plan, beyond, 50)).attained < card.question.goal
    assert f"can be promised {sections.show(card.promised_rps)} requests/s" in str(card)


def test_a_log_keeps_a_later_part_that_the_promise_has_to_hold_in():
    rng = np.random.default_rng(0)
    calm = workload.load("azure2023_conv").head(3000).poisson(4.0, rng)
    busy = np.where(np.arange(3000) < 2000, 1.0, 0.25)  # the last third comes four times as fast
    burst = replace(calm, arrival_s=np.cumsum(np.diff(calm.arrival_s, prepend=0.0) * busy))
    asked = request(PAIR, trace=replace(burst, source="file:own.csv"), **AT_VLLM)
    question = asked.question
    assert question.process == "scaled"
    seen, log = (len(question.load(whole=one).trace) for one in (False, True))
    assert seen == pytest.approx(2 * (log - seen), abs=2)
    made = card_of_pair().plan
    first = replace(question, whole=None)
    alone, both = (promised(made, one, asked.effort, 8.0) for one in (first, question))
    assert 0 < both < 0.7 * alone
    assert worst_quarter(made, question.load(0.5), 0) == pytest.approx(1.0, abs=0.1)


def test_cost_per_token_is_price_over_tokens_served(pair):
    assert pair.question.engine == "vllm"
    assert any(note.startswith("Engine: vLLM ") for note in pair.notes)
    a5000 = cluster.cluster(PAIR).machines[0].gpu.usd_per_h
    assert pair.usd_per_h == pytest.approx(a5000 * sum(one.count for one in pair.sources))
    tokens = pair.served["total_tps"]
    each = [pair.usd_per_h / 3600 / tps * 1e6 for tps in tokens.seeds]
    assert pair.usd_per_mtok.seeds == pytest.approx(each)


def test_twice_as_slow_carries_less_and_draws_spread_around_what_is_nominal(card):
    asked = request(TWO_KINDS, **ASKED)
    names = [replica.name for replica in card.plan.deployment.replicas]
    slow = rescaled(card.plan, dict.fromkeys(names, (2.0, 2.0)))
    effort = replace(asked.effort, seeds=1, draws=0)
    fast = goodput(card.plan, asked.question, effort).value
    assert goodput(slow, asked.question, effort).value < 0.6 * fast
    low, high = card.goodput_rps.interval()
    assert low <= card.goodput_rps.value + 1e-9 < high
    first = [r.step for one in drawn(card.plan, asked.question, 2) for r in one.deployment.replicas]
    again = [r.step for one in drawn(card.plan, asked.question, 2) for r in one.deployment.replicas]
    times = [[float(step.decode_seconds([500])) for step in steps] for steps in (first, again)]
    assert times[0] == times[1]  # the same draws for every plan of the question
    assert len(set(times[0])) > 1


def test_more_of_everything_carries_a_tenth_more_when_all_times_shrink(card):
    # Prefill and decode a tenth faster scale the clock, but for waiting against fixed targets.
    asked = request(TWO_KINDS, **ASKED)
    names = [replica.name for replica in card.plan.deployment.replicas]
    both = rescaled(card.plan, dict.fromkeys(names, (1 / BETTER, 1 / BETTER)))
    effort = replace(asked.effort, seeds=2, draws=0)
    gain = (
        goodput(both, asked.question, effort).value
        / goodput(card.plan, asked.question, effort).value
    )
    rows = {one.name: one.gain_percent for one in card.limits.rows}
    assert gain > 1.05
    assert card.limits.binding == max(rows, key=rows.get)
    assert rows["compute of prefill"] > 0 or rows["bandwidth of decode"] > 0
    assert card.limits.first_missed in ("ttft", "tpot")
    assert "binds" in card.limits.sentence


def test_a_latency_of_its_target_is_no_miss():
    asked = SimpleNamespace(slo=Slo(ttft_s=2.0))
    run = SimpleNamespace(ttft_s=np.array([1.0, 2.0]), finished=np.ones(2, bool))
    assert first_missed(run, asked) == ""
    run.finished = np.array([True, False])
    assert first_missed(run, asked) == "ttft"


def test_changes_go_the_way_they_must(card):
    gains = {one.what: one.gain_rps.value for one in card.changes}
    noise = 0.03 * card.goodput_rps.value
    machines = [gain for what, gain in gains.items() if what.startswith("one more ")]
    assert len(machines) == 2
    assert max(machines) > noise
    assert min(machines) >= -noise
    assert gains["TTFT of 3,000 ms"] >= -noise
    assert gains["TPOT of 150 ms"] >= -noise
    assert gains["TTFT of 1,333 ms"] <= noise
    assert gains["TPOT of 66.67 ms"] <= noise
    for one in card.changes:
        assert one.gain_rps.value == pytest.approx(one.goodput_rps.value - card.goodput_rps.value)
        assert len(one.gain_rps.draws) == len(one.goodput_rps.draws)


def test_gpus_that_serve_nothing_at_a_low_rate_can_be_given_back(card):
    asked = request(TWO_KINDS, **ASKED)
    fleet = asked.cluster
    dollars = tuple(replace(one, usd_per_h=2.0 * one.count) for one in fleet.machines)
    question = replace(asked.question, cluster=replace(fleet, machines=dollars), rate_rps=0.05)
    usd_per_h = 2.0 * sum(card.plan.gpus.values())
    plan = replace(card.plan, router=Predictive(), usd_per_h=usd_per_h)
    left, why = without(plan, question)
    assert left.gpus
    assert left.gpus.items() < plan.gpus.items()
    assert why.startswith("Left idle: ")
    assert left.usd_per_h == pytest.approx(2.0 * sum(left.gpus.values()))
    assert [one.name for one in left.deployment.replicas] == [one.name for one in left.groups]
    assert left.simulate(question.arrivals()).finished.all()
    assert without(plan, replace(question, rate_rps=card.goodput_rps.value)) == (plan, "")


def test_gpus_that_only_decode_short_answers_are_not_given_back():
    asked = request(TWO_KINDS, **(ASKED | {"trace": "azure2023_code"}))
    made = planner("phase splitting", LITTLE).plan(
        replace(asked.question, rate_rps=1.0, split=True)
    )
    groups = tuple({tuple(one.gpus): one for one in made.groups}.values())
    assert len(groups) == 2
    known = {one.name: one for one in made.deployment.replicas}
    first, second = (known[one.name] for one in groups)
    split = Deployment(
        "split",
        (replace(first, role="prefill"), replace(second, role="decode")),
        default_link=KvLink(10.0),
    )
    plan = replace(made, serving=split, router=Predictive(), groups=groups, pipelines=())
    question = replace(asked.question, rate_rps=0.2)
    run = plan.simulate(question.arrivals())
    tokens = run.replicas["decode_tokens"] + run.replicas["prefill_tokens"]
    assert tokens[1] < 0.02 * tokens.sum()
    assert without(plan, question) == (plan, "")


def test_a_card_grows_in_the_order_of_reading_and_a_brief_one_not(pair):
    asked = Ask(PAIR, **AT_VLLM)
    *parts, whole = map(sections.texts, grown(asked))
    for k, one in enumerate(parts):
        known = one[: -3 if k else 2]
        assert known == whole[: len(known)]
    assert "\n\n".join(whole) == str(pair)
    (brief,) = grown(replace(asked, brief=True))
    assert sections.texts(brief)[:2] == whole[:2]
    assert (brief.limits, brief.changes, brief.at_rates) == (None, (), ())


def test_json_goes_round_and_says_what_is_wrong(card, tmp_path):
    text = card.to_json()
    again = PlanCard.from_json(text)
    assert again.to_json() == text
    assert again.plan == card.plan
    assert str(again) == str(card)
    values = json.loads(text)
    assert (values["format"], values["version"]) == ("hetero plan card", 2)
    with pytest.raises(DataError, match="not JSON"):
        PlanCard.from_json("{")
    with pytest.raises(DataError, match="no plan card"):
        PlanCard.from_json("[1]")
    with pytest.raises(DataError, match="has version 7"):
        PlanCard.from_json(json.dumps(values | {"version": 7}))
    with pytest.raises(DataError, match="'planner' of the plan card: field required"):
        PlanCard.from_json(json.dumps({k: v for k, v in values.items() if k != "planner"}))
    wrong = values | {"goodput_rps": values["goodput_rps"] | {"seeds": ["many"]}}
    with pytest.raises(DataError, match=r"goodput_rps\.seeds"):
        PlanCard.from_json(json.dumps(wrong))
    file = tmp_path / "card.json"
    card.save(file)
    assert PlanCard.load(file).to_json() == text
    with pytest.raises(ParameterError, match="exists already"):
        card.save(file)
    with pytest.raises(ParameterError, match=r"neither in \.json nor"):
        card.save(tmp_path / "card.txt")
    with pytest.raises(DataError, match="cannot be read"):
        PlanCard.load(tmp_path / "none.json")
    with pytest.raises(ParameterError, match=r"is of .*, not of Qwen3-8B"):
        hetero.simulation(file, model="Qwen3-8B")


def test_text_fits_a_terminal_and_says_the_figures(card):
    text = str(card)
    assert max(map(len, text.splitlines())) <= 104
    assert max(len(line) for line in "\n".join(sections.headline(card)).splitlines()) > 0
    for title in ("Plan (", "What it delivers", "Latencies against targets", "What binds"):
        assert f"\n{title}" in text
    assert sections.show(card.goodput_rps.value) in text
    assert "NaN" not in text
    assert "nan" not in text


def test_the_headline_says_first_what_was_asked_for_and_ends_with_what_helps(card):
    draws = tuple(float(k) for k in range(1, 11))
    asked = replace(card.question, rate_given=True, rate_rps=4.0)
    rates = replace(card.goodput_rps, draws=draws)
    said = sections.headline(replace(card, question=asked, goodput_rps=rates))
    assert said[0].startswith("The plan carries the 4.00 requests/s asked for in 70 % of 10 draws")
    found = replace(asked, rate_given=False)
    said = sections.headline(replace(card, question=found, goodput_rps=rates))
    assert said[0].startswith(f"It can be promised {sections.show(card.promised_rps)} requests/s")
    none = sections.headline(replace(card, question=asked, goodput_rps=rates, promised_rps=0.0))
    assert none[1].startswith("No rate can be promised")
    assert none[2] == "The 4.00 requests/s asked for are more than can be promised."
    less = replace(card.changes[0], what="less", gain_rps=Sampled(-1.0, (-1.0,), (-2.0, -1.0)))
    most = replace(less, what="much", gain_rps=Sampled(2.0, (2.0,), (1.0, 3.0)))
    some = replace(less, what="some", gain_rps=Sampled(1.0, (1.0,), (0.5, 1.5)))
    last = sections.headline(replace(card, changes=(less, some, most)))[-1]
    assert last.startswith("Of the changes beyond chance, much brings most: 2.00 requests/s more (")
    assert not any("changes beyond" in one for one in sections.headline(replace(card, changes=())))
    assert "changes beyond" not in sections.headline(replace(card, changes=(less,)))[-1]


def test_pages_need_no_network_and_hold_every_table(card, tmp_path):
    page = card.to_html()
    assert page.startswith("<!doctype html>")
    assert "http" not in page.replace("http-equiv", "")
    for table in sections.tables(card):
        assert f">{table.title}<" in page
    assert "<script" not in page
    assert "color-scheme" in page
    fragment = card._repr_html_()
    assert fragment.count("<div") == fragment.count("</div>")
    assert fragment.count("<details>") == 2
    card.save(tmp_path / "card.html")
    assert (tmp_path / "card.html").read_text() == page


def test_a_card_against_itself_and_against_a_slower_fleet(card):
    rates = card.goodput_rps
    spread = Sampled.of(rates.seeds, np.linspace(0.8, 1.2, 21) * rates.value)
    card = replace(card, goodput_rps=spread)
    same = difference(card, card)
    assert all(one.flips == 0.5 for one in same.contrasts if math.isfinite(one.flips))
    assert same.contrasts[0].low == same.contrasts[0].high == 0
    half = replace(
        card,
        goodput_rps=Sampled.of(
            [v / 2 for v in card.goodput_rps.seeds], [v / 2 for v in card.goodput_rps.draws]
        ),
    )
    found = difference(card, half).contrasts[0]
    draws = np.array(card.goodput_rps.draws)
    assert found.flips == 0.0
    assert found.low == pytest.approx(np.quantile(draws / 2, 0.05))
    assert "first - second" in str(difference(card, half))
    other = replace(card, question=replace(card.question, seed=1))
    apart = difference(card, other)
    assert not apart.paired
    assert math.isnan(apart.contrasts[0].low)
    assert "did not play the same" in str(apart)
    assert json.dumps(apart.to_dict())


def test_alike_replicas_stand_in_one_row():
    group = Group("a", "both", (("m1", "A40", 2, 30), ("m2", "L4", 2, 30)), 0.25)
    rows = grouped([group, replace(group, name="b"), replace(group, name="c", phase="decode")])
    assert [(one.count, one.phase, one.share) for one in rows] == [
        (2, "both", 0.5),
        (1, "decode", 0.25),
    ]
    assert rows[0].gpus == {"A40": 2, "L4": 2}
    assert rows[0].parallelism == "TP 2, PP 2"


def test_intervals_of_draws_and_seeds():
    one = Sampled.of([1.0, 3.0], range(101))
    assert one.value == 2.0
    assert one.interval() == (2.0, 95.0)  # it reaches as far as the value
    assert Sampled.of([50.0], range(101)).interval() == (5.0, 95.0)
    assert Sampled.of([1.0, 3.0]).interval() == pytest.approx((2 - 12.706, 2 + 12.706), abs=1e-3)


def test_a_fleet_grows_and_shrinks_with_its_links():
    fleet = cluster.cluster("thunderserve-cloud-32")
    grown = more(fleet, fleet.machine("a40"), 2)
    assert grown.gpu_counts["A40"] == 24
    assert grown.link("a40", "a40-more-1") == fleet.link("a40", "a6000-1")
    small = fleet.part(fleet.machines[:2])
    assert small.gpus == 8
    assert small.link("a6000-1", "a6000-2") == fleet.link("a6000-1", "a6000-2")
    geo = cluster.cluster("helix-geo-24")
    for machine in geo.machines[:: len(geo.machines) // 4]:
        bigger = more(geo, machine, 2)
        assert bigger.gpus == geo.gpus + 2 * machine.count


def test_an_engine_leaves_out_what_it_does_not_run_on():
    asked = request(FLEET, **(ASKED | {"engine": "vllm"}))
    assert set(asked.question.cluster.gpu_types) == {"A800-PCIE-80GB"}
    assert set(asked.cluster.gpu_types) == {"A800-PCIE-80GB", "V100-SXM2-32GB"}
    with pytest.raises(hetero.errors.ParameterError, match="computes in fp16 under vLLM"):
        request("xiong-8xv100", **(ASKED | {"engine": "vllm"}))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"slo": ""}, "at least one target"),
        ({"slo": "ttft=2"}, "cannot read 'ttft=2'"),
        ({"rate": 0.0}, "rate is 0"),
        ({"budget": -3.0}, "budget is -3"),
        ({"budget": 5.0}, "needs prices, and machine v100"),
        ({"precision": "fp8"}, "No GPU of xiong-v100-a800 computes in fp8"),
        ({"precision": "half"}, "No precision is called 'half'"),
        ({"choose": "boldest"}, "--choose does not know 'boldest'"),
        ({"effort": "some"}, "--effort does not know 'some'"),
        ({"goal": 1.5}, "goal of 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"trace": "nothing"}, "neither a file nor a known trace"),
        ({"model": "GPT-9"}, "GPT-9"),
    ],
)
def test_wrong_questions_are_told_in_one_sentence(changed, said):
    with pytest.raises(hetero.errors.HeteroError, match=said):
        hetero.plan(FLEET, **(ASKED | changed))


def test_only_replicas_can_be_changed(card):
    layers = replace(card.plan, serving=None)
    with pytest.raises(ParameterError, match="no deployment of replicas"):
        redeployed(layers, card.plan.deployment)


def test_targets_read_as_the_shell_reads_them():
    assert Slo.read("ttft=500ms,tpot=50ms,e2e=1min") == Slo(0.5, 0.05, 60.0)
    with pytest.raises(ParameterError, match="slo gives ttft twice"):
        Slo.read("ttft=1s,ttft=2s")


def far(latency_s: float) -> cluster.Cluster:
    """Two equal machines, one beside the coordinator and one as far from it as is said."""
    like = cluster.cluster(PAIR).machines[0]
    machines = tuple(replace(like, name=name, region=name) for name in ("near", "far"))
    network = cluster.Network(
        within_region=Link(name="inside", bandwidth_gbs=12.5, latency_s=1e-4),
        between_regions=Link(name="between", bandwidth_gbs=0.6, latency_s=latency_s),
        coordinator_region="near",
    )
    return cluster.Cluster("apart", machines, network)


def test_the_way_between_regions_is_in_every_answer():
    def goodput_at(where: cluster.Cluster):
        asked = request(where, model="Llama-3-8B", slo="ttft=2s,tpot=100ms", rate=1.0).question
        plan = planner("Mélange", LITTLE).plan(asked)
        load = asked.load(precision=0.05)
        return plan, sustained_rps(plan, load, seed=0)

    (_, alone), (_, beside), (away, less), (beyond, least) = (
        goodput_at(where)
        for where in (far(0.0).part(far(0.0).machines[:1]), far(0.0), far(0.5), far(5.0))
    )
    # Five seconds there and five back: nothing that is served there comes in time.
    assert {machine for group in beyond.groups for machine, *_ in group.stages} == {"near"}
    assert least == pytest.approx(alone, rel=0.01)
    # A second there and back leaves one for the first token: less is served, but more than by one.
    assert alone < less <= 1.05 * beside
    assert {one.network_s for one in away.deployment.replicas} == {1e-4, 0.5}


def test_engines_are_as_asked_and_exports_follow(pair):
    older = {"engine": "vllm@0.12", "memory": 0.8, "kv_precision": "fp8"}
    tight = hetero.plan(PAIR, **AT_VLLM | older)
    for made, ahead in ((pair, True), (tight, False)):
        assert {one.engine.batching for one in made.plan.deployment.replicas} == {"chunked"}
        assert {one.engine.schedule_ahead for one in made.plan.deployment.replicas} == {ahead}
    assert "vLLM 0.12" in str(tight)
    read = PlanCard.from_json(tight.to_json()).question
    assert (read.release, read.memory_fraction, read.kv_precision) == ("0.12", 0.8, "fp8")
    service = Service.of_card(tight)
    words = [one.argv for part in service.servings for one in vllm.commands(service, part)]
    for argv in words:
        assert argv[argv.index("--gpu-memory-utilization") + 1] == "0.8"
        assert argv[argv.index("--kv-cache-dtype") + 1] == "fp8"
    for wrong in ({"engine": "vllm@new"}, {"memory": 1.5}, {"kv_precision": "fp3"}):
        with pytest.raises(ParameterError):
            hetero.plan(PAIR, **AT_VLLM | wrong)


def test_power_is_the_share_of_the_limits_that_public_runs_draw(card):
    gpus = TWO_KINDS.gpu_types
    limit_w = sum(one.count * gpus[one.gpu].tdp_w for one in card.sources)
    rows = {(what, unit): value for what, value, unit in sections.power_table(card, gpus).rows}
    assert rows["power limits of its GPUs", "W"] == pytest.approx(limit_w)
    busy_w = rows["power while they are busy", "W"]
    assert busy_w == pytest.approx(sections.SHARES[1] * limit_w)
    tokens = card.served["total_tps"].value / card.served["requests_per_s"].value
    joules = rows["energy at the goodput", "J per token"]
    assert joules * tokens * card.goodput_rps.value == pytest.approx(busy_w)
    bare = {name: replace(gpu, tdp_w=None) for name, gpu in gpus.items()}
    with pytest.raises(ParameterError, match="gives no power limit"):
        sections.power_table(card, bare)


def test_the_shares_of_the_power_limit_are_those_measured(need):
    need("serving_runs")
    runs = pd.read_csv(datasets.path("serving_runs", "argonne_power.csv"))
    limit_w = runs["Hardware"].map({"Nvidia A100 GPU": 400.0, "Nvidia H100 GPU": 700.0})
    shares = (runs["avg_power"] / 1e3 / limit_w)[limit_w.notna() & (runs["Batch Size"] > 1)]
    assert len(shares) == 30
    found = (shares.min(), shares.median(), shares.max())
    assert found == pytest.approx(sections.SHARES, abs=0.005)
