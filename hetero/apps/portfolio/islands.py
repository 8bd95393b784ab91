"""Islands for mixtures of experts: the exact layout, and the Bayesian search (Rignall)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal, TypeAlias

from hetero.apps.portfolio import assumptions
from hetero.apps.portfolio.base import Adapter
from hetero.catalog import serving_engine
from hetero.catalog.engines import EnginePlatform
from hetero.deployment import Deployment
from hetero.errors import CatalogError, InfeasibleError
from hetero.latency.models.moe_devices import moe_device
from hetero.planners.rignall import replay
from hetero.planners.rignall.assignment import Assignment
from hetero.planners.rignall.divider import Divider
from hetero.planners.rignall.exact import exact
from hetero.planners.rignall.model import IslandModel, devices_of
from hetero.planners.rignall.parallelism import Benchmark
from hetero.planners.rignall.rates import PHASES, IslandClass, Phase
from hetero.planners.rignall.search import Objective, search
from hetero.plans import Group, Plan
from hetero.question import Question

Method: TypeAlias = Literal["exact", "BO"]

_RANGES = 12  # ranges of input lengths, as far as the shortest range allows
_SHORTEST = 400  # range [tokens]
_SMALLEST = 2  # island [GPUs]
_LARGEST = 128
_BATCH = 8  # layouts that the Bayesian search proposes at a time


@dataclass(frozen=True)
class Islands(Adapter):
    """Islands of equal GPUs with expert parallelism, that prefill or decode ranges of lengths.

    Step times are those of the thesis's latency model at FP8, which no other planner here uses.

    Parameters
    ----------
    method
        ``"exact"``: the best layout of all islands of 2, 4, 8, ... GPUs, proven. ``"BO"``: the
        thesis's search over layouts by its divider.
    """

    method: Method = "exact"

    @property
    def name(self) -> str:
        """Its name."""
        return "islands exact" if self.method == "exact" else "islands by BO"

    def unfit(self, question: Question) -> str | None:
        """Dense models have no experts to divide, and GPUs need figures of the latency model."""
        if not question.llm.experts:
            return f"{question.llm.name} is dense: it has no experts for islands to divide."
        if question.precision not in ("fp16", "fp8"):
            return f"Islands serve {question.llm.name} in FP8, not in {question.precision}."
        engine = serving_engine(question.engine)
        if engine.limited and self.method == "BO":
            return (
                f"Its layouts have islands of any size, and {engine.title} runs them inside "
                "machines."
            )
        if not _offers(question):
            by = f", {engine.title} does not serve FP8 in both phases there" * engine.limited
            return (
                f"The latency model of islands has no figures for "
                f"{', '.join(question.cluster.gpu_types)}{by}, or fewer than {_SMALLEST} of each."
            )
        if self.method == "BO" and find_spec("botorch") is None:
            return "Bayesian search needs the package botorch, which is not installed."
        return assumptions.unfit_budget(question)

    def _plan(self, question: Question) -> Plan:
        offers = _offers(question)
        held = {gpu: n for offer in offers for gpu, n in offer.items()}
        longest = int(question.trace.input_tokens.max())
        model = IslandModel.of_trace(
            question.trace,
            max(_SHORTEST, -(-longest // _RANGES)),
            model=question.llm,
            devices=devices_of(question.cluster),
        )
        if self.method == "exact":
            found = [_best(question, model, offer) for offer in offers]
            plan = max((one for one in found if one), key=lambda one: one.served_rps, default=None)
            if plan is None:
                raise InfeasibleError(
                    f"No islands inside machines of {question.cluster.name} serve "
                    f"{question.llm.name} in both phases.",
                    resolve="offer larger machines, or plan for the engine 'any'.",
                )
        else:
            every = range(_SMALLEST, max(held.values()) + 1)
            rates = model.rates([(gpu, s) for gpu, n in held.items() for s in every if s <= n])
            searched = search(
                Divider(held, minimum=_SMALLEST),
                Objective(rates),
                "bo",
                batch=_BATCH,
                iterations=max(1, self.effort.layouts // _BATCH),
                seed=question.seed,
            ).best
            if searched is None:
                raise InfeasibleError(
                    f"None of {self.effort.layouts} layouts of {question.cluster.name} serves "
                    f"{question.llm.name}.",
                    resolve="ask for the exact layout, or raise the effort.",
                )
            plan = searched
        return self._entry(question, model, plan, held)

    def _entry(
        self, question: Question, model: IslandModel, plan: Assignment, held: dict[str, int]
    ) -> Plan:
        made = replay.deployment(model, plan, name=f"{self.name} on {question.cluster.name}")
        prices = _prices(question)
        played = Deployment(
            made.name,
            tuple(
                replace(one, usd_per_h=_price(prices, one.gpu.name if one.gpu else "", one.gpus))
                for one in made.replicas
            ),
            made.links,
            made.default_link,
        )
        groups: list[Group] = []
        limited = serving_engine(question.engine).limited
        seen: Counter[tuple[Phase, IslandClass]] = Counter()
        for phase in PHASES:
            for one, flow in zip(plan.of(phase), plan.flow_rps(phase), strict=True):
                if not one.share.any():
                    continue
                share = float(flow.sum()) / max(plan.served_rps, 1e-300) / one.count
                for _ in range(one.count):
                    seen[phase, one.island] += 1
                    size, gpu = one.island.size, one.island.gpu
                    label = f"{phase} {size}x{gpu} {seen[phase, one.island]}"
                    found = model.benchmark(gpu, size, phase)
                    # Decode divides the experts of an island among groups that are engines each.
                    parts = int(found.dp[found.chosen]) if limited and phase == "decode" else 1
                    words = _words(found, size // parts, size)
                    for k in range(parts):
                        stages = (("", gpu, size // parts, question.llm.layers),)
                        name = f"{label}.{k + 1}" if limited and phase == "decode" else label
                        tensor = int(found.tp[found.chosen])
                        each = Group(name, phase, stages, share / parts, words, tensor)
                        groups.append(each)
        if limited:
            groups = _placed(question, groups)
        used: Counter[str] = Counter()
        for group in groups:
            used.update(group.gpus)
        idle = {name: n - used.get(name, 0) for name, n in question.cluster.gpu_counts.items()}
        left = [f"{n} x {name}" for name, n in idle.items() if n]
        total = [_price(prices, name, n) for name, n in used.items()]
        return Plan(
            planner=self.name,
            groups=tuple(groups),
            routing="by length of the input, to islands in the plan's shares",
            usd_per_h=None if None in total else sum(p for p in total if p is not None),
            bound_rps=plan.bound if self.method == "exact" else None,
            bound="largest rate of any layout, by its program" if self.method == "exact" else "",
            serving=played,
            router=replay.router(model, plan),
            notes=(
                f"{plan.served_rps:.4g} requests/s by the planner's own account. "
                f"{plan.rates.reading}",
                "Step times of the analytic model of mixtures of experts, weights in FP8; islands "
                + (
                    "stand inside machines."
                    if limited
                    else "take GPUs of a type wherever they stand."
                ),
                *((f"Idle: {', '.join(left)}.",) if left else ()),
            ),
        )


def _words(chosen: Benchmark, gpus: int, island: int) -> str:
    """Degrees of attention, whose product is the number of GPUs, and of the experts."""
    tp, groups = int(chosen.tp[chosen.chosen]), int(chosen.dp[chosen.chosen])
    experts = f", EP {island // groups}" if chosen.phase == "decode" else ""
    return f"TP {tp} x DP {gpus // tp}{experts}"


def _inventory(question: Question) -> dict[str, int]:
    """GPUs that the latency model knows, by the name of their device."""
    own = {device.name for device in devices_of(question.cluster)}
    return {
        name: count
        for name, count in question.cluster.gpu_counts.items()
        if count >= _SMALLEST and (name in own or _known(name))
    }


def _offers(question: Question) -> list[dict[str, int]]:
    """GPUs between which KV caches can be sent, platform by platform; all for any engine."""
    engine, held = serving_engine(question.engine), _inventory(question)
    if not engine.limited:
        return [held] if held else []
    found: dict[EnginePlatform, dict[str, int]] = {}
    for name, count in held.items():
        gpu = question.cluster.gpu_types[name]
        where = engine.platform(gpu.name, gpu.vendor)
        able = "fp8" in gpu.precisions and not engine.lacks(gpu, "fp8")
        if able and where is not None and where.connector and _sizes(question, name):
            found.setdefault(where, {})[name] = count
    return list(found.values())


def _sizes(question: Question, gpu: str) -> list[int]:
    """Sizes of islands of a type: powers of two; for an engine, of which machines hold a number."""
    counts = [m.count for m in question.cluster.machines if m.gpu.name == gpu]
    most = [2**k for k in range(1, 8) if 2**k <= min(_LARGEST, sum(counts))]
    if not serving_engine(question.engine).limited:
        return most
    return [size for size in most if math.gcd(*counts) % size == 0]


def _best(question: Question, model: IslandModel, held: dict[str, int]) -> Assignment | None:
    """The best layout of an inventory; None where the engine's islands cannot serve."""
    classes = [(gpu, s) for gpu in held for s in _sizes(question, gpu)]
    try:
        return exact(model.rates(classes), held, minimum=_SMALLEST)
    except InfeasibleError:
        if serving_engine(question.engine).limited:
            return None
        raise


def _placed(question: Question, groups: list[Group]) -> list[Group]:
    """Groups on machines, the largest first; sizes divide what each machine has."""
    free = {machine.name: machine.count for machine in question.cluster.machines}
    kinds = {machine.name: machine.gpu.name for machine in question.cluster.machines}
    found: dict[str, Group] = {}
    for group in sorted(groups, key=lambda one: -one.stages[0][2]):
        _, gpu, size, layers = group.stages[0]
        machine = next(m for m, n in free.items() if kinds[m] == gpu and n >= size)
        free[machine] -= size
        found[group.name] = replace(group, stages=((machine, gpu, size, layers),))
    return [found[group.name] for group in groups]


def _known(name: str) -> bool:
    try:
        return moe_device(name).name == name
    except CatalogError:
        return False


def _prices(question: Question) -> dict[str, float]:
    """Mean price of a GPU of each type [$/h], of types whose machines all have one."""
    found: dict[str, float] = {}
    for name, count in question.cluster.gpu_counts.items():
        prices = [m.usd_per_h for m in question.cluster.machines if m.gpu.name == name]
        if None not in prices:
            found[name] = sum(p for p in prices if p is not None) / count
    return found


def _price(prices: dict[str, float], gpu: str, count: int) -> float | None:
    return prices[gpu] * count if gpu in prices else None
