"""The value of a design: the lower level solved, every part of it once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hetero.costs.attainment import Decode, Pairs, Prefill
from hetero.costs.cost import CostModel
from hetero.costs.demand import Demand
from hetero.costs.groups import PHASES, Design, Fleet, Group, Phase
from hetero.costs.parallel import Configurations
from hetero.costs.pipeline import Pipeline
from hetero.costs.replicas import split
from hetero.costs.transfer import KvTransfer
from hetero.planners.thunderserve.orchestrate import Orchestration, orchestrate
from hetero.routers.pairs import PairShares
from hetero.simulator.metrics import Slo, attainment
from hetero.simulator.replicas import simulate
from hetero.workload import Trace

_TIE = 1e-3
_MOST_HEADROOM = 3.0


@dataclass(frozen=True, slots=True)
class Value:
    """What a design attains.

    Attributes
    ----------
    score
        What searches maximise: the attainment, and among designs that attain the same the one
        whose capacities exceed the demand most (a thousandth at three times the demand). Minus 1
        for a design that cannot serve.
    attainment
        Share of the requests that meet their targets.
    headroom
        Smaller capacity of the two phases over the demand.
    """

    score: float
    attainment: float
    headroom: float


_NOTHING = Value(-1.0, 0.0, 0.0)


def weights(
    parts: Sequence[tuple[str, Pipeline, Phase]], found: Orchestration
) -> dict[tuple[str, str], float]:
    """Shares above 0 of an orchestration by the names of the two replicas."""
    first, second = ([name for name, _, at in parts if at == phase] for phase in PHASES)
    above = zip(*np.nonzero(found.share), strict=True)
    return {(first[i], second[j]): float(found.share[i, j]) for i, j in above}


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates designs of a fleet for a demand and its targets; results are kept.

    Parameters
    ----------
    iterations
        Transportation problems per design at most.
    fixed
        Pipelines of groups whose parallel configuration is not to be deduced but kept, for
        rescheduling without a reload.
    sample
        Requests with their arrivals, whose simulation under the shares of the formulas says what
        a design attains; by default the formulas say it.
        Source: ThunderServe, section 3.3: DistServe's simulator estimates the attainment.
    """

    model: CostModel
    demand: Demand
    slo: Slo
    transfer: KvTransfer = field(default_factory=KvTransfer)
    iterations: int = 4
    fixed: tuple[tuple[Group, Pipeline], ...] = ()
    sample: Trace | None = None
    _values: dict[Design, Value] = field(default_factory=dict, repr=False)
    _prefill: dict[Group, Prefill] = field(default_factory=dict, repr=False)
    _decode: dict[Group, Decode] = field(default_factory=dict, repr=False)
    _moves: dict[tuple[Group, Group], tuple[float, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def fleet(self) -> Fleet:
        """The machines as the search sees them."""
        return Fleet(self.model, frozenset(self._kept))

    @cached_property
    def configurations(self) -> Configurations:
        """Parallel configurations, each found once."""
        return Configurations(self.model, self.demand)

    @cached_property
    def _kept(self) -> dict[Group, Pipeline]:
        return dict(self.fixed)

    @property
    def evaluated(self) -> int:
        """Different designs evaluated so far."""
        return len(self._values)

    def pipeline(self, group: Group, phase: str) -> Pipeline | None:
        """Pipeline of a group in a phase, None where the model does not fit."""
        if group in self._kept:
            return self._kept[group]
        return self.configurations.best(group, "prefill" if phase == "prefill" else "decode")

    def pipelines(self, design: Design) -> tuple[list[Pipeline], list[Pipeline]] | None:
        """Prefill and decode pipelines in the order of the design; None if any does not fit."""
        found: dict[str, list[Pipeline]] = {"prefill": [], "decode": []}
        for group, phase in design:
            pipeline = self.pipeline(group, phase)
            if pipeline is None or pipeline.kv_tokens < 1:
                return None
            found[phase].append(pipeline)
        return found["prefill"], found["decode"]

    def parts(self, design: Design) -> list[tuple[str, Pipeline, Phase]]:
        """Name, pipeline and phase of every replica of a design that fits, first what prefills."""
        return [
            (f"{phase[0].upper()}{k} {one.label}", one, phase)
            for phase, built in zip(PHASES, self.pipelines(design) or (), strict=False)
            for k, one in enumerate(built, start=1)
        ]

    def pairs(self, design: Design) -> Pairs | None:
        """The pairs of replicas of a design; None if it lacks a phase or a group does not fit."""
        built = self.pipelines(design)
        if built is None or not all(built):
            return None
        first = [group for group, phase in design if phase == "prefill"]
        second = [group for group, phase in design if phase == "decode"]
        for group, pipeline in zip(first, built[0], strict=True):
            self._prefill[group] = self._prefill.get(group) or Prefill.of(pipeline, self.demand)
        for group, pipeline in zip(second, built[1], strict=True):
            self._decode[group] = self._decode.get(group) or Decode.of(pipeline, self.demand)
        times = np.empty((len(first), len(second), 2))
        for i, (a, source) in enumerate(zip(first, built[0], strict=True)):
            for j, (b, target) in enumerate(zip(second, built[1], strict=True)):
                if (a, b) not in self._moves:
                    self._moves[a, b] = self.transfer.seconds(source, target)
                times[i, j] = self._moves[a, b]
        return Pairs(
            self.demand,
            self.slo,
            tuple(self._prefill[group] for group in first),
            tuple(self._decode[group] for group in second),
            times[..., 0],
            times[..., 1],
        )

    def orchestration(self, design: Design) -> Orchestration | None:
        """Shares per pair of a design, None where it cannot serve."""
        pairs = self.pairs(design)
        return None if pairs is None else orchestrate(pairs, iterations=self.iterations)

    def value(self, design: Design) -> Value:
        """What a design attains; mirror images under machines of a kind are evaluated once."""
        # Groups whose pipelines are given have names, so no machine stands for another.
        key = design if self.fixed else self.fleet.canonical(design)
        if key not in self._values:
            self._values[key] = self._evaluate(key)
        return self._values[key]

    def _evaluate(self, design: Design) -> Value:
        pairs = self.pairs(design)
        if pairs is None:
            return _NOTHING
        found = orchestrate(pairs, iterations=self.iterations)
        met = found.attainment
        if self.sample is not None and met > 0:
            parts = self.parts(design)
            served = split("", parts, self.transfer)
            run = simulate(served, self.sample, PairShares(weights(parts, found)))
            met = attainment(run, self.slo)
        headroom = min(float(pairs.prefill_share.sum()), float(pairs.decode_share.sum()))
        tie = _TIE * min(headroom, _MOST_HEADROOM) / _MOST_HEADROOM
        return Value(met + tie, met, headroom)

    def values(self, designs: Iterable[Design], jobs: int = 1) -> list[Value]:
        """What several designs attain, in processes if ``jobs`` is not 1; the same either way."""
        wanted = list(designs)
        if jobs != 1:
            from joblib import Parallel, delayed

            keys = [design if self.fixed else self.fleet.canonical(design) for design in wanted]
            new = [key for key in dict.fromkeys(keys) if key not in self._values]
            found = Parallel(n_jobs=jobs)(delayed(self._evaluate)(key) for key in new)
            self._values.update(zip(new, found, strict=True))
        return [self.value(design) for design in wanted]
