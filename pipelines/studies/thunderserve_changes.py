"""ThunderServe when things change: lost GPUs, machines and links, and a shift of the workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np
import pandas as pd

from hetero import timings
from hetero.arrays import Floats
from hetero.costs.cost import CostModel, PipelineStage
from hetero.costs.demand import Demand
from hetero.costs.groups import Phase
from hetero.costs.pipeline import Pipeline
from hetero.errors import DataError, InfeasibleError
from hetero.planners.reschedule.change import lose_gpu, lose_groups, lose_machine, slow_link
from hetero.planners.reschedule.episode import Episode, Era, play
from hetero.planners.reschedule.policy import Policy, Rescheduling, reschedule
from hetero.planners.reschedule.reload import Disk, Reads, reload
from hetero.planners.reschedule.service import PhaseService
from hetero.planners.thunderserve.phases import PhasePlan
from hetero.planners.thunderserve.tabu import TabuSettings
from hetero.simulator import Slo
from hetero.workload import Trace
from pipelines.studies.shift_detector import ShiftDetector
from pipelines.studies.thunderserve import SCALES, Scales, ThunderServeStudy

Groups: TypeAlias = list[tuple[Pipeline, Phase]]
Losses: TypeAlias = dict[tuple[str, str, Policy], Rescheduling]
"""By workload, plan before the loss and policy; what cannot serve is missing."""
Serve: TypeAlias = Callable[..., pd.DataFrame]
"""Serves systems with a workload at a rate, and measures their runs."""

POLICIES: Final[tuple[Policy, ...]] = ("none", "light", "full")
_OF: Final[tuple[Policy, ...]] = ("none", "light", "light", "full")
ATTAINED: Final = "attainment at the planned scale [%]"
PRINTED_TABU_S: Final = {16: 21, 24: 36, 32: 54}
PRINTED_SEARCH_S: Final[dict[Policy, float]] = {"full": 54.0, "light": 13.0}
_PRINTED_RELOAD_S: Final[dict[Policy, float]] = {"full": 103.0, "light": 0.0}


def printed_groups(costs: CostModel) -> dict[str, Groups]:
    """Groups and phases of ThunderServe's Table 3 by workload, layers divided evenly."""
    where = {machine.name: k for k, machine in enumerate(costs.machines)}

    def groups(phase: Phase, *parts: tuple[str, int], times: int = 1) -> Groups:
        each = costs.llm.layers // len(parts)
        stages = [PipelineStage(where[name], degree, each) for name, degree in parts]
        return [(costs.pipeline(stages), phase) for _ in range(times)]

    mixed, ti = (("a5000-2", 2), ("3090ti-2", 2)), (("3090ti-1", 2), ("3090ti-1", 2))
    coding = groups("prefill", ("a40", 2), times=4) + groups("prefill", ("a5000-1", 4))
    coding += groups("prefill", ("a6000-1", 2), times=2) + groups("prefill", *mixed)
    coding += groups("decode", *ti) + groups("decode", *[("a6000-2", 1)] * 2, times=2)
    talk = groups("prefill", ("a40", 2), times=3) + groups("prefill", *mixed)
    talk += groups("decode", *ti) + groups("decode", *[("a40", 1)] * 2)
    talk += groups("decode", *[("a5000-1", 2)] * 2)
    for machine in ("a6000-1", "a6000-2"):
        talk += groups("decode", *[(machine, 1)] * 2, times=2)
    last = groups("decode", *mixed)
    return {"coding": coding + last, "conversation": talk + last}


def steady(
    study: ThunderServeStudy, rescheduled: Losses, rate_rps: float, serve: Serve
) -> tuple[pd.DataFrame, dict[tuple[str, str, str], list[Scales]]]:
    """Attainment before and after a loss, and the scales behind it (ThunderServe Fig. 11)."""
    rows, scales = [], {}
    for name, start in dict.fromkeys(key[:2] for key in rescheduled):
        # Before the loss a service is the same under every policy.
        for label, policy in zip(("none", "before", "light", "full"), _OF, strict=True):
            if (name, start, policy) not in rescheduled:
                continue
            change = rescheduled[name, start, policy]
            service = change.before if label == "before" else change.after
            systems = {label: [(service.deployment, service.router())] * len(study.seeds)}
            served = serve(systems, name, rate_rps, study.latencies(name))
            scales[name, start, label] = every = list(served[SCALES])
            attained = [one.attained("e2e", [study.plan_scale])[0] for one in every]
            load_s = 0.0 if label == "before" else change.reload_s
            shares = 100 * np.mean(attained), 100 * service.attainment
            rows.append((name, start, label, "{}:{}".format(*service.ratio), *shares, load_s))
    columns = ["workload", "plan", "rescheduling", "prefill:decode", ATTAINED]
    return pd.DataFrame(rows, columns=[*columns, "estimate [%]", "reload [s]"]), scales


def recorded_s(key: str) -> float | None:
    """A measured time [s], None where the benchmark has not been run."""
    try:
        return timings.timing(key).seconds
    except DataError:
        return None


def reload_s(service: PhaseService, reads: Reads) -> float:
    """Time to load all groups of a service [s] from a disk of 1.2 GB/s."""
    return reload([group.pipeline for group in service.groups], Disk(reads=reads)).seconds


def rescheduling_times_frame(
    service: PhaseService, search_s: Mapping[Policy, float | None]
) -> pd.DataFrame:
    """ThunderServe's Table 4: recorded times of the search [s], computed ones of the reload."""
    rows = []
    ways: tuple[Reads, ...] = ("per replica", "per machine")
    for policy, printed in PRINTED_SEARCH_S.items():
        for reads in ways:
            load_s, search = reload_s(service, reads) if policy == "full" else 0.0, search_s[policy]
            whole = None if search is None else search + load_s
            rows.append((policy, reads, search, load_s, whole, printed, _PRINTED_RELOAD_S[policy]))
    columns = ["search [s]", "reload [s]", "together [s]", "printed search [s]"]
    columns = ["rescheduling", "reads", *columns, "printed reload [s]"]
    return pd.DataFrame(rows, columns=columns)


def episodes(
    study: ThunderServeStudy, rescheduled: Losses, rate_rps: float, at_s: float
) -> tuple[pd.DataFrame, dict[tuple[str, Policy], Episode]]:
    """The loss with requests in flight, by workload and policy, from ThunderServe's Table 3.

    The new plan comes after the printed search time.
    """
    rows, simulated = [], {}
    for name, trace in study.traces.items():
        long = trace.take(np.arange(min(len(trace), 2 * study.requests)))
        arriving = long.poisson(rate_rps, np.random.default_rng(study.seeds[0]))
        for policy in POLICIES:
            if (name, "Table 3", policy) not in rescheduled:
                continue
            change = rescheduled[name, "Table 3", policy]
            episode = change.episode(arriving, at_s, search_s=PRINTED_SEARCH_S.get(policy, 0.0))
            simulated[name, policy] = episode
            late = episode.run.e2e_s[episode.run.requests["arrival_s"] >= at_s]
            rows.append(
                {
                    "workload": name,
                    "rescheduling": policy,
                    "requests": len(arriving),
                    "in flight at the loss": episode.in_flight(at_s),
                    "routed again": episode.routed_again,
                    "lost": episode.lost - episode.too_long,
                    "longer than any cache of the new plan": episode.too_long,
                    "nothing up for [s]": sum(b - a for a, b in episode.waits),
                    "attainment after the loss [%]": _within(late, study.target(name)),
                    "E2E P90 after the loss [s]": float(np.nanquantile(late, 0.9)),
                }
            )
    return pd.DataFrame(rows), simulated


def _within(e2e_s: Floats, slo: Slo) -> float:
    """Share of requests within the end-to-end target [%]."""
    return 100 * float((e2e_s <= (slo.e2e_s or np.nan)).mean())


def every_loss_frame(
    study: ThunderServeStudy, before: Losses, names: Iterable[str], rate_rps: float, steps: int = 10
) -> pd.DataFrame:
    """A GPU of every group, every machine and some links fail in turn, from the searched plan."""
    rows, settings = [], TabuSettings(steps=steps)
    for name in names:
        service = before[name, "Algorithm 1", "full"].before
        changes = [lose_gpu(service, group.name) for group in service.groups]
        changes += [lose_machine(service, machine.name) for machine in study.cloud.machines]
        links = (("a40", "3090ti-1"), ("a6000-1", "a40"), ("a5000-1", "3090ti-2"))
        changes += [slow_link(service, a, b) for a, b in links]
        short = study.sample(name, study.seeds[0]).head(150)
        short = short.poisson(rate_rps, np.random.default_rng(0))
        for change in changes:
            row: dict[str, object] = {"workload": name, "what happens": change.what}
            for policy in POLICIES[1:]:
                try:
                    new = reschedule(service, change, policy, search="tabu", tabu=settings)
                    episode = new.episode(short, 20.0, search_s=PRINTED_SEARCH_S[policy])
                    row |= {
                        f"{policy}: prefill:decode": "{}:{}".format(*new.after.ratio),
                        f"{policy}: estimate [%]": 100 * new.after.attainment,
                        f"{policy}: requests lost": episode.lost - episode.too_long,
                    }
                except InfeasibleError as error:
                    row |= {f"{policy}: prefill:decode": error.what}
            rows.append(row)
    return pd.DataFrame(rows)


def shift(
    study: ThunderServeStudy, made: PhasePlan, rate_rps: float
) -> tuple[ShiftDetector, pd.DataFrame]:
    """Coding gives way to conversation under a plan for coding; light rescheduling at the alarm.

    The detector is calibrated on coding; false alarms are counted in 20 streams of 20,000 requests.
    The table is empty where it raises no alarm.
    """
    rng = np.random.default_rng(study.seeds[0])

    def drawn(name: str, count: int) -> Trace:
        trace = study.traces[name]  # in an order of chance, so that lengths do not drift
        return trace.all_at_once().take(rng.integers(0, len(trace), count))

    detector = ShiftDetector.calibrate(drawn("coding", 5000).poisson(rate_rps, rng))
    streams = (drawn("coding", 20_000).poisson(rate_rps, rng) for _ in range(20))
    false_alarms = sum(detector.first(stream) is not None for stream in streams)
    parts = drawn("coding", study.requests), drawn("conversation", 2 * study.requests)
    stream = Trace(
        np.cumsum(rng.exponential(1 / rate_rps, sum(len(part) for part in parts))),
        np.concatenate([part.input_tokens for part in parts]),
        np.concatenate([part.output_tokens for part in parts]),
        name="coding, then conversation",
    )
    alarm = detector.first(stream)
    if alarm is None:
        return detector, pd.DataFrame()
    service, slo = PhaseService.of(made, "for coding"), study.target("conversation")
    since = stream.take(np.arange(alarm.since, alarm.request + 1))
    turned = replace(service, slo=slo)
    seen = Demand.of(since, rate_rps)
    light = reschedule(turned, lose_groups(turned, frozenset()), "light", demand=seen).after
    ready_s = alarm.time_s + PRINTED_SEARCH_S["light"]
    first = Era(0.0, service.deployment, service.weights, label="for coding")
    then = Era(ready_s, light.deployment, light.weights, change="drain", label="light rescheduling")
    later = stream.arrival_s > ready_s
    rows = []
    for label, eras, after in (("none", [first], service), ("light", [first, then], light)):
        episode = play(eras, stream)
        late = episode.run.e2e_s[later]
        rows.append(
            {
                "rescheduling": label,
                "alarm": str(alarm),
                "shift began at request": study.requests,
                "prefill:decode after": "{}:{}".format(*after.ratio),
                "attainment after [%]": _within(late, slo),
                "E2E P90 after [s]": float(np.nanquantile(late, 0.9)),
                "lost": episode.lost,
                "false alarms in 20 streams": false_alarms,
            }
        )
    return detector, pd.DataFrame(rows)
