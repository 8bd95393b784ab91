"""ThunderServe's experiments: plans beside other systems, deadlines, throughput, two machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Final, TypeAlias

import numpy as np
import pandas as pd

from hetero import catalog, cluster
from hetero.arrays import Floats
from hetero.catalog import Llm
from hetero.cluster import Cluster, Machine
from hetero.costs.cost import IN_PAPERS, CostModel, CostSettings, PipelineStage, Rates
from hetero.costs.demand import Demand, reference
from hetero.costs.groups import Design
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import replica, split
from hetero.costs.transfer import Bits, KvTransfer
from hetero.deployment import Deployment
from hetero.errors import require, require_share
from hetero.planners.thunderserve.evaluate import Evaluator
from hetero.planners.thunderserve.exact import enumerate_all
from hetero.planners.thunderserve.phases import PhasePlan
from hetero.planners.thunderserve.tabu import TabuSearch, TabuSettings
from hetero.routers import PairShares
from hetero.routers.base import Builtin, Router
from hetero.simulator import Run, Slo, simulate
from hetero.workload import Trace

System: TypeAlias = tuple[Deployment, Router | Builtin]
Planned: TypeAlias = Sequence[System]
"""A system by seed: that of a search differs between them."""
Key: TypeAlias = tuple[str, float, str]
"""Workload, rate [requests/s], system."""

KINDS: Final = ("ttft", "tpot", "e2e")
PRINTED: Final = ("ThunderServe", "HexGen", "DistServe", "vLLM")
SYSTEMS: Final = (*PRINTED, "our search", "DistServe, tuned", "vLLM, tuned")
GOALS: Final = (0.9, 0.99)
GRID: Final = np.geomspace(0.25, 64, 97)  # SLO scales of the figures
SCALE: Final = "smallest scale [x A100]"
TPS: Final = "throughput [tokens/s]"
E2E: Final = "mean E2E [s]"
SCALES: Final = "scales"
INPUTS: Final = 1024  # tokens of a request on the two machines of Fig. 16
OUTPUTS: Final = 32  # not printed
LENGTHS: Final = (512, 1024, 1536, 2048)
# Seeds of the requests that plans are searched with and that say what a plan attains by estimate.
_PLANNED_WITH: Final = 1000
_JUDGED_WITH: Final = 1001
_NETWORKS: Final = ("pair by pair", "shared interfaces")
#: The network of planner and simulator: every pair of groups its own (ThunderServe eq. 1).
PAIRS: Final = KvTransfer(shared=False)
# GPUs of each machine of the cloud, in its order; the paper prints the sums only.
_PARTS: Final = {16: (4, 0, 4, 0, 4, 4, 0), 24: (4, 0, 4, 4, 8, 4, 0), 32: (4, 4, 4, 4, 8, 4, 4)}
_TIMES: Final = ("prefill [ms]", "KV transfer [ms]", "decode [ms]", TPS)
# Designs of ThunderServe's Fig. 17; machine 0 has the A40.
_APART: Final[Design] = ((((0, 4),), "prefill"), (((1, 4),), "decode"))
_HALVES: Final[Design] = ((((0, 2), (1, 2)), "decode"), (((0, 2), (1, 2)), "prefill"))
_PRINTED_5_8: Final = {
    "baseline": (884, 0, 1689, 1610),
    "40 Gbit/s": (698, 133, 1126, 3292),
    "5 Gbit/s": (964, 41, 1846, 2196),
    "40 Gbit/s, 16 bits": (684, 584, 1108, 2450),
}


@dataclass(frozen=True, slots=True, eq=False)
class Scales:
    """Latencies of a run over those of the reference, sorted, by kind of target.

    Attributes
    ----------
    sorted_scales
        ``ttft``, ``tpot``, ``e2e``: of every request that arrived, infinite where it was not
        served, 0 for the TPOT of a reply of one token.
    """

    sorted_scales: dict[str, Floats]

    @classmethod
    def of(cls, run: Run, reference: Slo) -> Scales:
        """Scales of all requests of a run."""
        found = {}
        for kind in ("ttft", "tpot", "e2e"):
            unit = getattr(reference, f"{kind}_s")
            missing = f"The reference has no {kind.upper()}."
            require(unit is not None, missing, resolve="give all three latencies.")
            values = np.asarray(getattr(run, f"{kind}_s")) / unit
            if kind == "tpot":
                values = np.where(run.finished & np.isnan(values), 0.0, values)
            found[kind] = np.sort(np.where(run.finished, values, np.inf))
        return cls(found)

    def attained(self, kind: str, scales: Sequence[float] | Floats) -> Floats:
        """Share of the requests within each multiple of the reference."""
        values = self.sorted_scales[kind]
        return np.searchsorted(values, np.asarray(scales), side="right") / len(values)

    def smallest(self, kind: str, goal: float) -> float:
        """Smallest multiple of the reference that a share of the requests stays within.

        Examples
        --------
        >>> Scales({"e2e": np.array([1.0, 2.0, 3.0, 8.0])}).smallest("e2e", 0.75)
        3.0
        """
        values = self.sorted_scales[kind]
        require_share(goal=goal)
        return float(values[int(np.ceil(goal * len(values) - 1e-9)) - 1])


@dataclass(frozen=True, eq=False)
class ThunderServeStudy:
    """What all experiments share: workloads, both fleets, seeds, and how plans are made.

    Plans are made for an end-to-end target of ``plan_scale`` times the latency on an A100;
    ``tabu_steps`` and ``group_gpus`` are of the paper's search.
    """

    traces: Mapping[str, Trace]
    llm: Llm
    cloud: Cluster
    in_house: Cluster
    seeds: Sequence[int]
    requests: int
    plan_scale: float
    settings: CostSettings
    tabu_steps: int = 100
    group_gpus: int | None = 4
    _evaluators: dict[tuple[str, float, str, int], Evaluator] = field(
        default_factory=dict, init=False
    )

    @cached_property
    def printed(self) -> CostSettings:
        """Groups and configurations as ThunderServe's algorithms and plans have them."""
        return replace(self.settings, one_degree=True, max_gpus=self.group_gpus)

    @cached_property
    def free(self) -> ThunderServeStudy:
        """The same with groups of any size in the paper's search."""
        return replace(self, group_gpus=None)

    @cached_property
    def steady(self) -> ThunderServeStudy:
        """The same with runs eight times as long, in which queues grow to what they will be."""
        return replace(self, requests=8 * self.requests)

    @cached_property
    def costs(self) -> CostModel:
        """Costs of groups of the cloud's GPUs."""
        return CostModel(self.cloud, self.llm, self.settings)

    def demand(self, name: str, rate_rps: float) -> Demand:
        """A workload at a rate, as planners see it."""
        return Demand.of(self.traces[name], rate_rps)

    def unit(self, name: str) -> Slo:
        """Latencies of a mean request alone on one A100."""
        return reference(self.llm, self.demand(name, 1.0))

    def target(self, name: str) -> Slo:
        """The end-to-end target that plans are made for."""
        return Slo(e2e_s=self.plan_scale * (self.unit(name).e2e_s or np.nan))

    def sample(self, name: str, seed: int) -> Trace:
        """Requests of a workload, drawn without their arrivals."""
        trace = self.traces[name]
        return trace.sample(min(self.requests, len(trace)), np.random.default_rng(seed))

    def work(self, name: str, rate_rps: float, seed: int) -> Trace:
        """A sample with Poisson arrivals, as in the paper."""
        return self.sample(name, seed).poisson(rate_rps, np.random.default_rng([seed, 1]))

    def plan(
        self, name: str, rate_rps: float, seed: int, cloud: Cluster | None = None
    ) -> PhasePlan:
        """The paper's search (ThunderServe Algorithms 1 and 2), with its history.

        What the plan attains by estimate is of requests that the search has not seen.
        """
        cloud = cloud or self.cloud
        evaluator = self._evaluator(name, rate_rps, cloud, _PLANNED_WITH)
        search = TabuSearch.start(evaluator, TabuSettings(steps=self.tabu_steps), seed=seed)
        found = PhasePlan.of(evaluator, search.run(), search="tabu", history=tuple(search.history))
        fresh = self._evaluator(name, rate_rps, cloud, _JUDGED_WITH)
        return replace(found, value=fresh.value(found.design))

    def _evaluator(self, name: str, rate_rps: float, cloud: Cluster, seed: int) -> Evaluator:
        """Simulates designs with requests of a seed; one for all searches."""
        key = (name, rate_rps, cloud.name, seed)
        if key not in self._evaluators:
            self._evaluators[key] = Evaluator(
                CostModel(cloud, self.llm, self.printed),
                self.demand(name, rate_rps),
                self.target(name),
                PAIRS,
                sample=self.steady.work(name, rate_rps, seed),
            )
        return self._evaluators[key]

    def latencies(self, name: str) -> Callable[[Run], dict[str, Any]]:
        """Makes scales and mean end-to-end time of a run (ThunderServe Fig. 7, 8 and 12)."""
        unit = self.unit(name)
        return lambda run: {SCALES: Scales.of(run, unit), E2E: run.e2e_s.mean()}


def by_system(rows: pd.DataFrame) -> dict[str, list[Scales]]:
    """Scales of :meth:`ThunderServeStudy.latencies` by system, one per seed."""
    return {str(name): list(part[SCALES]) for name, part in rows.groupby("system", sort=False)}


def fed(run: Run) -> dict[str, float]:
    """Tokens per second until 80 % of the requests are done (ThunderServe Fig. 9).

    The last ones leave replicas idle.
    """
    done = run.requests[run.finished]
    first = done[np.argsort(done["finish_s"])[: int(0.8 * len(done))]]
    tokens = first["input_tokens"].sum() + first["output_tokens"].sum()
    return {TPS: float(tokens / first["finish_s"].max())}


def mean_attained(scales: Sequence[Scales], kind: str = "e2e") -> Floats:
    """Share of the requests within each scale of the grid, mean over runs."""
    shares: Floats = np.mean([one.attained(kind, GRID) for one in scales], axis=0)
    return shares


def workloads_frame(study: ThunderServeStudy) -> pd.DataFrame:
    """Mean lengths, and the latencies of a mean request on one A100."""
    rows = []
    for name, trace in study.traces.items():
        unit = study.unit(name)
        lengths = (name, trace.input_tokens.mean(), trace.output_tokens.mean())
        rows.append((*lengths, *(getattr(unit, f"{kind}_s") for kind in KINDS)))
    columns = ["workload", "mean input [tokens]", "mean output [tokens]"]
    return pd.DataFrame(rows, columns=[*columns, *(f"A100 {k.upper()} [s]" for k in KINDS)])


def replicas_frame(planned: Mapping[Key, Planned], seeds: Sequence[int]) -> pd.DataFrame:
    """Replicas of each phase, and the price of the GPUs in use, by setting, system and seed."""
    rows = []
    for key, systems in planned.items():
        for seed, (made, _) in zip(seeds, systems, strict=True):
            roles: list[str] = [node.role for node in made.replicas]
            counts = (roles.count(role) for role in ("prefill", "decode", "both"))
            rows.append((*key, seed, *counts, made.usd_per_h))
    columns = ["workload", "rate [req/s]", "system", "seed", "prefill replicas", "decode replicas"]
    return pd.DataFrame(rows, columns=[*columns, "replicas for both", "price [$/h]"])


def configurations_frame(plans: Mapping[tuple[str, str], PhasePlan]) -> pd.DataFrame:
    """Groups of plans, by workload and search, in the words of ThunderServe's Table 3."""
    rows = []
    for (name, search), made in plans.items():
        for groups, phase in ((made.prefill, "prefill"), (made.decode, "decode")):
            words = Counter(
                (group.label, "TP={}, PP={}".format(*group.degrees)) for group in groups
            )
            rows += [(name, search, *key, f"{count} {phase}") for key, count in words.items()]
    columns = ["workload", "search", "GPUs by stage", "strategy", "replicas"]
    return pd.DataFrame(rows, columns=columns)


def smallest_scales_frame(
    scales: Mapping[Key, Sequence[Scales]], seeds: Sequence[int]
) -> pd.DataFrame:
    """Smallest SLO scale that 90 and 99 % of the requests stay within, by seed."""
    rows = [
        (*key, kind.upper(), 100 * goal, seed, one.smallest(kind, goal))
        for key, every in scales.items()
        for seed, one in zip(seeds, every, strict=True)
        for kind in KINDS
        for goal in GOALS
    ]
    columns = ["workload", "rate [req/s]", "system", "target", "goal [%]", "seed", SCALE]
    return pd.DataFrame(rows, columns=columns)


def deadline_frame(deadlines: pd.DataFrame) -> pd.DataFrame:
    """Smallest scales side by side, a column per system, means over seeds."""
    keys = ["workload", "rate [req/s]", "target", "goal [%]"]
    wide = deadlines.pivot_table(index=keys, columns="system", values=SCALE, sort=False)
    return wide.reset_index().rename(columns=lambda c: f"{c} [x A100]" if c in SYSTEMS else c)


def convergence(
    study: ThunderServeStudy, whole: Mapping[str, Sequence[PhasePlan]], rate_rps: float
) -> dict[tuple[str, int], Floats]:
    """Best estimate [%] after each tabu step, by workload and GPUs (ThunderServe Fig. 10).

    Each array has a row per seed. ``whole`` has the searches on all GPUs by workload, one per seed,
    for ``rate_rps``; fewer GPUs are offered the same rate per GPU.
    """
    curves = {}
    for name, size in product(whole, _PARTS):
        made = whole[name]
        if size != study.cloud.gpus:
            machines = zip(study.cloud.machines, _PARTS[size], strict=True)
            kept = tuple(replace(m, count=n, usd_per_h=None) for m, n in machines if n)
            fleet = replace(study.cloud, name=f"{size} GPUs", machines=kept)
            made = [study.plan(name, rate_rps * size / 32, seed, fleet) for seed in study.seeds]
        curves[name, size] = np.array([[100 * step.best for step in one.history] for one in made])
    return curves


@dataclass(frozen=True, eq=False)
class SlowedCosts(CostModel):
    """Costs with a factor for each type of GPU and phase.

    What grows with new tokens is of prefill, what a step takes whatever their number of decode.
    """

    slower: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def _compute(self, machine: Machine, gpus: int, piped: bool) -> Rates:
        prefill, decode = self.slower.get(machine.gpu.name, (1.0, 1.0))
        factors = dict.fromkeys(("product_s", "pair_s", "reduce_s"), prefill)
        factors |= dict.fromkeys(("weights_s", "cached_s", "fixed_s"), decode)
        factors["padding_tokens"] = decode / prefill  # the floor of small batches, in tokens
        rates = super()._compute(machine, gpus, piped)
        return replace(rates, **{name: f * getattr(rates, name) for name, f in factors.items()})


def as_slow_as_printed(llm: Llm, settings: CostSettings) -> dict[str, tuple[float, float]]:
    """Factors on prefill and decode of A40 and 3090Ti that give ThunderServe's times of Table 5.

    The design at 40 Gbit/s prints the prefill of four A40 and the decode of four 3090Ti, the
    baseline the means over both types. Nothing else takes part, no time at 5 Gbit/s and no
    throughput. Decode rests on the number of outputs, which is not printed.
    """
    base, apart = _PRINTED_5_8["baseline"], _PRINTED_5_8["40 Gbit/s"]
    found = {"A40": (1.0, 1.0), "RTX-3090Ti": (1.0, 1.0)}
    pair = cluster.cluster("thunderserve-a40-3090ti-40gbit")
    for _ in range(40):  # each time rests on one factor above all, so this contracts
        costs = SlowedCosts(pair, llm, settings, slower=found)
        printed = PhasePlan.of(Evaluator(costs, Demand.of(_fed(), 30.0), Slo(e2e_s=1e4)), _APART)
        (p0, d0), (p1, d1) = (
            _request_ms(costs.pipeline([PipelineStage(k, 4, llm.layers)])) for k in (0, 1)
        )
        (ap, ad), (bp, bd) = found.values()
        first, _, then = _alone_ms(printed)
        a40 = ap * apart[0] / first, ad * (2 * base[2] - d1) / d0
        ti = bp * (2 * base[0] - p0) / p1, bd * apart[2] / then
        found = {"A40": a40, "RTX-3090Ti": ti}
    return found


def _request_ms(alone: Pipeline) -> tuple[float, float]:
    """Prefill and decode of one request alone [ms]."""
    step = float(alone.decode_step_s(1, INPUTS + OUTPUTS / 2))
    return 1e3 * float(alone.prefill_latency_s(INPUTS)), 1e3 * (OUTPUTS - 1) * step


def _fed() -> Trace:
    """Requests of the two machines of ThunderServe's Fig. 16."""
    lengths = np.full(400, INPUTS), np.full(400, OUTPUTS)
    return Trace(np.arange(400.0), *lengths, name="1,024 in, 32 out")


def two_machines(
    llm: Llm, settings: CostSettings, slower: Mapping[str, tuple[float, float]] | None = None
) -> tuple[pd.DataFrame, dict[str, PhasePlan]]:
    """Four A40 and four 3090Ti at 40 and 5 Gbit/s (ThunderServe Tables 5 and 8), best designs.

    Times and throughput are of the printed designs (ThunderServe Fig. 17); the best of all are
    those of highest throughput (a rate above any capacity, a wide deadline). The baseline keeps
    both phases on each machine.
    """
    trace = _fed()
    heavy, wide = Demand.of(trace, 30.0), Slo(e2e_s=1e4)
    fast, slow = (
        SlowedCosts(
            cluster.cluster(f"thunderserve-a40-3090ti-{g}gbit"), llm, settings, slower=slower or {}
        )
        for g in (40, 5)
    )
    cases: dict[str, tuple[CostModel, Bits]] = {"40 Gbit/s": (fast, 4), "5 Gbit/s": (slow, 4)}
    cases["40 Gbit/s, 16 bits"] = (fast, 16)
    rows = [("baseline", *_baseline(fast, trace), *_PRINTED_5_8["baseline"], None)]
    best = {}
    for label, (costs, bits) in cases.items():
        evaluator = Evaluator(costs, heavy, wide, replace(PAIRS, bits=bits))
        made = PhasePlan.of(evaluator, enumerate_all(evaluator).best, search="exact")
        best[label] = made
        printed = PhasePlan.of(evaluator, _HALVES if label == "5 Gbit/s" else _APART)
        tps = _fed_tps(trace, (printed.deployment(), printed.router()))
        ours = _fed_tps(trace, (made.deployment(), made.router()))
        rows.append((label, *_alone_ms(printed), tps, *_PRINTED_5_8[label], ours))
    columns = ["configuration", *_TIMES, *(f"printed {k}" for k in _TIMES), "our design [tokens/s]"]
    return pd.DataFrame(rows, columns=columns), best


def _baseline(costs: CostModel, trace: Trace) -> tuple[float, float, float, float]:
    """Prefill, transfer and decode of a request alone [ms], and tokens per second when fed."""
    alone = [costs.pipeline([PipelineStage(k, 4, costs.llm.layers)]) for k in (0, 1)]
    nodes = tuple(replica(p, name) for p, name in zip(alone, ("a40", "3090ti"), strict=True))
    times = np.array([_request_ms(p) for p in alone])
    speeds = {
        (node.name, node.name): float(1.0 / (first + then))
        for node, (first, then) in zip(nodes, times, strict=True)
    }
    prefill, decode = times.mean(axis=0)
    base = Deployment("both phases on each machine", nodes)
    return float(prefill), 0.0, float(decode), _fed_tps(trace, (base, PairShares(speeds)))


def _fed_tps(trace: Trace, system: System) -> float:
    """Tokens per second with requests always waiting, until 80 % have finished."""
    made, router = system
    return fed(simulate(made, trace.all_at_once(), router))[TPS]


def _alone_ms(made: PhasePlan) -> Floats:
    """Prefill, transfer and decode of one request alone [ms], mean over the planned shares."""
    share = made.orchestration.share / made.orchestration.share.sum()
    times = np.zeros(3)
    for (i, j), weight in np.ndenumerate(share):
        a, b = made.prefill[i], made.decode[j]
        fixed, per_token = made.evaluator.transfer.seconds(a, b)
        moved = 1e3 * (fixed + INPUTS * per_token)
        times += weight * np.array([_request_ms(a)[0], moved, _request_ms(b)[1]])
    return times


def kv_shares_frame() -> pd.DataFrame:
    """Share of the KV transfer in a request of LLaMA-7B on two A5000 [%] (ThunderServe Fig. 18)."""
    llm = catalog.llm("LLaMA-1-7B")
    costs = CostModel(cluster.cluster("thunderserve-a5000-pair"), llm, IN_PAPERS)
    prefill, decode = (costs.pipeline([PipelineStage(k, 1, llm.layers)]) for k in (0, 1))
    rows = []
    ways: tuple[Bits, ...] = (16, 8, 4)
    for bits, outputs, inputs in product(ways, (16, OUTPUTS, 64), LENGTHS):
        fixed, per_token = KvTransfer(bits=bits).seconds(prefill, decode)
        moved = fixed + inputs * per_token
        decoded = (outputs - 1) * float(decode.decode_step_s(1, inputs + outputs / 2))
        whole = float(prefill.prefill_latency_s(inputs)) + moved + decoded
        rows.append((bits, inputs, outputs, 100 * moved / whole))
    return pd.DataFrame(rows, columns=["bits", "input [tokens]", "output [tokens]", "KV share [%]"])


def arrivals(
    study: ThunderServeStudy, planned: Mapping[Key, Planned], rate_rps: float
) -> tuple[pd.DataFrame, dict[tuple[str, str], list[Scales]]]:
    """Deadlines with Poisson arrivals and with the trace's own; the latter's scales as well."""
    rows, own = [], {}
    goals = (("e2e", 0.9), ("e2e", 0.99), ("ttft", 0.9))
    for name, trace in study.traces.items():
        window = trace.head(min(len(trace), 3 * study.requests))
        poisson = window.poisson(rate_rps, np.random.default_rng(study.seeds[0]))
        both = {"Poisson": poisson, "of the trace": window.rescale(rate_rps=rate_rps)}
        for system in PRINTED:
            made, router = planned[name, rate_rps, system][0]
            for label, arriving in both.items():
                one = Scales.of(simulate(made, arriving, router), study.unit(name))
                rows.append((name, label, system, *(one.smallest(*goal) for goal in goals)))
            own[name, system] = [one]
    columns = ["workload", "arrivals", "system"]
    columns += [f"{kind.upper()} scale for {100 * goal:g} %" for kind, goal in goals]
    return pd.DataFrame(rows, columns=columns), own


def as_printed(cloud: Cluster) -> Cluster:
    """The cloud with the GPU figures of ThunderServe's Table 1."""
    named = {m.gpu.name: catalog.gpu(m.gpu.name, preset="thunderserve") for m in cloud.machines}
    machines = tuple(replace(m, gpu=named[m.gpu.name]) for m in cloud.machines)
    name = f"{cloud.name}, figures as printed"
    return replace(cloud, name=name, preset="thunderserve", machines=machines)


def gpu_phases_frame(plans: Mapping[tuple[str, str], PhasePlan]) -> pd.DataFrame:
    """Which GPUs plans give to which phase [%], by workload and source of the GPU figures."""
    parts = [("A40", "prefill"), ("RTX-3090Ti", "decode")]
    parts += [("RTX-A6000", "prefill"), ("RTX-A5000", "prefill")]
    rows = []
    for key, made in plans.items():
        shares = (100 * made.gpu_share(*part) for part in parts)
        ratio = f"{len(made.prefill)}:{len(made.decode)}"
        rows.append((*key, ratio, *shares, 100 * made.value.attainment))
    named = (f"{gpu.removeprefix('RTX-')} on {phase} [%]" for gpu, phase in parts)
    columns = ["workload", "GPU figures", "prefill:decode", *named, "estimate [%]"]
    return pd.DataFrame(rows, columns=columns)


def networks_frame(
    study: ThunderServeStudy,
    plans: Mapping[tuple[str, float], Sequence[PhasePlan]],
    serve: Callable[..., pd.DataFrame],
) -> pd.DataFrame:
    """Attainment of plans at their own target [%]: estimated, pair by pair, on shared interfaces.

    ``serve`` answers with the measured runs of systems with a workload at a rate.
    """
    rows = []
    shared = replace(PAIRS, shared=True)
    for (name, rate), made in plans.items():
        systems = {
            way: [(split(way, one.parts, transfer), one.router()) for one in made]
            for way, transfer in zip(_NETWORKS, (PAIRS, shared), strict=True)
        }
        served = by_system(serve(systems, name, rate, study.latencies(name), study.steady))
        for k, (seed, one) in enumerate(zip(study.seeds, made, strict=True)):
            found = (served[way][k].attained("e2e", [study.plan_scale])[0] for way in _NETWORKS)
            ratio = f"{len(one.prefill)}:{len(one.decode)}"
            values = (100 * share for share in (one.value.attainment, *found))
            rows.append((name, rate, seed, ratio, *values))
    columns = ["workload", "rate [req/s]", "seed", "prefill:decode", "estimate"]
    return pd.DataFrame(rows, columns=[*columns, *_NETWORKS])
