"""What makes a plan better: another router, division of a machine, phase, or size of its steps.

Every change is played on the same requests, gaps and seeds as the plan that it changes, and kept
where the changed plan carries more. Changes are tried in a fixed order and counted, so that the
same case gives the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, product

import numpy as np
from numpy.typing import NDArray

from hetero.apps.portfolio import assumptions
from hetero.apps.portfolio.build import plan_of
from hetero.apps.portfolio.score import margin, screened
from hetero.catalog import Gpu
from hetero.costs.cost import CostModel, PipelineStage
from hetero.costs.pipeline import Pipeline
from hetero.costs.transfer import Bits, KvTransfer
from hetero.deployment import Deployment, KvLink, Role
from hetero.errors import HeteroError, InfeasibleError
from hetero.planners.baselines.capacity import Bucket, capacity_rps
from hetero.planners.baselines.kinds import divisions
from hetero.plans import Plan
from hetero.question import Question
from hetero.routers import Builtin, Predictive, WeightedRoundRobin
from hetero.routers.named import factories
from hetero.simulator import Run, Slo
from hetero.simulator.saturation import attainment

Floats = NDArray[np.float64]

_DEGREES = (1, 2, 4, 8)
_OURS = 2  # routers that come first
_TUNED = 4  # rounds of fixed shares
_STEP = 0.5  # change of the logarithm of a share when all of its requests miss and no others do
_LEAST_SHARE = 1e-3  # of the case's load that a plan must carry where the one before carries none
_SIZES = 12  # sizes of steps that are tried
_LEAST_GAIN = 1.005  # a change must carry so much more than the plan that it changes


@dataclass(frozen=True, slots=True)
class Change:
    """One kept change: what was done, and the load that the plan carried then [requests/s]."""

    what: str
    carried_rps: float


@dataclass(frozen=True, slots=True, eq=False)
class Improved:
    """What is left when changes run out.

    Attributes
    ----------
    carried_rps
        Load that it carries with the arrivals of each seed.
    changes
        Those that were kept, in order.
    played
        Changes that were tried.
    """

    plan: Plan
    carried_rps: tuple[float, ...]
    changes: tuple[Change, ...]
    played: int


@dataclass(frozen=True, slots=True, eq=False)
class _Design:
    """Pipelines with their phases; what a plan of costed replicas is made of."""

    parts: tuple[tuple[Pipeline, Role], ...]
    bits: Bits

    @property
    def costs(self) -> CostModel:
        return self.parts[0][0].model


def improve(
    plan: Plan, question: Question, near_rps: float, *, seeds: Sequence[int], moves: int
) -> Improved:
    """Change a plan as long as that lets it carry more, at most so many changes tried.

    Parameters
    ----------
    near_rps
        About what it carries.
    """
    near = near_rps or None
    carried_rps = tuple(screened(plan, question, seed, start_rps=near) for seed in seeds)
    search = _Search(question, tuple(seeds), moves, plan, carried_rps)
    search.routers(every=True)
    search.shares()
    if plan.pipelines:
        while search.left and search.layouts():
            search.routers(every=False)
            search.shares()
    return Improved(search.plan, search.carried_rps, tuple(search.changes), moves - search.left)


def resized(found: Improved, question: Question, *, seeds: Sequence[int]) -> Improved:
    """The same with steps of the size that carries most, where prompts are cut into chunks."""
    search = _Search(question, tuple(seeds), _SIZES, found.plan, found.carried_rps)
    search.steps()
    changes, played = (*found.changes, *search.changes), found.played + _SIZES - search.left
    return Improved(search.plan, search.carried_rps, changes, played)


class _Search:
    """A plan, what it carries, and how many changes may still be tried."""

    def __init__(
        self,
        question: Question,
        seeds: tuple[int, ...],
        moves: int,
        plan: Plan,
        carried_rps: tuple[float, ...],
    ) -> None:
        self.question, self.seeds, self.left = question, seeds, moves
        self.plan, self.carried_rps = plan, carried_rps
        self.changes: list[Change] = []
        # The router that does best on the plan of those that do not depend on its replicas.
        self.general: tuple[str, Builtin] = ("hetero", Predictive())

    def routers(self, *, every: bool) -> None:
        """Try routers on the plan as it is: every one, or only ours."""
        if self.plan.deployment is None:
            return
        best = -2.0
        for routing, router in islice(_routers(self.question), None if every else _OURS):
            if routing == self.plan.routing:
                self.general = (routing, router)
                best = 0.0
                continue
            one = partial(_rerouted, self.plan, router, routing)
            found = self._try(f"routing: {routing}", one)
            if found > best:
                best, self.general = found, (routing, router)

    def shares(self) -> None:
        """Try fixed shares: by capacity, then less to replicas whose requests miss targets more."""
        made = self.plan.deployment
        if made is None or len(made.replicas) < 2 or self.question.slo == Slo():
            return
        if any(one.role != "both" for one in made.replicas):
            return
        trace = self.question.trace
        mean = Bucket(
            float(trace.input_tokens.mean()), float(trace.output_tokens.mean()), 1.0, (0.0, np.inf)
        )
        weights = np.array([capacity_rps(one, mean) for one in made.replicas])
        for round_ in range(_TUNED):
            if not self.left or weights.min() <= 0:
                return
            shares = weights / weights.sum()
            one = _shared(self.plan, shares)
            what = "shares by capacity" if not round_ else "shares by capacity, tuned"
            self._try(f"routing: {what}", lambda one=one: one)  # type: ignore[misc]
            rate = max(self.carried_rps[0], self.question.rate_rps) * _LEAST_GAIN
            run = one.simulate(self.question.arrivals(rate, seed=self.seeds[0]), self.seeds[0])
            weights = shares * np.exp(_STEP * met_by_replica(run, self.question.slo))

    def layouts(self) -> bool:
        """Try other divisions of machines and other phases of replicas; whether one was better."""
        for what, changed in _neighbours(_design(self.plan)):
            # Changes of the plan as it was may not apply to a better one: then begin anew.
            if self._try(what, partial(_entry, self.plan, changed, *self.general)) > 0:
                return True
        return False

    def steps(self) -> None:
        """Try steps of half and of twice as many tokens, one GPU type after the other.

        Large ones prefill more at once, small ones keep those that decode waiting for less.
        """
        made = self.plan.deployment
        if made is None or made.replicas[0].engine.batching != "chunked":
            return
        if self.question.max_step_tokens is not None:
            return
        for gpu in dict.fromkeys(one.gpu for one in made.replicas if one.role != "decode"):
            for factor in (0.5, 2.0):
                kept = len(self.changes)
                what = f"steps of {factor:g} times the tokens on {gpu.name if gpu else 'a GPU'}"
                while self._try(what, partial(_stepping, self.plan, gpu, factor)) > 0:
                    pass
                if len(self.changes) > kept:
                    break

    def _try(self, what: str, make: Callable[[], Plan]) -> float:
        """Play a changed plan and keep it if it carries more: above 0 if so, else how near it is.

        Nearness is the margin by which it misses what the plan carries.
        """
        if not self.left:
            return -1.0
        self.left -= 1
        try:
            one = make()
            # Most changes do not help: one run shows it.
            wanted = self.carried_rps[0] * _LEAST_GAIN or self.question.rate_rps * _LEAST_SHARE
            if (near := margin(one, self.question, wanted, self.seeds[0])) < 0:
                return near
            found = tuple(
                screened(one, self.question, seed, start_rps=before or None)
                for seed, before in zip(self.seeds, self.carried_rps, strict=True)
            )
        except HeteroError:
            return -1.0  # a change that no plan can have, such as a router that needs more
        if sum(found) <= sum(self.carried_rps):
            return 0.0
        self.plan, self.carried_rps = one, found
        self.changes.append(Change(what, sum(found) / len(found)))
        return 1.0


def _routers(question: Question) -> Iterator[tuple[str, Builtin]]:
    """Every router of whole replicas in words, ours first, with and without the targets."""
    made = factories()
    yield "hetero", Predictive()
    first_s = question.slo.ttft_s if question.slo.ttft_s is not None else question.slo.e2e_s
    if first_s is not None:
        target_s = 0.9 * first_s
        yield f"hetero, first token within {target_s:g} s", Predictive(target_s=target_s)
    for name, make in made.items():
        if make is not Predictive:
            yield name.replace("-", " "), make()


def _rerouted(plan: Plan, router: Builtin, routing: str) -> Plan:
    assert plan.deployment is not None
    return replace(
        plan,
        routing=routing,
        router=router,
        groups=tuple(replace(group, share=float("nan")) for group in plan.groups),
    )


def _shared(plan: Plan, shares: Floats) -> Plan:
    """The plan with requests in rotation by shares, one per replica."""
    weights = tuple(float(share) for share in shares)
    found = _rerouted(plan, WeightedRoundRobin(weights), "tuned shares, in rotation")
    groups = tuple(
        replace(group, share=weight) for group, weight in zip(found.groups, weights, strict=True)
    )
    return replace(found, groups=groups)


def met_by_replica(run: Run, slo: Slo) -> Floats:
    """Share of each replica's requests that met every target, less that of all; shape (M,).

    0 for replicas without a request.
    """
    node, whole = np.asarray(run.requests["node"]), attainment(run, slo)
    sent = [node == k for k in range(len(run.replicas))]
    return np.array([attainment(run, slo, own) - whole if own.any() else 0.0 for own in sent])


def _stepping(plan: Plan, gpu: Gpu | None, factor: float) -> Plan:
    """The plan with so many times the tokens in the steps of a GPU type.

    Raises
    ------
    InfeasibleError
        If no step has so many.
    """
    made, nodes = plan.deployment, []
    assert made is not None
    for one in made.replicas:
        tokens = round(factor * one.engine.max_step_tokens)
        if one.gpu == gpu:
            if tokens not in assumptions.STEP_TOKENS:
                raise InfeasibleError("No step has so many tokens.", resolve="keep its size.")
            one = replace(one, engine=replace(one.engine, max_step_tokens=tokens))
        nodes.append(one)
    return replace(plan, serving=replace(made, replicas=tuple(nodes)))


def _design(plan: Plan) -> _Design:
    assert plan.deployment is not None
    parts = tuple(
        (pipeline, node.role)
        for pipeline, node in zip(plan.pipelines, plan.deployment.replicas, strict=True)
    )
    ratio = min((link.compression for *_, link in plan.deployment.links), default=1.0)
    bits: Bits = 4 if ratio <= 0.25 else 8 if ratio <= 0.5 else 16
    return _Design(parts, bits)


def _entry(base: Plan, design: _Design, routing: str, router: Builtin) -> Plan:
    """The plan of a design with a router.

    Raises
    ------
    InfeasibleError
        If it serves only one of the phases.
    """
    roles = {role for _, role in design.parts}
    if not roles or ("prefill" in roles) != ("decode" in roles):
        raise InfeasibleError("A phase has no replica.", resolve="keep one of each.")
    if not _runs(design):
        raise InfeasibleError("The engine cannot run it.", resolve="change something else.")
    count: Counter[str] = Counter()
    names = []
    for pipeline, role in design.parts:
        where = "+".join(
            dict.fromkeys(pipeline.model.machines[stage.machine].name for stage in pipeline.stages)
        )
        label = where if role == "both" else f"{where} {role}"
        names.append(f"{label}/{count[label]}")
        count[label] += 1
    transfer = KvTransfer(bits=design.bits)
    links: list[tuple[str, str, KvLink]] = [
        (names[a], names[b], transfer.link(one, two))
        for a, (one, first) in enumerate(design.parts)
        for b, (two, second) in enumerate(design.parts)
        if (first, second) == ("prefill", "decode")
    ]
    nodes = [
        assumptions.replica(pipeline, name, role)
        for (pipeline, role), name in zip(design.parts, names, strict=True)
    ]
    assert base.deployment is not None
    return plan_of(
        base.planner,
        Deployment(base.deployment.name, tuple(nodes), tuple(links)),
        [pipeline for pipeline, _ in design.parts],
        router,
        routing,
        bound_rps=base.bound_rps,
        bound=base.bound,
        options=base.options,
    )


def _neighbours(design: _Design) -> Iterator[tuple[str, _Design]]:
    """Designs one change away, in a fixed order: whole kinds of machines, machines, phases."""
    for what, changed in chain(_divided(design), _flipped(design)):
        if _runs(changed):
            yield what, changed


def _runs(design: _Design) -> bool:
    """Whether the engine can run every replica, and send KV caches between those of both phases."""
    costs = design.costs
    ends: dict[Role, list[PipelineStage]] = {"prefill": [], "decode": [], "both": []}
    for pipeline, role in design.parts:
        if costs.misfit(pipeline.stages, role):
            return False
        ends[role].append(pipeline.stages[0])
    return all(costs.splits(a, b) for a, b in product(ends["prefill"], ends["decode"]))


def _divided(design: _Design) -> Iterator[tuple[str, _Design]]:
    costs = design.costs
    spanned = {
        stage.machine
        for pipeline, _ in design.parts
        if len({one.machine for one in pipeline.stages}) > 1
        for stage in pipeline.stages
    }
    kinds: dict[tuple[object, ...], list[int]] = {}
    for m, machine in enumerate(costs.machines):
        if m not in spanned:
            key = (machine.gpu, machine.count, machine.link)
            kinds.setdefault(key, []).append(m)
    for together in (True, False):
        for numbers in kinds.values():
            if together and len(numbers) == 1:
                continue
            for some in [numbers] if together else [[m] for m in numbers]:
                for division in _divisions(costs, some[0]):
                    changed = _redivided(design, some, division)
                    if changed is not None:
                        where = costs.machines[some[0]]
                        label = f"all {where.gpu.name}" if together else where.name
                        degrees = " + ".join(map(str, division))
                        yield f"{label} divided into {degrees}", changed


def _divisions(costs: CostModel, machine: int) -> tuple[tuple[int, ...], ...]:
    """Ways to divide a machine into instances of degrees that the model fits."""
    count = costs.machines[machine].count
    fitting = tuple(
        t
        for t in _DEGREES
        if t <= count
        and costs.divides(t)
        and costs.most_layers(machine, t, first=True, last=True) >= costs.llm.layers
    )
    return divisions(count, fitting) if fitting else ()


def _redivided(
    design: _Design, machines: Sequence[int], division: tuple[int, ...]
) -> _Design | None:
    """The design with machines divided anew into replicas for both phases; None if it is that."""
    costs = design.costs
    kept = [part for part in design.parts if part[0].stages[0].machine not in machines]
    before: Counter[tuple[int, int]] = Counter()
    for pipeline, role in design.parts:
        if pipeline.stages[0].machine in machines:
            whole = role == "both" and len(pipeline.stages) == 1
            before[pipeline.stages[0].machine, pipeline.stages[0].gpus if whole else 0] += 1
    made: list[tuple[Pipeline, Role]] = [
        (costs.pipeline([PipelineStage(m, degree, costs.llm.layers)]), "both")
        for m in machines
        for degree in division
    ]
    if before == Counter((m, degree) for m in machines for degree in division):
        return None
    return _Design((*kept, *made), design.bits)


def _flipped(design: _Design) -> Iterator[tuple[str, _Design]]:
    """Another phase for one replica of each kind, or for two of different kinds at once."""
    costs = design.costs
    first: dict[tuple[object, ...], int] = {}
    for k, (pipeline, role) in enumerate(design.parts):
        first.setdefault((pipeline.label, role), k)
    if len(costs.machines) > 1 and costs.cluster.network is None:
        return
    one_each = list(first.values())

    def changed(roles: dict[int, Role]) -> _Design:
        parts = tuple((p, roles.get(k, role)) for k, (p, role) in enumerate(design.parts))
        return _Design(parts, design.bits)

    split = any(role != "both" for _, role in design.parts)
    for k in one_each:
        pipeline, role = design.parts[k]
        for other in _ROLES:
            if other != role and split:
                yield f"{pipeline.label} for {other}", changed({k: other})
    if not split:
        for a in one_each:
            for b in range(len(design.parts)):
                if a != b and (b in one_each or b == a + 1):
                    what = f"{design.parts[a][0].label} for prefill, "
                    what += f"{design.parts[b][0].label} for decode"
                    yield what, changed({a: "prefill", b: "decode"})


_ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
