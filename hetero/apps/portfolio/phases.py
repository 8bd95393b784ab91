"""Groups of mixed GPUs: phases on different groups (ThunderServe), and both on each (HexGen)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hetero.apps.portfolio.base import Adapter
from hetero.apps.portfolio.bound import bound
from hetero.apps.portfolio.build import idle, of_baseline, plan_of
from hetero.apps.portfolio.effort import Effort
from hetero.apps.portfolio.replicas import only
from hetero.apps.portfolio.score import margin, screened
from hetero.catalog.engines import EngineStage
from hetero.costs.cost import PipelineStage
from hetero.costs.transfer import KvTransfer
from hetero.errors import InfeasibleError
from hetero.planners import ground
from hetero.planners.baselines.hexgen import hexgen
from hetero.planners.thunderserve import plan as phase_plan
from hetero.planners.thunderserve.tabu import TabuSettings
from hetero.plans import Plan
from hetero.question import Question

_SHARES = (0.5, 0.3, 0.7)  # of the bound on throughput, which nothing reaches


@dataclass(frozen=True)
class PhaseSplitting(Adapter):
    """Prefill and decode on different groups of GPUs (ThunderServe).

    Parameters
    ----------
    search
        ``"patterns"``: our integer program over groups, then tabu search; ``"tabu"``: the search
        of the paper.
    """

    search: phase_plan.Search = "patterns"

    @property
    def name(self) -> str:
        """Its name."""
        return "phase splitting" if self.search == "patterns" else f"phase splitting, {self.search}"

    def unfit(self, question: Question) -> str | None:
        """No network, no KV cache on its way."""
        reason = ground.unfit(question) or ground.unfit_split(question)
        if reason is None and not _platforms(question):
            engine = question.engine.serving.title
            gpus = ", ".join(question.cluster.gpu_types)
            return f"{engine} has no connector that moves KV caches between {gpus}."
        return reason

    def _plan(self, question: Question) -> Plan:
        # KV caches travel between devices of one platform only: the best of them is taken.
        best: tuple[float, Plan] | None = None
        reason: InfeasibleError | None = None
        parts = _platforms(question)
        for numbers in parts:
            whole = len(numbers) == len(question.cluster.machines)
            part = question if whole else only(question, numbers)
            try:
                plan = _over_rates(part, self.effort, self._at_rate)
            except InfeasibleError as error:
                reason = reason or _why(part, error)
                continue
            plan = plan if whole else _within(question, numbers, plan)
            value = -1.0
            if len(parts) > 1:
                short = ground.short(question, self.effort.requests)
                value = screened(plan, short, question.seed, precision=0.05)
            if best is None or value > best[0]:
                best = value, plan
        if best is None:
            assert reason is not None
            raise reason from None
        return best[1]

    def _at_rate(self, question: Question) -> Plan:
        found = phase_plan.plan(
            question.cluster,
            question.llm,
            ground.demand(question),
            ground.targets(question),
            search=self.search,
            settings=ground.costs(question).settings,
            transfer=KvTransfer(bits=question.transfer_bits),
            tabu=TabuSettings(
                steps=self.effort.tabu_steps,
                neighbours=self.effort.tabu_neighbours,
                stall=max(1, self.effort.tabu_steps // 3),
            ),
            seed=question.seed,
        )
        share = found.orchestration.share
        total = float(share.sum()) or 1.0
        shares = dict(zip(found.names[0], share.sum(axis=1) / total, strict=True))
        shares |= dict(zip(found.names[1], share.sum(axis=0) / total, strict=True))
        title = f"{self.name} on {question.cluster.name}"
        return plan_of(
            self.name,
            found.deployment(name=title),
            [*found.prefill, *found.decode],
            found.router(),
            "fixed shares of pairs of replicas, in rotation",
            shares={name: float(value) for name, value in shares.items()},
            notes=(
                f"{100 * found.value.attainment:.1f} % meet their targets at "
                f"{question.rate_rps:.4g} requests/s by the planner's own account.",
                f"KV caches travel in {question.transfer_bits} bits.",
            ),
        )


@dataclass(frozen=True)
class HexGen(Adapter):
    """Groups of mixed GPUs that serve both phases, by genetic search (HexGen)."""

    @property
    def name(self) -> str:
        """Its name."""
        return "HexGen"

    def unfit(self, question: Question) -> str | None:
        """Groups span machines."""
        return ground.unfit(question) or ground.unfit_network(question)

    def _plan(self, question: Question) -> Plan:
        try:
            return _over_rates(question, self.effort, self._at_rate)
        except InfeasibleError as error:
            raise _why(question, error) from None

    def _at_rate(self, question: Question) -> Plan:
        found = hexgen(
            ground.costs(question),
            ground.demand(question),
            ground.requests(question, self.effort.requests),
            ground.targets(question),
            generations=self.effort.generations,
            population=self.effort.population,
            children=2 * self.effort.population,
            seed=question.seed,
        )
        return of_baseline(self.name, found, routing="shares by capacity, in rotation")


def _platforms(question: Question) -> tuple[tuple[int, ...], ...]:
    """Numbers of the machines between which KV caches can be sent, platform by platform."""
    machines, engine = question.cluster.machines, question.engine.serving
    found: dict[object, list[int]] = {}
    for number, machine in enumerate(machines):
        seen = EngineStage(number, machine.gpu.name, machine.gpu.vendor, 1)
        if engine.splits(seen, seen):
            where = engine.platform(machine.gpu.name, machine.gpu.vendor)
            found.setdefault(where, []).append(number)
    return tuple(map(tuple, found.values()))


def _within(question: Question, numbers: tuple[int, ...], plan: Plan) -> Plan:
    """A plan of some of the machines as one of the whole cluster, whose other GPUs are idle."""
    costs = ground.costs(question)
    pipelines = tuple(
        costs.pipeline([PipelineStage(numbers[s.machine], s.gpus, s.layers) for s in one.stages])
        for one in plan.pipelines
    )
    notes = [note for note in plan.notes if not note.startswith("Idle: ")]
    return replace(plan, pipelines=pipelines, notes=(*notes, *idle(pipelines)))


def _why(question: Question, error: InfeasibleError) -> InfeasibleError:
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


def _over_rates(question: Question, effort: Effort, plan: Callable[[Question], Plan]) -> Plan:
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
