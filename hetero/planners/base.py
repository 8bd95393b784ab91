"""What planners are: a name, the questions that they can take, and a function to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Final

from hetero.cluster import Cluster
from hetero.cluster.fleets import within
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import grounded
from hetero.deployment import Deployment
from hetero.errors import InfeasibleError, ParameterError
from hetero.grouping import summed
from hetero.planners import ground
from hetero.planners.bound import bound
from hetero.planners.score import margin, screened
from hetero.plans import Group, Plan
from hetero.question import Question
from hetero.routers import Builtin

_DOZEN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Counts only; seconds are nobody's business here.

    Attributes
    ----------
    requests
        Requests that planners simulate with while they plan.
    rates
        Offered loads that planners of a given load plan for: the case's, then shares of the bound.
    tabu_steps, tabu_neighbours
        Of phase splitting; the search ends after a third of the steps without a better design.
    generations, population
        Of HexGen's genetic search; twice as many children as kept.
    layouts
        Layouts that the Bayesian search over islands evaluates.
    node_degrees
        Degrees that machines are divided into for layer placement, the largest first.
    exchanges, variety, exact_nodes, keep, proof
        Of layer placement.
    parts
        Parts of an offer within a budget that each planner plans for, those of the highest bound
        first.
    improved
        Planners' plans that the search begins with, the best first.
    designs
        Designs that the search races on up to a dozen GPUs; fewer on more, which take longer to
        simulate, about as the square of their number.
    """

    requests: int = 800
    rates: int = 3
    tabu_steps: int = 30
    tabu_neighbours: int = 6
    generations: int = 8
    population: int = 8
    layouts: int = 64
    node_degrees: int = 3
    exchanges: int = 300
    variety: int = 15
    exact_nodes: int = 500
    keep: int = 6
    proof: bool = False
    parts: int = 3
    improved: int = 3
    designs: int = 6_000

    def designs_for(self, cluster: Cluster) -> int:
        """Designs that the search races on a cluster."""
        return self.designs * _DOZEN**2 // max(_DOZEN, sum(cluster.gpu_counts.values())) ** 2


QUICK: Final = Effort(
    requests=400,
    rates=2,
    tabu_steps=9,
    tabu_neighbours=4,
    generations=3,
    population=6,
    layouts=24,
    node_degrees=2,
    exchanges=60,
    variety=5,
    exact_nodes=50,
    keep=3,
    parts=1,
    improved=3,
    designs=1_200,
)
"""Some seconds for some tens of GPUs, for people who wait."""

NORMAL: Final = Effort()
"""Some tens of seconds."""

THOROUGH: Final = Effort(
    requests=2_000,
    rates=4,
    tabu_steps=100,
    tabu_neighbours=10,
    generations=30,
    population=12,
    layouts=240,
    node_degrees=8,
    exchanges=1_000,
    variety=30,
    exact_nodes=5_000,
    keep=12,
    proof=True,
    parts=8,
    improved=5,
    designs=40_000,
)
"""The counts of the papers."""

EFFORTS: Final = {"quick": QUICK, "normal": NORMAL, "thorough": THOROUGH}


_SHARES = (0.5, 0.3, 0.7)  # of the bound on throughput, which nothing reaches


@dataclass(frozen=True)
class Planner:
    """A planner; called with a question and an effort, it returns its best plan.

    Within a budget that is the best plan for any part of the offer that the budget pays for, and
    no machine takes part that a first token could not come from in time.

    Attributes
    ----------
    make
        The plan for one cluster, without a budget.
    reason
        Why a question cannot be taken, in one sentence; None if it can.
    rents
        Whether ``make`` itself chooses what a budget pays for.
    effort
        How much it may try where nothing else is said.
    """

    name: str
    make: Callable[..., Plan]
    reason: Callable[[Question], str | None]
    rents: bool = False
    effort: Effort = NORMAL

    def __reduce__(self) -> tuple[Callable[..., Planner], tuple[str, str, Effort]]:
        # Processes find it by the name of its function, which it has taken the place of.
        return _standing_at, (self.make.__module__, self.make.__name__, self.effort)

    def unfit(self, question: Question) -> str | None:
        """Why it cannot take a question, in one sentence; None if it can."""
        return self.reason(question)

    def plan(self, question: Question) -> Plan:
        """Its best plan.

        Raises
        ------
        InfeasibleError
            If it cannot take the question, or no plan of its kind serves it; the text names what
            binds.
        """
        return self(question, self.effort)

    def __call__(self, question: Question, effort: Effort = NORMAL) -> Plan:
        """As :meth:`plan`, with so much effort."""
        if reason := self.unfit(question):
            raise InfeasibleError(
                f"{self.name}: {reason}", resolve="ask another planner, or change the case."
            )
        near = ground.within_reach(question)
        if self.rents:
            return self.make(near, effort)
        return best_of(near, effort.parts, lambda one: self.make(one, effort))


def _standing_at(module: str, name: str, effort: Effort) -> Planner:
    found: Planner = getattr(import_module(module), name)
    return replace(found, effort=effort)


def planner(
    name: str,
    reason: Callable[[Question], str | None] = ground.unfit,
    *,
    rents: bool = False,
) -> Callable[[Callable[..., Plan]], Planner]:
    """Make a planner of a function from a question and an effort to a plan."""
    return lambda make: Planner(name, make, reason, rents)


def parts(question: Question, most: int) -> tuple[Question, ...]:
    """The case on each part of its offer that the budget pays for, the highest bound first.

    To none of the parts a further machine could be added. Without a budget, or where it pays for
    everything, the case itself.

    Parameters
    ----------
    most
        Number of parts that are kept.

    Raises
    ------
    InfeasibleError
        If the budget pays for no machine, or leaves too many choices.
    """
    if question.budget_usd_per_h is None:
        return (question,)
    try:
        affordable = within(question.cluster, question.budget_usd_per_h)
    except ParameterError as error:
        raise InfeasibleError(error.what, resolve=error.resolve) from None
    offers = [replace(question, cluster=part, budget_usd_per_h=None) for part in affordable]
    if len(offers) == 1:
        return tuple(offers)
    values = []
    for number, one in enumerate(offers):
        limit = bound(one)
        values.append((-limit.rps() if limit else -float(one.cluster.mem_bytes), number))
    return tuple(offers[number] for _, number in sorted(values)[:most])


def best_of(question: Question, most: int, ask: Callable[[Question], Plan]) -> Plan:
    """The plan that carries most over the parts of an offer.

    Raises
    ------
    InfeasibleError
        If there is no plan for any of them; the text is that of the first.
    """
    offers = parts(question, most)
    if len(offers) == 1:
        return ask(offers[0])
    best: Plan | None = None
    value = -1.0
    reason: InfeasibleError | None = None
    for one in offers:
        try:
            plan = ask(one)
        except InfeasibleError as error:
            reason = reason or error
            continue
        found = screened(plan, one, question.seed)
        if found > value:
            best, value = plan, found
    if best is None:
        assert reason is not None
        raise reason
    return best


def plan_of(
    planner: str,
    deployment: Deployment,
    pipelines: Sequence[Pipeline],
    router: Builtin,
    routing: str,
    *,
    shares: Mapping[str, float] | None = None,
    bound_rps: float | None = None,
    bound: str = "",
    notes: Sequence[str] = (),
    options: Mapping[str, float | str] | None = None,
    evidence: object = None,
) -> Plan:
    """A plan of costed pipelines, replica by replica, on the ground that plans are compared by.

    Parameters
    ----------
    pipelines
        Configuration of each replica of the deployment, in their order.
    shares
        Share of the requests by replica, where it is fixed.
    """
    simulated = Deployment(
        deployment.name,
        tuple(
            grounded(one, pipeline)
            for one, pipeline in zip(deployment.replicas, pipelines, strict=True)
        ),
        deployment.links,
        deployment.default_link,
    )
    return Plan(
        planner=planner,
        groups=tuple(
            group_of(one.name, one.role, pipeline, (shares or {}).get(one.name, float("nan")))
            for one, pipeline in zip(simulated.replicas, pipelines, strict=True)
        ),
        routing=routing,
        usd_per_h=simulated.usd_per_h,
        bound_rps=bound_rps,
        bound=bound,
        serving=simulated,
        router=router,
        pipelines=tuple(pipelines),
        notes=tuple(filter(None, notes)) + idle(pipelines),
        options=dict(options or {}),
        evidence=evidence,
    )


def group_of(name: str, phase: str, pipeline: Pipeline, share: float) -> Group:
    """The GPUs of a pipeline, stage by stage."""
    machines = pipeline.model.machines
    stages = tuple(
        (machines[s.machine].name, machines[s.machine].gpu.name, s.gpus, s.layers)
        for s in pipeline.stages
    )
    return Group(name, phase, stages, share)


def idle(pipelines: Sequence[Pipeline]) -> tuple[str, ...]:
    """Which GPUs of the cluster no pipeline uses, in one sentence; nothing where all are used."""
    if not pipelines:
        return ()
    machines = pipelines[0].model.machines
    left = [machine.count for machine in machines]
    for pipeline in pipelines:
        for stage in pipeline.stages:
            left[stage.machine] -= stage.gpus
    counts = summed((one.gpu.name, free) for one, free in zip(machines, left, strict=True))
    unused = [f"{n} x {gpu}" for gpu, n in counts.items() if n]
    return (f"Idle: {', '.join(unused)}.",) if unused else ()


def best_over_rates(question: Question, effort: Effort, plan: Callable[[Question], Plan]) -> Plan:
    """The plan that carries most of those for the case's load and for higher ones.

    Attainment at a load that every design carries tells none from another.
    """
    limit = bound(question)
    asked = question.rate_rps
    most = limit.rps() if limit else asked
    rates = [asked, *(share * most for share in _SHARES if share * most > asked)]
    best = plan(question)
    short = ground.short(question, effort.requests)
    value = screened(best, short, question.seed, precision=0.05)
    for rate in rates[1 : effort.rates]:
        one = plan(replace(question, rate_rps=rate))
        # Most cannot reach the best so far: one run shows it.
        if value > 0 and margin(one, short, value, question.seed) < 0:
            continue
        found = screened(one, short, question.seed, start_rps=value or None, precision=0.05)
        if found > value:
            best, value = one, found
    return best


def too_few_groups(question: Question, error: InfeasibleError) -> InfeasibleError:
    """The error, or that pipelines would be too long where memory as such suffices."""
    costs = ground.costs(question)
    usable = sum(
        machine.count * costs.rates(number, 1).usable_bytes
        for number, machine in enumerate(costs.machines)
    )
    if usable < 2 * question.llm.weight_bytes(question.engine.precision):
        return error
    return InfeasibleError(
        f"{question.llm.name} fits too few groups of {question.cluster.name} in pipelines of at "
        f"most {costs.settings.max_stages} stages.",
        resolve="use larger machines, or a planner of layers.",
    )
