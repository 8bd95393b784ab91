r"""HexGen: a genetic search over groups of mixed GPUs that serve both phases.

A solution is a partition of the GPUs into groups. Each group serves one copy of the model with
the configuration of tensor and pipeline parallelism, uneven layers included, that sustains most
requests. Each generation keeps the fittest solutions; children are parents with groups merged,
split, or with GPUs moved or exchanged between them. Fitness is the share of requests that meet
the targets at the planned rate, in a simulation; of equal ones the larger capacity wins.

Source: Jiang et al. 2024 (HexGen); its cost model is the one that ThunderServe takes over, so
that both plan here with :mod:`hetero.costs.cost`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from hetero.costs.cost import CostModel
from hetero.costs.demand import Demand
from hetero.costs.groups import Fleet, Group, group, merged, two_of, without
from hetero.costs.parallel import Configuration, Configurations
from hetero.costs.pipeline import Pipeline, PipelineStage
from hetero.costs.replicas import replica
from hetero.deployment import Deployment, Replica
from hetero.errors import InfeasibleError, require_positive
from hetero.planners import ground
from hetero.planners.base import NORMAL, Effort, best_over_rates, planner, too_few_groups
from hetero.planners.baselines.capacity import Bucket, capacity_rps
from hetero.planners.baselines.plan import BaselinePlan, attained, plan_of_baseline
from hetero.plans import Plan
from hetero.question import Question
from hetero.simulator import Slo
from hetero.streams import stream
from hetero.workload import Trace

Partition = tuple[Group, ...]

_MOST_MACHINES = 4  # that a pipeline spans


@dataclass(frozen=True, eq=False)
class _Search:
    """Costed groups and evaluated partitions of one search."""

    costs: CostModel
    demand: Demand
    trace: Trace
    slo: Slo
    seed: int
    _groups: dict[Group, tuple[float, Pipeline] | None] = field(default_factory=dict)
    _kinds: dict[Group, tuple[float, Configuration] | None] = field(default_factory=dict)
    _found: dict[Partition, tuple[float, float]] = field(default_factory=dict)

    @cached_property
    def fleet(self) -> Fleet:
        return Fleet(self.costs)

    @cached_property
    def configurations(self) -> Configurations:
        return Configurations(self.costs, self.demand)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The demand's kinds, as sizes that capacities are computed for."""
        d = self.demand
        return tuple(
            Bucket(float(i), float(o), float(s), (0.0, np.inf))
            for i, o, s in zip(d.input_tokens, d.output_tokens, d.share, strict=True)
        )

    def best(self, one: Group) -> tuple[float, Pipeline] | None:
        """Capacity [requests/s] and configuration of a group; None where the model does not fit."""
        if one not in self._groups:
            # Groups of as many GPUs on machines of the same kinds have the same configuration.
            order = sorted(one, key=lambda part: (self.fleet.kinds[part[0]], part[1], part[0]))
            key = tuple((self.fleet.kinds[m], n) for m, n in order)
            if key not in self._kinds:
                self._kinds[key] = self._costed(tuple(order))
            found = self._kinds[key]
            self._groups[one] = (
                None
                if found is None
                else (found[0], self.configurations.pipeline(tuple(order), found[1]))
            )
        return self._groups[one]

    def _costed(self, one: Group) -> tuple[float, Configuration] | None:
        """The configuration that sustains most mean requests, and its capacity for all kinds."""
        if not self.fleet.fits(one) or len(one) > _MOST_MACHINES:
            return None
        d = self.demand
        mean = Bucket(d.mean_input, d.mean_output, 1.0, (0.0, np.inf))
        best, node, value = None, None, 0.0
        for found in self.configurations.configurations(one):
            pipeline = self.configurations.pipeline(one, found)
            if pipeline.kv_tokens < 1:
                continue
            tried = replica(pipeline, "group")
            rate = capacity_rps(tried, mean)
            if rate > value:
                best, node, value = found, tried, rate
        if best is None or node is None:
            return None
        rates = [capacity_rps(node, bucket) for bucket in self.buckets]
        if min(rates) <= 0:
            return None
        # Requests of all sizes share the group's time.
        return 1.0 / sum(b.share / rate for b, rate in zip(self.buckets, rates, strict=True)), best

    def deployed(
        self, partition: Partition
    ) -> tuple[Deployment, tuple[Pipeline, ...], dict[tuple[str, str], float]]:
        """Replicas of the groups that the model fits, and shares by capacity."""
        nodes: list[Replica] = []
        pipelines: list[Pipeline] = []
        weights: dict[tuple[str, str], float] = {}
        for one in partition:
            costed = self.best(one)
            if costed is None:
                continue
            name = f"group {len(nodes) + 1}"
            nodes.append(replica(costed[1], name))
            pipelines.append(costed[1])
            weights[name, name] = costed[0]
        return Deployment("HexGen", tuple(nodes)), tuple(pipelines), weights

    def fitness(self, partition: Partition) -> tuple[float, float]:
        """Attainment at the planned rate and capacity; worse than any if nothing fits."""
        key = tuple(sorted(partition))
        if key not in self._found:
            capacity = sum(found[0] for one in partition if (found := self.best(one)))
            share = -1.0
            if capacity > 0:
                deployment, _, weights = self.deployed(partition)
                share = attained(
                    deployment, weights, self.trace, self.demand.rate_rps, self.slo, self.seed
                )
            self._found[key] = (share, capacity)
        return self._found[key]


def hexgen(
    costs: CostModel,
    demand: Demand,
    trace: Trace,
    slo: Slo,
    *,
    generations: int = 30,
    population: int = 12,
    children: int = 24,
    seed: int = 0,
) -> BaselinePlan:
    """Groups of mixed GPUs for both phases, by genetic search.

    Source: ThunderServe, section 5.1: baseline HexGen.

    Parameters
    ----------
    demand
        Planned rate and kinds of requests.
    trace
        Requests that fitness is simulated with.
    slo
        Targets.
    generations, population, children
        Generations, solutions kept in each, and children of each.

    Raises
    ------
    InfeasibleError
        If the model fits no group of all GPUs.
    """
    require_positive(generations=generations, population=population, children=children)
    search = _Search(costs, demand, trace, slo, seed)
    rng = stream(seed, "hexgen")
    kept = [one for _ in range(population) if (one := _first(search, rng))]
    if not kept:
        raise _unfit(costs)
    history: list[tuple[str, float]] = []
    for generation in range(generations):
        parents = rng.integers(0, len(kept), size=children)
        born = [_child(search, kept[int(k)], rng) for k in parents]
        unique = {tuple(sorted(one)): one for one in [*kept, *born]}
        ranked = sorted(unique.items(), key=lambda item: (search.fitness(item[1]), item[0]))
        kept = [one for _, one in reversed(ranked)][:population]
        history.append((f"generation {generation + 1}", search.fitness(kept[0])[0]))
    best = kept[0]
    if search.fitness(best)[0] < 0:
        raise _unfit(costs)
    deployment, pipelines, weights = search.deployed(best)
    return BaselinePlan(
        "HexGen",
        deployment,
        pipelines,
        weights,
        f"attainment at {demand.rate_rps:g} req/s",
        search.fitness(best)[0],
        tuple(history),
    )


def _unfit(costs: CostModel) -> InfeasibleError:
    kinds = {one.gpu.name: PipelineStage(k, 1, 1) for k, one in enumerate(costs.machines)}
    if rule := costs.misfit([*kinds.values()]) if len(kinds) > 1 else None:
        what = f"{costs.llm.name} fits no GPUs of one type of {costs.cluster.name}, and a"
        return InfeasibleError(what + rule.what[1:], resolve=rule.resolve)
    return InfeasibleError(
        f"{costs.llm.name} fits no group of the GPUs of {costs.cluster.name}.",
        resolve="use more or larger GPUs, or a smaller model.",
    )


def _first(search: _Search, rng: np.random.Generator) -> Partition:
    """Every machine divided evenly into groups that fit; those too small for one are joined."""
    found: list[Group] = []
    small: list[tuple[int, int]] = []
    for m, count in enumerate(search.fleet.inventory):
        options = [
            n for n in range(1, count + 1) if count % n == 0 and search.fleet.fits(((m, n),))
        ]
        if options:
            n = int(options[int(rng.integers(len(options)))])
            found += [((m, n),)] * (count // n)
        else:
            small.append((m, count))
    if small:
        found += search.fleet.joined(group(small))
    return tuple(found)


def _child(search: _Search, parent: Partition, rng: np.random.Generator) -> Partition:
    """One to three changes of a parent; a change that leaves a group too small is not made."""
    one = list(parent)
    for _ in range(int(rng.integers(1, 4))):
        changed = _CHANGES[int(rng.integers(len(_CHANGES)))](one, rng)
        if changed is not None and all(search.fleet.fits(part) for part in changed):
            one = changed
    return tuple(one)


def _merge(parts: list[Group], rng: np.random.Generator) -> list[Group] | None:
    drawn = two_of(parts, rng)
    if drawn is None:
        return None
    one, two, rest = drawn
    return [*rest, merged(one, two)]


def _split(parts: list[Group], rng: np.random.Generator) -> list[Group] | None:
    k = int(rng.integers(len(parts)))
    taken = [(m, int(rng.integers(0, n + 1))) for m, n in parts[k]]
    left = [(m, n - dict(taken)[m]) for m, n in parts[k]]
    if not any(n for _, n in taken) or not any(n for _, n in left):
        return None
    return [*parts[:k], *parts[k + 1 :], group(taken), group(left)]


def _move(parts: list[Group], rng: np.random.Generator) -> list[Group] | None:
    drawn = two_of(parts, rng)
    if drawn is None:
        return None
    source, target, rest = drawn
    m, n = source[int(rng.integers(len(source)))]
    count = int(rng.integers(1, n + 1))
    left = without(source, m, count)
    return [*rest, left, merged(target, ((m, count),))] if left else None


def _exchange(parts: list[Group], rng: np.random.Generator) -> list[Group] | None:
    drawn = two_of(parts, rng)
    if drawn is None:
        return None
    a, b, rest = drawn
    m, first = a[int(rng.integers(len(a)))]
    n, second = b[int(rng.integers(len(b)))]
    if m == n:
        return None
    count = int(rng.integers(1, min(first, second) + 1))
    one = merged(without(a, m, count), ((n, count),))
    return [*rest, one, merged(without(b, n, count), ((m, count),))]


_CHANGES = (_merge, _split, _move, _exchange)


@planner("HexGen", lambda question: ground.unfit(question) or ground.unfit_network(question))
def plan(question: Question, effort: Effort = NORMAL) -> Plan:
    """Groups of mixed GPUs that serve both phases, by genetic search (HexGen)."""
    try:
        return best_over_rates(question, effort, partial(_at_rate, effort=effort))
    except InfeasibleError as error:
        raise too_few_groups(question, error) from None


def _at_rate(question: Question, effort: Effort) -> Plan:
    found = hexgen(
        ground.costs(question),
        ground.demand(question),
        ground.requests(question, effort.requests),
        ground.targets(question),
        generations=effort.generations,
        population=effort.population,
        children=2 * effort.population,
        seed=question.seed,
    )
    return plan_of_baseline(plan.name, found, routing="shares by capacity, in rotation")
