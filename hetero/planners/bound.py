r"""A bound on throughput that no plan exceeds: work, and the GPUs that do it.

Whatever the plan, every request of I input and O output tokens takes each of the L layers through

- I prompt tokens, and :math:`I^2 / 2` pairs of attention,
- O - 1 decode tokens, that read at least :math:`\sum_{j=0}^{O-2} (I + j)` cached tokens,

and every step ends in the logits. One GPU of type g spends on one layer at least

.. math::
    \frac{\max(p_g (n + n_{pad}), w_g) + x_g(n) + o_g}{n}, \quad a_g, \quad k_g

seconds per token of a step of n tokens, per pair, and per cached token: the terms of the roofline
on a single GPU. Sharing a layer among t GPUs adds all-reduces and repeats the fixed part on each of
them, pipelines add hops and turns of waiting; neither takes any of this work away.

A step of b decode and m prompt tokens that takes T seconds is a point (m / T, b / T) of prompt and
decode tokens per second, and what a GPU does in any time is a mean of such points. T is straight
between its knots, so all of them lie in the convex hull of the steps at the knots: b up to the
engine's largest batch, b + m up to the tokens of its largest steps (or of the longest prompt, where
prompts are not cut). Where prompts go first a step has one of the two; chunks share it. With x the
GPUs of type g at corner k of its hull, y those busy with the other work c, and :math:`W` the work
of a mean request,

.. math::
    \max \lambda \quad\text{s.t.}\quad \sum_{gk} x_{gk} rate_{gkp} = \lambda W_p \;\forall p,
    \quad \sum_g y_{gc} / cost_{gc} = \lambda W_c \;\forall c,
    \quad \sum_k x_{gk} + \sum_c y_{gc} \le N_g \;\forall g .

Leaving every part of the work to whichever type does it best relaxes every plan, so no plan
finishes more requests per second from its first arrival to its last token. This bound knows no
targets and no memory; that of :func:`goodput_bound` knows caches, the time per token, steps that
prompts do not fill, and that one type decodes all of a request. Neither knows waiting: a gap to
them is no proof that a better plan exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.spatial import ConvexHull

from hetero.arrays import Floats
from hetero.bounds import StepKind, fleet_rps
from hetero.costs.pipeline import PipelineStage, Rates
from hetero.costs.replicas import compared_replica
from hetero.deployment import Engine, Replica
from hetero.errors import InfeasibleError, ParameterError
from hetero.latency.step import Piece, StepModel
from hetero.planners import ground
from hetero.planners.rignall import replay
from hetero.planners.rignall.model import island_inventory, island_model
from hetero.planners.rignall.rates import PHASES
from hetero.plans import Plan
from hetero.programs import Program
from hetero.question import Load, Question
from hetero.workload import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """The most that the GPUs of a case can serve.

    Attributes
    ----------
    gpus
        Number of GPUs of each type.
    rates
        Corners of what one GPU of a type does: prompt and decode tokens per second, shape (K, 2).
    cost_s
        GPU seconds per unit of each other part by type: pairs, cached tokens, steps and logits.
    amounts
        Work of each request, see :func:`amounts`, shape (6, N).
    """

    name: str
    gpus: Mapping[str, int]
    rates: Mapping[str, Floats]
    cost_s: Mapping[str, Floats]
    amounts: Floats

    def rps(self, share: float = 1.0) -> float:
        """Requests per second that no plan exceeds, any ``share`` of the trace's requests served.

        Who may leave requests out leaves out the largest, part by part of the work.

        Raises
        ------
        SolverError
            If the linear program ends without its optimum.
        """
        kept = max(1, int(np.ceil(share * self.amounts.shape[1] - 1e-9)))
        work = self.amounts[:, :kept].sum(axis=1) / kept
        speed = {name: self._speed(name) for name in self.gpus}
        # Parts that no request has cost 0; the rate is in units of its largest coefficient.
        scale = np.max([one.max(axis=0) for one in speed.values()], axis=0)
        unit = float((work / scale).max())
        program = Program()
        rate = program.variables(1, objective=1.0)
        balance = program.rows(len(work), lower=0.0, upper=0.0)
        program.entries(balance, rate, -(work / scale) / unit)
        for name, one in speed.items():
            busy = program.variables(len(one))
            program.entries(program.rows(1, upper=self.gpus[name]), busy, 1.0)
            program.entries(balance[None, :], busy[:, None], one / scale)
        # HiGHS: where types are equally good at a part, GLOP would share it out otherwise.
        solution = program.solve(solver="highs", names=f"the bound of {self.name}")
        return float(solution.values[rate[0]] / unit)

    def _speed(self, name: str) -> Floats:
        """Work per second of a GPU at each of its corners and at each other part, (K + 4, 6)."""
        rates, others = self.rates[name], 1.0 / np.maximum(self.cost_s[name], 1e-300)
        # The order of `amounts`: prompt tokens, pairs, decode tokens, and the rest.
        speed = np.zeros((len(rates) + len(others), 2 + len(others)))
        speed[: len(rates), [0, 2]] = rates
        speed[len(rates) :, [1, 3, 4, 5]] = np.diag(others)
        return speed


def bound(question: Question) -> Bound | None:
    """The bound of a case; None for :func:`~hetero.planners.ground.analytic` ones.

    None as well where prefix caches shorten prompts by as much as the router makes of them.

    Where a budget is given, it holds for the whole offer, and so for every part of it.

    Examples
    --------
    >>> import numpy as np
    >>> from hetero import catalog, workload
    >>> from hetero.cluster import cluster
    >>> chats = workload.load("azure2023_conv").sample(500, np.random.default_rng(0))
    >>> one = Question(cluster("thunderserve-cloud-32"), catalog.llm("LLaMA-1-30B"), chats, 5.0)
    >>> limit = bound(one)
    >>> bool(5.0 < limit.rps() < limit.rps(0.9) < 50.0)
    True
    """
    if ground.analytic(question):
        return None
    return None if ground.shares_prefixes(question) else _bound(question)


def goodput_bound(question: Question, served: float = 1.0) -> float | None:
    """Rate of a case's requests that no plan sustains for ever [requests/s]; None as of `bound`.

    Plans serve requests that miss their targets all the same, so that all the work has to be done,
    within the time per token that the goal asks for (:mod:`hetero.bounds`).

    Parameters
    ----------
    served
        Share that a plan serves at all: who turns requests away may leave the largest out.
    """
    if ground.analytic(question):
        return _ceiling(question) if served == 1.0 else None
    limit = bound(question)
    if limit is None:
        return None
    return limit.rps(served) / served if served < 1.0 else min(limit.rps(), _ceiling(question))


def capped(plan: Plan, question: Question, precision: float) -> Load:
    """What a plan is judged by, with the bound of the case as the most that it sustains.

    A plan that holds no copy of the longest request may turn away what the goal leaves.
    """
    load, made = question.load(precision=precision), plan.deployment
    longest = int((load.trace.input_tokens + load.trace.output_tokens).max())
    held = made is not None and longest <= max(one.kv_tokens for one in made.replicas)
    limit = goodput_bound(question, 1.0 if held else question.goal)
    return load if limit is None else replace(load, most_rps=min(limit, load.most_rps))


@lru_cache(maxsize=64)
def _ceiling(question: Question) -> float:
    drawn, counts = question.drawn_from or question.trace, question.cluster.gpu_counts
    # A plan with drafts, slowed down by their gain, is one without.
    gain, tpot_s = _gain(question), question.slo.tpot_s
    if ground.analytic(question):
        kinds = tuple(_islands(question))
    else:
        plain = replace(question.engine, speculation=None)
        kinds = tuple(_kinds(replace(question, engine=plain) if gain != 1.0 else question))
    goal, slowed_s = question.goal, tpot_s and gain * tpot_s
    return gain * fleet_rps(counts, kinds, drawn, goal=goal, tpot_s=slowed_s)


def _gain(question: Question) -> float:
    """Times that drafts make a token cheaper at most."""
    return max(1.0, question.engine.speculation.gain) if question.engine.speculation else 1.0


def _kinds(question: Question) -> Iterator[StepKind]:
    """Steps of the GPUs of a case: replicas of one stage, and pipelines by the terms of a layer.

    Engines that exist join GPUs of one type and degree; any others may be parts of one pipeline.
    """
    costs, llm = ground.costs(question), question.llm
    limited = costs.engine.limited
    for number in {
        (one.gpu, one.link, one.count): k for k, one in enumerate(costs.machines)
    }.values():
        machine = costs.machines[number]
        engine = question.engine.limits(machine.gpu)
        chunked, most = engine.batching == "chunked", float(_most_tokens(engine))
        name, there = machine.gpu.name, question.cluster.gpu_counts[machine.gpu.name]
        for gpus in filter(costs.divides, range(1, machine.count + 1)):
            pool = f"{gpus} x {name}" if limited else ""
            for one in _whole(question, number, gpus) if limited else ():
                ranks = one.engine.max_batch / engine.max_batch
                yield StepKind.of(one, name, pool, most_tokens=ranks * most)
            if limited and (there < 2 * gpus or costs.misfit(2 * [PipelineStage(number, gpus, 1)])):
                continue
            layer, parts = costs.rates(number, gpus), there // gpus
            ends_s = layer.step_s + layer.logits_s if limited else 0.0
            bends = layer.bends[layer.bends > 0]
            knots = np.array([0.0, *bends, 2.0 * max([*bends, 1.0])])
            layer_s = layer.products_s(knots) + layer.fixed_s + layer.reduce_s * knots
            cached_s, pair_s = np.array([layer.cached_s]), llm.layers * layer.pair_s
            piece = Piece(knots, llm.layers * layer_s + ends_s, llm.layers * cached_s, pair_s)
            free = layer.usable_bytes - llm.layers * layer.layer_bytes / parts
            held = free / (llm.layers * layer.kv_layer_bytes) if limited else np.inf
            batch = engine.max_batch // (2 if limited else 1)
            if held > 0:
                yield StepKind(name, gpus, pool, piece, held, batch, most, chunked, whole=False)


def _islands(question: Question) -> Iterator[StepKind]:
    """Steps of islands of every size and parallelism: prompts one by one, or decode batches."""
    model = island_model(question)
    for name, count in island_inventory(question).items():
        degrees = ((size, tp) for size in range(1, count + 1) for tp in range(1, size + 1))
        for size, tp in (one for one in degrees if one[0] % one[1] == 0):
            for phase in PHASES:
                first = phase == "prefill"
                dp = size // tp if first else 1
                with suppress(InfeasibleError):
                    one = replay.replica(
                        model, name, phase, tp=tp, dp=dp, size=size, engine=Engine()
                    )
                    yield StepKind.of(one, name, one.name, whole=first)


def _most_tokens(engine: Engine) -> int:
    """Tokens of a step at most: searches choose chunks, plans of layers keep to usual steps."""
    chunked = engine.batching == "chunked"
    return max(engine.max_step_tokens, *(ground.STEP_TOKENS if chunked else (0,)))


def _whole(question: Question, number: int, gpus: int) -> Iterator[Replica]:
    """Replicas of one stage, of one rank or of several that share the experts."""
    costs, machine = ground.costs(question), question.cluster.machines[number]
    if costs.most_layers(number, gpus, first=True, last=True) >= question.llm.layers:
        alone = costs.pipeline([PipelineStage(number, gpus, question.llm.layers)])
        yield compared_replica(alone, machine.name)
    ranks = range(2, machine.count // gpus + 1) if question.llm.experts else ()
    for count in (n for n in ranks if machine.count % (n * gpus) == 0):
        with suppress(InfeasibleError, ParameterError):
            yield ground.in_ranks(question, {machine.name: gpus}, count).replicas[0]


@lru_cache(maxsize=32)
def _bound(question: Question) -> Bound:
    costs = ground.costs(question)
    # Each of a machine's ranks has limits of its own.
    ranks = max(machine.count for machine in costs.machines) if question.llm.experts else 1
    rates: dict[str, Floats] = {}
    cost: dict[str, Floats] = {}
    longest = float((question.drawn_from or question.trace).input_tokens.max())
    for number, machine in enumerate(costs.machines):
        engine = question.engine.limits(machine.gpu)
        tokens, batch = ranks * _most_tokens(engine), ranks * engine.max_batch
        engine = replace(engine, max_step_tokens=tokens, max_batch=batch)
        # Tables were measured under an engine, each for one degree.
        for gpus in range(1, machine.count + 1) if costs.engine.limited else (1,):
            if gpus > 1 and not costs.divides(gpus):
                continue
            table = costs.measured(costs.machines[number], gpus)
            found = [_of_roofline(costs.rates(number, gpus), costs.llm.layers, engine, longest)]
            found += [_of_table(table.step, engine, longest)] if table else []
            # One type may stand in machines with other figures: the better counts.
            for corners, others in found:
                name, alone = machine.gpu.name, gpus * others
                known = [rates[name]] if name in rates else []
                rates[name] = _corners([*known, corners / gpus])
                cost[name] = np.minimum(cost.get(name, alone), alone)
    work = amounts(question.trace)
    work[2:] /= _gain(question)
    return Bound(question.name, question.cluster.gpu_counts, rates, cost, work)


def _of_table(table: StepModel, engine: Engine, longest: float) -> tuple[Floats, Floats]:
    """Corners and seconds per part by a table; the steps themselves are in its times."""
    piece = table.pieces[0]  # steps take the longest of them
    cached_s = piece.per_cached_token_s.min()
    if engine.batching == "chunked":
        cached_s = min(cached_s, piece.mixed_rows[0].min())
    corners = _steps(
        lambda n, b: piece.seconds(n, b, 0.0, 0.0), piece.knots_tokens, engine, longest
    )
    return corners, np.array([piece.per_pair_s, float(cached_s), 0.0, 0.0])


def _of_roofline(one: Rates, layers: int, engine: Engine, longest: float) -> tuple[Floats, Floats]:
    """Corners and seconds per part by the terms of a layer, see the module."""

    def seconds(n: Floats, _: Floats) -> Floats:
        return np.asarray(layers * (one.products_s(n) + one.fixed_s))

    batch = float(engine.max_batch)
    others = np.array(
        [layers * one.pair_s, layers * one.cached_s, one.step_s / batch, one.logits_s / batch]
    )
    return _steps(seconds, np.maximum(one.bends, 1.0), engine, longest), others


def _steps(
    seconds: Callable[[Floats, Floats], Floats], knots: Floats, engine: Engine, longest: float
) -> Floats:
    """Corners of the prompt and decode tokens per second of the steps that an engine forms."""
    chunked, most = engine.batching == "chunked", float(engine.max_step_tokens)
    prompt = most if chunked else max(most, longest)
    alone = np.append(knots[(knots >= 1.0) & (knots < prompt)], prompt)
    batch = np.arange(1.0, engine.max_batch + 1.0)
    tokens, decoding = [alone, batch], [np.zeros_like(alone), batch]
    if chunked:
        # From one prompt token beside the batch on, a step is a mixed one.
        n = np.concatenate([np.repeat(alone[None, :], len(batch), axis=0), batch[:, None] + 1.0], 1)
        b = np.repeat(batch[:, None], n.shape[1], axis=1)
        good = (n > b) & (n <= prompt)
        tokens, decoding = [*tokens, n[good]], [*decoding, b[good]]
    n, b = np.concatenate(tokens), np.concatenate(decoding)
    return _corners([np.stack([n - b, b], axis=1) / seconds(n, b)[:, None]])


def _corners(points: Sequence[Floats]) -> Floats:
    """Corners of the convex hull of points and the origin, the origin left out."""
    found = np.concatenate(points)
    hull = ConvexHull(np.concatenate([found, np.zeros((1, 2))]))
    return np.asarray(found[[k for k in hull.vertices if k < len(found)]])


def amounts(trace: Trace) -> Floats:
    """Work of every request, each part sorted by itself; shape (6, N).

    The parts are prompt tokens, pairs, decode tokens, cached tokens, steps and logits.
    """
    inputs = trace.input_tokens.astype(np.float64)
    steps = np.maximum(trace.output_tokens.astype(np.float64) - 1.0, 0.0)
    cached = steps * inputs + steps * (steps - 1.0) / 2.0
    return np.sort(np.array([inputs, inputs**2 / 2.0, steps, cached, steps, steps]), axis=1)
