r"""What a fleet can be divided into: whole replicas with their phases, the best bounds first.

A machine is divided into instances: a tensor-parallel degree, with as many pipeline stages as the
model takes at it, each for prefill, decode or both; or it stays idle. Machines that are alike are
one kind, and a layout says how many of them are divided in which way, not which.

What a replica is worth at prices of work bounds any router over any set of replicas. Every request
takes work :math:`W_p` of each part p: prompt tokens, their pairs, decode tokens, and cached tokens
read by them. Whatever the router does, the replicas r of a design serve at most

.. math::
    \lambda \le \sum_r v_r, \qquad
    v_r = \max_{steps} \frac{\sum_p \pi_p w_p + \theta\,\tau\,b}{T} - \theta\,b, \qquad
    \sum_p \pi_p W_p = 1

requests/s at any prices :math:`\pi \ge 0`, where a step of T seconds does work w and decodes b
requests (weak duality). The target :math:`\tau` of TPOT holds on average over the tokens of those
that meet it, priced by :math:`\theta \ge 0`; tokens of the others, at most those of the longest
replies, have steps and a price of their own. T is a line between the knots of the step model, over
pairs and over cached tokens, of which the KV cache holds M, so that the largest value stands at a
knot, with none or the most of them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from typing import TypeAlias

import numpy as np

from hetero.arrays import Floats
from hetero.bounds import StepKind, fleet_rps
from hetero.costs.cost import CostModel, PipelineStage
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import replica
from hetero.costs.transfer import Bits
from hetero.deployment import Replica, Role
from hetero.errors import HeteroError
from hetero.grouping import grouped
from hetero.question import Load

MOST_STEP_TOKENS = 8192.0
"""Of the steps that prompts may be cut into."""

_DECODE = (0.0, 0.15, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)  # of the price of a request
_CACHED = (0.0, 0.4, 0.8, 1.0)  # of that of its decoding
_LATE = ((1.0, 0.0), (0.0, 1.0), (0.0, 4.0), (0.6, 1.0), (0.6, 4.0))  # price of late tokens, theta


@dataclass(frozen=True, slots=True, eq=False)
class WorkPrices:
    """Prices of the parts of the work in requests per unit, shape (P,) each.

    Attributes
    ----------
    prompt, pair, token, cached
        Per prompt token, pair, decode token and cached token.
    late
        Share of its price that a decode token of a request that misses its target has.
    theta
        Per decoding request of a step beyond the target of TPOT [requests/s].
    tpot_s
        That target; 0 without one, where theta is 0.
    longest
        Tokens of the longest prompt.
    """

    prompt: Floats
    pair: Floats
    token: Floats
    cached: Floats
    late: Floats
    theta: Floats
    tpot_s: float
    longest: float

    @classmethod
    def of(cls, load: Load, *, pairs: float, prompts: bool = True) -> WorkPrices:
        """A grid of prices for the requests of a load.

        Parameters
        ----------
        pairs
            Prompt tokens that take as long as a pair, about.
        prompts
            Whether prompts are work, which prefix caches may spare.

        Examples
        --------
        >>> from hetero.latency.step import StepModel
        >>> from hetero.workload import Trace
        >>> even = Load(Trace([0.0], [1000], [101]), 1.0)
        >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
        >>> found = WorkPrices.of(even, pairs=0.0).values(Replica("a", step, kv_tokens=50_000))
        >>> bool(6.1 < found.min() < 7.1)  # 1 / (0.1 s of prefill + 100 steps of 30 ms / 48)
        True
        """
        inputs = load.trace.input_tokens.astype(np.float64)
        steps = np.maximum(load.trace.output_tokens.astype(np.float64) - 1.0, 0.0)
        cached = float((steps * inputs + steps * (steps - 1.0) / 2.0).mean())
        slo_s, met = load.slo.tpot_s, int(np.ceil(load.goal * len(steps) - 1e-9))
        prompt = float(inputs.mean() + pairs * (inputs**2).mean() / 2.0)
        least = float(np.sort(steps)[:met].sum()) / len(steps)
        rows = []
        for share, read, (late, theta) in product(_DECODE, _CACHED, _LATE if slo_s else _LATE[:1]):
            token = late * float(steps.mean()) + (1.0 - late) * least
            parts = np.array([1.0 - share, share * (1.0 - read), share * read])
            work = np.array([prompt, token, cached])
            if (work[parts > 0] > 0).all() and (prompts or share == 1.0):
                first, each, held = parts / np.maximum(work, 1e-300)
                slow = theta * share / max(token, 1e-300) / slo_s if slo_s else 0.0
                rows.append((first, pairs * first, each, held, late, slow))
        first, pair, each, held, late_share, slow = np.array(rows).T
        return cls(first, pair, each, held, late_share, slow, slo_s or 0.0, float(inputs.max()))

    def values(self, replica: Replica) -> Floats:
        """The most that a replica adds to the rate at each price, shape (P,) [requests/s]."""
        engine, found = replica.engine, np.full(len(self.prompt), np.inf)
        chunked = engine.batching == "chunked"
        most = max(engine.max_step_tokens, MOST_STEP_TOKENS if chunked else self.longest)
        batch = np.arange(1.0, engine.max_batch + 1.0)
        for piece in replica.step.pieces:
            knots = piece.knots_tokens
            alone = np.array([1.0, *knots[(knots > 1.0) & (knots < most)], most])
            # New tokens and decoding requests: prefill alone, decode alone, and both at once.
            corners = {"prefill": [(alone, 0.0 * alone)], "decode": [(batch, batch)]}
            both = (np.repeat(alone, len(batch)), np.tile(batch, len(alone)))
            mixed = [both, (batch + 1.0, batch)] if chunked else []
            corners["both"] = [*corners["prefill"], *corners["decode"], *mixed]
            n, b = (np.concatenate(one) for one in zip(*corners[replica.role], strict=True))
            n, b = n[n >= b], b[n >= b]
            straight, best = replace(piece, bends=None), np.zeros_like(found)  # bends only add
            for held, longest in product((0.0, float(replica.kv_tokens)), (0.0, self.longest)):
                cached, pairs = np.where(b > 0, held, 0.0), (n - b) * longest
                seconds = straight.seconds(n, b, cached, pairs)[:, None]
                parts = ((n - b, self.prompt), (pairs, self.pair), (cached, self.cached))
                work = sum(np.multiply.outer(*part) for part in parts)
                token, slack = b[:, None] * self.token, b[:, None] * self.theta
                met = (work + token + slack * self.tpot_s) / seconds - slack
                missed = (work + self.late * token) / seconds
                best = np.maximum(best, np.maximum(met, missed).max(axis=0))
            found = np.minimum(found, best)
        return found


Parts: TypeAlias = tuple[tuple[Pipeline, Role], ...]
Division: TypeAlias = tuple[tuple[int, int, Role], ...]
"""Instances of one machine by degree, pipeline stages and phase; none where it is idle."""

_DEGREES = (8, 4, 2, 1)
_ROLES: tuple[Role, ...] = ("both", "prefill", "decode")
_LEAST_TOKENS = 16  # of a KV cache: a block


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaLayout:
    """Pipelines with their phases, and the bits in which KV caches travel between them."""

    parts: Parts
    bits: Bits

    @property
    def split(self) -> bool:
        """Whether some replicas serve one phase."""
        return any(role != "both" for _, role in self.parts)

    def runs(self) -> bool:
        """Whether both phases are served, and the engine can run and connect all replicas."""
        ends: dict[Role, set[PipelineStage]] = {role: set() for role in _ROLES}
        for pipeline, role in self.parts:
            if pipeline.model.misfit(pipeline.stages, role):
                return False
            ends[role].add(pipeline.stages[0])
        if not self.parts or bool(ends["prefill"]) != bool(ends["decode"]):
            return False
        splits = self.parts[0][0].model.splits
        return all(splits(a, b) for a, b in product(ends["prefill"], ends["decode"]))


@dataclass(frozen=True, eq=False)
class ReplicaSpace:
    """All layouts of a fleet.

    Parameters
    ----------
    bits
        In which KV caches may travel.
    prices
        Prices of work that layouts are bounded by.
    replica
        A costed pipeline as it is simulated.
    split
        Whether replicas may serve one phase.

    Examples
    --------
    >>> from hetero import workload
    >>> from hetero.catalog import llm
    >>> from hetero.cluster import cluster
    >>> from hetero.question import Load
    >>> costs = CostModel(cluster("thunderserve-a5000-pair"), llm("Llama-3-8B"))
    >>> chats = Load(workload.load("azure2023_conv"), 1.0)
    >>> space = ReplicaSpace(costs, (16,), WorkPrices.of(chats, pairs=0.0))
    >>> space.count, [len(one.parts) for _, some in space.layouts() for one in some]
    (10, [2, 2, 1])
    """

    costs: CostModel
    bits: tuple[Bits, ...]
    prices: WorkPrices
    replica: Callable[[Pipeline, str, Role], Replica] = replica
    split: bool = True
    _parts: dict[tuple[int, Division], Parts] = field(default_factory=dict, repr=False)
    _values: dict[object, Floats] = field(default_factory=dict, repr=False)

    @cached_property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of machines that are alike, kind by kind."""
        found = grouped(
            ((one.gpu, one.count, one.link, one.region, one.usd_per_h, self.costs.reach_s(m)), m)
            for m, one in enumerate(self.costs.machines)
        )
        return tuple(map(tuple, found.values()))

    @cached_property
    def divisions(self) -> list[list[tuple[float, Division]]]:
        """By kind its divisions with their values at the prices that bound all layouts best."""
        ways = [self._divisions(numbers[0]) for numbers in self.kinds]
        worth = [
            np.array([self._worth(self.parts(of[0], one)) for one in each])
            for of, each in zip(self.kinds, ways, strict=True)
        ]
        best = [len(of) * one.max(axis=0) for of, one in zip(self.kinds, worth, strict=True)]
        at = int(np.sum(best, axis=0).argmin())
        pairs = [
            zip(one[:, at].tolist(), each, strict=True)
            for one, each in zip(worth, ways, strict=True)
        ]
        return [sorted(each, key=lambda one: -one[0]) for each in pairs]

    @cached_property
    def count(self) -> int:
        """Ways to divide the fleet, with those that serve only one phase or that no engine runs."""
        pairs = zip(self.kinds, self.divisions, strict=True)
        return math.prod(math.comb(len(one) + len(ways) - 1, len(one)) for one, ways in pairs)

    def parts(self, machine: int, division: Division) -> Parts:
        """Costed replicas of a divided machine."""
        if (key := (machine, division)) not in self._parts:
            self._parts[key] = tuple(
                (self._pipeline(machine, degree, stages), role) for degree, stages, role in division
            )
        return self._parts[key]

    def bound_rps(self, layout: ReplicaLayout) -> float:
        """The most that a layout serves, whatever the router [requests/s]."""
        return float(self._worth(layout.parts).min())

    def most_rps(self, load: Load) -> float:
        """Rate of a load that no layout sustains, whatever the router [requests/s].

        See :mod:`hetero.bounds`; closer than a sum of :meth:`bound_rps`, and for all layouts
        together.
        """
        kinds, gpus = list[StepKind](), dict[str, int]()
        for of, ways in zip(self.kinds, self.divisions, strict=True):
            machine = self.costs.machines[of[0]]
            gpus[machine.name] = len(of) * machine.count
            for instance in sorted({one for _, division in ways for one in division}):
                ((pipeline, role),) = self.parts(of[0], (instance,))
                one = self.replica(pipeline, "", role)
                name = f"{machine.name}, {pipeline.label}, {role}"
                kinds.append(StepKind.of(one, machine.name, name, most_tokens=MOST_STEP_TOKENS))
        return fleet_rps(gpus, kinds, load.trace, goal=load.goal, tpot_s=load.slo.tpot_s)

    def key(self, layout: ReplicaLayout) -> object:
        """The same for layouts that differ only in which of alike machines does what."""
        alike = (tuple(sorted(contents(layout, m) for m in numbers)) for numbers in self.kinds)
        return (*alike, layout.bits if layout.split else 0)

    def layouts(self) -> Iterator[tuple[float, list[ReplicaLayout]]]:
        """All ways to divide the fleet, the best first at the prices that bound all best.

        They come with what neither they nor any after them exceed [requests/s]; as a layout for
        each number of bits where phases are split, and none where nothing runs.
        """
        order = [(kind, m) for kind, numbers in enumerate(self.kinds) for m in numbers]
        worth = [[value for value, _ in each] for each in self.divisions]
        for value, state in best_first(worth, [kind for kind, _ in order]):
            own = (
                (m, self.divisions[kind][i][1]) for (kind, m), i in zip(order, state, strict=True)
            )
            parts = tuple(part for m, one in own for part in self.parts(m, one))
            found = [ReplicaLayout(parts, bits) for bits in self.bits]
            found = found if found[0].split else found[:1]
            yield value, found if found[0].runs() else []

    def neighbours(self, layout: ReplicaLayout) -> list[tuple[str, ReplicaLayout]]:
        """Layouts one change away, the best bounds first: of alike machines, of one, of phases."""
        found = list(self._flipped(layout))
        for kind, numbers in enumerate(self.kinds):
            groups = grouped((contents(layout, m), m) for m in numbers)
            for alike, (_, division) in product(groups.values(), self.divisions[kind]):
                for n in sorted({len(alike), (len(alike) + 1) // 2, 1}):
                    some = alike[:n]
                    # What spans machines goes as a whole.
                    kept = [part for part in layout.parts if not _machines(part[0]) & set(some)]
                    made = [part for m in some for part in self.parts(m, division)]
                    where = ", ".join(self.costs.machines[m].name for m in some)
                    changed = ReplicaLayout((*kept, *made), layout.bits)
                    found.append((f"{where} {_words(division)}", changed))
        good = [one for one in found if one[1].runs()]
        return sorted(good, key=lambda one: -self.bound_rps(one[1]))

    def _flipped(self, layout: ReplicaLayout) -> Iterator[tuple[str, ReplicaLayout]]:
        """Another phase for a replica of each kind, or one each for two of them."""
        first: dict[object, int] = {}
        for k, (pipeline, role) in enumerate(layout.parts):
            first.setdefault((pipeline.label, role), k)
        changes: list[dict[int, Role]] = [{k: r} for k in first.values() for r in self._roles]
        if len(self._roles) > 1:
            pairs = product(first.values(), repeat=2)
            changes += [{a: "prefill", b + (a == b): "decode"} for a, b in pairs]
        for one in changes:
            if max(one) < len(layout.parts):
                parts = tuple((p, one.get(k, role)) for k, (p, role) in enumerate(layout.parts))
                words = ", ".join(f"{layout.parts[k][0].label} for {r}" for k, r in one.items())
                yield words, ReplicaLayout(parts, layout.bits)

    @cached_property
    def _roles(self) -> tuple[Role, ...]:
        alone = len(self.costs.machines) == 1 or self.costs.cluster.network is not None
        return _ROLES if alone and self.split else _ROLES[:1]

    def _worth(self, parts: Parts) -> Floats:
        """The most that replicas serve together at each price."""
        found = np.zeros_like(self.prices.prompt)
        for pipeline, role in parts:
            stages = zip(pipeline.stages, pipeline.machines, strict=True)
            key = (*((one.gpu.name, one.link, s.gpus, s.layers) for s, one in stages), role)
            if key not in self._values:
                self._values[key] = self.prices.values(self.replica(pipeline, "", role))
            found = found + self._values[key]
        return found

    def _divisions(self, machine: int) -> list[Division]:
        """Idle, and every division that leaves no room for a further instance."""
        count = self.costs.machines[machine].count
        shapes = [
            (degree, stages)
            for degree in _DEGREES
            if degree <= count and self.costs.divides(degree)
            for stages in [self._stages(machine, degree)]
            if stages
        ]
        instances = [(*shape, role) for shape in shapes for role in self._roles]
        least = min((degree * stages for degree, stages in shapes), default=count + 1)

        def fill(left: int, start: int) -> Iterator[Division]:
            if left < least:
                yield ()
            for k in range(start, len(instances)):
                rest = left - instances[k][0] * instances[k][1]
                if rest >= 0:
                    yield from ((instances[k], *more) for more in fill(rest, k))

        return [(), *(fill(count, 0) if shapes else ())]

    def _stages(self, machine: int, degree: int) -> int:
        """Fewest pipeline stages in which the model fits a machine at a degree; 0 if in none."""
        for stages in range(1, self.costs.machines[machine].count // degree + 1):
            try:
                if self._pipeline(machine, degree, stages).kv_tokens >= _LEAST_TOKENS:
                    return stages
            except HeteroError:
                continue
        return 0

    def _pipeline(self, machine: int, degree: int, stages: int) -> Pipeline:
        cuts = [round(k * self.costs.llm.layers / stages) for k in range(stages + 1)]
        return self.costs.pipeline(
            [PipelineStage(machine, degree, b - a) for a, b in pairwise(cuts)]
        )


def best_first(
    worth: Sequence[Sequence[float]], kinds: Sequence[int]
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All choices of one entry each for machines of these kinds, by their sums, the largest first.

    ``worth`` falls along each kind; machines of a kind stand side by side, and which of them has
    which entry makes no difference.

    Examples
    --------
    >>> list(best_first([[3.0, 1.0]], [0, 0]))
    [(6.0, (0, 0)), (4.0, (1, 0)), (2.0, (1, 1))]
    """

    def entry(state: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return -sum(worth[k][i] for k, i in zip(kinds, state, strict=True)), state

    heap = [entry((0,) * len(kinds))]
    while heap:
        negative, state = heapq.heappop(heap)
        yield -negative, state
        # Each state has one parent: with its last number that is not 0 one lower.
        for j in range(max((j for j, i in enumerate(state) if i), default=0), len(kinds)):
            i, follows = state[j] + 1, j > 0 and kinds[j - 1] == kinds[j]
            if i < len(worth[kinds[j]]) and not (follows and i > state[j - 1]):
                heapq.heappush(heap, entry((*state[:j], i, *state[j + 1 :])))


def _machines(pipeline: Pipeline) -> set[int]:
    return {stage.machine for stage in pipeline.stages}


def contents(layout: ReplicaLayout, machine: int) -> tuple[object, ...]:
    """What stands on a machine: the same where machines are divided in the same way."""
    own = []
    for pipeline, role in layout.parts:
        if machine in (on := _machines(pipeline)):
            # Pipelines over machines are told apart by these.
            where = tuple(s.machine if len(on) > 1 else -1 for s in pipeline.stages)
            own.append((where, tuple((s.gpus, s.layers) for s in pipeline.stages), role))
    return tuple(sorted(own))


def _words(division: Division) -> str:
    each = (
        f"{n} x TP {degree}{f' PP {stages}' if stages > 1 else ''} for {role}"
        for (degree, stages, role), n in Counter(division).items()
    )
    return f"divided into {', '.join(each)}" if division else "left idle"
