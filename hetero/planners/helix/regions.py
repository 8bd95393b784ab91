"""Search over regions: which of them hold a copy of the model together, and each line of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from hetero.placement import Problem
from hetero.planners.helix.assemble import Layout, exchange, of_chain, of_line
from hetero.planners.helix.blocks import Pool, line
from hetero.planners.helix.bound import simple_bound
from hetero.planners.helix.chains import chain
from hetero.planners.helix.groups import NodeGroup, groups
from hetero.streams import stream

_WHOLE = 150  # nodes beyond which a region is parted
_LINKED = 300  # nodes beyond which regions are planned apart
_PART = 50  # nodes of a part
_REGIONS = 4  # regions up to which every set of them is considered
_NARROW = (0.75, 0.5, 0.25)  # quantiles of the links into a region that its entry is made for
_MANY = 60  # nodes beyond which less is tried per line, as every flow takes longer


@dataclass(frozen=True, slots=True)
class PlacementEffort:
    """How much is tried; counts only.

    Attributes
    ----------
    precision
        Relative precision of the flow that blocks are sought for.
    steps
        Steps that throughputs are rounded to in blocks.
    variety
        Rounds of further blocks for the integer program.
    exchanges
        Layouts evaluated by hill climbing.
    exact_nodes
        Nodes of the exact program's search tree.
    shallow
        Shares of the best flow for which shallower placements are sought as well.
    keep
        Placements that are kept.
    proof
        Whether a bound closer than that of work alone is sought, which takes most of the time.
    """

    precision: float = 1e-4
    steps: int = 2_000
    variety: int = 30
    exchanges: int = 1_000
    exact_nodes: int = 5_000
    shallow: tuple[float, ...] = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
    keep: int = 12
    proof: bool = True

    def chains_only(self) -> PlacementEffort:
        """Only the single chain."""
        return replace(self, precision=np.inf)


class LayoutPool:
    """Distinct layouts with the largest flow."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.layouts: dict[bytes, tuple[Layout, str]] = {}

    def add(self, layout: Layout, method: str) -> None:
        """Remember a layout that has a flow."""
        if layout.value > 0:
            self.layouts.setdefault(_shape(layout), (layout, method))

    @property
    def best(self) -> Layout:
        """The layout of the largest flow."""
        return max((layout for layout, _ in self.layouts.values()), key=lambda one: one.value)

    @property
    def value(self) -> float:
        """The largest flow [tokens/s], 0 where there is no layout."""
        return self.best.value if self.layouts else 0.0

    def sorted(self) -> list[tuple[Layout, str]]:
        """Layouts by falling flow."""
        order = sorted(self.layouts.values(), key=lambda item: -item[0].value)
        return order[: self.keep]


def _shape(layout: Layout) -> bytes:
    """Equal for layouts that differ only in which of several equal nodes does what."""
    kinds = [(node.kind.name, node.region) for node in layout.problem.nodes]
    held = zip(layout.starts.tolist(), layout.stops.tolist(), strict=True)
    rows = sorted(zip(kinds, held, strict=True))
    return repr((rows, round(layout.value, 3))).encode()


def too_small(problem: Problem) -> str:
    """Why a problem has no placement at all, empty where it may have one."""
    held = sum(node.max_layers for node in problem.nodes)
    if held >= problem.llm.layers:
        return ""
    largest = max(problem.nodes, key=lambda node: node.max_layers)
    return (
        f"The {len(problem.nodes)} nodes of {problem.name} hold at most {held} of the "
        f"{problem.llm.layers} layers of {problem.llm.name} together ('{largest.name}' with "
        f"{largest.max_layers} the most)."
    )


def regions(
    problem: Problem, found: LayoutPool, upper: float, effort: PlacementEffort, seed: int
) -> None:
    """Search all regions as one line and, where links between them bind, sets of regions."""
    parts = _parts(problem, upper)
    everything = list(range(len(problem.nodes)))
    count = len(problem.nodes)
    # Where every region holds parts of its own, lines across slow links are not worth their time.
    linked = count <= _LINKED and not all(_holds(problem, part) for part in parts)
    if count <= _WHOLE or linked:
        _line_of(problem, everything, parts, found, upper, effort, seed)
    if len(parts) > 1 and (count <= _WHOLE or linked):
        _sets(problem, parts, found, upper, effort, seed)
    if count > _WHOLE:
        _parted(problem, parts, found, effort, seed)


def _parts(problem: Problem, upper: float) -> list[list[int]]:
    """Nodes by region; regions whose links all carry ``upper`` count as one."""
    names = problem.regions
    members = [[k for k, node in enumerate(problem.nodes) if node.region == r] for r in names]
    parent = list(range(len(names)))

    def root(k: int) -> int:
        while parent[k] != k:
            k = parent[k]
        return k

    capacity = problem.link_tokens_per_s
    for a, b in combinations(range(len(names)), 2):
        both = np.ix_(members[a], members[b])
        if min(capacity[both].min(), capacity.T[both].min()) >= upper:
            parent[root(b)] = root(a)
    merged: dict[int, list[int]] = {}
    for k in range(len(names)):
        merged.setdefault(root(k), []).extend(members[k])
    return list(merged.values())


def _holds(problem: Problem, nodes: Sequence[int]) -> bool:
    return sum(problem.nodes[k].max_layers for k in nodes) >= problem.llm.layers


def _line_of(
    problem: Problem,
    nodes: Sequence[int],
    parts: Sequence[Sequence[int]],
    found: LayoutPool,
    upper: float,
    effort: PlacementEffort,
    seed: int,
) -> None:
    """Best single line through all the nodes of the parts, in and around one order of them."""
    inside = np.zeros(len(problem.nodes), dtype=bool)
    inside[list(nodes)] = True
    kinds = [
        NodeGroup(g.region, g.tokens_per_s, members)
        for g in groups(problem)
        if (members := tuple(k for k in g.members if inside[k]))
    ]
    layers = problem.llm.layers
    draws = stream(seed, "exchange")
    if not np.isfinite(effort.precision):
        if (best_chain := chain(kinds, layers)) is not None:
            layout = of_chain(problem, kinds, best_chain[1])
            found.add(layout, "chain")
            if layout.value < best_chain[0] * (1 - 1e-9) and len(nodes) <= _MANY:
                found.add(exchange(layout, effort.exchanges, draws), "chain, exchanged")
        return
    own = [[t for t, g in enumerate(kinds) if g.members[0] in set(part)] for part in parts]
    best = max(
        (layout.value for layout, _ in found.layouts.values() if _uses(layout, inside)), default=0.0
    )
    variants: list[tuple[list[Pool], int]] = []
    many = len(nodes) > _MANY
    rounds = int(effort.exchanges * min(1.0, (_MANY / len(nodes)) ** 2))
    precision = max(effort.precision, 1e-3) if many or len(parts) > 1 else effort.precision
    if len(parts) == 1:
        variants.append(([Pool(tuple(own[0]))], 0))
    else:
        order = sorted(
            range(len(parts)),
            key=lambda p: -sum(problem.nodes[k].tokens_per_s.max() for k in parts[p]),
        )
        for quantile in (0.5,) if many else _NARROW:
            pools = [
                Pool(tuple(members), _into(problem, part, parts, quantile))
                for part, members in zip(parts, own, strict=True)
            ]
            variants += [(pools, first) for first in (order[:2] if many else order)]
    top = min(upper, simple_bound(kinds, layers))
    for pools, first in variants:
        low, high = best, top
        flow = low * (1 + 10 * precision) if low > 0 else high / 2
        while high - low > precision * high and flow < high:
            made = line(
                pools, kinds, layers, flow, first=first, steps=effort.steps, variety=effort.variety
            )
            if made is None:
                high = flow
            else:
                layout = of_line(problem, kinds, made, first)
                if layout.value < flow * (1 - 1e-3):
                    layout = exchange(layout, rounds // 3, draws, target=flow)
                found.add(layout, "blocks")
                best = max(best, layout.value)
                low = max(flow, min(layout.value, high))
            flow = (low + high) / 2
    if best <= 0:
        return
    for share in effort.shallow if len(nodes) == len(problem.nodes) else ():
        pools, first = variants[0]
        made = line(pools, kinds, layers, share * best, first=first, steps=effort.steps)
        if made is not None:
            found.add(of_line(problem, kinds, made, first), "shallower blocks")
    start = max(
        (layout for layout, _ in found.layouts.values() if _uses(layout, inside)),
        key=lambda one: one.value,
    )
    found.add(exchange(start, rounds, draws, target=upper), "exchange")


def _uses(layout: Layout, inside: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> bool:
    return not ((layout.starts >= 0) & ~inside).any()


def _into(
    problem: Problem, part: Sequence[int], parts: Sequence[Sequence[int]], quantile: float
) -> float:
    """Capacity of a link into a part from another one."""
    others = [k for other in parts if other is not part for k in other]
    return float(np.quantile(problem.link_tokens_per_s[np.ix_(others, list(part))], quantile))


def _sets(
    problem: Problem,
    parts: Sequence[Sequence[int]],
    found: LayoutPool,
    upper: float,
    effort: PlacementEffort,
    seed: int,
) -> None:
    """Copies of the model side by side: every set of regions that holds one carries its own."""
    count = len(parts)
    if len(problem.nodes) > _MANY:
        # Regions that hold a copy stand alone, the others together.
        small = tuple(p for p in range(count) if not _holds(problem, parts[p]))
        sets = [(p,) for p in range(count) if p not in small] + ([small] if small else [])
    else:
        sizes = range(1, count) if count <= _REGIONS else (1, 2)
        sets = [chosen for size in sizes for chosen in combinations(range(count), size)]
    nodes = {s: [k for p in s for k in parts[p]] for s in sets}
    sets = [s for s in sets if _holds(problem, nodes[s])]
    tops = {s: simple_bound(groups(problem.only(nodes[s])), problem.llm.layers) for s in sets}
    done: dict[tuple[int, ...], Layout] = {}
    for cover in _covers(sets, tops):
        if sum(tops[s] for s in cover) <= found.value * (1 + 1e-3) or len(cover) < 2 <= len(sets):
            continue
        for s in cover:
            if s not in done:
                some = LayoutPool(effort.keep)
                own = [parts[p] for p in s]
                if not np.isfinite(effort.precision):
                    _line_of(problem, nodes[s], own, some, upper, effort, seed)
                else:
                    chains = effort.chains_only()
                    _line_of(problem, nodes[s], own, some, upper, chains, seed)
                    _line_of(problem, nodes[s], own, some, tops[s], effort, seed)
                if some.layouts:
                    done[s] = some.best
        if all(s in done for s in cover):
            found.add(_side_by_side(problem, [done[s] for s in cover]), "copies by region")


def _covers(
    sets: Sequence[tuple[int, ...]], tops: dict[tuple[int, ...], float]
) -> list[tuple[tuple[int, ...], ...]]:
    """Disjoint sets that cannot be joined by a further one, the most promising first."""
    covers: list[tuple[tuple[int, ...], ...]] = []

    def grow(chosen: tuple[tuple[int, ...], ...], begin: int) -> None:
        used = {p for s in chosen for p in s}
        grown = False
        for k in range(begin, len(sets)):
            if not used & set(sets[k]):
                grow((*chosen, sets[k]), k + 1)
                grown = True
        if chosen and not grown and len(covers) < 2_000:
            covers.append(chosen)

    grow((), 0)
    return sorted(covers, key=lambda cover: -sum(tops[s] for s in cover))[:40]


def _side_by_side(problem: Problem, layouts: Sequence[Layout]) -> Layout:
    starts, stops = layouts[0].starts.copy(), layouts[0].stops.copy()
    for layout in layouts[1:]:
        used = layout.starts >= 0
        starts[used], stops[used] = layout.starts[used], layout.stops[used]
    return Layout(problem, starts, stops)


def _parted(
    problem: Problem,
    parts: Sequence[Sequence[int]],
    found: LayoutPool,
    effort: PlacementEffort,
    seed: int,
) -> None:
    """Every region in parts of about equal composition, each of which holds a copy."""
    light = replace(effort, shallow=(), exchanges=0, precision=max(effort.precision, 1e-3))
    layouts: list[Layout] = []
    known: dict[tuple[bytes, ...], Layout] = {}
    for region in parts:
        if not _holds(problem, region):
            continue
        number = max(1, round(len(region) / _PART))
        while number > 1 and not _holds(problem, list(region)[::number]):
            number -= 1
        # Sorted by kind, every n-th node goes to the same part.
        order = sorted(region, key=lambda k: (problem.nodes[k].kind.name, k))
        for first in range(number):
            nodes = order[first::number]
            if not _holds(problem, nodes):
                continue
            key = tuple(sorted(problem.nodes[k].tokens_per_s.tobytes() for k in nodes))
            if key in known:
                layouts.append(_copied(problem, known[key], nodes))
                continue
            own = problem.only(nodes)
            some = LayoutPool(effort.keep)
            everything = list(range(len(nodes)))
            for how in (light.chains_only(), light):
                _line_of(own, everything, [everything], some, np.inf, how, seed)
            if some.layouts:
                known[key] = some.best
                layouts.append(_copied(problem, some.best, nodes))
    if layouts:
        found.add(_side_by_side(problem, layouts), "parts")


def _copied(problem: Problem, layout: Layout, nodes: Sequence[int]) -> Layout:
    """The layout of a part on nodes of the whole problem with the same tables."""
    starts = np.full(len(problem.nodes), -1, dtype=np.int64)
    stops = starts.copy()
    free: dict[bytes, list[int]] = {}
    for k in nodes:
        free.setdefault(problem.nodes[k].tokens_per_s.tobytes(), []).append(k)
    for node, s, e in zip(layout.problem.nodes, layout.starts, layout.stops, strict=True):
        k = free[node.tokens_per_s.tobytes()].pop(0)
        starts[k], stops[k] = s, e
    return Layout(problem, starts, stops)
