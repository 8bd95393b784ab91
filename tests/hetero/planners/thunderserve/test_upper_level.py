"""The upper level: designs, moves, tabu search, enumeration, the integer program and plans."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hetero import workload
from hetero.apps.answers.phases import phases as answer
from hetero.catalog import llm
from hetero.cluster import Machine, cluster
from hetero.costs.cost import IN_PAPERS, CostModel
from hetero.costs.demand import Demand, reference, scaled
from hetero.costs.groups import Fleet, design, group
from hetero.errors import DataError, InfeasibleError, ParameterError
from hetero.planners.thunderserve.evaluate import Evaluator
from hetero.planners.thunderserve.exact import designs, enumerate_all, partitions
from hetero.planners.thunderserve.patterns import columns, sizes, solve, starts
from hetero.planners.thunderserve.phases import PhasePlan, keep, phases, replan, within
from hetero.planners.thunderserve.tabu import TabuSearch, TabuSettings, neighbours
from hetero.simulator import Slo, metrics, simulate
from hetero.streams import stream

PAIR = "thunderserve-a40-3090ti-40gbit"
CLOUD = "thunderserve-cloud-32"


def evaluator(name: str, rate: float, model: str = "LLaMA-1-30B", scale: float = 8.0) -> Evaluator:
    chosen = llm(model)
    demand = Demand.of(workload.load("azure2023_conv"), rate)
    target = scaled(reference(chosen, demand), scale)
    return Evaluator(CostModel(cluster(name), chosen, IN_PAPERS), demand, target)


@pytest.fixture(scope="module")
def small() -> Evaluator:
    return evaluator(PAIR, 1.0)


@pytest.fixture(scope="module")
def cloud() -> Evaluator:
    return evaluator(CLOUD, 5.0)


@pytest.fixture(scope="module")
def started(cloud) -> list:
    """Designs of the integer program on the cloud at 5 requests/s."""
    return starts(cloud)


def used(one, machines: int) -> np.ndarray:
    counts = np.zeros(machines, int)
    for members, _ in one:
        for m, n in members:
            counts[m] += n
    return counts


# Designs --------------------------------------------------------------------------------------


def test_partitions_agree_with_a_plain_recursion():
    """All set partitions of eight GPUs, of which equal ones are merged."""
    fleet = Fleet(CostModel(cluster(PAIR), llm("LLaMA-1-13B"), IN_PAPERS))
    gpus = [0] * 4 + [1] * 4

    def divide(left):
        if not left:
            yield []
            return
        first, rest = left[0], left[1:]
        for mask in range(2 ** len(rest)):
            chosen = [first] + [g for k, g in enumerate(rest) if mask >> k & 1]
            others = [g for k, g in enumerate(rest) if not mask >> k & 1]
            one = group((m, chosen.count(m)) for m in (0, 1))
            if fleet.fits(one):
                for more in divide(others):
                    yield [one, *more]

    plain = {tuple(sorted(found)) for found in divide(gpus)}
    listed = [tuple(sorted(found)) for found in partitions(fleet)]
    assert len(listed) == len(set(listed))
    assert set(listed) == plain


def test_mirror_images_are_one_design(cloud):
    one = design([(group([(0, 4), (2, 2)]), "prefill"), (group([(1, 4)]), "decode")])
    mirrored = design([(group([(1, 4), (3, 2)]), "prefill"), (group([(0, 4)]), "decode")])
    assert cloud.fleet.kinds == (0, 0, 2, 2, 4, 5, 5)
    assert cloud.fleet.canonical(one) == cloud.fleet.canonical(mirrored)
    assert cloud.value(one) == cloud.value(mirrored)


def test_first_design_clusters_by_bandwidth(cloud):
    first = cloud.fleet.clusters(stream(0, "tabu"))
    assert {phase for _, phase in first} == {"prefill", "decode"}
    assert (used(first, 7) == cloud.fleet.inventory).all()
    # Links inside machines are the fastest, so no group spans two.
    assert all(len(members) == 1 and cloud.fleet.fits(members) for members, _ in first)


# Searches -------------------------------------------------------------------------------------


def test_searches_keep_to_memory_and_inventory(cloud):
    rng = np.random.default_rng(3)
    current = cloud.fleet.clusters(rng)
    for _ in range(40):
        options = neighbours(cloud.fleet, current, 10, rng)
        assert len(set(options)) == len(options)
        for one in options:
            assert one != current
            assert (used(one, 7) == cloud.fleet.inventory).all()
            assert all(cloud.fleet.fits(members) for members, _ in one)
            assert {phase for _, phase in one} == {"prefill", "decode"}
        current = options[int(rng.integers(len(options)))]


def test_flips_alone_keep_the_groups(cloud):
    current = cloud.fleet.clusters(stream(0, "tabu"))
    for one in neighbours(cloud.fleet, current, 20, np.random.default_rng(0), moves=("flip",)):
        assert [members for members, _ in one] == [members for members, _ in current]
        assert sum(a != b for a, b in zip(one, current, strict=True)) == 1


def test_tabu_finds_the_optimum_of_small_fleets(small):
    best = enumerate_all(small)
    assert best.designs == len(designs(small.fleet))
    found = []
    for seed in range(20):
        search = TabuSearch.start(small, TabuSettings(steps=20), seed=seed)
        search.run()
        found.append(search.history[-1].best)
    assert max(found) <= best.value.score + 1e-12
    assert sum(value >= best.value.score - 1e-9 for value in found) >= 19


def test_the_tabu_list_is_not_entered(small):
    search = TabuSearch.start(small, TabuSettings(steps=30, memory=5), seed=1)
    visited = []
    while not search.done:
        before, stood = list(search.tabu), search.current
        search.step()
        # Where every neighbour is tabu a step stays where it is.
        assert search.current == stood or search.current not in before
        assert len(search.tabu) <= 5
        visited.append(search.current)
    assert len(set(visited)) > 10
    assert search.history[-1].best == max(one.best for one in search.history)
    best = [one.best for one in search.history]
    assert best == sorted(best)


def test_a_saved_search_goes_on_as_if_it_had_not_stopped(small, tmp_path):
    whole = TabuSearch.start(small, TabuSettings(steps=12), seed=5)
    whole.run()
    part = TabuSearch.start(small, TabuSettings(steps=5), seed=5)
    part.run()
    file = part.save(tmp_path / "search.json")
    rest = TabuSearch.resume(file, small, steps=12)
    rest.run()
    assert (rest.best, rest.current, rest.tabu) == (whole.best, whole.current, whole.tabu)
    assert [one.best for one in rest.history] == [one.best for one in whole.history]
    with pytest.raises(DataError, match="search for LLaMA-1-30B"):
        TabuSearch.resume(file, evaluator(CLOUD, 1.0))
    file.write_text("{}")
    with pytest.raises(DataError, match="no saved search"):
        TabuSearch.resume(file, small)


def test_processes_find_the_same(small):
    options = designs(small.fleet)[:3]
    alone = replace(small, _values={})
    together = replace(small, _values={})
    assert alone.values(options) == together.values(options, jobs=2)


def test_the_program_keeps_to_the_inventory_and_starts_well(cloud, started):
    clusters = cloud.fleet.clusters(stream(0, "tabu"))
    assert max(cloud.value(one).score for one in started) > cloud.value(clusters).score
    for one in started:
        assert (used(one, 7) <= cloud.fleet.inventory).all()
        assert all(cloud.fleet.fits(members) for members, _ in one)
    assert [sizes(n) for n in (1, 4, 12)] == [[1], [1, 2, 4], [1, 3, 6, 12]]


def test_the_program_agrees_with_enumeration(small):
    """Every choice of columns of two small pools that keeps to the inventory, tried."""
    pool = columns(small, (0.5,))
    rate = 1.0
    for some in (pool[::9], pool[1::9]):
        if {column.phase for column in some} != {"prefill", "decode"}:
            continue
        chosen = dict(solve(small.fleet, some, rate))
        best, found = -1.0, -1.0
        for counts in product(range(3), repeat=len(some)):
            gpus = np.zeros(2, int)
            for column, n in zip(some, counts, strict=True):
                for kind, k in column.shape:
                    gpus[kind] += n * k
            if (gpus > small.fleet.inventory).any():
                continue
            value = worth(some, counts, rate)
            best = max(best, value)
            if counts == tuple(chosen.get(column, 0) for column in some):
                found = value
        assert found == pytest.approx(best, rel=6e-3)


def worth(pool, counts, rate) -> float:
    """The objective for given numbers of groups: the best columns of each phase served first."""
    served, spare = {}, []
    for phase in ("prefill", "decode"):
        own = [(c, n) for c, n in zip(pool, counts, strict=True) if c.phase == phase and n]
        if not own:
            return -1.0
        spare.append(sum(c.rate_rps * n for c, n in own))
        served[phase] = sorted(own, key=lambda one: -one[0].met)
    total = min(rate, *spare)
    gained = 0.0
    for own in served.values():
        left = total
        for column, n in own:
            part = min(left, column.rate_rps * n)
            gained += column.met * part
            left -= part
    return gained + 1e-2 * min(*spare, 3.0 * rate)


def test_a_fleet_too_small_says_what_is_missing():
    with pytest.raises(InfeasibleError, match="39 GiB, which do not hold two copies"):
        plan_for("thunderserve-a5000-pair", "tabu")
    with pytest.raises(InfeasibleError, match="do not hold two copies"):
        plan_for("thunderserve-a5000-pair", "patterns")
    with pytest.raises(InfeasibleError, match="cannot hold LLaMA-1-30B twice"):
        plan_for("thunderserve-a5000-pair", "exact")


def plan_for(name: str, search, **options) -> PhasePlan:
    one = evaluator(name, 1.0)
    how = {"search": search, "settings": IN_PAPERS, **options}
    return phases(cluster(name), one.model.llm, one.demand, one.slo, **how)


# Plans ----------------------------------------------------------------------------------------


def test_estimated_attainment_is_what_a_simulation_finds(cloud, started):
    for rate in (3.0, 5.0):
        one = replace(cloud, demand=cloud.demand.at(rate), _values={}, _prefill={}, _decode={})
        best = max(started, key=lambda start: one.value(start).score)
        found = PhasePlan.of(one, best)
        rng = np.random.default_rng(0)
        trace = workload.load("azure2023_conv").sample(3000, rng).poisson(rate, rng)
        run = simulate(found.deployment(), trace, found.router())
        seen = metrics(run, one.slo, warmup_s=60.0).attainment["joint"]
        assert seen == pytest.approx(found.value.attainment, abs=0.03)
        assert run.counts["rejected"] == 0


def test_light_rescheduling_flips_phases_and_loads_nothing(cloud, started):
    before = PhasePlan.of(cloud, started[0])
    coding = Demand.of(workload.load("azure2023_code"), 5.0)
    after = Evaluator(cloud.model, coding, cloud.slo, fixed=keep(before))
    light = replan(after, before.design)
    assert [members for members, _ in light.design] == [members for members, _ in before.design]
    assert light.value.score >= after.value(before.design).score
    kept = dict(keep(before))
    for members, phase in light.design:
        assert after.pipeline(members, phase) is kept[members]
    flips = replan(after, before.design, tabu=TabuSettings(steps=10, moves=("flip",)))
    assert light.value.score >= flips.value.score - 1e-12  # few groups: all choices are tried
    with pytest.raises(InfeasibleError, match="each phase needs one"):
        replan(after, before.design[:1])


def test_plans_follow_the_network():
    """Appendix H: inputs of 1,024 tokens without end; where KV caches cross a slow link, not."""
    chosen = llm("LLaMA-1-30B")
    lengths = np.array([1024.0]), np.array([64.0]), np.array([1.0])
    shares = {}
    for speed in (40, 5):
        fleet = cluster(f"thunderserve-a40-3090ti-{speed}gbit")
        one = Evaluator(CostModel(fleet, chosen, IN_PAPERS), Demand(20.0, *lengths), Slo())
        shares[speed] = PhasePlan.of(one, enumerate_all(one).best).gpu_share
    assert shares[40]("A40", "prefill") >= 0.75
    assert shares[40]("RTX-3090Ti", "decode") == 1.0
    assert shares[5]("A40", "prefill") == shares[5]("RTX-3090Ti", "decode") == 0.5


def test_budgets_rent_maximal_parts():
    offer = cluster(CLOUD)
    for part in within(offer, 5.0):
        assert part.usd_per_h <= 5.0
        left = [m for m in offer.machines if m.name not in {k.name for k in part.machines}]
        assert all(part.usd_per_h + m.usd_per_h > 5.0 for m in left)
    with pytest.raises(InfeasibleError, match=r"cheapest costs 0\.892"):
        within(offer, 0.5)
    unpriced = replace(offer, machines=(replace_price(offer.machines[0]),))
    with pytest.raises(ParameterError, match="has no price"):
        within(unpriced, 5.0)


def replace_price(machine: Machine) -> Machine:
    return Machine(machine.name, replace(machine.gpu, usd_per_h=None), machine.count)


def test_the_command_plans_and_simulates(said, refused, tmp_path):
    target = tmp_path / "plan.json"
    words = ["plan", "phases", PAIR, "--rate", "0.5", "--search", "exact", "--requests", "100"]
    out = said(*words, "-o", target)
    found = json.loads(target.read_text())
    assert sum(row["share"] for row in found["shares"]) == pytest.approx(1.0, abs=1e-6)
    gpus = sum(stage["gpus"] for row in found["replicas"] for stage in row["stages"])
    assert gpus == 8
    assert "Simulated with 100 requests" in out
    same = answer(PAIR, rate=0.5, search="exact", requests=100)
    assert json.loads(json.dumps(same.record)) == found
    assert "did you mean 'exact'" in refused("plan", "phases", PAIR, "--search", "exakt")


def test_a_plan_is_chosen_by_a_rule_over_the_error_of_step_times(said, told):
    words = ["plan", "phases", PAIR, "--rate", "0.5", "--steps", "3", "--choose", "best worst case"]
    chosen = told(*words)["chosen"]
    assert chosen["rule"] == "best worst case"
    assert {chosen["plan"], chosen["nominal"]} <= {"seed 0", "seed 1", "seed 2"}
    assert "Chosen by best worst case of 40 draws" in said(*words)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ParameterError, match="neighbours"):
        TabuSettings(neighbours=0)
