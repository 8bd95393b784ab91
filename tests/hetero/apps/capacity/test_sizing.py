"""Sizing against brute force, linear programs solved elsewhere, and closed forms."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.optimize import linprog

import hetero
from hetero import catalog, workload
from hetero.apps.answers import fleets
from hetero.apps.capacity import prices
from hetero.apps.capacity.fluid import work_s
from hetero.apps.capacity.market import Market
from hetero.apps.capacity.outcome import dispatcher, outcome
from hetero.apps.capacity.sizing import Candidate, cheapest, cheapest_part
from hetero.catalog import EngineName
from hetero.cluster import find
from hetero.costs.cost import IN_PAPERS, CostSettings
from hetero.deployment import Deployment, Engine, Replica
from hetero.engines import EngineSpec
from hetero.errors import DataError, InfeasibleError, ParameterError
from hetero.latency.step import Piece, StepModel
from hetero.plans import Plan
from hetero.question import (
    DRAWS,
    Load,
    drawn,
    sustained_draws,
    sustains,
    within_context,
)
from hetero.routers import RoundRobin
from hetero.simulator import Slo, simulate
from hetero.workload import Trace
from tests.hetero.engine_plans import as_in_papers

MODEL = catalog.llm("Llama-3-8B")
CHATS = workload.load("azure2023_conv")
RATE = 25.0
SLO = Slo(ttft_s=2.0, tpot_s=0.12)
LOAD = Load(CHATS, 5.0, SLO, precision=0.05)


def market(rate_rps: float, gpus=("L4", "A40"), precision=0.05, most=None) -> Market:
    listed = prices.from_catalog(gpus, sizes=(1,)).limited(most or {})
    return Market(listed, MODEL, Load(CHATS, rate_rps, SLO, 0.9, precision, (0,)), IN_PAPERS)


def test_no_cheaper_fleet_of_two_types_carries_the_load() -> None:
    here = market(5.0)
    found = cheapest(here)
    assert here.sustains(found.best.counts)
    columns = here.fluid.columns
    each = [here.offers[k].usd_per_h for k, _ in columns]
    most = [int(found.usd_per_h / price) for price in each]
    better = [
        numbers
        for numbers in product(*(range(n + 1) for n in most))
        if any(numbers)
        and sum(n * p for n, p in zip(numbers, each, strict=True)) < found.usd_per_h - 1e-9
        and here.sustains({at: n for at, n in zip(columns, numbers, strict=True) if n})
    ]
    assert len(most) == 2
    assert max(most) >= 2
    assert better == []


def test_the_bound_is_the_best_of_all_fleets_of_a_linear_program_per_request() -> None:
    few = CHATS.head(40)
    listed = prices.from_catalog(["L4", "A40", "A100-SXM-80GB"], sizes=(1, 2))
    here = Market(listed, MODEL, Load(few, RATE, SLO), IN_PAPERS)
    fluid = here.fluid
    prices_h = np.array([here.offers[k].usd_per_h for k, _ in fluid.columns])
    bound = fluid.least_usd_per_h(RATE)

    def serves(numbers: tuple[int, ...]) -> bool:
        held = fluid.held({at: n for at, n in zip(fluid.columns, numbers, strict=True) if n})
        # Shares z of request r on instance i, then the rate; maximise the rate.
        count, kinds = len(few), len(fluid.work)
        rows, limits = [], []
        for i, work in enumerate(fluid.work):
            for row in range(work.shape[1]):
                line = np.zeros(count * kinds + 1)
                line[i * count : (i + 1) * count] = work[:, row]
                rows.append(line)
                limits.append(held[i])
        balance = np.zeros((count, count * kinds + 1))
        for r in range(count):
            balance[r, r : count * kinds : count] = 1.0
            balance[r, -1] = -1.0 / count
        goal = np.zeros(count * kinds + 1)
        goal[-1] = -1.0
        solved = linprog(goal, rows, limits, balance, np.zeros(count))
        assert solved.status == 0
        return bool(-solved.fun >= RATE * (1 - 1e-6))

    affordable = [
        numbers
        for numbers in product(*(range(int(bound / p + 1e-9) + 1) for p in prices_h))
        if np.array(numbers) @ prices_h <= bound * (1 + 1e-3)
    ]
    cost = {numbers: float(np.array(numbers) @ prices_h) for numbers in affordable}
    cheaper = [numbers for numbers in affordable if cost[numbers] < bound * (1 - 1e-3)]
    # Those that another of them contains serve no more than it.
    largest = [
        numbers
        for numbers in cheaper
        if not any(
            numbers != other and all(a <= b for a, b in zip(numbers, other, strict=True))
            for other in cheaper
        )
    ]
    assert len(largest) > 10
    assert not any(serves(numbers) for numbers in largest)
    assert any(serves(numbers) for numbers in affordable if numbers not in cheaper)


def test_the_bound_on_the_rate_holds_in_simulation_and_is_met_by_equal_requests() -> None:
    floor_s, slots, replies = 0.05, 16, 51
    step = StepModel((Piece([0.0], [floor_s], [0.0]),), "test", "assumed")
    engine = Engine(batching="chunked", max_batch=slots, max_step_tokens=4096)
    one = Replica("a", step, kv_tokens=10**6, engine=engine)
    # 16 requests share 50 steps of 50 ms each after the first token.
    work = work_s(one, np.array([100.0]), np.array([float(replies)]))
    assert work.max() == pytest.approx(50 * floor_s / slots)
    busy = Trace(np.zeros(3200), np.full(3200, 100), np.full(3200, replies))
    run = simulate(Deployment("one", (one,)), busy, RoundRobin())
    assert 0.9 / work.max() <= 3200 / run.span_s <= 1.0 / work.max()


@pytest.mark.parametrize("seed", range(4))
def test_no_replica_is_faster_than_the_bound(seed: int) -> None:
    here = market(4.0, gpus=("L4", "A40", "H100-SXM"))
    lengths = CHATS.sample(600, np.random.default_rng(seed)).all_at_once()
    x = lengths.input_tokens.astype(float)
    y = lengths.output_tokens.astype(float)
    for kind in here.kinds:
        one = kind.instances[1]
        run = simulate(Deployment("one", (one,)), lengths, RoundRobin())
        assert run.finished.all()
        assert run.span_s >= work_s(one, x, y).sum(axis=0).max() * (1 - 1e-9)


def test_it_is_never_dearer_than_one_type_nor_cheaper_than_the_bound() -> None:
    found = cheapest(market(9.0, gpus=("L4", "A40", "L40S")))
    assert found.homogeneous is not None
    assert found.bound_usd_per_h <= found.usd_per_h <= found.homogeneous[1].usd_per_h
    assert all(
        one.outcome.mean >= 0.9 for one in found.alone.values() if isinstance(one, Candidate)
    )
    assert found.usd_per_h == pytest.approx(found.plan.usd_per_h)
    assert sum(found.plan.gpus.values()) == len(found.plan.deployment.replicas)
    assert "no fleet of these machines" in str(found)


def test_nothing_that_costs_more_than_the_answer_is_called_a_bound() -> None:
    found = cheapest(market(5.0))
    for estimate in (found.program_usd_per_h, 2 * found.usd_per_h):  # no bound: it may be above
        told = " ".join(str(replace(found, program_usd_per_h=estimate)).split())
        claims = re.findall(r"less than ([\d.]+) \$/h|([\d.]+) \$/h or more", told)
        assert claims
        assert all(float(low or least) <= found.usd_per_h + 5e-4 for low, least in claims)
        assert f"under the targets: {estimate:.3f} $/h." in told


def test_limits_are_kept_and_what_does_not_suffice_is_said() -> None:
    free = cheapest(market(5.0, gpus=("A40", "L4")))
    used = {name: n for name, n in free.plan.gpus.items() if n}
    name = max(used, key=lambda one: used[one])
    tight = cheapest(market(5.0, gpus=("A40", "L4"), most={name: used[name] - 1}))
    assert tight.plan.gpus.get(name, 0) <= used[name] - 1
    assert tight.usd_per_h >= free.usd_per_h
    with pytest.raises(InfeasibleError, match="within the limits"):
        cheapest(market(50.0, most={"A40": 2, "L4": 2}))
    with pytest.raises(InfeasibleError, match="fits no machine"):
        hetero.size(model="Llama-3.1-70B", trace=CHATS, rate=1.0, gpu=["T4"], slo=SLO)


def test_a_division_that_smaller_machines_offer_as_cheaply_is_left_out() -> None:
    listed = prices.from_catalog(["A40"], sizes=(1, 2, 4))
    assert Market(listed, MODEL, LOAD, IN_PAPERS).fluid.columns == [(0, (1,)), (1, (2,)), (2, (4,))]
    offers = tuple(
        replace(o, usd_per_h=o.usd_per_h * (2 if o.count == 1 else 1)) for o in listed.offers
    )
    dear = Market(replace(listed, offers=offers), MODEL, LOAD, IN_PAPERS)
    assert (1, (1, 1)) in dear.fluid.columns
    assert (2, (2, 2)) not in dear.fluid.columns


def test_only_gpus_that_compute_in_the_precision_are_offered() -> None:
    listed = prices.from_catalog(["A40", "L40S"], sizes=(1,))
    here = Market(listed, MODEL, LOAD, CostSettings(engine=EngineSpec(name="any", precision="fp8")))
    assert [offer.gpu.name for offer in here.offers] == ["L40S"]
    with pytest.raises(InfeasibleError, match="computes in fp8"):
        Market(
            prices.from_catalog(["A40"]),
            MODEL,
            LOAD,
            CostSettings(engine=EngineSpec(name="any", precision="fp8")),
        )


def test_only_gpus_that_the_engine_runs_on_are_offered() -> None:
    machines = [prices.Offer(catalog.gpu(name), 1, 1.0) for name in ("L40S", "MI300X", "V100-16GB")]
    listed = replace(prices.from_catalog(["L40S"]), offers=tuple(machines))

    def offered(engine: EngineName) -> list[str]:
        here = Market(listed, MODEL, LOAD, CostSettings(engine=EngineSpec(name=engine)))
        return [offer.gpu.name for offer in here.offers]

    assert offered("vllm") == ["L40S", "MI300X"]
    assert offered("trtllm") == ["L40S"]
    few = replace(listed, offers=tuple(machines[1:2]))
    with pytest.raises(InfeasibleError, match="computes in int8 under vLLM"):
        Market(few, MODEL, LOAD, CostSettings(engine=EngineSpec(precision="int8")))


def test_a_load_without_targets_must_keep_up() -> None:
    step = StepModel.affine(floor_s=0.1, per_token_s=0.0, per_cached_token_s=0.0)
    engine = Engine(max_step_tokens=100)
    one = Deployment("one", (Replica("a", step, kv_tokens=10_000, engine=engine),))
    alike = Trace([0.0] * 100, [100] * 100, [1] * 100)
    load = Load(alike, 8.0, seeds=(0,))  # it serves 10 a second
    plan = Plan("by hand", (), one, dispatcher(load), "hetero", None)
    assert outcome(plan, load).sustained
    found = outcome(plan, load.at(12.0))
    assert found.mean == 1.0
    assert not found.sustained
    assert found.seen[0].growth == pytest.approx(1 - 10 / 12, abs=0.02)


def test_price_lists_are_read_and_refused_in_one_sentence(tmp_path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(
        "name: mine\nstart_s: 60\ngpus:\n  X1: {mem_gib: 64, mem_bw_gbs: 3000, fp16_tflops: 400}\n"
        "machines:\n  - {gpu: X1, count: 2, usd_per_h: 3.5, limit: 4}\n"
        "  - {gpu: L4, usd_per_h: 0.8, spot_usd_per_h: 0.3, losses_per_h: 0.1}\n"
    )
    found = prices.load(path)
    assert [offer.name for offer in found.offers] == ["2xX1", "1xL4"]
    assert found.offers[0].gpu.mem_gib == 64
    assert (found.offers[0].limit, found.start_s) == (4, 60)
    assert found.offers[1].spot_usd_per_h == 0.3
    for text, said in (
        ("machines: []", "at least 1 item"),
        ("machines: [{gpu: L4}]", "usd_per_h"),
        ("machines: [{gpu: L5, usd_per_h: 1}]", "No GPU is called"),
        ("machines: [{gpu: L4, usd_per_h: 1, spot_usd_per_h: 0.5}]", "loss rate"),
        ("machines: [{gpu: L4, usd_per_h: -1}]", "greater than 0"),
        ("machines: [{gpu: L4, usd_per_h: 1, colour: red}]", "colour"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            prices.load(path)
    with pytest.raises(DataError, match="no such file"):
        prices.load(tmp_path / "none.yaml")
    with pytest.raises(ParameterError, match="no price"):
        prices.from_catalog(["A800-PCIE-80GB"])
    with pytest.raises(ParameterError, match="cannot be limited"):
        prices.from_catalog(["L4"]).limited({"A40": 2})


def test_a_fleet_says_in_how_many_draws_it_carries_the_load() -> None:
    here = market(5.0)
    found = cheapest(here)
    assert len(found.best.draws) == DRAWS
    assert 0 < np.mean(found.best.draws) < 1
    assert f"in {100 * np.mean(found.best.draws):.0f} % of 24 draws" in str(found)
    assert "for these step times" in str(found)
    plan, load = found.plan, here.load
    gpus = {offer.gpu.name: offer.gpu for offer in here.offers}
    # What is decided by dominance is what simulation of every draw shows.
    question = as_in_papers(here.cluster, MODEL, CHATS, 5.0, SLO)
    each = [sustains(one, load, 0) for one in drawn(plan, question, DRAWS)]
    assert sustained_draws(plan, gpus, load) == tuple(each) == found.best.draws
    # A fleet of twice the machines is as safe or safer.
    twice = {at: 2 * n for at, n in found.best.counts.items()}
    assert all(a >= b for a, b in zip(here.draws(twice), found.best.draws, strict=True))


def test_when_an_assumed_gpu_wins_it_says_how_often() -> None:
    found = cheapest(market(5.0, gpus=("RTX-A5000", "L40S", "H100-SXM")), near=100.0)
    assert found.market.assumed(found.best.counts) == ("RTX-A5000",)
    assert "No step time of RTX-A5000 was ever measured" in str(found)
    assert "carries the load where it does not. No fleet is sized anew" in str(found)
    sized = market(5.0, gpus=("H100-SXM",))
    assert not sized.assumed(cheapest(sized, draws=0).best.counts)


def test_other_gpu_types_are_searched_up_to_a_factor() -> None:
    gpus = ("L4", "A40", "H100-SXM")
    all_of = cheapest(market(5.0, gpus=gpus), near=100.0, draws=0)
    assert all(isinstance(one, Candidate) for one in all_of.alone.values())
    few = cheapest(market(5.0, gpus=gpus), near=1.0, draws=0)
    assert few.usd_per_h == pytest.approx(all_of.usd_per_h)
    for name, one in few.alone.items():
        assert few.least_usd_per_h[name] <= all_of.alone[name].usd_per_h * (1 + 1e-6)
        if isinstance(one, str):
            assert "not searched: proven to cost" in one
            assert few.least_usd_per_h[name] >= few.homogeneous[1].usd_per_h


def test_price_lists_are_joined_and_filtered(tmp_path) -> None:
    for name, gpu, usd in (("one", "L4", 0.8), ("two", "A40", 0.9), ("three", "L4", 0.7)):
        text = f"name: {name}\nmachines: [{{gpu: {gpu}, usd_per_h: {usd}, limit: 3}}]\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    lists = [prices.load(tmp_path / f"{name}.yaml") for name in ("one", "two", "three")]
    found = prices.PriceList.joined(lists)
    assert [(o.name, o.usd_per_h, o.source) for o in found.offers] == [
        ("1xL4", 0.8, "one.yaml"),
        ("1xA40", 0.9, "two.yaml"),
        ("1xL4", 0.7, "three.yaml"),
    ]
    assert [o.usd_per_h for o in found.only(["l4"]).offers] == [0.8, 0.7]
    with pytest.raises(ParameterError, match="offers no L40S"):
        found.only(["L40S"])
    both = Market(found.only(["L4"]), MODEL, Load(CHATS, 2.0, SLO, 0.9, 0.05, (0,)), IN_PAPERS)
    sized = cheapest(both, draws=0)
    # Machines of the same name from two lists stay apart.
    assert len({group.name for group in sized.plan.groups}) == len(sized.plan.groups)
    assert both.offers[next(iter(sized.best.counts))[0]].usd_per_h == 0.7


def test_the_cheapest_part_of_a_cluster_carries_the_load() -> None:
    whole = find("thunderserve-cloud-32")
    question = as_in_papers(whole, MODEL, CHATS, 3.0, Slo(ttft_s=2.0, tpot_s=0.15))
    part, found = cheapest_part(question, seeds=(0,))
    assert part.usd_per_h == pytest.approx(found.usd_per_h)
    assert part.usd_per_h < whole.usd_per_h
    assert {m.name for m in part.machines} <= {m.name for m in whole.machines}
    assert sustains(found.plan, question.load(), 0)
    with pytest.raises(InfeasibleError, match="above the budget"):
        cheapest_part(replace(question, budget_usd_per_h=0.1), seeds=(0,))
    unpriced = replace(whole.machines[0].gpu, usd_per_h=None)
    free = replace(whole.machines[0], gpu=unpriced, usd_per_h=None)
    with pytest.raises(ParameterError, match="has no price"):
        prices.PriceList.of_cluster(replace(whole, machines=(free, *whole.machines[1:])))


def test_requests_beyond_the_context_window_are_left_out_and_counted() -> None:
    long = Trace([0.0, 1.0, 2.0], [100, 9000, 200], [10, 10, 10])
    here = Market(prices.from_catalog(["A40"]), MODEL, Load(long, 1.0, SLO), IN_PAPERS)
    assert len(here.load.trace) == 2
    assert here.notes[:-1] == (
        "1 of 3 requests is longer than the context window of Llama-3-8B, 8,192 tokens: left out.",
    )
    with pytest.raises(ParameterError, match="All 1 requests"):
        within_context(Trace([0.0], [9000], [10]), MODEL)


def test_the_command_and_python_answer_alike(told) -> None:
    words = ["--rate", "3", "--gpu", "L4", "--gpu", "A40", "--seeds", "1", "--max", "A40=2"]
    found = told("size", *words)
    same = hetero.size(rate=3.0, gpu=["L4", "A40"], seeds=1, most={"A40": 2})
    assert json.loads(json.dumps(fleets.record(same))) == found
    assert found["bound_usd_per_h"] <= found["usd_per_h"]
    assert found["attainment"] >= found["goal"] == 0.9
    spent = sum(one["number"] * one["usd_per_h_each"] for one in found["machines"])
    assert spent == pytest.approx(found["usd_per_h"])
    assert sum(m["number"] * m["gpus_each"] for m in found["machines"] if m["gpu"] == "A40") <= 2
    assert found["arrivals"] == "poisson"
    assert found["draws"] == 24
    assert 0 <= found["carries_in_draws"] <= 1
    assert {one["gpu"] for one in found["of_one_gpu_type"]} == {"L4", "A40"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "3", "--curve", "x.csv"], "one of --rate, --curve and"),
        (["--rate", "3", "--within", "c.yaml", "--prices", "p.yaml"], "--within takes"),
        (["--arrivals", "trace", "--trace", "sharegpt"], "arrive at once"),
        (["--rate", "0"], "--rate is 0"),
        (["--rate", "3", "--max", "L4"], "--max cannot read"),
        (["--rate", "3", "--figure", "x.png"], "--figure draws a day"),
        (["--rate", "3", "--spot", "0.9", "--gpu", "L4"], "spot price"),
    ],
)
def test_what_the_command_refuses(refused, arguments: list[str], said: str) -> None:
    assert said in refused("size", *arguments)
