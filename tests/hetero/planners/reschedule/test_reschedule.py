"""Detector, reload, episodes and policies of rescheduling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetero import catalog, workload
from hetero.cluster import cluster
from hetero.costs.cost import IN_PAPERS, CostModel, PipelineStage
from hetero.costs.demand import Demand, reference
from hetero.deployment import Deployment, KvLink, Replica
from hetero.errors import InfeasibleError, ParameterError
from hetero.latency.step import StepModel
from hetero.planners.reschedule.change import fewer, lose_gpu, lose_groups, lose_machine, slow_link
from hetero.planners.reschedule.episode import Era, play
from hetero.planners.reschedule.policy import reschedule
from hetero.planners.reschedule.reload import Disk, reload
from hetero.planners.reschedule.service import PhaseService
from hetero.routers import PairShares
from hetero.simulator import Slo, simulate
from hetero.workload import Trace
from pipelines.studies.shift_detector import ShiftDetector


def poisson(count: int, rate_rps: float, seed: int, factor: float = 1.0) -> Trace:
    rng = np.random.default_rng(seed)
    return Trace(
        np.cumsum(rng.exponential(1 / rate_rps, count)),
        np.clip(factor * rng.lognormal(6, 0.8, count), 1, 8000).astype(np.int32),
        np.clip(rng.lognormal(4, 0.8, count), 1, 2000).astype(np.int32),
    )


# Detector ---------------------------------------------------------------------------------------


def test_false_alarms_stay_below_what_is_stated() -> None:
    # 60 streams at 10 %: more than 13 would happen by chance once in 200.
    detector = ShiftDetector.calibrate(
        poisson(20_000, 5.0, 0), horizon_requests=5000, false_alarm=0.1
    )
    alarms = sum(detector.first(poisson(5000, 5.0, seed)) is not None for seed in range(1, 61))
    assert alarms <= 13


@pytest.mark.parametrize(
    ("factor", "rate_rps", "figure"), [(2.0, 5.0, "input length"), (1.0, 10.0, "rate")]
)
def test_a_shift_is_named_and_dated(factor: float, rate_rps: float, figure: str) -> None:
    detector = ShiftDetector.calibrate(poisson(10_000, 5.0, 0))
    first, second = poisson(2000, 5.0, 1), poisson(2000, rate_rps, 2, factor)
    joined = Trace(
        np.concatenate([first.arrival_s, first.arrival_s[-1] + second.arrival_s]),
        np.concatenate([first.input_tokens, second.input_tokens]),
        np.concatenate([first.output_tokens, second.output_tokens]),
    )
    alarm = detector.first(joined)
    assert alarm is not None
    assert alarm.figure == figure
    assert 2000 <= alarm.request <= 2000 + 2 * detector.delay_requests(2.0, figure)
    # The sum may have left zero a few blocks before by chance, which dilutes the factor.
    assert abs(alarm.since - 2000) <= 300
    assert 1.3 < alarm.factor < 2.3


def test_a_reference_that_is_too_short_is_refused() -> None:
    with pytest.raises(ParameterError, match="a reference needs 20"):
        ShiftDetector.calibrate(poisson(500, 5.0, 0))


# Reload -----------------------------------------------------------------------------------------


def test_reload_reads_the_weights_once_per_replica_or_machine() -> None:
    model = CostModel(cluster("thunderserve-cloud-32"), catalog.llm("LLaMA-1-30B"), IN_PAPERS)
    weights_s = model.llm.weight_bytes() / 1.2e9
    pairs = [model.pipeline([PipelineStage(4, 2, 60)]) for _ in range(4)]
    assert reload(pairs).seconds == pytest.approx(4 * weights_s)
    assert reload(pairs, Disk(reads="per machine")).seconds == pytest.approx(weights_s)
    # A pipeline over two machines: each reads its half.
    spread = model.pipeline([PipelineStage(0, 2, 30), PipelineStage(2, 4, 30)])
    assert sum(read for _, read, _ in reload([spread]).machines) == pytest.approx(
        model.llm.weight_bytes()
    )


# Episodes ---------------------------------------------------------------------------------------

STEP = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
ROLES = {"a": "prefill", "b": "prefill", "c": "decode", "d": "decode"}


def four() -> Deployment:
    nodes = tuple(
        Replica(name, STEP, 60_000, kv_bytes_per_token=1e5, role=role)  # type: ignore[arg-type]
        for name, role in ROLES.items()
    )
    return Deployment("four", nodes, default_link=KvLink(bandwidth_gbs=5.0))


WEIGHTS = {(a, b): 1.0 for a in "ab" for b in "cd"}


def test_an_episode_in_which_nothing_changes_is_a_simulation() -> None:
    trace = poisson(300, 4.0, 3)
    run = simulate(four(), trace, PairShares(WEIGHTS))
    same = play([Era(0.0, four(), WEIGHTS), Era(30.0, four(), WEIGHTS)], trace)
    assert len(same.lives) == 4
    assert np.array_equal(same.run.e2e_s, run.e2e_s)


@pytest.mark.parametrize("change", ["abrupt", "drain"])
def test_a_group_turns_and_no_request_is_lost(change: str) -> None:
    trace = poisson(400, 4.0, 4)
    turned = replace(
        four(),
        replicas=tuple(
            replace(one, role="decode") if one.name == "b" else one for one in four().replicas
        ),
    )
    after = {("a", name): 1.0 for name in "bcd"}
    episode = play(
        [Era(0.0, four(), WEIGHTS), Era(40.0, turned, after, change=change)],  # type: ignore[arg-type]
        trace,
    )
    assert episode.lost == 0
    old, new = (life for life in episode.lives if life.origin == "b")
    assert old.end_s == new.begin_s >= 40.0
    records = episode.run.requests
    names = [node.name for node in episode.run.deployment.replicas]
    late = records["arrival_s"] >= 40.0
    assert not (records["node"][late] == names.index(old.replica.name)).any()
    assert (records["decode_node"][late] == names.index(new.replica.name)).any()
    if change == "drain":
        # Nothing that it held was interrupted.
        assert episode.routed_again == 0
        assert old.end_s > 40.0
    else:
        assert old.end_s == 40.0


def test_while_a_restart_loads_requests_wait() -> None:
    trace = poisson(300, 3.0, 5)
    other = replace(
        four(), replicas=tuple(replace(one, name=f"{one.name}2") for one in four().replicas)
    )
    after = {(f"{a}2", f"{b}2"): weight for (a, b), weight in WEIGHTS.items()}
    episode = play([Era(0.0, four(), WEIGHTS), Era(30.0, other, after, ready_s=70.0)], trace)
    assert episode.lost == 0
    assert episode.waits == ((30.0, 70.0),)
    records = episode.run.requests
    held = (records["arrival_s"] >= 30.0) & (records["arrival_s"] < 70.0)
    assert held.any()
    assert (records["first_token_s"][held] > 70.0).all()
    assert episode.in_flight(70.0) >= held.sum()
    # Those that waited are shared out over all new replicas.
    assert len(set(records["decode_node"][held])) == 2


def test_eras_are_in_order() -> None:
    with pytest.raises(ParameterError, match="the first at 0"):
        play([Era(1.0, four(), WEIGHTS)], poisson(10, 1.0, 0))


# Policies ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service() -> PhaseService:
    """Two A40 and two 3090Ti pairs prefill, the others decode."""
    llm = catalog.llm("LLaMA-1-13B")
    fleet = cluster("thunderserve-a40-3090ti-40gbit")
    model = CostModel(fleet, llm, IN_PAPERS)
    demand = Demand.of(workload.load("azure2023_conv"), 1.0)
    slo = Slo(e2e_s=8 * float(reference(llm, demand).e2e_s or 0))
    parts = [
        (model.pipeline([PipelineStage(m, 2, 40)]), phase)
        for m in (0, 1)
        for phase in ("prefill", "decode")
    ]
    return PhaseService.given(parts, demand, slo)  # type: ignore[arg-type]


TRACE = workload.load("azure2023_conv").head(120).poisson(1.0, np.random.default_rng(0))


@pytest.mark.parametrize("group", ["G1", "G2", "G3", "G4"])
@pytest.mark.parametrize("policy", ["none", "light"])
def test_losing_a_gpu_of_any_group_loses_no_request(
    service: PhaseService, group: str, policy: str
) -> None:
    change = lose_gpu(service, group)
    assert change.cluster.gpus == service.cluster.gpus - 1
    found = reschedule(service, change, policy)  # type: ignore[arg-type]
    assert {one.name for one in found.after.groups} == {one.name for one in service.groups} - {
        group
    }
    assert min(found.after.ratio) >= 1
    assert found.reload_s == 0
    episode = found.episode(TRACE, 20.0, search_s=5.0)
    assert episode.lost == 0
    assert len(episode.run.requests) == len(TRACE)


def test_losing_a_machine_leaves_two_groups_or_none(service: PhaseService) -> None:
    change = lose_machine(service, "a40")
    assert change.lost == {"G1", "G2"}
    light = reschedule(service, change, "light")
    assert light.after.ratio == (1, 1)
    both = lose_groups(service, frozenset({"G1", "G2", "G3"}))
    with pytest.raises(InfeasibleError, match="1 group holds LLaMA-1-13B"):
        reschedule(service, both, "light")
    with pytest.raises(InfeasibleError, match="a phase has no group left"):
        reschedule(service, lose_groups(service, frozenset({"G1", "G3"})), "none")


def test_light_turns_a_group_where_a_phase_has_none_left(service: PhaseService) -> None:
    change = lose_groups(service, frozenset({"G2", "G4"}))  # every decode group
    found = reschedule(service, change, "light")
    assert found.between is None
    assert found.after.ratio == (1, 1)
    assert len(found.turned) == 1
    assert found.episode(TRACE, 20.0, search_s=5.0).lost == 0


def test_a_link_that_drops_is_planned_around(service: PhaseService) -> None:
    slow = slow_link(service, "a40", "3090ti", 0.01)
    assert slow.cluster.link("a40", "3090ti").bandwidth_gbs == pytest.approx(0.05)
    light, none = reschedule(service, slow, "light"), reschedule(service, slow, "none")
    assert none.after.attainment < service.attainment
    assert light.after.attainment >= none.after.attainment
    for found in (light, none):
        assert found.episode(TRACE, 20.0, search_s=5.0).lost == 0


def test_full_rescheduling_loads_and_loses_nothing(service: PhaseService) -> None:
    found = reschedule(service, lose_machine(service, "3090ti"), "full")
    assert found.reload_s > 0
    assert all(one.machines == {"a40"} for one in found.after.groups)
    episode = found.episode(TRACE, 20.0, search_s=5.0)
    assert episode.lost == 0
    # What is left goes on until the search has ended, then all waits for the reload.
    assert episode.waits == ((25.0, pytest.approx(25.0 + found.reload_s)),)


def test_fewer_gpus_keep_the_links_of_what_is_left() -> None:
    fleet = cluster("thunderserve-cloud-32")
    left = fewer(fleet, {"a40": 8, "a6000-1": 1})
    assert (left.gpus, len(left.machines)) == (23, 6)
    assert left.link("a6000-1", "a5000-1") == fleet.link("a6000-1", "a5000-1")
    with pytest.raises(ParameterError, match="has 4 GPUs and cannot lose 5"):
        fewer(fleet, {"a6000-1": 5})
