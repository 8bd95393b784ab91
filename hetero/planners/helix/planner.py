"""Our planner: a bound, chains, lines of blocks, regions, exchange, and an exact end if small.

Every candidate is judged by its exact maximum flow on all links, none pruned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse.csgraph import connected_components

from hetero.catalog import Llm
from hetero.cluster import Cluster
from hetero.display import Column, Shown, Table
from hetero.errors import InfeasibleError
from hetero.placement import Flow, FlowNetwork, Links, Placement, Problem
from hetero.placement.network import bounds
from hetero.placement.throughput import HELIX_POINT, OperatingPoint
from hetero.planners.helix.assemble import Layout, exchange
from hetero.planners.helix.bound import PROOF, FlowBound, flow_bound, simple_bound
from hetero.planners.helix.exact import exact
from hetero.planners.helix.regions import LayoutPool, PlacementEffort, regions, too_small
from hetero.streams import stream

_EXACT = "exact program"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PlacementCandidate(Shown):
    """A placement with its maximum flow.

    Attributes
    ----------
    method
        Step of the planner that found it.
    bound
        No placement of the problem carries more [tokens/s].
    """

    placement: Placement
    flow: Flow
    method: str
    bound: float

    @property
    def tokens_per_s(self) -> float:
        """Its maximum flow [tokens/s]."""
        return self.flow.tokens_per_s

    @property
    def gap(self) -> float:
        """Distance to the bound over its flow."""
        return max(0.0, self.bound / self.tokens_per_s - 1)

    @property
    def mean_use(self) -> float:
        """Mean share of their throughput that flows through the nodes it uses."""
        return float(self.flow.utilisation[list(self.placement.used)].mean())

    def table(self) -> Table:
        """The flow through its nodes."""
        return self.flow.table()


@dataclass(frozen=True, slots=True)
class PlannerStep:
    """What was known after a step of the planner [tokens/s]."""

    name: str
    tokens_per_s: float
    bound: float
    seconds: float = field(compare=False)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FlowPlan(Shown):
    """The best placements that were found, and a bound on all.

    Attributes
    ----------
    best
        Distinct placements, the largest flow first. Behind them stand shallower ones of less
        flow, because the flow is not all that counts.
    bound
        Upper bound with how it came about.
    steps
        Progress: flow and bound after every step.
    """

    problem: Problem
    best: tuple[PlacementCandidate, ...]
    bound: FlowBound
    steps: tuple[PlannerStep, ...]

    @property
    def tokens_per_s(self) -> float:
        """Flow of the best placement."""
        return self.best[0].tokens_per_s

    @property
    def gap(self) -> float:
        """Distance of the best placement to the bound, over its flow."""
        return self.best[0].gap

    @property
    def proven(self) -> bool:
        """Whether no placement can be better, to 1e-5."""
        return self.gap <= 1e-5

    @property
    def seconds(self) -> float:
        """Elapsed time of the search."""
        return self.steps[-1].seconds

    def table(self) -> Table:
        """One row per placement."""
        columns = (
            Column("plan", of=lambda ranked: ranked[0]),
            Column("found by", of=lambda ranked: ranked[1].method),
            Column("flow", "tokens/s", 6, lambda ranked: ranked[1].tokens_per_s),
            Column("to the bound", "%", 3, lambda ranked: 100 * ranked[1].gap),
            Column("nodes used", of=lambda ranked: len(ranked[1].placement.used)),
            Column("depth", "nodes", 3, lambda ranked: ranked[1].flow.depth),
            Column("mean use", "%", 3, lambda ranked: 100 * ranked[1].mean_use),
        )
        verdict = "proven optimal" if self.proven else "the best flow lies between"
        return Table.of(
            f"{self.problem.llm.name} on {self.problem.name}",
            columns,
            enumerate(self.best, 1),
            f"Bound: {self.bound.tokens_per_s:,.2f} tokens/s ({verdict}); by work alone "
            f"{self.bound.simple_tokens_per_s:,.2f}.",
            *self._left_out(),
        )

    def _left_out(self) -> tuple[str, str]:
        """Which nodes the best placement does not use, and whether they could be used at all."""
        used = set(self.best[0].placement.used)
        idle = [node for k, node in enumerate(self.problem.nodes) if k not in used]
        small = ", ".join(node.name for node in idle if not np.any(node.tokens_per_s > 0))
        others = ", ".join(node.name for node in idle if np.any(node.tokens_per_s > 0))
        return (
            f"Too small for a layer and its KV cache: {small}." if small else "",
            f"Plan 1 leaves out {others}: no better one with them was found." if others else "",
        )


def place(
    cluster: Cluster,
    llm: Llm,
    *,
    links: Links | None = None,
    point: OperatingPoint = HELIX_POINT,
    effort: PlacementEffort | None = None,
    seed: int = 0,
) -> FlowPlan:
    """Plan of a cluster: see :func:`search`."""
    return search(Problem.of(cluster, llm, links=links, point=point), effort=effort, seed=seed)


def search(
    problem: Problem,
    *,
    effort: PlacementEffort | None = None,
    seed: int = 0,
    progress: Callable[[PlannerStep], None] | None = None,
) -> FlowPlan:
    """Placements of the largest flow that the planner finds, and a bound on every placement.

    Stops by counts, never by time: the same problem and seed give the same plan.

    Parameters
    ----------
    progress
        Called after every step.

    Raises
    ------
    InfeasibleError
        If the nodes hold too few layers, or no placement has any flow.

    Examples
    --------
    >>> from pipelines.studies.helix_artifact import problem
    >>> plan = search(problem("single-24", "70B"))
    >>> round(plan.tokens_per_s, 2), plan.proven
    (2045.64, True)
    """
    began = time.perf_counter()
    effort = effort or PlacementEffort()
    if reason := too_small(problem):
        raise InfeasibleError(reason, resolve="add nodes, or take a smaller model.")
    if _parted(problem):
        raise _nothing_flows(problem)
    upper = simple_bound(problem)
    found = LayoutPool(effort.keep)
    steps: list[PlannerStep] = []

    def done(name: str) -> None:
        steps.append(
            PlannerStep(name, found.value, max(upper, found.value), time.perf_counter() - began)
        )
        if progress is not None:
            progress(steps[-1])

    done("work alone")
    regions(problem, found, np.inf, effort.chains_only(), seed)
    done("chain")
    bound = FlowBound(upper, upper, 0)
    if effort.proof:
        bound = flow_bound(problem, known=found.value)
        upper = min(upper, bound.tokens_per_s)
        done("configurations")
    if not found.layouts or upper > found.value * (1 + 2 * PROOF):
        regions(problem, found, upper, effort, seed)
        done("blocks and exchange")
        if effort.proof and found.layouts and 1 + 2 * PROOF < upper / found.value <= 1.005:
            bound = flow_bound(problem, known=found.value)
            upper = min(upper, bound.tokens_per_s)
            done("finer configurations")
    if not found.layouts:
        raise _nothing_flows(problem)
    if upper > found.value * (1 + 2 * PROOF):
        before = upper, found.value
        upper = _close(problem, found, upper, effort, partial=False)
        if (upper, found.value) != before:
            done(_EXACT)
    bound = FlowBound(max(upper, found.value), bound.simple_tokens_per_s, bound.programs)
    return FlowPlan(problem, _candidates(found, bound), bound, tuple(steps))


def with_partial_inference(
    found: FlowPlan, *, effort: PlacementEffort | None = None, seed: int = 0
) -> FlowPlan:
    """A plan gone on with, where a node may start in the middle of its layers: s_j <= e_i < e_j.

    Its placements are judged anew, the best is exchanged further, and a small problem is closed
    by the exact program. The bounds of work and of configurations hold either way; one that the
    exact program gave without partial inference is dropped.

    Notes
    -----
    Source: Helix, section 4.4: partial inference in the search; s_j <= e_i < e_j.

    Examples
    --------
    >>> from pipelines.studies.helix_artifact import problem
    >>> plan = search(problem("single-24", "70B"))
    >>> round(with_partial_inference(plan).tokens_per_s, 2)  # the bound leaves no more
    2045.64
    """
    began = time.perf_counter()
    effort, problem = effort or PlacementEffort(), found.problem
    upper = min((step.bound for step in found.steps if step.name != _EXACT), default=np.inf)
    pool = LayoutPool(effort.keep)
    for one in found.best:
        pool.add(Layout(problem, *bounds(one.placement), partial=True), one.method)
    name = "partial inference"
    if upper > pool.value * (1 + 2 * PROOF):
        rounds, draws = effort.exchanges, stream(seed, name)
        pool.add(exchange(pool.best, rounds, draws, target=upper), name)
    if upper > pool.value * (1 + 2 * PROOF):
        upper = _close(problem, pool, upper, effort, partial=True)
    bound = FlowBound(max(upper, pool.value), found.bound.simple_tokens_per_s, found.bound.programs)
    seconds = found.seconds + time.perf_counter() - began
    step = PlannerStep(name, pool.value, bound.tokens_per_s, seconds)
    return FlowPlan(problem, _candidates(pool, bound), bound, (*found.steps, step))


def _close(
    problem: Problem, found: LayoutPool, upper: float, effort: PlacementEffort, *, partial: bool
) -> float:
    """The bound after the exact program, whose layout joins the others if it is better."""
    tree = effort.exact_nodes
    closed = exact(problem, known=found.value, upper=upper, nodes=tree, partial=partial)
    if closed is None:
        return upper
    layout, upper = closed
    if layout is not None:
        found.add(layout, _EXACT)
    return upper


def _candidates(found: LayoutPool, bound: FlowBound) -> tuple[PlacementCandidate, ...]:
    problem, best = found.best.problem, []
    for layout, method in found.sorted():
        ranges = tuple(
            (int(s), int(e)) if s >= 0 else None
            for s, e in zip(layout.starts, layout.stops, strict=True)
        )
        placement = Placement(problem, ranges, f"{problem.name}, {method}")
        flow = FlowNetwork(placement, layout.partial).max_flow()
        best.append(PlacementCandidate(placement, flow, method, bound.tokens_per_s))
    return tuple(best)


def timing_key(cluster: str, model: str, step: str) -> str:
    """Key of the recorded time after a step of planning one of Helix's clusters.

    Examples
    --------
    >>> timing_key("hetero-42", "70B", "blocks and exchange")
    'placement.hetero-42.70B.blocks-and-exchange'
    """
    return f"placement.{cluster}.{model}.{step.replace(' ', '-')}"


def _parted(problem: Problem) -> bool:
    """Whether nodes are without links to the coordinator, or in groups too small for the model.

    Nodes of a pipeline are linked with one another, so one group has to hold every layer.
    """
    n = len(problem.nodes)
    linked = problem.link_tokens_per_s > 0
    if not (linked[n, :n].any() and linked[:n, n].any()):
        return True
    count, label = connected_components(linked[:n, :n], directed=False)
    held = np.bincount(label, [node.max_layers for node in problem.nodes], minlength=count)
    return bool(held.max() < problem.llm.layers)


def _nothing_flows(problem: Problem) -> InfeasibleError:
    """Why no placement has a flow: a link to the coordinator, or between nodes, is missing."""
    capacity, n = problem.link_tokens_per_s, len(problem.nodes)
    names = [node.name for node in problem.nodes]
    for text, values in (("from", capacity[n, :n]), ("to", capacity[:n, n])):
        if not (values > 0).any():
            return InfeasibleError(
                f"No link {text} the coordinator of {problem.name} has any bandwidth, that of "
                f"'{names[0]}' among them.",
                resolve="give the links of the coordinator a bandwidth.",
            )
    inner = capacity[:n, :n] + np.diag(np.full(n, np.inf))
    a, b = np.unravel_index(int(inner.argmin()), inner.shape)
    return InfeasibleError(
        f"The links of {problem.name} part its nodes into groups that are each too small for "
        f"{problem.llm.name}; the slowest link is from '{names[a]}' to '{names[b]}' with "
        f"{inner[a, b]:g} tokens/s.",
        resolve="give such links a bandwidth, or add nodes on one side.",
    )
